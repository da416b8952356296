#!/bin/bash
# Run a Horovod script, each rank in the container.
#
# usage: sbatch [SBATCH OPTION]... launch/apptainer_horovod.sh [OPTION]...
#            [TRAINER | SCRIPT.py | -m MODULE] [ARGUMENT]...
#
#   sbatch launch/apptainer_horovod.sh                              train_horovod on digits
#   sbatch launch/apptainer_horovod.sh --launcher=horovodrun ./mine.py --anything "a b"
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

parse_options apptainer_horovod.sh "$@"
read_slurm_job
use_runtime "${HPCTRAIN_RUNTIME:-apptainer}"
set_program train_horovod
launcher=${OPTION[launcher]:-srun}
case $launcher in
srun) use_launcher mpi ;;
mpirun | horovodrun) use_launcher "$launcher" ;;
*) die "--launcher=$launcher: choose srun, mpirun or horovodrun" ;;
esac
launch
