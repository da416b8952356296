#!/bin/bash
# Run a trainer on every task of a Slurm job without a container: with the Python of modules, a venv or conda.
#
# usage: sbatch [SBATCH OPTION]... launch/modules_ddp.sh [OPTION]...
#            [TRAINER | SCRIPT.py | -m MODULE] [ARGUMENT]...
#
#   HPCTRAIN_MODULES="cuda pytorch" sbatch launch/modules_ddp.sh train_ddp --epochs 3
#   HPCTRAIN_PYTHON_ENV=~/my-venv sbatch launch/modules_ddp.sh ./mine.py --anything "a b"
#   HPCTRAIN_MODULES=conda HPCTRAIN_PYTHON_ENV=my-conda-env sbatch launch/modules_ddp.sh
#
#SBATCH --job-name=hpctrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=00:30:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --open-mode=append
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

parse_options modules_ddp.sh "$@"
read_slurm_job
use_runtime none
set_program
use_launcher srun
launch
