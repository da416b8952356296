#!/bin/bash
# Run JupyterLab from the image on a compute node, or TensorBoard, or the page of a fine-tuned model, for you
# alone. The log says how to connect: one ssh command, and the file with the token.
#
# usage: sbatch [SBATCH OPTION]... launch/jupyter.sh [OPTION]... [tensorboard FOLDER | serve FOLDER]
#
#   sbatch launch/jupyter.sh                                    a node for two hours
#   sbatch --gpus-per-node=4 --time=04:00:00 launch/jupyter.sh  with GPUs
#   sbatch launch/jupyter.sh tensorboard runs                   TensorBoard of all run folders
#   sbatch launch/jupyter.sh serve runs/names                   the page of a model
#   salloc --nodes=1 --ntasks-per-node=1, then launch/jupyter.sh
#   qsub launch/jupyter.sh                                      in a PBS job; arguments as for pbs_ddp.sh
#
#SBATCH --job-name=hpctrain-jupyter
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --time=02:00:00
#SBATCH --no-requeue
#PBS -N hpctrain-jupyter
#PBS -l select=1:ncpus=2:mpiprocs=1
#PBS -l walltime=02:00:00
#PBS -j oe
set -euo pipefail

# Slurm and PBS run a copy of this script, and its functions are beside the original, of the same owner. Those
# of the folder of the job count only if they are the user's own. Others can put files beside both.
load_functions() {
    local script=$0 main=${HPCTRAIN_ROOT:-}/launch/lib/main.sh
    unset "${!SQUEUE_@}" # options of squeue, which could hide the job from it
    [[ ! ${SLURM_JOB_ID:-} || $0 != */slurm_script ]] ||
        script=/$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%o | sed q) || true
    [[ -n ${HPCTRAIN_ROOT:-} ]] || main=$(functions_in "$(dirname "$(readlink -f "$script")")" "$script") ||
        main=$(functions_in "${SLURM_SUBMIT_DIR:-${PBS_O_WORKDIR:-}}/launch" "/proc/$$") || main=''
    [[ -r $main ]] || {
        echo 'hpctrain: error: submit from the hpctrain folder, or export HPCTRAIN_ROOT=FOLDER' >&2
        exit 2
    }
    # shellcheck source=/dev/null # is checked by itself
    source "$main"
}

# functions_in FOLDER OWNED: print the file of the functions if it has the owner of OWNED, and its folder, too
functions_in() {
    local main owner
    main=$(readlink -f "$1/lib/main.sh") && owner=$(stat -Lc %u "$2" 2>/dev/null) &&
        [[ $(stat -c %u "$main" "${main%/*}" 2>/dev/null) == "$owner"$'\n'"$owner" ]] && echo "$main"
}
load_functions

parse_options jupyter.sh "$@"
((${#ARGUMENTS[@]})) || ARGUMENTS=(jupyter)
[[ ${ARGUMENTS[0]} == @(jupyter|tensorboard|serve) ]] ||
    die "${ARGUMENTS[0]}: this script starts only JupyterLab (no argument), tensorboard FOLDER" \
        "or serve FOLDER: use another one for training"
if [[ -n ${PBS_NODEFILE:-} ]]; then
    read_pbs_job
    launcher=mpirun
else
    read_slurm_job
    launcher=srun
fi
use_runtime "${HPCTRAIN_RUNTIME:-apptainer}"
set_program
use_launcher "$launcher"
launch
