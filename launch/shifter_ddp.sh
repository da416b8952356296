#!/bin/bash
# Run a trainer on every task of a Slurm job, in the container: srun starts the tasks, shifter enters it.
#
# usage: sbatch [SBATCH OPTION]... launch/shifter_ddp.sh [OPTION]...
#            [TRAINER | SCRIPT.py | -m MODULE] [ARGUMENT]...
#
#   source launch/site.sh perlmutter
#   HPCTRAIN_IMAGE=docker:registry/hpctrain:TAG sbatch --account=m1234 launch/shifter_ddp.sh train_ddp
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

parse_options shifter_ddp.sh "$@"
read_slurm_job
use_runtime shifter
set_program
use_launcher srun
launch
