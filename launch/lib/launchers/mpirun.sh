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
    # Otherwise a rank that ends with an exception waits in MPI_Finalize for the others, which wait for it.
    # Within a block, the import may be an optional one.
    [[ ${PROGRAM[0]:-} != *.py ]] || ! grep -Eq '^(import|from)[[:blank:]]+mpi4py\b' "${PROGRAM[0]}" ||
        PYTHON=(python "$ROOT/launch/lib/mpi4py_main.py")
}

task_mpirun() {
    set_ranks OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_LOCAL_RANK
    ! is_users_script || export_torchrun_env
}
