#!/bin/bash
# Run a trainer on this machine without a scheduler, in the container or not: torchrun, one rank per GPU.
#
# usage: launch/local.sh [OPTION]... [TRAINER | SCRIPT.py | -m MODULE] [ARGUMENT]...
#
#   launch/local.sh                                             train_ddp on digits, one rank per GPU, or one
#   HPCTRAIN_TASKS=4 launch/local.sh train_ddp --epochs 3       4 ranks
#   HPCTRAIN_RUNTIME=none HPCTRAIN_PYTHON_ENV=.venv launch/local.sh ./mine.py --anything "a b"
#
set -euo pipefail

# Slurm runs a copy of this script, which has no other files beside it.
. "${HPCTRAIN_ROOT:-${SLURM_SUBMIT_DIR:-${PBS_O_WORKDIR:-$(dirname "$0")/..}}}/launch/lib/main.sh" \
    2>/dev/null ||
    { echo 'hpctrain: error: submit from the hpctrain folder, or export HPCTRAIN_ROOT=FOLDER' >&2 && exit 2; }

parse_options local.sh "$@"
make_local_job
use_runtime "${HPCTRAIN_RUNTIME:-apptainer}"
set_program
use_launcher torchrun
launch
