# What the batch script and the tasks of a job share. Sourced by launch/lib/main.sh and task.sh.
#
# The batch script and the ranks on its node communicate through files in the folder HPCTRAIN_CONTROL:
#   stop       the script asks the ranks to save a checkpoint and end
#   saved      the ranks have saved a checkpoint of this attempt; one line, the option that resumes from it
#   trains     the ranks have come to the first optimizer step of this attempt
#   stopped    the ranks end because of stop, with their checkpoint saved and work left
#   polled     a rank looks for stop, so that it needs no signal
#   failed     an error of the program ends it, and would come again after a restart
#   task.*     one for each task on this node whose command runs
#   ended.*    one for each task on this node whose command has ended with exit status 0
#   failed.*   one for each task on this node whose command has ended otherwise
#   lonely     the launcher has been ended, because it waited although no rank was left on any node
# A signal to the ranks would also reach squashfuse, and without the image they end with "Bus error".
# shellcheck shell=bash

# has_control: whether this node has that folder, and not a copy of somebody else's, with links to user files
has_control() {
    is_own "$HPCTRAIN_CONTROL"
}

# has_file NAME: whether this file is in the folder
has_file() {
    [[ -e $HPCTRAIN_CONTROL/$1 ]]
}

# has_files KIND: whether there are such files of tasks
has_files() {
    compgen -G "$HPCTRAIN_CONTROL/$1.*" >/dev/null
}

# begin_task, end_task STATUS: let the batch script know that this task's command runs, and how it has ended
begin_task() {
    ! has_control || touch "$HPCTRAIN_CONTROL/task.$$" || true
}

end_task() {
    local how=ended
    (($1 == 0)) || how=failed
    mv "$HPCTRAIN_CONTROL/task.$$" "$HPCTRAIN_CONTROL/$how.$$" 2>/dev/null || true
}

# has_signal KIND SIGNAL PROCESS: whether this signal is in the process's masks of these kinds, such as Cgt
# for those that it catches (proc_pid_status(5))
has_signal() {
    local number=$2 key mask found=0
    [[ $2 == [0-9]* ]] || number=$(kill -l "$2" 2>/dev/null) || return 1
    while read -r key mask; do
        # shellcheck disable=SC2053 # a pattern
        [[ $key != Sig$1: ]] || found=$((found | 16#$mask))
    done 2>/dev/null <"/proc/$3/status"
    ((found >> (number - 1) & 1))
}

# parent_of PROCESS: set REPLY to the process that started it
parent_of() {
    local key value
    while read -r key value; do [[ $key != PPid: ]] || REPLY=$value; done <"/proc/$1/status"
}

# signal_ranks RANKS: send SIGUSR1 to those ranks of this node that have a handler for it, or else SIGTERM to
# those that have one for that: not to apptainer around a rank, nor to the workers of a DataLoader below it.
# RANKS is a regular expression.
signal_ranks() {
    local process parent name ranks=' '
    while read -r process; do
        process=${process%/environ}
        [[ $(readlink "$process/exe") != */python* ]] || ranks+="${process#/proc/} "
    done < <(grep -slzx "RANK=$1" /proc/[0-9]*/environ | xargs -r grep -slzx "HPCTRAIN_JOB=$HPCTRAIN_JOB")
    for process in $ranks; do
        parent=$process
        while parent_of "$parent" 2>/dev/null && parent=$REPLY && ((parent > 1)); do
            [[ $ranks != *" $parent "* ]] || continue 2
        done
        for name in USR1 TERM; do
            ! has_signal Cgt "$name" "$process" || { kill -"$name" "$process" && break; }
        done
    done
}

# is_alive PID: not even a zombie, whose parent may be waiting for this process to close its output
is_alive() {
    local stat
    { read -r stat <"/proc/$1/stat"; } 2>/dev/null && [[ $stat != *') Z '* ]]
}

# status_of_child PROCESS: the exit status of a child that has ended, after a signal has ended `wait` before.
# bash 5.2 loses a child that ends in that moment, and would wait for it as long as it has another one.
status_of_child() {
    [[ $'\n'$(jobs -rp)$'\n' != *$'\n'"$1"$'\n'* ]] || return 143
    wait "$1" 2>/dev/null
}

# job_id: print the job's number, or ARRAY_TASK: one task of an array has the number of the whole array
job_id() {
    echo "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
}

# job_field NAME: print this field of squeue --Format; in a PBS job nothing. Not of scontrol show job, whose
# text has the job's name and other words of the user beside the fields. A time is printed as @SECONDS since
# 1970: a local time comes twice in the hour in which clocks go back.
job_field() {
    [[ -n ${SLURM_JOB_ID:-} ]] || return 0
    SLURM_TIME_FORMAT=@%s squeue --noheader --states=all --jobs="$(job_id)" --Format="$1:4000" 2>/dev/null |
        sed 's/ *$//;q' || true
}
