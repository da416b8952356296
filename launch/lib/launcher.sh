# The launchers start a copy of the program for each rank. Sourced by launch/lib/main.sh and task.sh.
#
# To add one, write launchers/NAME.sh with two functions. launch_with_NAME runs on the first node and fills
#   LAUNCH               the words before the command of a rank; they end with "$TASK" NAME, or with "$TASK"
#                        none for a program that starts the ranks of its node itself
#   LAUNCHER_TEXT        for the log
# and, if it needs to,
#   PYTHON               what starts the words of PROGRAM, instead of python
#   COMMAND_IN_VARIABLE  not empty: the command of a rank goes to the tasks in HPCTRAIN_COMMAND
#   CLEAN_UP+=(FUNCTION) ends the processes that outlive a failed job
# task_NAME runs in each task before it enters the image. It calls set_ranks, and export_torchrun_env if
# neither Lightning nor hpctrain (src/hpctrain/distributed/world.py) detects the variables of the launcher.
# shellcheck shell=bash
# shellcheck disable=SC2034 # the variables in capitals are read by main.sh and task.sh

# use_launcher NAME [ARGUMENT]...
use_launcher() {
    LAUNCHER_USED=("$@") LAUNCH=() PYTHON=(python) COMMAND_IN_VARIABLE='' MPI_HINT=''
    # shellcheck source=/dev/null
    source "$ROOT/launch/lib/launchers/$1.sh"
    "launch_with_$1" "${@:2}"
    [[ -z $SRUN_ENTERS || ${LAUNCH[0]} == srun ]] ||
        die "with HPCTRAIN_RUNTIME=$RUNTIME only srun enters the image, and $1 would start the ranks here:" \
            "let srun start them, or set another runtime"
}

# ---- what several launchers use ----

# set_srun TASKS_PER_NODE [OPTION]...: fill LAUNCH. When a task fails, srun kills the others at once. When one
# ends without an error, the others may take any time: rank 0 of a script may evaluate or save after them.
set_srun() {
    local nodelist
    LAUNCH=(srun --nodes="$NODES" --ntasks=$((NODES * $1)) --ntasks-per-node="$1"
        --cpus-per-task=$((THREADS * TASKS / $1)) --export=ALL --kill-on-bad-exit=1 --wait=0 --label
        "${STEP_OPTIONS[@]}" "${@:2}")
    # A step with other tasks or nodes than the job gets too few GPUs without it, or is refused.
    ((GPUS == 0 || ($1 == JOB_TASKS && NODES == ${#JOB_HOSTS[@]}))) || LAUNCH+=(--gpus=$((NODES * GPUS)))
    if ((NODES < ${#JOB_HOSTS[@]})); then
        printf -v nodelist '%s,' "${HOSTS[@]}"
        LAUNCH+=(--nodelist="${nodelist%,}")
    fi
}

# set_mpirun TASKS_PER_NODE: fill LAUNCH; REPLY is the version. In a PBS job it starts its daemons on other
# nodes with pbs_tmrsh, where it is, unless the user has named another program.
set_mpirun() {
    local name places agent=$ROOT/launch/lib/tmrsh.sh
    command -v mpirun >/dev/null ||
        die "there is no mpirun on the PATH of $(hostname): load an Open MPI module (HPCTRAIN_MODULES)"
    REPLY=$(mpirun --version 2>&1 | head -n 1) || true
    [[ $REPLY == *"Open MPI"* || $REPLY == *OpenRTE* ]] ||
        die "$(command -v mpirun) is not Open MPI's, whose options this script uses:" \
            "load an Open MPI module, or use srun"
    LAUNCH=(mpirun -np $((NODES * $1)) --map-by "ppr:$1:node" --bind-to none)
    if ((NODES < ${#JOB_HOSTS[@]})); then
        printf -v places "%s:$TASKS," "${HOSTS[@]}"
        LAUNCH+=(--host "${places%,}")
    fi
    if [[ -n ${PBS_NODEFILE:-} ]]; then
        LAUNCH+=(--hostfile "$PBS_NODEFILE")
        # the names of the setting in Open MPI 5 and 4
        [[ -n ${PRTE_MCA_plm_ssh_agent:-}${OMPI_MCA_plm_rsh_agent:-} ]] || ! has_tmrsh ||
            LAUNCH=(env "PRTE_MCA_plm_ssh_agent=$agent" "OMPI_MCA_plm_rsh_agent=$agent" "${LAUNCH[@]}")
    fi
    while read -r name; do
        LAUNCH+=(-x "$name")
    done < <(forwarded_names)
}

# set_mpi_hint: fill MPI_HINT, the last line of a job that fails, if the program is a script for MPI. Without
# a PMI, Open MPI ends it with the advice to build Slurm again.
set_mpi_hint() {
    local name import='^[[:blank:]]*(import|from)[[:blank:]]+(horovod|mpi4py|dask_mpi)\b'
    [[ ${PROGRAM[0]:-} == *.py ]] || return 0
    name=$(grep -Eom1 "$import" "${PROGRAM[0]}") || return 0
    MPI_HINT="if MPI did not start above: ${PROGRAM[0]} imports ${name##*[[:blank:]]}, so submit it by"
    MPI_HINT+=' launch/apptainer_mpi.sh or launch/apptainer_horovod.sh'
}

# ---- in a task ----

# set_ranks RANK LOCAL_RANK [NODE_RANK]: export RANK and so on from the variables of these names. A launcher
# that fills one node after the other and does not number them has no third one.
set_ranks() {
    local name
    for name in "$@"; do
        [[ -n ${!name:-} ]] || die "$name is not set: start this with a launch script"
    done
    export RANK=${!1} LOCAL_RANK=${!2} NODE_RANK
    export WORLD_SIZE=$HPCTRAIN_WORLD_SIZE LOCAL_WORLD_SIZE=$HPCTRAIN_TASKS_PER_NODE
    NODE_RANK=$((RANK / LOCAL_WORLD_SIZE))
    (($# < 3)) || NODE_RANK=${!3}
    HPCTRAIN_NODE_TASK=$LOCAL_RANK HPCTRAIN_NODE_TASKS=$LOCAL_WORLD_SIZE
}

# export_torchrun_env: set the variables by which Lightning and hpctrain detect torchrun. Lightning checks
# them before Slurm's, in which every task of mpirun is rank 0.
export_torchrun_env() {
    export TORCHELASTIC_RUN_ID=$MASTER_PORT GROUP_RANK=$NODE_RANK
    export GROUP_WORLD_SIZE=$((HPCTRAIN_WORLD_SIZE / HPCTRAIN_TASKS_PER_NODE))
}

# index_of_command: print where the command begins in WORDS: after the words that enter the image, and --
index_of_command() {
    local index=0
    while [[ ${WORDS[index]} != -- ]]; do
        index=$((index + 1))
    done
    echo $((index + 1))
}

# is_users_script: whether the task runs a user's script, which may read its rank from Slurm's variables
is_users_script() {
    local program=("${WORDS[@]:$(index_of_command) + 1}")
    [[ ${program[0]:-} == *.py || (${program[0]:-} == -m && ${program[1]:-} != hpctrain) ]]
}
