#!/bin/bash
# Run a trainer on every task of a Slurm job, each in the container: srun starts them, apptainer enters the image.
#
# usage: sbatch [SBATCH OPTION]... launch/apptainer_ddp.sh [TRAINER | SCRIPT.py] [ARGUMENT]...
#
#   sbatch launch/apptainer_ddp.sh                                  train_ddp on digits, 2 nodes with 2 tasks each
#   sbatch launch/apptainer_ddp.sh train_ddp --epochs 3             a bundled trainer and its options
#   sbatch launch/apptainer_ddp.sh ./mine.py --anything "a b"       your own script; its arguments stay as they are
#   sbatch --nodes=8 --ntasks-per-node=4 --gpus-per-node=4 launch/apptainer_ddp.sh
#   salloc --nodes=2 --ntasks-per-node=2, then launch/apptainer_ddp.sh check
#
# Submit from the hpctrain folder, or from anywhere with HPCTRAIN_ROOT set to it; paths are taken from where you submit.
# A job that Slurm runs again after a node died goes on from its last checkpoint.
#
# Settings, from the environment (a file of launch/sites sets them for your site):
#   HPCTRAIN_IMAGE   the image, a SIF or a sandbox folder
#   HPCTRAIN_BIND    folders to show inside the container beside the one you submit from, those that exist
#   SBATCH_...       any default for sbatch, such as SBATCH_ACCOUNT or SBATCH_PARTITION
#
#SBATCH --job-name=hpctrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=00:30:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

# Slurm runs a copy of this file, so its own place does not tell where the others are.
root=${HPCTRAIN_ROOT:-${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}}
if [[ ! -r $root/launch/lib.sh ]]; then
    echo "hpctrain: error: there is no launch/lib.sh in $root: submit from the hpctrain folder, or export HPCTRAIN_ROOT" >&2
    exit 2
fi
source "$root/launch/lib.sh"
[[ ${1:-} != --help && ${1:-} != -h ]] || { usage && exit; }
[[ -n ${HPCTRAIN_SITE:-} ]] || source "$root/launch/sites/generic.env"

slurm_job
cd "${SLURM_SUBMIT_DIR:?}"
trainer_command "$@"
rendezvous
apptainer_command
resolved
run_tasks "${CONTAINER[@]}" "${COMMAND[@]}"
