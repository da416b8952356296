#!/bin/bash
# Run a trainer with torchrun: srun starts one in the container of each node, and that starts its ranks. In a
# PBS job mpirun starts them.
#
# usage: sbatch [SBATCH OPTION]... launch/apptainer_torchrun.sh [OPTION]...
#            [TRAINER | SCRIPT.py | -m MODULE] [ARGUMENT]...
#
#   sbatch launch/apptainer_torchrun.sh train_ddp --epochs 3
#   sbatch launch/apptainer_torchrun.sh --max-restarts=3 ./mine.py --anything "a b"
#   qsub launch/apptainer_torchrun.sh                    in a PBS job; arguments as for pbs_ddp.sh
#
#SBATCH --job-name=hpctrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=00:30:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --open-mode=append
#SBATCH --ignore-pbs
#PBS -N hpctrain
#PBS -l select=2:ncpus=2:mpiprocs=2
#PBS -l place=scatter
#PBS -l walltime=00:30:00
#PBS -j oe
#PBS -k oed
set -euo pipefail

# Slurm and PBS run a copy of this script. launch/lib/trust.sh says which functions it may run.
unset "${!SQUEUE_@}" # options of squeue, which could hide the job from it
_of=$0 _main=${HPCTRAIN_ROOT:+$HPCTRAIN_ROOT/launch/lib/main.sh}
[[ $0 != */slurm_script ]] || _of=/$(squeue --noheader --jobs="${SLURM_JOB_ID:-0}" -o %o | sed q) || true
for _folder in "$(dirname "$(readlink -f "$_of")")" "${SLURM_SUBMIT_DIR:-${PBS_O_WORKDIR:-}}/launch"; do
    [[ -z $_main ]] || break
    _main=$(readlink -f "$_folder/lib/main.sh") &&
        [[ $(stat -Lc %u "$_of" "$_main" "${_main%/*}" 2>/dev/null | uniq -c) == *' 3 '* ]] || _main=''
    _of=/proc/$$ # the user's
done
[[ -r $_main ]] ||
    { echo 'hpctrain: error: submit from the hpctrain folder, or export HPCTRAIN_ROOT=FOLDER' \
        ${PYXIS_CONTAINER_IMAGE:+"(and unset PYXIS_CONTAINER_IMAGE: this script enters the image itself)"} \
        >&2 && exit 2; }
# shellcheck source=/dev/null
source "$_main"

parse_options apptainer_torchrun.sh "$@"
read_job
use_runtime "${HPCTRAIN_RUNTIME:-apptainer}"
set_program
use_launcher torchrun
launch
