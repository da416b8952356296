#!/bin/bash
# Run a trainer with torchrun: srun starts one in the container of each node, and that starts its ranks.
#
# usage: sbatch [SBATCH OPTION]... launch/apptainer_torchrun.sh [OPTION]...
#            [TRAINER | SCRIPT.py | -m MODULE] [ARGUMENT]...
#
#   sbatch launch/apptainer_torchrun.sh train_ddp --epochs 3
#   sbatch launch/apptainer_torchrun.sh --max-restarts=3 ./mine.py --anything "a b"
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

parse_options apptainer_torchrun.sh "$@"
read_slurm_job
use_runtime "${HPCTRAIN_RUNTIME:-apptainer}"
set_program
use_launcher torchrun
launch
