#!/bin/bash
# machine.sh - one machine of the test cluster, from the inside. cluster.sh starts it as process 1 of new namespaces
# (processes, mounts, and for a node of the cluster its own network and host name); nobody calls it by hand.
#
# It first builds the machine's file system: the shared root file system (read only) with a writable layer on top, and a
# /dev, /proc, /tmp of its own. Then it makes that its root and becomes either a machine of the cluster, with
# its daemons, or the surroundings of one command.
set -euo pipefail

usage='usage: machine.sh boot NAME          become a machine of the cluster
       machine.sh run CMD [ARG]...    run one command
started by cluster.sh, which passes the settings in the environment:
  MACHINE_ROOTFS    the root file system, only read
  MACHINE_DIR       folder of this machine: its writable layer and /tmp
  MACHINE_BINDS     lines SRC=DST or SRC=DST=ro: folders or files of the host to show in the machine
  MACHINE_GPUS      how many fake GPU devices to make
  MACHINE_LOGIN     process that holds the login machine, where a node plugs its network in
  MACHINE_OWNER     process with which the machine ends'

die() {
    echo "machine.sh: $*" >&2
    exit 1
}

# ---- on the host's files: build the new root ----

# make_root: mount everything under $root
make_root() {
    mkdir -p "$MACHINE_DIR"/{upper,work,root}
    local layers="lowerdir=$MACHINE_ROOTFS,upperdir=$MACHINE_DIR/upper,workdir=$MACHINE_DIR/work"
    mount -t overlay -o "$layers" overlay "$root" ||
        die "cannot mount an overlay in $MACHINE_DIR: set CLUSTER to a folder on a disk, not in a container's layers"
    mount -t proc -o nosuid,nodev,noexec proc "$root/proc"
    mount -t sysfs -o nosuid,nodev,noexec sysfs "$root/sys"
    # crun, which podman calls, looks for it before it starts a container
    mount -t cgroup2 -o nosuid,nodev,noexec cgroup2 "$root/sys/fs/cgroup"
    mount -t tmpfs -o nosuid,nodev,mode=755 tmpfs "$root/run"
    install -d -m 1777 "$MACHINE_DIR/tmp"
    mount --bind "$MACHINE_DIR/tmp" "$root/tmp"
    make_dev
    bind_folders
}

# make_dev: a /dev of its own, where users may open fuse (the host's is often for root only)
make_dev() {
    local dev=$root/dev name major minor i
    mount -t tmpfs -o nosuid,mode=755 tmpfs "$dev"
    mkdir "$dev"/{net,pts,shm,mqueue}
    while read -r name major minor; do
        mknod -m 666 "$dev/$name" c "$major" "$minor"
        chmod 666 "$dev/$name" # mknod heeds the umask
    done <<<"null 1 3
zero 1 5
full 1 7
random 1 8
urandom 1 9
tty 5 0
fuse 10 229
net/tun 10 200"
    # Slurm counts GPUs by their device files; these are /dev/null under another name
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

# bind_folders: show the host's folders and files of MACHINE_BINDS in the machine
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
        mount --rbind "$src" "$root$dst" || die "cannot show $src as $dst"
        [[ $mode != ro ]] || mount -o remount,bind,ro "$root$dst"
    done <<<"${MACHINE_BINDS:-}"
}

# enter_root STAGE [ARG]...: make $root the root, and go on there with this script's STAGE, on the machine's own bash.
# pivot_root, not chroot: in a chroot the kernel denies the user namespaces that apptainer needs.
enter_root() {
    install -m 755 "$script" "$root/usr/local/sbin/machine.sh"
    mkdir "$root/.host"
    cd "$root"
    pivot_root . .host
    umount --lazy /.host
    rmdir /.host
    exec /bin/bash /usr/local/sbin/machine.sh "$@"
}

# ---- on the machine's own files ----

# connect NAME: the login machine has a bridge, and each node a cable from its eth0 to that. File 7 is the network
# of the login machine.
connect() {
    local name=$1 address
    address=$(getent hosts "$name" | cut -d ' ' -f 1)
    ip link set lo up
    if [[ $name == login ]]; then
        ip link add bridge type bridge forward_delay 0
        ip address add "$address/24" dev bridge
        ip link set bridge up
        return
    fi
    local in_login=(nsenter --net=/proc/self/fd/7)
    # the cable of a machine that crashed under this name may not have been cleared away yet
    "${in_login[@]}" ip link delete "$name" 2>/dev/null || true
    ip link add eth0 type veth peer name "$name" netns /proc/self/fd/7
    "${in_login[@]}" ip link set "$name" master bridge up
    ip address add "$address/24" dev eth0
    ip link set eth0 up
}

# start_daemons NAME
start_daemons() {
    # /run is new and empty, and no systemd makes these
    install -d /run/sshd /run/lock /var/spool/slurmd
    install -d -o munge -g munge /run/munge
    install -d -o slurm -g slurm /var/spool/slurmctld /var/log/slurm
    setpriv --reuid munge --regid munge --clear-groups munged
    /usr/sbin/sshd
    if [[ $1 == login ]]; then
        slurmctld
    else
        slurmd
    fi
    touch /run/ready # cluster.sh waits for it
}

# wait_for_end: stay, as process 1, until the owner is gone. File 8 is the owner's folder in the host's /proc: it stays
# that one process's even if the number is given out again, and a dead process has no exe there.
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
        [[ $# -eq 2 && -n ${MACHINE_DIR:-} ]] || die "started by cluster.sh only; see machine.sh --help"
        if [[ -n ${MACHINE_OWNER:-} ]]; then
            [[ -e /proc/$MACHINE_OWNER/exe ]] || die "process $MACHINE_OWNER, the owner, is gone"
            exec 8<"/proc/$MACHINE_OWNER"
        fi
        [[ -z ${MACHINE_LOGIN:-} ]] || exec 7<"/proc/$MACHINE_LOGIN/ns/net"
        make_root
        enter_root booted "$2"
        ;;
    booted) # NAME
        echo "$2" | tee /etc/hostname >/proc/sys/kernel/hostname
        connect "$2"
        start_daemons "$2" 7<&- 8<&- # they have no business with the host's files
        wait_for_end
        ;;
    run) # CMD [ARG]...
        [[ $# -ge 2 && -n ${MACHINE_DIR:-} ]] || die "started by cluster.sh only; see machine.sh --help"
        make_root
        enter_root ran "${@:2}"
        ;;
    ran) # CMD [ARG]...: a child of this bash, because process 1 gets no signals and must reap
        "${@:2}"
        ;;
    *)
        die "unknown command '${1-}': started by cluster.sh only; see machine.sh --help"
        ;;
esac
