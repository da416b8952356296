# mpirun: Open MPI's, of the host.
# shellcheck shell=bash
# shellcheck disable=SC2034 # the variables in capitals are read by main.sh

launch_with_mpirun() {
    local name version
    command -v mpirun >/dev/null ||
        die "there is no mpirun on the PATH of $(hostname): load an Open MPI module (HPCTRAIN_MODULES)"
    version=$(mpirun --version 2>&1 | head -n 1) || true
    [[ $version == *"Open MPI"* || $version == *OpenRTE* ]] ||
        die "$(command -v mpirun) is not Open MPI's, whose options this script uses:" \
            "load an Open MPI module, or use srun"
    LAUNCHER_TEXT="mpirun, $version"
    LAUNCH=(mpirun -np $((NODES * TASKS)) --map-by "ppr:$TASKS:node" --bind-to none)
    [[ -z ${PBS_NODEFILE:-} ]] || LAUNCH+=(--hostfile "$PBS_NODEFILE")
    while read -r name; do
        LAUNCH+=(-x "$name")
    done < <(forwarded_names)
    LAUNCH+=("$TASK" mpirun)
}

# Open MPI 4 in the image under mpirun 5 of the host. The first variable names the host's plugins, which the
# image lacks. Without the second, Open MPI 4 starts as rank 0 of 1. Open MPI 5 in the image ignores both.
task_mpirun() {
    set_ranks OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_LOCAL_RANK
    unset OMPI_MCA_mca_base_component_path
    if [[ -n ${PMIX_SERVER_URI3:-} ]]; then
        export OMPI_MCA_orte_local_daemon_uri=${OMPI_MCA_orte_local_daemon_uri:-$PMIX_SERVER_URI3}
    fi
    ! is_users_script || export_torchrun_env
}
