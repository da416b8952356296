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

parse_options local.sh "$@"
make_local_job
use_runtime "${HPCTRAIN_RUNTIME:-apptainer}"
set_program
use_launcher torchrun
launch
