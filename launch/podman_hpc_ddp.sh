#!/bin/bash
# Run a trainer on every task of a Slurm job, each in the container: srun starts them, podman-hpc enters the image (NERSC).
#
# usage: sbatch [SBATCH OPTION]... launch/podman_hpc_ddp.sh [OPTION]... [TRAINER | SCRIPT.py] [ARGUMENT]...
#
#   source launch/sites/perlmutter.env
#   sbatch --account=m1234 launch/podman_hpc_ddp.sh train_ddp --epochs 3
#
# HPCTRAIN_PODMAN_MODULES names podman-hpc's modules, such as "gpu nccl".
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
runtime podman-hpc
trainer
by_srun
go
