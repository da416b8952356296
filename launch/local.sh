#!/bin/bash
# Run a trainer on this machine without a scheduler, in the container or not: torchrun, one rank per GPU.
#
# usage: launch/local.sh [OPTION]... [TRAINER | SCRIPT.py | -m MODULE] [ARGUMENT]...
#
#   launch/local.sh                                             train_ddp on digits, one rank per GPU, or one
#   HPCTRAIN_TASKS=4 launch/local.sh train_ddp --epochs 3       4 ranks
#   HPCTRAIN_RUNTIME=none HPCTRAIN_PYTHON_ENV=.venv launch/local.sh ./mine.py --anything "a b"
#
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

parse_options local.sh "$@"
make_local_job
use_runtime "${HPCTRAIN_RUNTIME:-apptainer}"
set_program
use_launcher torchrun
launch
