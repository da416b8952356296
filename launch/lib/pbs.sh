# A PBS job: what it was granted, and the job that continues it. Sourced by launch/lib/main.sh.
# shellcheck shell=bash
# shellcheck disable=SC2034 # the variables in capitals are read by main.sh and its other parts

QSTAT='' # what qstat -f says of this job, with long lines unfolded
QSUB_OPTIONS=() # of a job like this one
# Sums of the select line, which qsub refuses beside it
OF_SELECT=(ncpus nodect nodes mpiprocs mem vmem ompthreads ngpus naccelerators)
# What PBS, its hooks and the shell set in each job. Their values are wrong in another one.
OF_ONE_JOB=('PBS_*' ENVIRONMENT NCPUS '*_VISIBLE_DEVICES' _ SHLVL PWD OLDPWD HOSTNAME)

# A PBS job. PBS_NODEFILE names each host once per slot (mpiprocs of the select line).
read_pbs_job() {
    local slots
    if [[ -n ${PBS_NODEFILE:-} ]]; then
        # PBS starts it in the home. In the shell of qsub -I the user is where he wants to be.
        [[ ${PBS_ENVIRONMENT:-} != PBS_BATCH ]] || cd "${PBS_O_WORKDIR:?}" 2>/dev/null ||
            die "$PBS_O_WORKDIR, where you submitted, is not on $(hostname):" \
                'submit from a folder that all nodes share'
        [[ -r $PBS_NODEFILE ]] ||
            die "$PBS_NODEFILE, the PBS_NODEFILE of this job, cannot be read on $(hostname):" \
                "run this on its first node"
        JOB=${PBS_JOBID%%.*}
        mapfile -t HOSTS < <(awk '!seen[$1]++ { print $1 }' "$PBS_NODEFILE")
        ((${#HOSTS[@]})) || die "$PBS_NODEFILE, the PBS_NODEFILE of this job, names no nodes: submit it again"
        mapfile -t slots < <(sort "$PBS_NODEFILE" | uniq -c | awk '{ print $1 }' | sort -u)
        ((${#slots[@]} == 1)) ||
            die "PBS gave $(counted ${#HOSTS[@]} node) $(grep -c . "$PBS_NODEFILE") slots," \
                "not the same number each: give select=N:mpiprocs=M and place=scatter"
        TASKS=${slots[0]}
        find_pbs
        read_qstat
    elif [[ -n ${OPTION[dry-run]:-} ]]; then
        fake_allocation PBS select mpiprocs
    else
        die "this is not a PBS job: submit it with qsub launch/$SCRIPT, or run it inside qsub -I"
    fi
    TASKS_OPTION=mpiprocs
    count_pbs_cpus
    GPUS=$(visible_gpus)
    choose_ranks
    load_site
    export_job_env
    open_control
}

# count_pbs_cpus: fill THREADS with a slot's part of the CPUs of a node. PBS sets OMP_NUM_THREADS and NCPUS to
# those of all the slots of a chunk, and a node may have several chunks.
count_pbs_cpus() {
    local granted
    check_numbers NCPUS
    granted=$(pbs_field Resource_List.ncpus)
    [[ $granted =~ ^[1-9][0-9]{0,8}$ ]] && granted=$((granted / ${#HOSTS[@]})) || granted=''
    THREADS=$((${granted:-${NCPUS:-1}} / TASKS))
    ((THREADS)) || THREADS=1
    [[ ${OMP_NUM_THREADS:-} != "${NCPUS:-}" ]] || unset OMP_NUM_THREADS
    [[ -z $granted ]] || check_cpus "$granted" 'ncpus of the select line'
}

# find_pbs: put the commands of PBS on the PATH. A job of qsub -- SCRIPT has no login shell, which does that.
find_pbs() {
    local folder
    ! command -v qstat >/dev/null || return 0
    folder=$(sed -n 's/^PBS_EXEC=//p' "${PBS_CONF_FILE:-/etc/pbs.conf}" 2>/dev/null) || return 0
    [[ ! -d $folder/bin ]] || PATH+=:$folder/bin
}

# read_qstat: fill QSTAT, by one question: after qdel this script has ten seconds
read_qstat() {
    QSTAT=$(qstat -f "${PBS_JOBID:-}" 2>/dev/null | sed ':a;N;$!ba;s/\n\t//g') || true
}

# pbs_field NAME: print this field of the job; nothing if qstat has not answered
pbs_field() {
    sed -n "s/^ *$1 = //p" <<<"$QSTAT"
}

has_tmrsh() {
    command -v pbs_tmrsh >/dev/null
}

# on_nodes_of_pbs COMMAND...: run this program on the nodes of the job that are left; fails if it fails on one
on_nodes_of_pbs() {
    local host process words processes=() remote=(ssh -o BatchMode=yes) status=0
    words=$(printf '%q ' env "HPCTRAIN_JOB=$JOB" "$@")
    ! has_tmrsh || remote=("$ROOT/launch/lib/tmrsh.sh")
    for host in $(nodes_left); do
        if [[ $host == "${JOB_HOSTS[0]}" ]]; then
            "$@" &
        else
            timeout "$WITHIN" "${remote[@]}" "$host" "$words" </dev/null &
        fi
        processes+=($!)
    done
    for process in "${processes[@]}"; do
        wait "$process" || status=$?
    done
    return $status
}

# continue_in_another_job WHY RESTARTS OPTION LATER: submit a job that continues the run, or say how to
continue_in_another_job() {
    local said number unless=''
    if said=$(submit_again "${@:2}"); then
        number=${said##*$'\n'} said=''
        if [[ $STOPPING != TERM ]] || ! qdel "$number"; then # it was deleted meanwhile
            say "$1: job $number continues the run"
            return 0
        fi
    fi
    [[ $STOPPING != TERM ]] || unless='unless qstat shows that it goes on, ' # qrerun sends it, too
    say "$1: ${said:+$said: }$unless$(how_to_resume "$3")"
}

# submit_again RESTARTS OPTION LATER: submit another PBS job, which continues the run after this one, in LATER
# seconds or more; print its number, or why there is none. PBS lets only operators requeue a running job.
submit_again() {
    local options=(-S /bin/bash -W "depend=afterany:$PBS_JOBID")
    trap '' TERM # qsub is to end
    [[ $STOPPING != TERM && $PBS_JOBID != *'['* ]] && set_qsub_options || return 1
    command -v qsub >/dev/null || return 1
    (($3 == 0)) || options+=(-a "$(date -d "+$3 seconds" +%Y%m%d%H%M.%S)")
    # Otherwise qrerun, a preemption or the failure of this node would give two jobs of one run.
    qalter -r n "$PBS_JOBID" >/dev/null 2>&1 || true
    { export_for_next_job "$1" && echo "exec $(words_to_resume "$2")"; } |
        qsub "${options[@]}" "${QSUB_OPTIONS[@]}" 2>&1
}

# export_for_next_job RESTARTS: print the commands that export what the user has exported in this job. Of the
# values that qsub -v takes, some arrive changed, and one with a quotation mark ends in an error.
export_for_next_job() {
    local name value
    for name in "${!HPCTRAIN_BEFORE[@]}"; do
        value=${HPCTRAIN_BEFORE[$name]}
        [[ $name != OMP_NUM_THREADS || $value != "${NCPUS:-}" ]] || continue # that of PBS
        [[ $value == *"$PBS_JOBID"* ]] || is_one_of "$name" "${OF_ONE_JOB[@]}" ||
            printf 'export %s=%q\n' "$name" "$value"
    done
    echo "export HPCTRAIN_RESTARTS=$(($1 + 1)) $(job_of_trainers)"
}

# set_qsub_options: fill QSUB_OPTIONS with those of a job like this one. Fails where PBS does not tell.
set_qsub_options() {
    local line name value folder select
    QSUB_OPTIONS=()
    [[ -n $QSTAT ]] || read_qstat
    select=$(pbs_field Resource_List.select)
    [[ -n $select ]] || return 1
    while IFS= read -r line; do
        [[ $line =~ ^\ +([A-Za-z_.]+)\ =\ (.+)$ ]] || continue
        name=${BASH_REMATCH[1]} value=${BASH_REMATCH[2]}
        case $name in
        Resource_List.*)
            name=${name#*.}
            [[ $select == *[:+]"$name="* ]] || is_one_of "$name" "${OF_SELECT[@]}" ||
                QSUB_OPTIONS+=(-l "$name=$value")
            ;;
        Job_Name) QSUB_OPTIONS+=(-N "$value") ;;
        Join_Path) QSUB_OPTIONS+=(-j "$value") ;;
        Keep_Files) QSUB_OPTIONS+=(-k "$value") ;;
        Output_Path)
            folder=${value#*:}
            folder=${folder%/*}
            [[ $folder == "${PBS_O_WORKDIR:-}" ]] || QSUB_OPTIONS+=(-o "$folder/")
            ;;
        Rerunable) [[ $value != False ]] || QSUB_OPTIONS+=(-r n) ;;
        Priority) [[ $value == 0 ]] || QSUB_OPTIONS+=(-p "$value") ;;
        Account_Name) QSUB_OPTIONS+=(-A "$value") ;;
        project) [[ $value == _pbs_project_default ]] || QSUB_OPTIONS+=(-P "$value") ;;
        Mail_Points) QSUB_OPTIONS+=(-m "$value") ;;
        Mail_Users) QSUB_OPTIONS+=(-M "$value") ;;
        group_list | umask) QSUB_OPTIONS+=(-W "$name=$value") ;;
        esac
    done <<<"$QSTAT"
    name=$(pbs_field queue)
    [[ $name == [RMS][0-9]* ]] || name=${PBS_O_QUEUE:-} # a reservation, or what may be a routing queue
    [[ -z $name ]] || QSUB_OPTIONS+=(-q "$name")
}
