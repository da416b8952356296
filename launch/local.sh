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

parse_options local.sh "$@"
make_local_job
use_runtime "${HPCTRAIN_RUNTIME:-apptainer}"
set_program
use_launcher torchrun
launch
