# srun: one task per rank.
# shellcheck shell=bash
# shellcheck disable=SC2034 # the variables in capitals are read by main.sh

launch_with_srun() {
    LAUNCHER_TEXT='srun, one task per rank'
    set_mpi_hint
    set_srun "$TASKS"
    LAUNCH+=("$TASK" srun)
}

# Lightning reads the ranks from Slurm's variables, unless the job has a name that salloc gives.
task_srun() {
    set_ranks SLURM_PROCID SLURM_LOCALID SLURM_NODEID
    [[ ${SLURM_JOB_NAME:-} != @(interactive|bash) ]] || ! is_users_script || export SLURM_JOB_NAME=hpctrain
}
