#!/bin/bash
# Run a trainer, or any MPI program in Python, by MPI: srun or the mpirun of the host starts the ranks, each in the container.
# Before it runs anything it sees that MPI gives one world of all ranks.
#
# usage: sbatch [SBATCH OPTION]... launch/apptainer_mpi.sh [OPTION]... [TRAINER | SCRIPT.py] [ARGUMENT]...
#
#   sbatch launch/apptainer_mpi.sh check                            all-reduce and ring by torch and by MPI
#   sbatch launch/apptainer_mpi.sh --mpi=mpirun train_horovod
#   sbatch launch/apptainer_mpi.sh ./my_mpi4py_script.py
#
#   --mpi=HOW         mpirun, or pmix, pmi2, cray_shasta: what srun is to speak (default: what the image's MPI library
#                     speaks, of what srun --mpi=list offers); HPCTRAIN_MPI sets it for a site
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
by_mpi "$MPI"
go
