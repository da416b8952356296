#!/bin/bash
# Run a trainer on this machine without a scheduler, in the container or not: torchrun, one rank per GPU.
#
# usage: launch/local.sh [OPTION]... [TRAINER | SCRIPT.py | -m MODULE] [ARGUMENT]...
#
#   launch/local.sh                                             train_ddp on digits, one rank per GPU, or one
#   HPCTRAIN_TASKS=4 launch/local.sh train_ddp --epochs 3       4 ranks
#   HPCTRAIN_RUNTIME=none launch/local.sh ./mine.py --anything "a b"
#
# Without Apptainer, or with HPCTRAIN_RUNTIME=none, it takes the .venv that `make venv` has made here, unless
# another environment is active, or HPCTRAIN_PYTHON_ENV or HPCTRAIN_MODULES names one.
#
set -euo pipefail

# Slurm and PBS run a copy of this script. launch/lib/trust.sh says which functions it may run.
unset "${!SQUEUE_@}" # options of squeue, which could hide the job from it
_of=$0 _main=${HPCTRAIN_ROOT:+$HPCTRAIN_ROOT/launch/lib/main.sh}
[[ $0 != */slurm_script ]] || _of=/$(squeue --noheader --jobs="${SLURM_JOB_ID:-0}" -o %o | sed q) || true
for _folder in "$(dirname "$(readlink -f "$_of")")" "${SLURM_SUBMIT_DIR:-${PBS_O_WORKDIR:-}}/launch"; do
    [[ -z $_main ]] || break
    _main=$(readlink -f "$_folder/lib/main.sh") &&
        [[ $(stat -Lc %u "$_of" "$_main" "${_main%/*}" 2>/dev/null | uniq -c) == *' 3 '* ]] || _main=''
    _of=/proc/$$ # the user's
done
[[ -r $_main ]] ||
    { echo 'hpctrain: error: submit from the hpctrain folder, or export HPCTRAIN_ROOT=FOLDER' \
        ${PYXIS_CONTAINER_IMAGE:+"(and unset PYXIS_CONTAINER_IMAGE: this script enters the image itself)"} \
        >&2 && exit 2; }
# shellcheck source=/dev/null
source "$_main"

# choose_venv: without a container, take the .venv of this folder, and say so
choose_venv() {
    local set=${HPCTRAIN_PYTHON_ENV:-}${HPCTRAIN_MODULES:-}${VIRTUAL_ENV:-}${CONDA_PREFIX:-}
    [[ -z $set && -r $ROOT/.venv/bin/activate ]] || return 0
    [[ -n ${HPCTRAIN_RUNTIME:-} ]] || command -v apptainer singularity >/dev/null || HPCTRAIN_RUNTIME=none
    [[ ${HPCTRAIN_RUNTIME:-} == none ]] || return 0
    HPCTRAIN_PYTHON_ENV=$ROOT/.venv
    say "no container: taking $HPCTRAIN_PYTHON_ENV"
}

parse_options local.sh "$@"
make_local_job
choose_venv
use_runtime "${HPCTRAIN_RUNTIME:-apptainer}"
set_program
use_launcher torchrun
launch
