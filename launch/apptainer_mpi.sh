#!/bin/bash
# Run a trainer, or any MPI program in Python, over MPI: srun or the host's mpirun starts the ranks in the
# container. First it checks that MPI gives one world of all ranks.
#
# usage: sbatch [SBATCH OPTION]... launch/apptainer_mpi.sh [OPTION]...
#            [TRAINER | SCRIPT.py | -m MODULE] [ARGUMENT]...
#
#   sbatch launch/apptainer_mpi.sh check                         all-reduce and ring over torch and over MPI
#   sbatch launch/apptainer_mpi.sh --mpi=mpirun train_horovod
#   sbatch launch/apptainer_mpi.sh ./my_mpi4py_script.py
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

parse_options apptainer_mpi.sh "$@"
read_slurm_job
use_runtime "${HPCTRAIN_RUNTIME:-apptainer}"
set_program
use_launcher mpi "${OPTION[mpi]:-}"
launch
