# The job goes on by itself after its time limit, a preemption or a fault: Slurm requeues it, and it resumes
# from its checkpoint. Sourced by launch/lib/main.sh. control.sh lists the files shared with the ranks.
# shellcheck shell=bash

STOPPING='' # not empty: the job is to stop, because of this signal
STOP_AT=0   # then the ranks are asked to stop, in SECONDS
WALLTIME='' # of a PBS job, in seconds, if qstat tells it here
OF_OWN_SCRIPT='' # not empty: a batch script of the user's own has called this script
NOTICE=120 # so many seconds before the end of a job this script sends itself USR1, where Slurm does not
REQUEUED='' # not empty: Slurm is about to end this attempt
SHELL_ENDS=0 # so many seconds before the time limit a signal of Slurm may end the user's batch script
KILL_AT=''  # then ranks that have not stopped are killed, in SECONDS
ATTEMPT=${SLURM_RESTART_COUNT:-0} # replace_nodes changes the variable
RESTARTS='' # the attempt that Slurm runs
# The exit status of srun when it could not start the tasks of a node: the low 8 bits of Slurm's error 1001
UNREACHED=233
KILLED=137 # that of what SIGKILL has ended
LAUNCHED=0   # when this attempt has started the ranks, in SECONDS
LOG_BEGAN='' # then the job log had this number of bytes; empty where it is no file

# open_control: create HPCTRAIN_CONTROL in a batch job. In salloc or qsub -I the user sees how it ends.
open_control() {
    [[ ${HPCTRAIN_REQUEUES:=10} =~ ^(0|[1-9][0-9]{0,8})$ ]] ||
        die "HPCTRAIN_REQUEUES is '$HPCTRAIN_REQUEUES': set it to a number of restarts"
    [[ -z ${OPTION[dry-run]:-} ]] || return 0
    [[ ${ENVIRONMENT:-} == BATCH || ${PBS_ENVIRONMENT:-} == PBS_BATCH ]] || return 0
    # All runtimes show /tmp in the image. They do not show SLURM_TMPDIR.
    remove_left_folders
    HPCTRAIN_CONTROL=$(mktemp -d "/tmp/hpctrain-control.${JOB//[^0-9]/_}.XXXXXXXX") ||
        die "/tmp of $(hostname) cannot be written: exclude this node"
    export HPCTRAIN_CONTROL
    trap clean_up EXIT
    trap request_stop USR1
    if [[ -n ${PBS_JOBID:-} ]]; then
        read_pbs_fields
    elif [[ $0 != */slurm_script ]] || ! grep -qs '^#SBATCH.* --signal' "$0"; then
        [[ $0 == */slurm_script ]] || OF_OWN_SCRIPT=1 # otherwise a copy of this script, or it is sourced
        read_own_script
        start_timer seconds_to_notice
    fi
    [[ -z $EARLY_STOP ]] || request_stop
}

# read_own_script: set NOTICE and SHELL_ENDS from the --signal of a batch script of the user's own. Slurm
# sends it to the shell of that script, which waits for this one and ends by it, unless it has a trap.
read_own_script() {
    local signal left otherwise='otherwise the job ends before the ranks can save a checkpoint'
    [[ $(job_field Requeue) != 0 ]] ||
        say 'warning: Slurm will not requeue this job at its time limit: submit it with sbatch --requeue' >&2
    signal=${SBATCH_SIGNAL:-$(scontrol write batch_script "$SLURM_JOB_ID" - 2>/dev/null |
        sed -n 's/^#SBATCH\( .*\)\? --signal[= ]*\([^ ]*\).*/\2/p' | tail -n 1)}
    [[ $signal =~ ^(([RB]+):)?([A-Za-z0-9]+)(@(0|[1-9][0-9]{0,8}))?$ ]] || return 0
    NOTICE=${BASH_REMATCH[5]:-60}
    [[ ${BASH_REMATCH[2]} == *B* ]] || return 0
    ! has_signal '@(Cgt|Ign)' "${BASH_REMATCH[3]}" "${SLURM_TASK_PID:-$$}" || return 0
    SHELL_ENDS=$((NOTICE + 60)) NOTICE=120 # Slurm may send it a minute earlier
    left=$(seconds_to_notice) || return 0
    ((left + NOTICE < 30)) ||
        otherwise="otherwise the ranks save $((SHELL_ENDS + NOTICE)) s before the time limit"
    say "warning: --signal=$signal ends your batch script, which has no trap for this signal:" \
        "leave --signal out, or write exec before launch/$SCRIPT; $otherwise" >&2
}

# seconds_to_notice: print the seconds until NOTICE before the end of a Slurm job, which may change
seconds_to_notice() {
    local end
    end=$(job_field EndTime)
    [[ -n $end ]] && end=$(date -d "$end" +%s 2>/dev/null) || return 1
    echo $((end - SHELL_ENDS - NOTICE - $(date +%s)))
}

# start_timer FUNCTION: send this script USR1 when no seconds are left of those that the function prints
start_timer() {
    local left
    # Not by a signal, because bash 5.2 fails on one that comes while it reads $( of a file.
    left=$("$1") && ((left <= 0)) && EARLY_STOP=1 && return 0
    (
        trap 'kill $!; exit' TERM
        while left=$("$1") || left=60; ((left > 0)); do # without a time limit, or an answer
            sleep "$left" &
            wait $! || exit # qdel ends sleep first
        done
        kill -USR1 $$
    ) </dev/null >/dev/null 2>&1 &
    TIMER=$!
    CLEAN_UP+=(end_timer)
}

# remove_left_folders: those of the user's jobs whose batch script was killed here
remove_left_folders() {
    local folder running=''
    for folder in /tmp/hpctrain-{control.,container-}*; do
        is_own "$folder" && [[ $folder =~ ^[^0-9]*([0-9]+)(_[0-9]+_)?[.-] ]] || continue
        running=${running:-$(jobs_of_user)} || return 0
        [[ $'\n'$running$'\n' == *$'\n'"${BASH_REMATCH[1]}"$'\n'* ]] || rm -rf "$folder"
    done
}

# jobs_of_user: print the numbers of the user's jobs that have not ended; of an array of PBS that of all
jobs_of_user() {
    if [[ -n ${SLURM_JOB_ID:-} ]]; then
        squeue --noheader --user="$UID" --format=%A
    else
        qselect -u "$(id -un)" 2>/dev/null | sed 's/[^0-9].*//'
    fi
}

# read_pbs_fields: PBS announces the end of the walltime by SIGTERM, seconds before SIGKILL. So this script
# gets USR1 two minutes before, as by sbatch --signal. If PBS has run this job before, the ranks resume.
read_pbs_fields() {
    [[ ! $(pbs_field run_count) =~ ^[1-9][0-9]{0,8}$ ]] || export HPCTRAIN_PBS_RERUNS=$((BASH_REMATCH[0] - 1))
    [[ $(pbs_field Resource_List.walltime) =~ ^([0-9]+):([0-9]+):([0-9]+)$ ]] || return 0
    WALLTIME=$((10#${BASH_REMATCH[1]} * 3600 + 10#${BASH_REMATCH[2]} * 60 + 10#${BASH_REMATCH[3]}))
    start_timer seconds_of_walltime
}

seconds_of_walltime() {
    echo $((WALLTIME - NOTICE - SECONDS))
}

end_timer() {
    kill "$TIMER" 2>/dev/null
}

# request_stop [TERM]: the trap for USR1 (sbatch --signal) and TERM (end of the walltime, qdel, end by Slurm)
request_stop() {
    local start end limit left
    [[ -z $STOPPING ]] || is_qdel "${1:-}" || return 0
    STOPPING=${1:-USR1} STOP_AT=$SECONDS
    # The ranks have read it, and this script may be killed before it cleans up.
    [[ $STOPPING != TERM || -z ${HPCTRAIN_ENVIRONMENT:-} ]] || rm -rf "$HPCTRAIN_ENVIRONMENT"
    start=$(job_field StartTime) end=$(job_field EndTime)
    if [[ $STOPPING == TERM ]]; then
        : # now
    elif [[ -n $WALLTIME ]]; then
        limit=$WALLTIME left=$((WALLTIME - SECONDS))
    elif [[ -n $start && -n $end ]] && start=$(date -d "$start" +%s 2>/dev/null) &&
        end=$(date -d "$end" +%s 2>/dev/null); then
        limit=$((end - SHELL_ENDS - start)) left=$((end - SHELL_ENDS - $(date +%s)))
    fi
    if [[ -n ${limit:-} ]]; then
        # Slurm sends it at once if the time limit is not longer than --signal. Such a job trains half of it.
        ((limit > 240 || left <= limit / 2)) || STOP_AT=$((SECONDS + left - limit / 2))
        # The last third of the time is for ending the ranks and requeuing the job.
        KILL_AT=$((STOP_AT + (left - STOP_AT + SECONDS) * 2 / 3))
    fi
    ask_to_stop
}

# is_qdel SIGNAL: whether a signal after USR1 deletes a PBS job, and is not that of the end of the walltime
is_qdel() {
    [[ -z ${SLURM_JOB_ID:-} && $STOPPING == USR1 && $1 == TERM ]] &&
        ((SECONDS + 5 < ${WALLTIME:-1000000000}))
}

ask_to_stop() {
    ((SECONDS >= STOP_AT)) && ! has_file stop || return 0
    touch "$HPCTRAIN_CONTROL/stop"
    # A script without hpctrain.Run never reads it, whatever its Trainer prints about a requeue.
    has_file polled || signal_every_rank &
    has_file saved ||
        say 'asked to stop, and no rank has saved a checkpoint yet: without one the job ends for good'
}

# signal_every_rank: a script without hpctrain.Run may have a handler of its own
signal_every_rank() {
    # shellcheck disable=SC2016 # the shells on the nodes expand it
    on_every_node bash -c 'source "$0"; signal_ranks "[0-9]*"' "$ROOT/launch/lib/control.sh" 2>/dev/null
}

# run_launcher: run COMMAND, in the background because bash runs traps between commands; return its status
run_launcher() {
    local status=0 launcher
    trap request_stop USR1
    trap 'request_stop TERM' TERM
    rm -f "$HPCTRAIN_CONTROL"/{task,ended,failed}.*
    LAUNCHED=$SECONDS
    LOG_BEGAN=$([[ ! -f /proc/$$/fd/2 ]] || stat -Lc %s /proc/$$/fd/2)
    "${COMMAND[@]}" &
    launcher=$!
    watch_step "$launcher" </dev/null &
    [[ -n $STOPPING ]] || wait "$launcher" || status=$?
    [[ -n $STOPPING ]] || return "$status"
    while is_alive "$launcher"; do # a signal ended the wait
        ask_to_stop
        if [[ -n $KILL_AT ]] && ((SECONDS >= KILL_AT)) && has_file saved; then
            say 'the ranks have not stopped, and the time is nearly over: killing them'
            kill "$launcher"
            kill -CONT "$launcher" # a launcher that is stopped acts on no signal
            KILL_AT=''
        fi
        sleep 1
    done
    status_of_child "$launcher"
}

# watch_step LAUNCHER: srun waits without end for tasks whose slurmstepd has been killed on another node, and
# mpirun for a node that is dead. End the launcher when the tasks of this node have ended, and no rank is left
# on any node.
watch_step() {
    local seconds
    for ((seconds = 0; ; seconds += 5)); do
        sleep 5
        is_alive "$1" || return 0
        if has_files task || ! { has_files ended || has_files failed; }; then
            seconds=0
        elif ((seconds >= 30)); then
            # shellcheck disable=SC2016 # the shells on the nodes expand it
            ! on_every_node bash -c '! grep -slzx "RANK=[0-9]*" /proc/[0-9]*/environ |
                xargs -r grep -slzx "HPCTRAIN_JOB=$HPCTRAIN_JOB" | grep -q .' 2>/dev/null || break
            seconds=0
        fi
    done
    say 'no rank is left on any node, and the launcher waits, as for a node that has failed: ending it'
    touch "$HPCTRAIN_CONTROL/lonely"
    kill "$1"
    sleep 10
    kill -KILL "$1" 2>/dev/null
}

# print_log: print what the job log has got in this attempt
print_log() {
    tail -c "+$((LOG_BEGAN + 1))" "/proc/$$/fd/2"
}

# first_failure: print which task of this attempt has failed first, NODE TASK HOW, and its last line. srun
# kills the others then, and its exit status is the highest of all. It tells of tasks in the order of their
# ends, and those that have lost a connection may end before the one that failed. Ranks have a label.
first_failure() {
    [[ -n $LOG_BEGAN && ${LAUNCH[0]:-} == srun ]] || return 0
    print_log | awk '
        # the list of the watchdog, indented lines, stacks of faulthandler, warnings of torch at its exit
        BEGIN {
            follows_reason = "^(slurmstepd-|hpctrain: rank [0-9]+ on |[ \t]|$|(Current t|T)hread 0x" \
                "|Extension modules: |\\[rank[0-9]+\\]:\\[W)"
        }
        /^srun: error: [^ ]+: tasks? [0-9,-]+: / {
            how = $0
            sub(/^srun: error: [^ ]+: tasks? [0-9,-]+: /, "", how)
            parts = split($5, part, ",")
            for (i = 1; i <= parts; i++) {
                split(part[i], ends, "-")
                for (task = ends[1] + 0; task <= (ends[2] == "" ? ends[1] : ends[2]) + 0; task++)
                    if (!(task in hows)) { order[++ended] = task; nodes[task] = $3; hows[task] = how }
            }
        }
        match($0, /^ *[0-9]+: /) {
            text = substr($0, RLENGTH + 1)
            if (text !~ follows_reason) last[$1 + 0] = text
        }
        END {
            if (!ended) exit
            first = order[1]
            for (i = ended; i; i--) {
                task = order[i]
                if (last[task] ~ /lost the connection to another rank|Horovod has been shut down/) continue
                if (hows[task] !~ /^Terminated/) alone = task " "
                # MPI kills the others of such a rank
                if (hows[task] ~ /^(Segmentation|Bus|Illegal|Floating)/) crashed = task " "
                sub(/^\[rank[0-9]+\]: /, "", last[task])
                if (last[task] ~ /^([A-Za-z0-9_.]+: error|[A-Za-z0-9_.]*(Error|Exception)):/)
                    with_error = task " "
            }
            task = (with_error crashed alone first) + 0
            # It had failed before srun or MPI ended it.
            how = hows[task]
            if (with_error && how ~ /^(Terminated|Killed)/)
                how = hows[first] ~ /^Exited/ ? hows[first] : "Exited with exit code 1"
            sub(/:$/, "", nodes[task])
            print nodes[task], task, how
            print last[task]
        }'
}

# replace_nodes: after a node failure, start the ranks again within the job if a spare node is there. Slurm
# has taken the failed node from a job of sbatch --no-kill, and has ended the step that ran there.
replace_nodes() {
    local left host failed=''
    ((SPARE_NODES)) && [[ -z $STOPPING ]] && ! has_file failed && is_current || return 1
    mapfile -t left < <(nodes_left)
    for host in "${HOSTS[@]}"; do
        [[ " ${left[*]} " == *" $host "* ]] || failed+=" $host"
    done
    [[ -n $failed ]] && ((${#left[@]} >= NODES)) || return 1
    HOSTS=("${left[@]:0:NODES}") SPARE_NODES=$((${#left[@]} - NODES))
    say "failed:$failed. Going on within the job on ${HOSTS[*]}"
    # Ranks on a node that was only cut off find another port and another secret.
    unset MASTER_PORT HPCTRAIN_JOB_SECRET
    export SLURM_RESTART_COUNT=$((${SLURM_RESTART_COUNT:-0} + 1))
    # shellcheck disable=SC2034 # print_summary reads it
    BEGAN=$(date +%s%3N)
    export_job_env
    use_launcher "${LAUNCHER_USED[@]}"
    set_command
}

# guard_batch_script: if this node fails, Slurm does not requeue a job of sbatch --no-kill, and its other
# nodes would idle until the time limit. So they look at the first one, one of them every ten seconds.
guard_batch_script() {
    ((SPARE_NODES)) || return 0
    while watch_from_other_nodes; sleep 10; do :; done &
}

# watch_from_other_nodes: returns when the step ends, for example because one of its nodes has failed
watch_from_other_nodes() {
    local others count
    mapfile -t others < <(nodes_left | grep -vxF "${HOSTS[0]}")
    count=${#others[@]}
    { ((count)) && is_current; } || return 0
    # shellcheck disable=SC2016 # the shells on those nodes expand it
    "${SIDE_STEP[@]}" --no-kill --nodes="$count" --ntasks="$count" --exclude="${HOSTS[0]}" --quiet bash -c '
        seconds=$(((SLURM_PROCID + 1) * 10))
        while sleep "$seconds"; do
            seconds=$((SLURM_NTASKS * 10))
            shown=$(squeue --noheader --jobs="$1" --Format=RestartCnt:9,NodeList:4000) || continue
            read -r restarts nodes <<<"$shown"
            [[ $restarts == "$2" ]] || exit
            hosts=$(scontrol show hostnames "$nodes") || continue
            grep -qxF "$3" <<<"$hosts" || ! scontrol requeue "$1" || exit
        done' guard "$(job_id)" "$ATTEMPT" "${HOSTS[0]}" || true
}

# is_current: whether Slurm runs this attempt. If this node was cut off, another may run elsewhere. Where
# slurmctld does not answer, as while it is restarted, waits for it: Slurm ends this script at the time limit.
is_current() {
    local state='' is_waiting=''
    until read -r RESTARTS state < <(job_field RestartCnt:10,State); do
        [[ -n $is_waiting ]] ||
            say "slurmctld does not answer $(hostname), and this job waits for" \
                "it${resumable:+. If its time limit comes first, $(how_to_resume "$option")}"
        is_waiting=1
        sleep 5
    done
    [[ $state == RUNNING && $RESTARTS == "$ATTEMPT" ]]
}

# conclude STATUS: requeue the job, or say why it does not go on. Returns the script's exit status. The
# functions down to requeue read and set its variables.
conclude() {
    local status=$1 restarts=${SLURM_RESTART_COUNT:-${HPCTRAIN_RESTARTS:-0}} option='' stopped='' node=''
    local resumable='' # not empty: the run has a checkpoint
    trap '' USR1 TERM # a requeue ends this script
    [[ -n ${SLURM_JOB_ID:-} ]] || trap 'STOPPING=TERM' TERM # qdel ends the job that is submitted again, too
    if has_file saved; then
        resumable=1
        read -r option <"$HPCTRAIN_CONTROL/saved" || true
    elif ((restarts)) && option=$(find_earlier_checkpoint); then
        resumable=1
    fi
    # There is no squeue inside, so each SIGTERM to a task may have been that of a preemption.
    [[ -z $SRUN_ENTERS || -n $STOPPING ]] || is_preempted || rm -f "$HPCTRAIN_CONTROL/stop"
    ! has_waited_in_vain || status=0 # all ranks have ended so
    if has_stopped; then
        stopped=1 status=75 # for Slurm or PBS the job has completed only if it has no work left
    elif ((status == 0)) && has_files task; then
        # As mpirun does when the daemon of another node has been killed
        say "the launcher ended with exit status 0, and its ranks on $(hostname) had not ended"
        status=$KILLED
    fi
    ((status)) || return 0
    if ! is_over_for_slurm; then
        [[ -n $STOPPING ]] || find_culprit
        decide
    elif [[ $RESTARTS != "$ATTEMPT" ]]; then
        say 'Slurm has requeued the job, and it goes on by itself'
    elif [[ -n $resumable ]]; then
        say "Slurm has ended the job: $(how_to_resume "$option")"
    fi
    return "$status"
}

# decide: the first row that applies. docs/guides/results.md has them for users ("When the time is up").
decide() {
    local why later=0
    if [[ -n $stopped ]] && has_file saved; then
        # A job whose attempts save nothing would go on for ever, so HPCTRAIN_REQUEUES limits them.
        why='the ranks have saved a checkpoint and stopped'
    elif would_fail_again; then
        [[ -z $resumable ]] ||
            say "not requeued, because a restart does not correct this error: $(how_to_resume "$option")"
        return 0
    elif is_preempted; then
        why='the job is preempted'
    elif ! may_get_further; then
        say "not requeued: exit status $status before this attempt has saved a" \
            "checkpoint${resumable:+: $(how_to_resume "$option")}"
        return 0
    elif [[ -n $STOPPING ]] && has_file saved; then
        why="exit status $status after the request to stop"
    elif ((restarts < HPCTRAIN_REQUEUES)); then
        why="$(describe_fault), restart $((restarts + 1)) of at most $HPCTRAIN_REQUEUES (HPCTRAIN_REQUEUES)"
        # It may need time to go away, as a full disk or an image that is being copied.
        ! was_starting || ((SECONDS - LAUNCHED >= 60)) || later=$(longer_wait "$restarts")
    else
        say "not requeued: exit status $status after $(counted "$restarts" restart)," \
            "HPCTRAIN_REQUEUES allows no more: $(how_to_resume "$option")"
        return 0
    fi
    requeue "$why" "$restarts" "$option" "$later" "$node"
}

# The facts. A rank that stops on request may exit with 75. srun kills the others then, and may exit with 137.
has_waited_in_vain() { has_file lonely && ! has_files failed; } # none of its ranks here has failed
has_stopped() { { has_file stopped && [[ $status == @(0|75) ]]; } || { has_file stop && ((status == 75)); }; }
ended_on_request() { has_file stop && ((status == 75 || status >= 128)); }
is_over_for_slurm() { [[ -n ${SLURM_JOB_ID:-} ]] && ! is_current; }
is_preempted() { [[ $(job_field PreemptTime) == @* ]]; }
has_told() { has_file failed || ((status == 2)); } # an error of usage or data, which has been printed
would_fail_again() { has_told && ! is_starting_again; }
# The same command has trained before. So its error is one that passes, whatever it looks like: a slow node, a
# name or a port that is not there yet, an import or a file of a file system that is mounted late.
is_starting_again() { [[ -n $resumable ]] && ! has_file saved && ! has_file trains; }
was_starting() { ! has_file saved && ! has_file stop; }
was_killed_in_restart() { ((restarts && status >= 128)); } # perhaps by the failure of a node
may_get_further() {
    has_file saved || is_starting_again || ended_on_request || was_killed_in_restart ||
        ((status == UNREACHED))
}

describe_fault() {
    if ((status == UNREACHED)); then
        echo "exit status $status, as after a node that srun does not reach"
    elif was_starting; then
        echo "exit status $status while a restart began"
    else
        echo "exit status $status after a checkpoint or the request to stop"
    fi
}

# find_culprit: set status to that of the task that failed first, and name it, unless it has printed its error
find_culprit() {
    local task how last
    { read -r node task how && IFS= read -r last; } < <(first_failure) || return 0
    if [[ $how =~ ^'Exited with exit code '([0-9]+) ]]; then
        status=${BASH_REMATCH[1]}
    elif ((status < 128)); then
        status=$KILLED
    fi
    has_told || say "task $task on $node failed first: $how${last:+. Its last line: $last}"
}

# longer_wait RESTARTS: print how many seconds the next attempt is to wait: twice those that this one waited
# after its requeue, from 30 to 1920. Before the first attempt a job waits for other reasons, such as sbatch
# --begin. PBS does not tell how long a job has waited, and there each restart counts.
longer_wait() {
    local wait=$((15 << ($1 < 6 ? $1 : 6))) asked start
    if [[ -n ${SLURM_JOB_ID:-} ]]; then
        wait=0
        ((ATTEMPT == 0)) || { asked=$(date -d "$(job_field SubmitTime)" +%s) &&
            start=$(date -d "$(job_field EligibleTime)" +%s) && wait=$((start - asked)); } 2>/dev/null
    fi
    wait=$((wait * 2))
    echo $((wait < 30 ? 30 : wait > 1920 ? 1920 : wait))
}

# requeue WHY RESTARTS OPTION LATER NODE: have the scheduler start the job again, in LATER seconds or more.
# OPTION resumes the run. NODE may be at fault.
requeue() {
    if [[ -n ${SLURM_JOB_ID:-} ]]; then
        say "$1: requeuing the job$( (($4 == 0)) || echo ", to start in $4 s or later")"
        # slurmctld may have gone away since it was asked
        scontrol requeue "$(job_id)" || { is_current && scontrol requeue "$(job_id)"; } || {
            say "Slurm does not requeue the job: unless squeue shows that it goes on, $(how_to_resume "$3")"
            return 0
        }
        REQUEUED=1
        (($4)) || return 0
        scontrol update JobId="$(job_id)" StartTime="now+${4}seconds" || true
        [[ -z $5 ]] || say "if $5 is at fault, leave it out: scontrol update JobId=$(job_id) ExcNodeList=$5"
    else
        continue_in_another_job "$1" "$2" "$3" "$4"
    fi
}

# await_end: Slurm ends a job that it requeues. Until then the user's own batch script is not to go on with
# its next line, such as another training.
await_end() {
    [[ -z $OF_OWN_SCRIPT || -z $REQUEUED ]] || sleep 60
}

# nodes_left: print the nodes of the job, without those that failed: Slurm takes them from it, PBS does not
nodes_left() {
    local host
    if [[ -n ${SLURM_JOB_ID:-} ]]; then
        scontrol show hostnames "$(job_field NodeList)" 2>/dev/null
        return 0
    fi
    for host in "${HOSTS[@]}"; do
        pbsnodes "$host" 2>/dev/null | grep -q '^ *state = .*down' || echo "$host"
    done
}

# own_id: print the number that the run folders of this job have in their names
own_id() {
    if [[ -n ${SLURM_JOB_ID:-} ]]; then job_id; else echo "${PBS_JOBID:-}"; fi
}

# job_of_trainers: print the variable by which another job goes on with the Trainers of this one that have a
# run folder although their script has none: see JobFolder in src/hpctrain/lightning.py
job_of_trainers() {
    local id
    id=${HPCTRAIN_CONTINUES:-$(own_id)}
    ! compgen -G "runs/trainer*/$id/attempt.json" >/dev/null || printf 'HPCTRAIN_CONTINUES=%q ' "$id"
}

# find_earlier_checkpoint: print the option that resumes the run, if an earlier attempt of this job has saved
# a checkpoint: in the folder of --resume or --out, or in the default one. Otherwise fails.
find_earlier_checkpoint() {
    local word before='' id trial folder folders=()
    for word in "${ARGUMENTS[@]}"; do
        [[ $before != --@(out|resume) ]] || word=$before=$word
        [[ $word != --@(out|resume)=* ]] || folders+=("${word#*=}")
        before=$word
        word=${word##*/}
        [[ $word != *.yaml ]] || folders+=("runs/${word%.yaml}") # of a sweep
    done
    printf -v trial 'trial-%03d' "$((10#${SLURM_ARRAY_TASK_ID:-0}))"
    id=$(own_id)
    for folder in "${folders[@]}" runs/*/"$id" runs/*-"$id" runs/trainer*/"${HPCTRAIN_CONTINUES:-$id}"; do
        if ls -d -- "$folder"/checkpoints/epoch-* >/dev/null 2>&1; then
            [[ -e $folder/attempt.json ]] || printf -- '--resume %q\n' "$folder"
        # Trials, and the Trainer of transformers, which resume without an option
        elif ! ls -d -- "$folder/$trial"/checkpoints/epoch-* >/dev/null 2>&1 &&
            ! ls -d -- "$folder"/checkpoint-* >/dev/null 2>&1; then
            continue
        fi
        return 0
    done
    return 1
}

# words_to_resume OPTION: print the launch script and its arguments, and OPTION, which continues the run
words_to_resume() {
    local words
    words=$(quote_words "$ROOT/launch/$SCRIPT" "${OPTIONS_GIVEN[@]}" "${ARGUMENTS[@]}")
    echo "${words%"$1 "}$1"
}

# how_to_resume OPTION: print the command that continues the run in another job, with as many ranks
how_to_resume() {
    local words trainers spare=${OPTION[spare-nodes]:-0} per_node=--gpus-per-node=
    words=$(words_to_resume "$1" | hide_secrets)
    if [[ -n ${SLURM_JOB_ID:-} ]]; then
        [[ ! -v SBATCH_GRES ]] || per_node=--gres=gpu: # sbatch would grant what both say
        ((GPUS == 0)) || words="$per_node$GPUS $words"
        ((THREADS == 1)) || words="--cpus-per-task=$THREADS $words"
        ((spare == 0)) || words="--no-kill $words"
        words="--nodes=$((NODES + spare)) --ntasks-per-node=$TASKS $words"
        echo "continue with $(job_of_trainers)sbatch $words"
    else
        set_qsub_options || true
        trainers=$(job_of_trainers)
        words="${trainers:+env $trainers}$words"
        echo "continue with echo ${words@Q} |$(printf ' %q' qsub "${QSUB_OPTIONS[@]}")"
    fi
}
