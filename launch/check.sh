#!/bin/bash
# Check every rank with hpctrain check, by one of the other scripts; if it passes, start the run itself.
#
# usage: sbatch [SBATCH OPTION]... launch/check.sh [SCRIPT] [OPTION]...
#            [TRAINER | SCRIPT.py | -m MODULE] [ARGUMENT]...
#
#   sbatch launch/check.sh                                          check with apptainer_ddp.sh, and no more
#   sbatch launch/check.sh apptainer_mpi.sh --mpi=pmix              check with another script and its options
#   sbatch launch/check.sh apptainer_ddp.sh train_ddp --epochs 90   check, then train in the same job
#   launch/check.sh --collect FOLDER [FILE]...                      copy the host's NCCL plugin for the image
#
# Options are those of SCRIPT, by default of apptainer_ddp.sh: its own are listed here.
#
#SBATCH --job-name=hpctrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=00:30:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --open-mode=append
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

[[ ${1:-} != --collect ]] || exec "$ROOT/launch/lib/collect.sh" "${@:2}"
# shellcheck disable=SC2034 # SCRIPT is read by usage
[[ ${1:-} != --help && ${1:-} != -h ]] || { SCRIPT=apptainer_ddp.sh && usage && exit; }
script=$ROOT/launch/apptainer_ddp.sh
[[ ${1:--} == -* ]] || { script=$ROOT/launch/$1 && shift; }
[[ -f $script && -x $script ]] ||
    die "$script: no such script: give the name of one in launch/ first, such as apptainer_mpi.sh"
options=()
while [[ ${1:-} == -* && $1 != -m ]]; do
    options+=("$1")
    shift
done
[[ ${1:-} != *.sh || ! -x $ROOT/launch/$1 ]] ||
    die "the script comes before its options: check.sh $1 ${options[*]} ${*:2}"
"$script" "${options[@]}" check
[[ -z $EARLY_STOP ]] || export HPCTRAIN_EARLY_STOP=1 # Slurm sends it once
(($# == 0)) || exec "$script" "${options[@]}" "$@"
