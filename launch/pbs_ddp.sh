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

# Slurm and PBS run a copy of this script, and its functions are beside the original, of the same owner. Those
# of the folder of the job count only if they are the user's own. Others can put files beside both.
load_functions() {
    local script=$0 main=${HPCTRAIN_ROOT:-}/launch/lib/main.sh
    unset "${!SQUEUE_@}" # options of squeue, which could hide the job from it
    [[ ! ${SLURM_JOB_ID:-} || $0 != */slurm_script ]] ||
        script=/$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%o | sed q) || true
    [[ -n ${HPCTRAIN_ROOT:-} ]] || main=$(functions_in "$(dirname "$(readlink -f "$script")")" "$script") ||
        main=$(functions_in "${SLURM_SUBMIT_DIR:-${PBS_O_WORKDIR:-}}/launch" "/proc/$$") || main=''
    [[ -r $main ]] || {
        echo 'hpctrain: error: submit from the hpctrain folder, or export HPCTRAIN_ROOT=FOLDER' >&2
        exit 2
    }
    # shellcheck source=/dev/null # is checked by itself
    source "$main"
}

# functions_in FOLDER OWNED: print the file of the functions if it has the owner of OWNED, and its folder, too
functions_in() {
    local main owner
    main=$(readlink -f "$1/lib/main.sh") && owner=$(stat -Lc %u "$2" 2>/dev/null) &&
        [[ $(stat -c %u "$main" "${main%/*}" 2>/dev/null) == "$owner"$'\n'"$owner" ]] && echo "$main"
}
load_functions

parse_options pbs_ddp.sh "$@"
read_pbs_job
use_runtime "${HPCTRAIN_RUNTIME:-apptainer}"
set_program
use_launcher mpirun
launch
