#!/bin/bash
# Run a trainer on every slot of a PBS job, in the container: mpirun starts the ranks, apptainer enters it.
#
# usage: qsub [QSUB OPTION]... launch/pbs_ddp.sh                train_ddp on digits, 2 nodes with 2 ranks each
#        echo "$PWD/launch/pbs_ddp.sh [OPTION]... [TRAINER | SCRIPT.py | -m MODULE] [ARGUMENT]..." |
#            qsub [QSUB OPTION]...
#
#   qsub -l select=4:ncpus=24:ngpus=4:mpiprocs=4 launch/pbs_ddp.sh
#   echo "$PWD/launch/pbs_ddp.sh train_ddp --epochs 3" | qsub -l select=2:ncpus=2:mpiprocs=2
#   HPCTRAIN_RUNTIME=none HPCTRAIN_PYTHON_ENV=~/my-venv qsub -V launch/pbs_ddp.sh
#
# mpirun is the host's Open MPI. If it was built without PBS support, it reaches the other nodes over ssh.
#
#PBS -N hpctrain
#PBS -l select=2:ncpus=2:mpiprocs=2
#PBS -l walltime=00:30:00
#PBS -j oe
set -euo pipefail

# Slurm and PBS run a copy of this script, and its functions are beside the original. Those of the folder of
# the job count only if they are the user's own.
load_functions() {
    local script=$0 folder=${SLURM_SUBMIT_DIR:-${PBS_O_WORKDIR:-}}/launch/lib root
    [[ $0 != */slurm_script ]] || script=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%o | sed q)
    root=$(dirname "$(readlink -f "$script")")/..
    [[ -r $root/launch/lib/main.sh || ! -O $folder/main.sh ]] || root=$folder/../..
    root=${HPCTRAIN_ROOT:-$root}
    [[ -r $root/launch/lib/main.sh ]] || {
        echo 'hpctrain: error: submit from the hpctrain folder, or export HPCTRAIN_ROOT=FOLDER' >&2
        exit 2
    }
    source "$root/launch/lib/main.sh"
}
load_functions

parse_options pbs_ddp.sh "$@"
read_pbs_job
use_runtime "${HPCTRAIN_RUNTIME:-apptainer}"
set_program
use_launcher mpirun
launch
