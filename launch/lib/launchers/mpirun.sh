# mpirun: Open MPI's, of the host.
# shellcheck shell=bash
# shellcheck disable=SC2034 # the variables in capitals are read by main.sh

launch_with_mpirun() {
    set_mpirun "$TASKS"
    LAUNCHER_TEXT="mpirun, $REPLY"
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
