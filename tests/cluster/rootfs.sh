#!/bin/bash
# rootfs.sh DIR - make the root file system that every machine of the test cluster runs from.
#
# Debian trixie (Slurm 24.11 with the commands of PBS, munge, OpenMPI 5, podman, environment modules) with one package of
# sid, apptainer, one of PyPI, podman-hpc, and the users alice and bob. It takes about a minute and 800 MB.
# DIR appears only when it is complete; where it is there already, made by this same script, nothing happens.
set -euo pipefail

usage='usage: rootfs.sh DIR    make the root file system of the test cluster in DIR (needs root and mmdebstrap)'

packages=(
    # the scheduler and what its parts trust each other by
    slurmctld slurmd slurm-client munge
    # MPI on the host, over ssh and under srun
    openmpi-bin openssh-server openssh-client python3 python3-mpi4py
    # apptainer and what it calls: user namespaces, and SIF files mounted by FUSE
    apptainer uidmap fakeroot squashfs-tools squashfuse fuse3 fuse2fs fuse-overlayfs gocryptfs e2fsprogs
    # podman-hpc's surroundings: rootless podman with a network of its own, and the tools that its scripts call
    podman crun passt netavark inotify-tools python3-venv python3-click python3-toml python3-yaml
    # qsub, qstat, qdel over Slurm; and the command module
    slurm-wlm-torque environment-modules
    # a registry of images, and what pushes to it
    docker-registry skopeo
    # to look around with
    iproute2 iputils-ping procps ca-certificates
)

die() {
    echo "rootfs.sh: $*" >&2
    exit 1
}

# mirror: where the host takes Debian from, so that a site's own mirror is used here as well
mirror() {
    local uri=
    if command -v apt-get >/dev/null; then
        # shellcheck disable=SC2016  # apt-get, not the shell, fills in REPO_URI
        uri=$(apt-get indextargets --format '$(REPO_URI)' \
            'Created-By: Packages' 'Origin: Debian' 'Label: Debian' | sort -u | head -n 1)
    fi
    echo "${uri:-http://deb.debian.org/debian/}"
}

# install_packages ROOT
install_packages() {
    local debian keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    debian=$(mirror)
    # trixie is the default release, so sid serves only what trixie does not have: apptainer. The index of sid is
    # valid for a week; a mirror that lags, or a clock that is ahead, must not stop the tests.
    # In a mount namespace of its own, a build that is killed leaves no mount behind.
    unshare --mount --propagation private \
        mmdebstrap --quiet --mode=root --variant=apt --include="${packages[*]}" \
        --aptopt='APT::Install-Recommends "false"' \
        --aptopt='APT::Default-Release "trixie"' \
        --dpkgopt='path-exclude=/usr/share/man/*' \
        --dpkgopt='path-exclude=/usr/share/doc/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*' \
        trixie "$1" \
        "deb [signed-by=$keyring] $debian trixie main" \
        "deb [signed-by=$keyring check-valid-until=no] $debian sid main"
}

# install_podman_hpc ROOT: NERSC's wrapper of podman
install_podman_hpc() {
    local root=$1 home=/opt/podman-hpc file
    chroot "$root" python3 -m venv --system-site-packages "$home"
    # pip runs in there with the names and the certificates of this host, mounted for as long as it runs
    touch "$root/etc/hosts" "$root/etc/resolv.conf"
    # shellcheck disable=SC2016  # the inner shell expands them
    PIP_CERT=/etc/ssl/certs/ca-certificates.crt unshare --mount --propagation private bash -euc '
        for file in /etc/{hosts,resolv.conf,ssl/certs}; do
            mount --bind "$file" "$1$file"
        done
        chroot "$1" "$2/bin/pip" install --quiet --no-deps --no-cache-dir podman-hpc==1.2.2
    ' - "$root" "$home"
    chroot "$root" "$home/bin/pip" --quiet uninstall --yes pip
    cp -r "$root$home/etc/podman_hpc" "$root/etc/podman_hpc"
    for file in podman-hpc hook_tool fuse-overlayfs-wrap; do
        ln -s "$home/bin/$file" "$root/usr/bin/$file"
    done
    chroot "$root" "$home/bin/python" -m podman_hpc.configure_hooks --hooksd /usr/share/containers/oci/hooks.d
    make_static_mksquashfs "$root"
}

# make_static_mksquashfs ROOT: podman-hpc runs mksquashfs inside the image that it squashes, so it may need no library
# of that image. Debian has no static one: this is a script that carries the dynamic one and its libraries with it.
make_static_mksquashfs() {
    local root=$1
    cat >"$root/usr/bin/mksquashfs.static" <<'END'
#!/bin/sh
# mksquashfs and its libraries, as a tar after the last line of this script
mkdir /.mksquashfs
sed '1,/^exit/d' "$0" | tar -x -C /.mksquashfs
/.mksquashfs/ld-linux-x86-64.so.2 --library-path /.mksquashfs /.mksquashfs/mksquashfs "$@" -e /.mksquashfs
exit
END
    # shellcheck disable=SC2016  # the inner shell expands them
    chroot "$root" sh -c 'tar -c --dereference --transform "s|.*/||" \
        /usr/bin/mksquashfs $(ldd /usr/bin/mksquashfs | grep -o "/[^ ]*") 2>/dev/null' >>"$root/usr/bin/mksquashfs.static"
    chmod 755 "$root/usr/bin/mksquashfs.static"
}

# add_users ROOT: ordinary users who can start containers (useradd gives each a range of subordinate ids) and reach
# every machine by ssh. A cluster starts with a copy of this /home.
add_users() {
    local root=$1 user
    for user in alice:1000 bob:1001; do
        # the password is '*', because sshd takes the default '!' for a locked account
        chroot "$root" useradd --create-home --shell /bin/bash --uid "${user#*:}" --password '*' "${user%:*}"
        user=${user%:*}
        chroot "$root" install -d -m 700 "/home/$user/.ssh"
        chroot "$root" ssh-keygen -q -t ed25519 -N '' -C "$user" -f "/home/$user/.ssh/id_ed25519"
        cp "$root/home/$user/.ssh/id_ed25519.pub" "$root/home/$user/.ssh/authorized_keys"
        chroot "$root" chown -R "$user:$user" "/home/$user"
    done
    # apptainer's --fakeroot wants a range for root as well
    chroot "$root" usermod --add-subuids 1000000-1065535 --add-subgids 1000000-1065535 root
}

# configure ROOT: what is the same on all machines of all clusters
configure() {
    local root=$1
    # all machines have the same host key: users meet no question about an unknown host
    sed 's/^/login,n* /' "$root/etc/ssh/ssh_host_ed25519_key.pub" >"$root/etc/ssh/ssh_known_hosts"
    printf '%s\n' 'UsePAM no' 'PasswordAuthentication no' >"$root/etc/ssh/sshd_config.d/cluster.conf"
    # a root that lacks some capabilities (as in a container) cannot hand all of them on, which is the default
    sed -i 's/^root default capabilities.*/root default capabilities = file/' "$root/etc/apptainer/apptainer.conf"
    # Machines of one host have no fabric: with Open MPI 5's own choice (ofi and uct too) some starts of Horovod hung.
    echo 'btl = tcp,self,sm' >>"$root/etc/openmpi/openmpi-mca-params.conf"
    # the qsub that users find first is a file of tests/cluster/slurm
    ln -s /etc/slurm/qsub "$root/usr/local/bin/qsub"
    # the module that a centre would offer: the environment of the image, where bare.sh has put it
    printf '%s\n' '#%Module' 'module-whatis {PyTorch, Horovod and hpctrain}' 'prepend-path PATH /opt/hpctrain/bin' \
        >"$root/usr/share/modules/modulefiles/pytorch"
    # each machine writes its own name; the machines of a cluster have no DNS
    rm -f "$root/etc/hostname" "$root/etc/resolv.conf"
    touch "$root/etc/resolv.conf"
}

case ${1-} in
    -h | --help) echo "$usage" && exit 0 ;;
    '' | -*) die "$usage" ;;
esac
[[ $# -eq 1 ]] || die "$usage"
[[ $EUID -eq 0 ]] || die "needs root: run it as root, or with sudo"
command -v mmdebstrap >/dev/null || die "mmdebstrap is not installed: apt-get install mmdebstrap"

dir=$(realpath -m -- "$1")
part=$dir.part
version=$(sha256sum <"${BASH_SOURCE[0]}")
stamp=etc/hpctrain-rootfs

mkdir -p "$(dirname "$dir")"
exec 9>"$dir.lock"
flock 9 # two tests that both need the file system make it once
if [[ -e $dir/$stamp && $(<"$dir/$stamp") == "$version" ]]; then
    exit 0
fi
if grep -qs -- "lowerdir=$dir," /proc/[0-9]*/mountinfo; then
    die "$dir is out of date, and a cluster is running from it: end that one first (cluster.sh down)"
fi

trap 'rm -rf --one-file-system "$part"' EXIT
umask 022
rm -rf --one-file-system "$part"
install_packages "$part" >&2
install_podman_hpc "$part" >&2
add_users "$part"
configure "$part"
echo "$version" >"$part/$stamp"
rm -rf --one-file-system "$dir"
mv "$part" "$dir"
echo "rootfs.sh: made $dir ($(du -sm "$dir" | cut -f 1) MB)" >&2
