# One container on each node, which all tasks of a launch enter: the image is mounted, and unpacked by a FUSE
# server, once per node instead of once per rank. Sourced by launch/lib/task.sh.
#
# Apptainer has --sharens for that since 1.3, for processes with one parent. Here each task has a shell of its
# own as the parent of its rank (shield_from_term), and the process that starts with --sharens ends last,
# whenever its rank ends. So the first task starts a container that only reads from a pipe, which the tasks
# enter as an instance. All their shells have the pipe open: the container ends with the last of them.
#
# The folder HPCTRAIN_NODE_CONTAINER on the disk of the node, whose name is new in each launch, has
#   tasks/RANK    one for each task; the last task removes the whole folder
#   alive         the pipe
#   name          a link to the name of the instance, once it can be entered; to nothing if there is none. A
#                 link can be made on a full disk, too.
#   error         what apptainer said
#   instances/    its record of the instance
# shellcheck shell=bash

# enter_node_container: let WORDS enter the container of this node, or the image if there is none
enter_node_container() {
    local folder=$HPCTRAIN_NODE_CONTAINER deadline=$((SECONDS + 60)) name='' container=''
    # It may be a copy by somebody else, who saw its name on another node.
    until is_own "$folder" && mkdir "$folder/tasks/$RANK" 2>/dev/null; do
        if (umask 077 && mkdir "$folder") 2>/dev/null; then
            if mkfifo "$folder/alive" && mkdir "$folder/tasks" "$folder/tasks/$RANK"; then
                start_node_container "$folder"
                container=$REPLY
            fi
            break
        fi
        is_own "$folder" && ((SECONDS < deadline)) || return 0
        sleep 0.05
    done
    # shellcheck disable=SC2034 # task.sh reads it
    { [[ -p $folder/alive ]] && exec {ALIVE}<>"$folder/alive"; } || return 0
    [[ -z $container ]] || publish_node_container "$folder" "$container" "$deadline"
    until name=$(readlink "$folder/name") || ((SECONDS >= deadline)); do
        sleep 0.05
    done
    [[ ${name:-nothing} != nothing ]] || return 0
    WORDS=(env -u APPTAINER_SHARENS "APPTAINER_CONFIGDIR=$folder" "${WORDS[0]}" exec "instance://$name"
        "${WORDS[@]:$(index_of_command)-1}")
}

# start_node_container FOLDER: start the container, which reads from the pipe; REPLY is its process
start_node_container() {
    # Somebody else may have taken this name of Apptainer's, in which Apptainer waits for a byte.
    if ! rm -f "/dev/shm/sharens_instance_$$" 2>"$1/error"; then
        false &
        REPLY=$!
        return 0
    fi
    # Apptainer passes each signal on to the process group of the command, and ends if there is none: the
    # SIGTSTP of scontrol suspend would end the container under the ranks. So cat has one and ignores them.
    # shellcheck disable=SC2016 # the shell in the image expands it
    APPTAINER_CONFIGDIR=$1 "${WORDS[0]}" exec --sharens "${WORDS[@]:2:$(index_of_command)-3}" \
        sh -c 'trap "" HUP INT QUIT USR1 USR2 TERM TSTP; exec $(command -v setsid) cat' \
        <"$1/alive" >/dev/null 2>"$1/error" &
    REPLY=$!
    disown || true
}

# publish_node_container FOLDER PROCESS DEADLINE: write the name of the instance when it can be entered
publish_node_container() {
    # Apptainer then writes a byte to this file. Nothing else needs it, and a killed process would leave it.
    local error name=sharens_instance_$$ ready=/dev/shm/sharens_instance_$$
    until belongs_to_user "$ready" && [[ -s $ready ]]; do
        if ((SECONDS >= $3)) || ! kill -0 "$2" 2>/dev/null; then
            error=$(head -n 1 "$1/error")
            printf 'hpctrain: on %s each rank mounts the image: apptainer --sharens: %s\n' \
                "$(uname -n)" "${error:-no message, as on a full /tmp}" >&2
            kill "$2" 2>/dev/null || true
            name=nothing
            break
        fi
        sleep 0.02
    done
    rm -f "$ready" 2>/dev/null || true
    ln -s "$name" "$1/name"
}

# leave_node_container: the rank has ended
leave_node_container() {
    rmdir "$HPCTRAIN_NODE_CONTAINER/tasks/$RANK" "$HPCTRAIN_NODE_CONTAINER/tasks" 2>/dev/null || return 0
    rm -rf "$HPCTRAIN_NODE_CONTAINER"
}
