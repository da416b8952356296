#!/bin/bash
# What each task does before it enters the container: tell plain PyTorch scripts their rank by torchrun's names.
# The launch scripts put it between the launcher and the container; nobody calls it by hand.
#
# usage: task.sh slurm|mpi|horovodrun|none [CONTAINER COMMAND]... -- COMMAND [ARGUMENT]...
set -euo pipefail

die() {
    echo "hpctrain: error: rank ${RANK:-?} on $(hostname): $*" >&2
    exit 127
}

case ${1:-} in
-h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit ;;
slurm)
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID NODE_RANK=$SLURM_NODEID
    ;;
mpi)
    : "${OMPI_COMM_WORLD_RANK:?no variables of mpirun: start it by a launch script}"
    export RANK=$OMPI_COMM_WORLD_RANK LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK
    export NODE_RANK=$((RANK / HPCTRAIN_TASKS_PER_NODE))
    # Under mpirun all are task 0 for Slurm, by which podman-hpc tells who makes the container of the node.
    export PODMANHPC_LOCALID_VAR=OMPI_COMM_WORLD_LOCAL_RANK PODMANHPC_TASKS_PER_NODE_VAR=OMPI_COMM_WORLD_LOCAL_SIZE
    # Open MPI 4 in the image under mpirun 5 of the host: the first names the host's plugins, which are not there; without the
    # second it takes itself for a program that nobody launched, and is rank 0 of 1. Neither means anything to Open MPI 5 inside.
    unset OMPI_MCA_mca_base_component_path
    if [[ -n ${PMIX_SERVER_URI3:-} ]]; then
        export OMPI_MCA_orte_local_daemon_uri=${OMPI_MCA_orte_local_daemon_uri:-$PMIX_SERVER_URI3}
    fi
    ;;
horovodrun)
    # ssh has brought the variables of the first node's container along
    unset APPTAINER_BIND SINGULARITY_BIND
    eval "set -- horovodrun $HPCTRAIN_COMMAND" # words quoted by printf %q
    export RANK=$HOROVOD_RANK LOCAL_RANK=$HOROVOD_LOCAL_RANK NODE_RANK=$HOROVOD_CROSS_RANK
    ;;
none) ;; # torchrun, or horovodrun itself: what they start has its rank from them
*) echo "${0##*/}: started by the launch scripts (see --help)" >&2 && exit 2 ;;
esac
launcher=$1
if [[ $launcher != none ]]; then
    export WORLD_SIZE=$HPCTRAIN_WORLD_SIZE LOCAL_WORLD_SIZE=$HPCTRAIN_TASKS_PER_NODE
fi
shift

container=()
while [[ $1 != -- ]]; do
    container+=("$1")
    shift
done
shift
# horovodrun runs in a container on the first node: its ranks there are inside already.
if [[ -e /.singularity.d || -e /run/.containerenv ]]; then
    container=()
fi
# A Lightning script of the user's asks Slurm for its rank where it can, and Slurm says 0 to every rank of mpirun; it believes
# torchrun first. (In the shell of salloc it would not ask Slurm, because of the job's name.)
if [[ ${2:-} == *.py ]]; then
    case $launcher in
    mpi | horovodrun)
        export TORCHELASTIC_RUN_ID=$MASTER_PORT GROUP_RANK=$NODE_RANK
        export GROUP_WORLD_SIZE=$((HPCTRAIN_WORLD_SIZE / HPCTRAIN_TASKS_PER_NODE))
        ;;
    slurm) [[ ${SLURM_JOB_NAME:-} != @(interactive|bash) ]] || export SLURM_JOB_NAME=hpctrain ;;
    esac
fi
set -- "${container[@]}" "$@"
command -v "$1" >/dev/null || die "there is no $1 on the PATH: load its module before you submit (HPCTRAIN_MODULES)"
[[ $launcher == horovodrun ]] || exec "$@"
# ssh makes 255 of whatever a signal did
"$@" || {
    status=$?
    ((status <= 128)) || echo "hpctrain: error: rank $RANK on $(hostname) was ended by signal $((status - 128))" >&2
    exit $status
}
