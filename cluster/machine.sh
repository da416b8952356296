#!/bin/bash
# machine.sh - one node of the test cluster, from the inside. cluster.sh starts it as process 1 of new
# namespaces (processes and mounts, and for a node of a cluster also network and host name). Do not call it by
# hand.
#
# It first builds the node's file system: the shared root file system, read-only, with a writable layer on
# top, and its own /dev, /proc and /tmp. Then it makes that its root, and either starts the daemons of a
# cluster node or runs one command.
set -euo pipefail

usage='usage: machine.sh boot NAME          become a node of the cluster
       machine.sh run CMD [ARG]...    run one command
cluster.sh starts it, and passes the settings in the environment:
  MACHINE_ROOTFS    root file system, used read-only
  MACHINE_DIR       folder of this node, for its writable layer and /tmp
  MACHINE_BINDS     lines SRC=DST or SRC=DST=ro: files or folders of the host to mount in the node
  MACHINE_GPUS      number of fake GPU devices
  MACHINE_LOGIN     pid of the login node, whose network a compute node joins
  MACHINE_OWNER     pid of the process with which the node ends'

die() {
    echo "machine.sh: $*" >&2
    exit 1
}

# ---- still with the host's root: build the new one ----

# make_root: mount everything under $root
make_root() {
    mkdir -p "$MACHINE_DIR"/{upper,work,root}
    local layers="lowerdir=$MACHINE_ROOTFS,upperdir=$MACHINE_DIR/upper,workdir=$MACHINE_DIR/work"
    mount -t overlay -o "$layers" overlay "$root" ||
        die "cannot mount an overlay in $MACHINE_DIR; set CLUSTER to a folder on a disk, outside of a" \
            "container's own layers"
    mount -t proc -o nosuid,nodev,noexec proc "$root/proc"
    mount -t sysfs -o nosuid,nodev,noexec sysfs "$root/sys"
    # podman's crun needs it to start a container
    mount -t cgroup2 -o nosuid,nodev,noexec cgroup2 "$root/sys/fs/cgroup"
    mount -t tmpfs -o nosuid,nodev,mode=755 tmpfs "$root/run"
    install -d -m 1777 "$MACHINE_DIR/tmp"
    mount --bind "$MACHINE_DIR/tmp" "$root/tmp"
    make_dev
    bind_folders
}

# make_dev: make a /dev in which users may open fuse; the host's is often for root only
make_dev() {
    local dev=$root/dev name major minor i
    mount -t tmpfs -o nosuid,mode=755 tmpfs "$dev"
    mkdir "$dev"/{net,pts,shm,mqueue}
    while read -r name major minor; do
        mknod -m 666 "$dev/$name" c "$major" "$minor"
        chmod 666 "$dev/$name" # mknod applies the umask
    done <<<"null 1 3
zero 1 5
full 1 7
random 1 8
urandom 1 9
tty 5 0
fuse 10 229
net/tun 10 200"
    # Slurm counts GPUs by their device files. These are /dev/null under other names.
    for ((i = 0; i < ${MACHINE_GPUS:-0}; i++)); do
        mknod -m 666 "$dev/nvidia$i" c 1 3
    done
    mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts "$dev/pts"
    mount -t tmpfs -o nosuid,nodev,mode=1777 tmpfs "$dev/shm"
    mount -t mqueue mqueue "$dev/mqueue"
    ln -s pts/ptmx "$dev/ptmx"
    ln -s /proc/self/fd "$dev/fd"
    ln -s /proc/self/fd/0 "$dev/stdin"
    ln -s /proc/self/fd/1 "$dev/stdout"
    ln -s /proc/self/fd/2 "$dev/stderr"
}

# bind_folders: mount the host's files and folders of MACHINE_BINDS
bind_folders() {
    local src dst mode
    while IFS='=' read -r src dst mode; do
        [[ -n $src ]] || continue
        if [[ -d $src ]]; then
            mkdir -p "$root$dst"
        else
            mkdir -p "$(dirname "$root$dst")"
            [[ -e $root$dst ]] || touch "$root$dst"
        fi
        mount --rbind "$src" "$root$dst" || die "cannot mount $src at $dst"
        [[ $mode != ro ]] || mount -o remount,bind,ro "$root$dst"
    done <<<"${MACHINE_BINDS:-}"
}

# enter_root STAGE [ARG]...: make $root the root and continue there with STAGE of this script, in the node's
# own bash. With pivot_root, because in a chroot the kernel denies the user namespaces that apptainer needs.
enter_root() {
    install -m 755 "$script" "$root/usr/local/sbin/machine.sh"
    mkdir "$root/.host"
    cd "$root"
    pivot_root . .host
    umount --lazy /.host
    rmdir /.host
    exec /bin/bash /usr/local/sbin/machine.sh "$@"
}

# ---- with the node's own root ----

# connect NAME: set up the network. The login node has a bridge, and each compute node a veth pair from its
# eth0 to it. File 7 is the network namespace of the login node.
connect() {
    local name=$1 address bytes mac
    address=$(getent hosts "$name" | cut -d ' ' -f 1)
    # A node that is switched on again has the MAC address it had. With another one, nodes that remember the
    # old one do not reach it for up to a minute.
    IFS=. read -ra bytes <<<"$address"
    printf -v mac '02:00:%02x:%02x:%02x:%02x' "${bytes[@]}"
    ip link set lo up
    if [[ $name == login ]]; then
        ip link add bridge type bridge forward_delay 0
        ip address add "$address/24" dev bridge
        ip link set bridge up
        return
    fi
    local in_login=(nsenter --net=/proc/self/fd/7)
    # The kernel may not have removed the veth of a crashed node of this name yet.
    "${in_login[@]}" ip link delete "$name" 2>/dev/null || true
    ip link add eth0 address "$mac" type veth peer name "$name" netns /proc/self/fd/7
    "${in_login[@]}" ip link set "$name" master bridge up
    ip address add "$address/24" dev eth0
    ip link set eth0 up
}

# start_daemons NAME: start sshd, munge and Slurm's daemon
start_daemons() {
    local name
    # /run is empty, and there is no systemd to make these
    install -d /run/sshd /run/lock /var/spool/slurmd
    install -d -o munge -g munge /run/munge
    install -d -o slurm -g slurm /var/spool/slurmctld /var/log/slurm
    # PBS: its commands, and the folders of its daemon, which the jobs themselves write here
    for name in qsub qstat qdel qalter qselect pbsnodes pbs_tmrsh; do
        ln -sf /etc/slurm/qsub "/usr/local/bin/$name"
    done
    install -d -m 1777 /var/spool/pbs/{spool,aux,mom_priv/jobs}
    setpriv --reuid munge --regid munge --clear-groups munged
    /usr/sbin/sshd
    if [[ $1 == login ]]; then
        slurmctld
    else
        slurmd
    fi
    touch /run/ready # cluster.sh waits for it
}

# wait_for_end: stay as process 1 until the owner has ended. File 8 is the owner's folder in the host's /proc.
# It refers to that process even if the pid is reused, and has no exe once the process is dead.
wait_for_end() {
    while [[ -z ${MACHINE_OWNER:-} || -e /proc/self/fd/8/exe ]]; do
        sleep 1
    done
}

umask 022
script=${BASH_SOURCE[0]}
root=${MACHINE_DIR:-}/root
case ${1-} in
    -h | --help)
        echo "$usage"
        ;;
    boot) # NAME
        [[ $# -eq 2 && -n ${MACHINE_DIR:-} ]] || die "only cluster.sh may start it; see machine.sh --help"
        if [[ -n ${MACHINE_OWNER:-} ]]; then
            [[ -e /proc/$MACHINE_OWNER/exe ]] || die "the owner, process $MACHINE_OWNER, has ended"
            exec 8<"/proc/$MACHINE_OWNER"
        fi
        [[ -z ${MACHINE_LOGIN:-} ]] || exec 7<"/proc/$MACHINE_LOGIN/ns/net"
        make_root
        enter_root booted "$2"
        ;;
    booted) # NAME
        echo "$2" | tee /etc/hostname >/proc/sys/kernel/hostname
        connect "$2"
        start_daemons "$2" 7<&- 8<&- # without the two files of the host
        wait_for_end
        ;;
    run) # CMD [ARG]...
        [[ $# -ge 2 && -n ${MACHINE_DIR:-} ]] || die "only cluster.sh may start it; see machine.sh --help"
        make_root
        enter_root ran "${@:2}"
        ;;
    ran) # CMD [ARG]...: as a child of this bash, because process 1 ignores signals and must reap zombies
        "${@:2}"
        ;;
    *)
        die "unknown command '${1-}'; only cluster.sh may start it, see machine.sh --help"
        ;;
esac
