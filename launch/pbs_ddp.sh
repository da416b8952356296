#!/bin/bash
# Run a trainer on every slot of a PBS job, in the container: mpirun starts the ranks, apptainer enters it.
#
# usage: qsub [QSUB OPTION]... launch/pbs_ddp.sh                train_ddp on digits, 2 nodes with 2 ranks each
#        echo "$PWD/launch/pbs_ddp.sh [OPTION]... [TRAINER | SCRIPT.py | -m MODULE] [ARGUMENT]..." |
#            qsub [QSUB OPTION]...
#
#   qsub -l select=4:ncpus=24:ngpus=4:mpiprocs=4:mem=100gb launch/pbs_ddp.sh
#   echo "$PWD/launch/pbs_ddp.sh train_ddp --epochs 3" | qsub -l select=2:ncpus=2:mpiprocs=2 -l place=scatter
#   HPCTRAIN_RUNTIME=none HPCTRAIN_PYTHON_ENV=~/my-venv qsub -V launch/pbs_ddp.sh
#
# With place=scatter each chunk of the select line is on a node of its own; otherwise PBS may put two on one.
# mpirun is the host's Open MPI. It reaches the other nodes with PBS's pbs_tmrsh, or over ssh.
#
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

parse_options pbs_ddp.sh "$@"
read_pbs_job
use_runtime "${HPCTRAIN_RUNTIME:-apptainer}"
set_program
use_launcher mpirun
launch
