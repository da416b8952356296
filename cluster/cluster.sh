#!/bin/bash
# cluster.sh - a small supercomputer on one machine: a login node and compute nodes with Slurm, made of Linux
# namespaces. Each node has its own host name, network address, processes, /tmp and /dev, and a writable layer
# of its own over one root file system (build_rootfs.sh). All nodes share /home and /project.
#
# How it works: each node is one `unshare` process, whose child is process 1 of the node (machine.sh). The pid
# of the unshare is in STATE/machines/NAME/pid. When it dies, the whole node dies.
set -euo pipefail

usage() {
    cat <<'END'
usage: cluster.sh up [N]                 start a login node and N compute nodes n1, n2, ... (default 2)
       cluster.sh status                 show the nodes and the jobs
       cluster.sh exec [-e NAME=VALUE]... HOST[:USER] CMD [ARG]...
                                         run CMD on login, n1, ... as USER (root, alice or bob), in the home
                                         folder
       cluster.sh crash NODE             switch off a compute node
       cluster.sh boot NODE              switch on a crashed node, with a fresh disk
       cluster.sh link NODE up|down      connect or disconnect the network of a compute node
       cluster.sh down [--purge]         stop all nodes; keep home/, project/ and log/ unless --purge
       cluster.sh run [-u USER] [-e NAME=VALUE]... [-b SRC[:DST]]... -- CMD [ARG]...
                                         run one command in a temporary node with this host's network and the
                                         current folder, without a cluster: for example
                                         run -- apptainer build ...

settings from the environment, which `up` records for the later commands, and their defaults:
  CLUSTER            state folder of this cluster (build/cluster/default of the repository)
  CLUSTER_ROOTFS     root file system, from build_rootfs.sh (build/cluster/rootfs of the repository)
  CLUSTER_NET        first three numbers of the nodes' IP addresses, visible inside only (10.78.0)
  CLUSTER_CPUS       cores that each node reports to Slurm            (8)
  CLUSTER_MEM        memory in MB that each node reports to Slurm     (16000)
  CLUSTER_GPUS       GPUs that each node reports to Slurm, with fake devices  (0)
  CLUSTER_MPI        default of srun --mpi: none, pmix, pmi2          (none)
  CLUSTER_BIND       lines SRC=DST: files or folders of the host to mount on all nodes
  CLUSTER_OWNER_PID  process with which all nodes end
for exec and run:
  CLUSTER_CWD        folder to run CMD in
END
}

die() {
    echo "cluster.sh: $*" >&2
    exit 1
}

bad_usage() {
    die "$*; see cluster.sh --help"
}

here=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
repository=$(realpath "$here/..")
state=$(realpath -m "${CLUSTER:-$repository/build/cluster/default}")
umask 022

# The settings. load_settings replaces them with those of the running cluster.
ROOTFS=$(realpath -m "${CLUSTER_ROOTFS:-$repository/build/cluster/rootfs}")
NET=${CLUSTER_NET:-10.78.0}
CPUS=${CLUSTER_CPUS:-8}
MEM=${CLUSTER_MEM:-16000}
GPUS=${CLUSTER_GPUS:-0}
MPI=${CLUSTER_MPI:-none}
BIND=${CLUSTER_BIND:-}
OWNER=${CLUSTER_OWNER_PID:-}
NODES=2

# ---- processes ----

# start_time PID: print the start time of a process in clock ticks; fail if it has ended or is a zombie. A pid
# with its start time identifies one process, even if the pid is reused.
start_time() {
    local stat fields
    stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
    # The name in parentheses can contain anything; fields[0] is the 3rd field.
    read -ra fields <<<"${stat##*) }"
    [[ ${fields[0]} != Z ]] || return 1
    echo "${fields[19]}"
}

# machine_pid NAME: print the pid of a node's unshare; fail if the node is not running
machine_pid() {
    local pid started
    read -r pid started 2>/dev/null <"$state/machines/$1/pid" || return 1
    [[ $(start_time "$pid") == "$started" ]] || return 1
    echo "$pid"
}

# kill_machine NAME: kill all processes of a node, and return when the last one has ended
kill_machine() {
    local pid first
    while pid=$(machine_pid "$1"); do
        # When process 1 of the node dies, all its processes die; unshare waits for that and ends last.
        first=
        read -r first 2>/dev/null <"/proc/$pid/task/$pid/children" || true
        kill -KILL "${first:-$pid}" 2>/dev/null || true
        sleep 0.02
    done
}

# kill_machines: kill all nodes, login first, so that a compute node that is starting fails
kill_machines() {
    local dir
    rm -f "$state/up"
    kill_machine login
    for dir in "$state"/machines/*/; do
        kill_machine "$(basename "$dir")"
    done
    rm -rf --one-file-system "$state/machines"
}

# ---- machines ----

# start_machine NAME: start a node, without waiting for its daemons
start_machine() {
    local name=$1 dir=$state/machines/$1 login='' gpus=0
    rm -rf --one-file-system "$dir"
    mkdir -p "$dir" "$state/log/$name"
    if [[ $name != login ]]; then
        login=$(machine_pid login) ||
            die "the login node is not running; start the cluster with cluster.sh up"
        gpus=$GPUS
    fi
    local binds="$state/home=/home
$state/project=/project
$state/etc/slurm=/etc/slurm=ro
$state/etc/hosts=/etc/hosts=ro
$state/log/$name=/var/log/slurm
$BIND"
    # The process records its own pid before it becomes the node, and holds the lock (file 9) until then. So
    # `down` always finds it, even if `up` is killed at this moment.
    (
        pid=$BASHPID # here, because the next line has a subshell
        echo "$pid $(start_time "$pid")" >"$dir/pid"
        exec setsid env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 \
            MACHINE_ROOTFS="$ROOTFS" MACHINE_DIR="$dir" MACHINE_BINDS="$binds" MACHINE_GPUS="$gpus" \
            MACHINE_LOGIN="$login" MACHINE_OWNER="$OWNER" \
            unshare --fork --kill-child=KILL --pid --mount --uts --ipc --net --propagation private \
            "$here/machine.sh" boot "$name" 9>&-
    ) </dev/null >"$state/log/$name/boot.log" 2>&1 &
    disown # otherwise bash reports its end
    until [[ -s $dir/pid ]]; do
        sleep 0.01
    done
}

# wait_booted NAME: wait until the daemons of a node have started
wait_booted() {
    local deadline=$((SECONDS + 30)) pid
    until pid=$(machine_pid "$1") && [[ -e /proc/$pid/root/run/ready ]]; do
        if [[ -z $pid ]] || ((SECONDS > deadline)); then
            die "$1 did not start: $(tail -n 1 "$state/log/$1/boot.log"); see $state/log/$1"
        fi
        sleep 0.02
    done
}

# enter NAME: set the array `enter` to a command prefix that runs a command as root in all namespaces of a
# node. The node's unshare is in all of them except the pid namespace, which only its child entered.
enter() {
    local pid
    pid=$(machine_pid "$1") || die "$1 is not running; see cluster.sh status"
    enter=(nsenter --target "$pid" --mount --uts --ipc --net --root --wd
        --pid="/proc/$pid/ns/pid_for_children" --)
}

# in_machine NAME CMD [ARG]...: run a command as root on a node
in_machine() {
    local enter=()
    enter "$1"
    "${enter[@]}" "${@:2}"
}

# count_idle_nodes: print how many nodes are idle for Slurm
count_idle_nodes() {
    in_machine login sinfo --noheader --Node --states=idle --format=%N 2>/dev/null | sort -u | wc -l
}

# ---- common parts of the commands ----

need_root() {
    [[ $EUID -eq 0 ]] || die "needs root; run it as root or with sudo"
}

need_rootfs() {
    [[ -e $ROOTFS/etc/hpctrain-rootfs ]] ||
        die "there is no root file system in $ROOTFS; run $here/build_rootfs.sh $ROOTFS"
}

# lock: only one command at a time may change the nodes
lock() {
    mkdir -p "$state"
    exec 9>"$state/lock"
    flock 9
}

# is_up: succeed if a complete cluster is running
is_up() {
    [[ -e $state/up ]] && machine_pid login >/dev/null
}

# load_settings: read the settings of the running cluster
load_settings() {
    is_up || die "no cluster is running in $state; start it with cluster.sh up"
    # shellcheck source=/dev/null
    source "$state/settings"
}

# check_node NAME: stop unless it is a compute node of the running cluster
check_node() {
    [[ ${1-} =~ ^n([1-9][0-9]*)$ && ${BASH_REMATCH[1]} -le $NODES ]] ||
        bad_usage "'${1-}' is not a compute node; give n1 to n$NODES"
}

# print_settings: print the settings as shell assignments
print_settings() {
    local name
    for name in NODES ROOTFS NET CPUS MEM GPUS MPI BIND OWNER; do
        printf '%s=%q\n' "$name" "${!name}"
    done
}

# write_etc: write the nodes' /etc/hosts and /etc/slurm
write_etc() {
    local i gres=''
    mkdir -p "$state/etc"
    {
        echo "127.0.0.1 localhost"
        echo "$NET.1 login"
        for ((i = 1; i <= NODES; i++)); do
            echo "$NET.$((10 + i)) n$i"
        done
    } >"$state/etc/hosts"

    rm -rf "$state/etc/slurm"
    cp -r "$here/slurm" "$state/etc/slurm"
    chmod -R a+rX "$state/etc/slurm" # a clone that was made with umask 077 is for its owner alone
    : >"$state/etc/slurm/gres.conf"
    if ((GPUS > 0)); then
        gres="Gres=gpu:$GPUS"
        echo "Name=gpu File=/dev/nvidia[0-$((GPUS - 1))]" >"$state/etc/slurm/gres.conf"
    fi
    cat >"$state/etc/slurm/nodes.conf" <<END
MpiDefault=$MPI
NodeName=n[1-$NODES] CPUs=$CPUS RealMemory=$MEM $gres State=UNKNOWN
END
}

# ---- the commands ----

up() {
    local number bind i deadline started=$EPOCHREALTIME
    NODES=${1:-$NODES}
    [[ $# -le 1 && $NODES =~ ^[1-9][0-9]*$ && $NODES -le 200 ]] ||
        bad_usage "give up a number of nodes from 1 to 200"
    for number in "$CPUS" "$MEM" "$GPUS"; do
        [[ $number =~ ^[0-9]+$ ]] ||
            bad_usage "CLUSTER_CPUS, CLUSTER_MEM and CLUSTER_GPUS must be numbers, not '$number'"
    done
    while read -r bind; do
        [[ -z $bind || $bind == /*=/* && -e ${bind%%=*} ]] ||
            bad_usage "CLUSTER_BIND must hold lines SRC=DST with an existing SRC and absolute paths, not" \
                "'$bind'"
    done <<<"$BIND"
    need_root
    need_rootfs
    lock
    if is_up; then
        [[ $(<"$state/settings") == "$(print_settings)" ]] ||
            die "a cluster with other settings ($state/settings) is running; stop it with cluster.sh down" \
                "first"
        echo "cluster.sh: already up in $state" >&2
        return
    fi

    kill_machines # of an `up` that was interrupted
    trap kill_machines EXIT
    print_settings >"$state/settings"
    write_etc
    mkdir -p "$state/project"
    chmod 1777 "$state/project"
    if [[ ! -d $state/home ]]; then
        rm -rf "$state/home.part"
        cp -a "$ROOTFS/home" "$state/home.part"
        mv "$state/home.part" "$state/home"
    fi

    start_machine login
    wait_booted login
    for ((i = 1; i <= NODES; i++)); do
        start_machine "n$i"
    done
    for ((i = 1; i <= NODES; i++)); do
        wait_booted "n$i"
    done
    deadline=$((SECONDS + 60))
    until [[ $(count_idle_nodes) -eq $NODES ]]; do
        ((SECONDS < deadline)) || die "Slurm has fewer than $NODES idle nodes after a minute; see $state/log"
        sleep 0.05
    done
    touch "$state/up"
    trap - EXIT
    echo "cluster.sh: $NODES nodes up in $(seconds_since "$started") s" >&2
}

# seconds_since EPOCHREALTIME: print the seconds since then, with two decimals
seconds_since() {
    local now=$EPOCHREALTIME hundredths
    hundredths=$(((${now/[.,]/} - ${1/[.,]/}) / 10000)) # without the decimal point, these are microseconds
    printf '%d.%02d' $((hundredths / 100)) $((hundredths % 100))
}

down() {
    [[ $# -eq 0 || ($# -eq 1 && $1 == --purge) ]] || bad_usage "down takes no argument but --purge"
    need_root
    [[ -d $state ]] || return 0
    lock
    kill_machines
    sweep_scratch
    rm -rf --one-file-system "${state:?}/etc" "$state/settings"
    if [[ ${1-} == --purge ]]; then
        rm -rf --one-file-system "$state"
    fi
}

status() {
    [[ $# -eq 0 ]] || bad_usage "status takes no argument"
    need_root
    load_settings
    local name
    for name in login $(seq -f n%.0f "$NODES"); do
        if machine_pid "$name" >/dev/null; then
            echo "$name: running"
        else
            echo "$name: switched off"
        fi
    done
    in_machine login sinfo
    in_machine login squeue
}

# as_user USER FOLDER CMD [ARG]...: set the array `command` to a command that runs CMD as USER in FOLDER, in a
# clean environment with `variables`. CMD gets a SIGTERM when its caller ends, as a command over ssh does.
# Open MPI waits in a loop, and has to be told that other nodes share its cores.
as_user() {
    command=(
        setpriv --reuid "$1" --regid "$1" --init-groups --reset-env --pdeathsig TERM --
        env --chdir="$2" LANG=C.UTF-8 OMPI_MCA_mpi_yield_when_idle=1 "${variables[@]}" "${@:3}"
    )
}

exec_command() {
    local variables=() host user folder enter command
    while [[ ${1-} == -e ]]; do
        [[ ${2-} == ?*=* ]] || bad_usage "-e takes NAME=VALUE"
        variables+=("$2")
        shift 2
    done
    [[ $# -ge 2 && $1 != -* ]] || bad_usage "exec takes HOST[:USER] and a command"
    need_root
    load_settings
    host=${1%%:*}
    user=root
    if [[ $1 == *:* ]]; then
        user=${1#*:}
    fi
    shift
    [[ $host == login ]] || check_node "$host"
    folder=/home/$user
    if [[ $user == root ]]; then
        folder=/root
    fi
    [[ $user == root || -d $state/home/$user ]] ||
        bad_usage "there is no user '$user'; give root, alice or bob"
    as_user "$user" "${CLUSTER_CWD:-$folder}" "$@"
    enter "$host"
    exec "${enter[@]}" "${command[@]}"
}

crash() {
    [[ $# -eq 1 ]] || bad_usage "crash takes a node"
    need_root
    lock
    load_settings
    check_node "$1"
    machine_pid "$1" >/dev/null || die "$1 is not running; start it with cluster.sh boot $1"
    # The network first: a node that loses power does not close its TCP connections.
    in_machine login ip link set "$1" down
    kill_machine "$1"
}

boot() {
    [[ $# -eq 1 ]] || bad_usage "boot takes a node"
    need_root
    lock
    load_settings
    check_node "$1"
    ! machine_pid "$1" >/dev/null || die "$1 is running already"
    start_machine "$1"
    wait_booted "$1"
}

link() {
    [[ $# -eq 2 && $2 =~ ^(up|down)$ ]] || bad_usage "link takes a node, then up or down"
    need_root
    load_settings
    check_node "$1"
    in_machine login ip link set "$1" "$2"
}

# sweep_scratch: remove the files of temporary nodes whose `cluster.sh run` was killed
sweep_scratch() {
    local dir pid started
    for dir in "$state"/run/*.*/; do
        IFS=. read -r pid started <<<"$(basename "$dir")"
        [[ -d $dir && $(start_time "$pid") != "$started" ]] && rm -rf --one-file-system "$dir"
    done
    return 0
}

run_command() {
    local variables=() user=root binds="$PWD=$PWD"$'\n' folder=${CLUSTER_CWD:-$PWD} src dst file command
    while [[ ${1-} == -[a-z] ]]; do
        [[ $# -ge 2 ]] || bad_usage "$1 takes a value"
        case $1 in
            -u) user=$2 ;;
            -e)
                [[ $2 == ?*=* ]] || bad_usage "-e takes NAME=VALUE"
                variables+=("$2")
                ;;
            -b)
                src=$(realpath -m -- "${2%%:*}")
                dst=$src
                [[ $2 != *:* ]] || dst=${2#*:}
                [[ -e $src && $dst == /* ]] ||
                    bad_usage "-b takes SRC[:DST] with an existing SRC and an absolute DST"
                binds+="$src=$dst"$'\n'
                ;;
            *) bad_usage "run has no option $1" ;;
        esac
        shift 2
    done
    [[ ${1-} == -- && $# -ge 2 ]] || bad_usage "run takes its options, then --, then a command"
    shift
    [[ $PWD != / ]] ||
        die "cannot run in /, because the current folder is mounted in the node; cd to another folder"
    need_root
    need_rootfs
    [[ $user == root || -d $ROOTFS/home/$user ]] ||
        bad_usage "there is no user '$user'; give root, alice or bob"

    # With the host's network go its host names and certificates.
    for file in /etc/{hosts,resolv.conf,ssl/certs} /usr/{share,local/share}/ca-certificates; do
        [[ ! -e $file ]] || binds+="$file=$file=ro"$'\n'
    done

    # The writable layer is on disk, because images are built in it. If this process is killed, the node is
    # killed (pdeathsig), and the next run or down removes the layer.
    local scratch
    scratch=$state/run/$$.$(start_time $$)
    sweep_scratch
    mkdir -p "$scratch"
    # shellcheck disable=SC2064  # expand it now
    trap "rm -rf --one-file-system '$scratch'" EXIT
    as_user "$user" "$folder" "$@"
    env MACHINE_ROOTFS="$ROOTFS" MACHINE_DIR="$scratch" MACHINE_BINDS="$binds" \
        PATH=/usr/sbin:/usr/bin:/sbin:/bin \
        setpriv --pdeathsig KILL unshare --fork --kill-child=KILL --pid --mount --ipc --propagation private \
        "$here/machine.sh" run "${command[@]}"
}

case ${1-} in
    -h | --help) usage ;;
    up | down | status | crash | boot | link) "$@" ;;
    exec) exec_command "${@:2}" ;;
    run) run_command "${@:2}" ;;
    '') bad_usage "give a command" ;;
    *) bad_usage "unknown command '$1'" ;;
esac
