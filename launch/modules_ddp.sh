#!/bin/bash
# Run a trainer on every task of a Slurm job without a container: with the Python of modules, a venv or conda.
#
# usage: sbatch [SBATCH OPTION]... launch/modules_ddp.sh [OPTION]...
#            [TRAINER | SCRIPT.py | -m MODULE] [ARGUMENT]...
#
#   HPCTRAIN_MODULES="cuda pytorch" sbatch launch/modules_ddp.sh train_ddp --epochs 3
#   HPCTRAIN_PYTHON_ENV=~/my-venv sbatch launch/modules_ddp.sh ./mine.py --anything "a b"
#   HPCTRAIN_MODULES=conda HPCTRAIN_PYTHON_ENV=my-conda-env sbatch launch/modules_ddp.sh
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

parse_options modules_ddp.sh "$@"
read_slurm_job
use_runtime none
set_program
use_launcher srun
launch
