#!/bin/bash
# Runs in each task, between the launcher and the container: sets RANK, WORLD_SIZE and so on, as torchrun
# would for a plain PyTorch script, and enters the image. Only the launch scripts call it.
#
# usage: task.sh LAUNCHER|none [CONTAINER COMMAND]... -- COMMAND [ARGUMENT]...
#
# LAUNCHER is a file of launch/lib/launchers. "none" is for a program that starts the ranks of its node.
set -euo pipefail

die() {
    echo "hpctrain: error: rank ${RANK:-?} on $(uname -n): ${*//[[:cntrl:]]/?}" >&2
    exit 127
}

[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit; }
# shellcheck source=launch/lib/environment.sh
source "$(dirname "$0")/environment.sh"
# shellcheck source=launch/lib/trust.sh
source "$(dirname "$0")/trust.sh"
# shellcheck source=launch/lib/control.sh
source "$(dirname "$0")/control.sh"
# shellcheck source=launch/lib/launcher.sh
source "$(dirname "$0")/launcher.sh"
# shellcheck source=launch/lib/node_container.sh
source "$(dirname "$0")/node_container.sh"

# Run HPCTRAIN_END_TASK on SIGTERM, which Slurm sends to every process of a step when it ends the job. Slurm
# waits for what holds the task's output, so this holds none.
end_with_task() {
    (
        trap 'bash -c "$HPCTRAIN_END_TASK"; exit' TERM
        while kill -0 $$; do
            sleep 1 &
            wait $! || true
        done
    ) </dev/null >/dev/null 2>&1 &
}

# end_with_connection: kill this rank when its connection of ssh has ended before it, as after scancel. It is
# in no step of Slurm, which ends horovodrun alone. See kill_horovod_ranks.
end_with_connection() {
    local process sshd=$$
    until [[ $(<"/proc/$sshd/comm") == sshd* ]]; do
        parent_of "$sshd" || return 0
        sshd=$REPLY
        ((sshd > 1)) || return 0 # on the first node
    done
    (
        while [[ -d /proc/$sshd ]]; do
            sleep 1
            kill -0 $$ || exit
        done
        bash -c "${HPCTRAIN_END_TASK:-}" || true
        for process in /proc/[0-9]*; do
            [[ ${process#/proc/} != "$BASHPID" ]] && grep -qszx "HOROVOD_RANK=$RANK" "$process/environ" &&
                grep -qszx "SLURM_JOB_ID=$HPCTRAIN_JOB" "$process/environ" &&
                kill -KILL "${process#/proc/}" || true
        done
    ) </dev/null >/dev/null 2>&1 &
}

# run_as_child TRAP COMMAND...: run the command as the process CHILD, with a function as the trap for SIGTERM,
# and return its exit status. The trap sets ASKED, because the signal ends the wait before CHILD has ended.
run_as_child() {
    local status
    # shellcheck disable=SC2064 # the name of the function
    trap "$1" TERM
    shift
    # In parentheses: otherwise the child ignores SIGINT. The node container's pipe is for this shell.
    (
        [[ -z $ALIVE ]] || exec {ALIVE}>&-
        restore_users_variables
        exec "$@"
    ) <&0 &
    CHILD=$!
    ASKED='' status=0
    wait "$CHILD" 2>/dev/null || status=$?
    if [[ -n $ASKED ]]; then # SIGTERM has ended the wait
        while is_alive "$CHILD"; do sleep 0.2; done
        status=0
        status_of_child "$CHILD" || status=$?
    fi
    CHILD=''
    return $status
}

# Otherwise the child lives on. horovodrun waits for what it has sent SIGTERM, and for what has its output.
# shellcheck disable=SC2329 # a trap calls it
pass_on_term() {
    ASKED=1
    [[ -z ${CHILD:-} ]] || kill -TERM "$CHILD" 2>/dev/null || true
}

# Slurm sends SIGTERM to the tasks of a job that it preempts. With proctrack/cgroup it sends it to them alone,
# so that the ranks and the server of the image have time to save. Only the tasks on the node of rank 0 have
# the folder. srun sends SIGTERM also when another rank has failed: then there is nothing to wait for.
# shellcheck disable=SC2329 # a trap calls it
shield_from_term() {
    ASKED=1
    # What has it open keeps it. A job that Slurm ends can start nothing that would remove it.
    [[ -z ${HPCTRAIN_SIF_COPY:-} ]] || rm -f "$HPCTRAIN_SIF_COPY"
    [[ -n ${SLURM_JOB_ID:-} ]] || { pass_on_term && return 0; } # mpirun of PBS sends it
    has_control || return 0
    if [[ $(job_field State) == RUNNING && $(job_field PreemptTime) != @* ]]; then
        pass_on_term
    else
        touch "$HPCTRAIN_CONTROL/stop"
    fi
}

# As sbatch --signal=USR1@300 sends it, without a B. It would end a rank that has no handler for it.
# shellcheck disable=SC2329 # a trap calls it
pass_on_usr1() {
    ASKED=1
    if has_control; then
        touch "$HPCTRAIN_CONTROL/stop"
        ! has_file polled || return 0
    fi
    signal_ranks "${RANK:-[0-9]*}"
}

# is_shielded: whether this shell stays, between Slurm's SIGTERM and the rank. Not with podman-hpc: its tasks
# find the container of their node by the number of their parent, slurmstepd.
is_shielded() {
    [[ -n ${HPCTRAIN_CONTROL:-} && -z ${HPCTRAIN_END_TASK:-}$WAIT_AND_REPORT ]]
}

# end_left_overs: end the processes that still have the output of this task after ten seconds, such as the
# server of an image. sshd waits for them with the end of the connection, and horovodrun waits for that.
end_left_overs() {
    local process seconds parent=$$ spared=' ' left
    [[ -p /proc/$$/fd/1 && -p /proc/$$/fd/2 ]] || return 0 # no pipes of this task alone
    while [[ -r /proc/$parent/status ]]; do # this task, and what started it: they end by themselves
        spared+="$parent "
        parent_of "$parent"
        parent=$REPLY
    done
    for seconds in {0..10}; do
        left=()
        for process in /proc/[0-9]*; do
            [[ $process/fd/1 -ef /proc/$$/fd/1 || $process/fd/2 -ef /proc/$$/fd/2 ]] || continue
            [[ $spared == *" ${process#/proc/} "* ]] || left+=("${process#/proc/}")
        done
        ((${#left[@]})) || return 0
        ((seconds == 10)) || sleep 1
    done
    kill -KILL "${left[@]}" 2>/dev/null || true
}

# leave_out_missing_folders: the first node of the job may have folders that this one has not. PBS makes
# TMPDIR there alone, and on another node for the processes that it starts itself.
leave_out_missing_folders() {
    local index end folder kept=()
    end=$(index_of_command)
    for ((index = 0; index < end; index++)); do
        case ${WORDS[index]} in
        --bind | --volume) folder=${WORDS[index + 1]%%:*} ;;
        --env=TMPDIR=*) folder=${WORDS[index]#*=*=} ;;
        *) folder=/ ;;
        esac
        if [[ -e $folder ]]; then
            kept+=("${WORDS[index]}")
            continue
        fi
        ((HPCTRAIN_NODE_TASK)) ||
            echo "hpctrain: warning: the image has no $folder on $(uname -n), because this node has none" >&2
        [[ ${WORDS[index]} == --env=* ]] || index=$((index + 1))
    done
    WORDS=("${kept[@]}" "${WORDS[@]:end}")
    [[ -z ${TMPDIR:-} || -d $TMPDIR ]] || unset TMPDIR
}

launcher=${1:-}
WORDS=("${@:2}")
WAIT_AND_REPORT='' ALIVE='' CHILD=''
# The index of this task among those that one launcher process started on this node, and their number.
HPCTRAIN_NODE_TASK=0 HPCTRAIN_NODE_TASKS=1

if [[ $launcher != none ]]; then
    file=$(dirname "$0")/launchers/$launcher.sh
    [[ -r $file ]] || die "no launcher '$launcher': only the launch scripts call this (see --help)"
    # shellcheck source=/dev/null
    source "$file"
    "task_$launcher"
fi
export HPCTRAIN_NODE_TASK HPCTRAIN_NODE_TASKS

# The caches that are in /tmp by default (launch/sites/generic.env), and the kernels of torch.compile: torch
# makes their folder at import, and its own default is a name that others can make first, too.
own=/tmp/hpctrain-$UID
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$own/inductor}
for name in HPCTRAIN_CACHE HF_HOME TORCH_HOME MPLCONFIGDIR TORCHINDUCTOR_CACHE_DIR; do
    [[ ${!name:-} == "$own"/* ]] || continue
    make_own_or_other "$own" ||
        die "$own and $REPLY belong to somebody else: set $name to a folder of your own"
    [[ $REPLY != "$own" ]] || continue
    [[ $name != TORCHINDUCTOR_CACHE_DIR || $HPCTRAIN_NODE_TASK != 0 ]] ||
        printf 'hpctrain: warning: on %s %s belongs to somebody else: caches are in %s instead\n' \
            "$(uname -n)" "$own" "$REPLY" >&2
    export "$name=$REPLY${!name#"$own"}"
done

# Open MPI writes its messages into files of foreseeable names there, also if they are somebody else's. These
# runtimes may have a /dev/shm of their own.
if [[ ${WORDS[0]} != @(podman-hpc|shifter) && -z ${APPTAINER_CONTAIN:-}${APPTAINER_CONTAINALL:-} ]] &&
    make_own_or_other "/dev/shm/hpctrain-$UID"; then
    export OMPI_MCA_btl_sm_backing_directory=${OMPI_MCA_btl_sm_backing_directory:-$REPLY}
    export OMPI_MCA_btl_vader_backing_directory=$OMPI_MCA_btl_sm_backing_directory # its name in Open MPI 4
fi

leave_out_missing_folders
[[ ${WORDS[0]} != podman-hpc ]] || refuse_podman_settings_of_others
! is_shielded || [[ -z ${SLURM_JOB_ID:-} || -z ${HPCTRAIN_NODE_CONTAINER:-} || $HPCTRAIN_NODE_TASKS == 1 ]] ||
    enter_node_container
command=$(index_of_command)
[[ ${WORDS[0]} == -- ]] || export HPCTRAIN_CONTAINER_ON=${HPCTRAIN_CONTAINER_ON:-$(uname -n)}
set -- "${WORDS[@]:0:command-1}" "${WORDS[@]:command}"
command -v "$1" >/dev/null ||
    die "there is no $1 on the PATH: load its module before you submit (HPCTRAIN_MODULES)"
[[ -z ${HPCTRAIN_END_TASK:-} || $HPCTRAIN_NODE_TASK != 0 ]] || end_with_task
status=0
if [[ -n $WAIT_AND_REPORT ]]; then
    end_with_connection
    run_as_child pass_on_term "$@" || status=$?
    ((status <= 128)) ||
        echo "hpctrain: error: rank $RANK on $(uname -n) was ended by signal $((status - 128))" >&2
    end_left_overs
elif is_shielded; then
    begin_task
    trap pass_on_usr1 USR1
    run_as_child shield_from_term "$@" || status=$?
    end_task "$status"
    [[ -z $ALIVE ]] || leave_node_container
    # End by the same signal, for srun to report it.
    trap - TERM
    ulimit -c 0
    ((status <= 128)) || kill -$((status - 128)) $$ 2>/dev/null || true
else
    restore_users_variables
    exec "$@"
fi
exit $status
