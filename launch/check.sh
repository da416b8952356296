#!/bin/bash
# Check every rank with hpctrain check, by one of the other scripts; if it passes, start the run itself.
#
# usage: sbatch [SBATCH OPTION]... launch/check.sh [SCRIPT] [OPTION]...
#            [TRAINER | SCRIPT.py | -m MODULE] [ARGUMENT]...
#
#   sbatch launch/check.sh                                          check with apptainer_ddp.sh, and no more
#   sbatch launch/check.sh apptainer_mpi.sh --mpi=pmix              check with another script and its options
#   sbatch launch/check.sh apptainer_ddp.sh train_ddp --epochs 90   check, then train in the same job
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

# Slurm runs a copy of this script, which has no other files beside it.
. "${HPCTRAIN_ROOT:-${SLURM_SUBMIT_DIR:-${PBS_O_WORKDIR:-$(dirname "$0")/..}}}/launch/lib/main.sh" \
    2>/dev/null ||
    { echo 'hpctrain: error: submit from the hpctrain folder, or export HPCTRAIN_ROOT=FOLDER' >&2 && exit 2; }

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
"$script" "${options[@]}" check
(($# == 0)) || exec "$script" "${options[@]}" "$@"
