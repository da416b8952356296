#!/bin/bash
# Run a trainer on every task of a Slurm job, in the container: srun starts the tasks, apptainer enters it.
#
# usage: sbatch [SBATCH OPTION]... launch/apptainer_ddp.sh [OPTION]...
#            [TRAINER | SCRIPT.py | -m MODULE] [ARGUMENT]...
#
#   sbatch launch/apptainer_ddp.sh                              train_ddp on digits, 2 nodes with 2 tasks each
#   sbatch launch/apptainer_ddp.sh train_ddp --epochs 3         a bundled trainer and its options
#   sbatch launch/apptainer_ddp.sh ./mine.py --anything "a b"   your own script; arguments arrive unchanged
#   sbatch --nodes=8 --ntasks-per-node=4 --gpus-per-node=4 launch/apptainer_ddp.sh
#   salloc --nodes=2 --ntasks-per-node=2, then launch/apptainer_ddp.sh check
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

parse_options apptainer_ddp.sh "$@"
read_slurm_job
use_runtime "${HPCTRAIN_RUNTIME:-apptainer}"
set_program
use_launcher srun
launch
