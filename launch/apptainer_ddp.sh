#!/bin/bash
# Run a trainer on every task of a Slurm job, each in the container: srun starts them, apptainer enters the image.
#
# usage: sbatch [SBATCH OPTION]... launch/apptainer_ddp.sh [OPTION]... [TRAINER | SCRIPT.py] [ARGUMENT]...
#
#   sbatch launch/apptainer_ddp.sh                                  train_ddp on digits, 2 nodes with 2 tasks each
#   sbatch launch/apptainer_ddp.sh train_ddp --epochs 3             a bundled trainer and its options
#   sbatch launch/apptainer_ddp.sh ./mine.py --anything "a b"       your own script; its arguments stay as they are
#   sbatch --nodes=8 --ntasks-per-node=4 --gpus-per-node=4 launch/apptainer_ddp.sh
#   salloc --nodes=2 --ntasks-per-node=2, then launch/apptainer_ddp.sh check
#
# A job that Slurm runs again after a node died goes on from its last checkpoint.
#
#SBATCH --job-name=hpctrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=00:30:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

# Slurm runs a copy of this file, so its own place does not tell where the others are.
lib=${HPCTRAIN_ROOT:-${SLURM_SUBMIT_DIR:-${PBS_O_WORKDIR:-$(dirname "$0")/..}}}/launch/lib.sh
[[ -r $lib ]] || { echo "hpctrain: error: no $lib: submit from the hpctrain folder, or export HPCTRAIN_ROOT" >&2 && exit 2; }
# shellcheck source=launch/lib.sh
source "$lib"

options "$@"
slurm_job
runtime "${HPCTRAIN_RUNTIME:-apptainer}"
trainer
by_srun
go
