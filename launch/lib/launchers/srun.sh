# srun: one task per rank.
# shellcheck shell=bash
# shellcheck disable=SC2034 # the variables in capitals are read by main.sh

launch_with_srun() {
    LAUNCHER_TEXT='srun, one task per rank'
    set_mpi_hint
    set_srun "$TASKS"
    LAUNCH+=("$TASK" srun)
}

task_srun() {
    set_ranks_of_srun
}
