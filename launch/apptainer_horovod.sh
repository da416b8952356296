#!/bin/bash
# Run a Horovod script, each rank in the container.
#
# usage: sbatch [SBATCH OPTION]... launch/apptainer_horovod.sh [OPTION]... [TRAINER | SCRIPT.py] [ARGUMENT]...
#
#   sbatch launch/apptainer_horovod.sh                              train_horovod on digits
#   sbatch launch/apptainer_horovod.sh --launcher=horovodrun ./mine.py --anything "a b"
#
#   --launcher=HOW    srun, mpirun or horovodrun (default: srun where it speaks the PMI of the image's MPI library, else mpirun)
#                     srun and mpirun: ranks meet by MPI; horovodrun: by Gloo, and nodes are reached by ssh without a password
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
((${#ARGUMENTS[@]})) || ARGUMENTS=(train_horovod)
slurm_job
runtime "${HPCTRAIN_RUNTIME:-apptainer}"
trainer
case $LAUNCHER in
auto | srun) by_mpi "$MPI" ;;
mpirun) by_mpi mpirun ;;
horovodrun) by_horovodrun ;;
*) die "--launcher=$LAUNCHER: choose srun, mpirun or horovodrun" ;;
esac
go
