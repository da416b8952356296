# horovodrun, in the image of the first node, reaches the others over ssh, which ends outside of containers.
# shellcheck shell=bash
# shellcheck disable=SC2034 # the variables in capitals are read by main.sh and task.sh

launch_with_horovodrun() {
    local places interface
    [[ -z ${OPTION[broadcast]:-} ]] ||
        die "--broadcast does not work with horovodrun: use --launcher=srun or mpirun"
    LAUNCHER_TEXT='horovodrun over ssh'
    interface=${HPCTRAIN_INTERFACE:-$(find_interface || true)}
    [[ -n $interface || -n ${OPTION[dry-run]:-} ]] ||
        die "$(uname -n) has no interface with the address $MASTER_ADDR:" \
            "start this on the first node of the job, or set HPCTRAIN_INTERFACE"
    places=$(printf "%s:$TASKS," "${HOSTS[@]}")
    # horovodrun parses words of the command as its own options where they look like one (--network=host).
    COMMAND_IN_VARIABLE=1
    export HPCTRAIN_HOST_PATH=$PATH
    hide_environment
    # --network-interface, because it would look for common ones by running Python outside of the containers.
    LAUNCH=("$TASK" none "${CONTAINER[@]}" ${SIF:+"$SIF"} -- env "${HIDDEN[@]/#/--unset=}"
        horovodrun -np $((NODES * TASKS)) -H "${places%,}" --gloo
        --network-interface "${interface:-INTERFACE}"
        "$TASK" horovodrun)
    CLEAN_UP+=(kill_horovod_ranks)
}

# find_interface: print the network interface of this node that has the address MASTER_ADDR, or from which
# this node of the job reaches it
find_interface() {
    local address here=${SLURMD_NODENAME:-$(uname -n)}
    here=${here%%.*}
    address=$(getent ahostsv4 "$MASTER_ADDR" | awk '{ print $1; exit }')
    if is_one_of "$here" "${HOSTS[0]%%.*}" || ! is_one_of "$here" "${JOB_HOSTS[@]%%.*}"; then
        ip -o -4 address show | awk -v a="$address" 'index($4, a "/") == 1 { print $2; exit }'
    else
        ip -o -4 route get "$address" | sed -n 's/.* dev \([^ ]*\).*/\1/p'
    fi
}

# horovodrun writes its whole environment on the command lines of ssh, which every user of a node can read. So
# the variables travel in HPCTRAIN_ENVIRONMENT, a folder for this user alone, and horovodrun itself has only
# these. HIDDEN gets the names of the others.
hide_environment() {
    local name line lines
    HIDDEN=()
    lines="# $(random_hex)"$'\n'
    while read -r name; do
        ! is_one_of "$name" HPCTRAIN_ENVIRONMENT HPCTRAIN_HOST_PATH HPCTRAIN_JOB SLURM_JOB_ID HOME _ SHLVL \
            PWD OLDPWD HOSTNAME PYTHONNOUSERSITE 'HOROVOD_*' "${HOST_VARIABLES[@]}" || continue
        printf -v line 'export %s=%q\n' "$name" "${!name}"
        lines+=$line
        HIDDEN+=("$name")
    done < <(compgen -e)
    HPCTRAIN_ENVIRONMENT=$PWD/.hpctrain-$JOB.$(digest_of "$lines")
    export HPCTRAIN_ENVIRONMENT
    [[ -z ${OPTION[dry-run]:-} ]] || return 0
    CLEAN_UP+=(remove_environment)
    trap clean_up EXIT
    # Whoever can write this folder can replace that one, whose name therefore has the digest of the file.
    write_private "$HPCTRAIN_ENVIRONMENT" variables "$lines" ||
        die "$PWD: cannot be written: submit from a folder of your own"
}

digest_of() {
    printf %s "$1" | sha256sum | cut -c -32
}

remove_environment() {
    rm -rf "$HPCTRAIN_ENVIRONMENT"
}

# Processes that horovodrun started over ssh keep running when the connection ends. A job that a rank has
# submitted has the variables of the rank, but a SLURM_JOB_ID of its own.
kill_horovod_ranks() {
    # shellcheck disable=SC2016 # the shells on the nodes expand them
    (($1 == 0)) || on_every_node bash -c '
        for process in /proc/[0-9]*; do
            grep -qsz "^HOROVOD_RANK=" "$process/environ" &&
                grep -qszx "SLURM_JOB_ID=$HPCTRAIN_JOB" "$process/environ" &&
                kill -KILL "${process#/proc/}" 2>/dev/null
        done
        true'
}

task_horovodrun() {
    local lines
    if [[ -n ${HPCTRAIN_ENVIRONMENT:-} ]]; then
        lines=$(timeout 10 head -c 10000000 "$HPCTRAIN_ENVIRONMENT/variables" && echo .) || true
        lines=${lines%.}
        [[ $HPCTRAIN_ENVIRONMENT == *."$(digest_of "$lines")" ]] ||
            die "$HPCTRAIN_ENVIRONMENT is not what this job wrote: submit from a folder of your own"
        eval "$lines"
    fi
    set_ranks HOROVOD_RANK HOROVOD_LOCAL_RANK HOROVOD_CROSS_RANK
    eval "WORDS=($HPCTRAIN_COMMAND)" # words quoted by printf %q
    if [[ ${HPCTRAIN_CONTAINER_ON:-} == "$(uname -n)" ]]; then
        # The ranks on the first node are in the container of horovodrun.
        WORDS=(-- "${WORDS[@]:$(index_of_command)}")
    else
        # horovodrun passes on the PATH of its container, which need not have the runtime.
        PATH=$HPCTRAIN_HOST_PATH
    fi
    # horovodrun's ssh command has set the variables of that container here.
    # shellcheck disable=SC2086 # a list of names
    unset ${HPCTRAIN_CONTAINER_VARIABLES:-}
    # Each task has its own ssh connection and its own container, so podman-hpc counts one task.
    HPCTRAIN_NODE_TASK=0 HPCTRAIN_NODE_TASKS=1
    ! is_users_script || export_torchrun_env
    # ssh exits with 255 after every signal, so task.sh waits for the command and reports the signal.
    WAIT_AND_REPORT=1
}
