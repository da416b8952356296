#!/bin/bash
# Run JupyterLab from the image on a compute node, or TensorBoard, the page of a fine-tuned model, an editor,
# or any web server, for you alone. The log says how to connect: one ssh command, and the file with the token.
#
# usage: sbatch [SBATCH OPTION]... launch/jupyter.sh [OPTION]... [tensorboard FOLDER | serve FOLDER]
#        sbatch [SBATCH OPTION]... launch/jupyter.sh [OPTION]... code | -- COMMAND...
#
#   sbatch launch/jupyter.sh                                    a node for two hours
#   sbatch --gpus-per-node=4 --time=04:00:00 launch/jupyter.sh  with GPUs
#   sbatch launch/jupyter.sh tensorboard runs                   TensorBoard of all run folders
#   sbatch launch/jupyter.sh serve runs/names                   the page of a model
#   sbatch launch/jupyter.sh code                               VS Code: your own code-server
#   sbatch launch/jupyter.sh -- vllm serve MODEL --uds {socket} a program that listens on {socket} or {port}
#   salloc --nodes=1 --ntasks-per-node=1, then launch/jupyter.sh
#   qsub launch/jupyter.sh                                      in a PBS job; arguments as for pbs_ddp.sh
#
#SBATCH --job-name=hpctrain-jupyter
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --time=02:00:00
#SBATCH --no-requeue
#SBATCH --ignore-pbs
#PBS -N hpctrain-jupyter
#PBS -l select=1:ncpus=2:mpiprocs=1
#PBS -l walltime=02:00:00
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

parse_options jupyter.sh "$@"
((${#ARGUMENTS[@]})) || ARGUMENTS=(jupyter)
case ${ARGUMENTS[0]} in
jupyter | tensorboard | serve) ;;
code) ARGUMENTS=(proxy "${ARGUMENTS[@]}") ;;
--) ARGUMENTS=(proxy "${ARGUMENTS[@]:1}") ;;
*)
    die "${ARGUMENTS[0]}: this script starts only JupyterLab (no argument), tensorboard FOLDER," \
        "serve FOLDER, code, or a server after --: use another one for training"
    ;;
esac
[[ -z ${OPTION[port]:-} ]] || export HPCTRAIN_NODE_PORT=1
read_job
use_runtime "${HPCTRAIN_RUNTIME:-apptainer}"
set_program
use_launcher "$([[ -n ${PBS_NODEFILE:-} ]] && echo mpirun || echo srun)"
launch
