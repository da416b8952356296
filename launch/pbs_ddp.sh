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

# Slurm runs a copy of this script, which has no other files beside it.
. "${HPCTRAIN_ROOT:-${SLURM_SUBMIT_DIR:-${PBS_O_WORKDIR:-$(dirname "$0")/..}}}/launch/lib/main.sh" \
    2>/dev/null ||
    { echo 'hpctrain: error: submit from the hpctrain folder, or export HPCTRAIN_ROOT=FOLDER' >&2 && exit 2; }

parse_options pbs_ddp.sh "$@"
read_pbs_job
use_runtime "${HPCTRAIN_RUNTIME:-apptainer}"
set_program
use_launcher mpirun
launch
