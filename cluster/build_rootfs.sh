#!/bin/bash
# build_rootfs.sh DIR - build the root file system of all nodes of the test cluster.
#
# Debian trixie (Slurm 24.11 with the commands of PBS, munge, Open MPI 5, podman, environment modules) with
# apptainer from sid, podman-hpc from PyPI, and the users alice and bob. It takes about a minute and 800 MB.
# DIR appears when it is complete. If this version of the script has made it before, nothing happens.
set -euo pipefail

usage='usage: build_rootfs.sh DIR
build the root file system of the test cluster in DIR (needs root and mmdebstrap)'

packages=(
    # the scheduler and its authentication
    slurmctld slurmd slurm-client munge
    # MPI on the host, over ssh and under srun
    openmpi-bin openssh-server openssh-client python3 python3-mpi4py
    # apptainer and the tools that it calls, for user namespaces and for SIF files mounted by FUSE
    apptainer uidmap fakeroot squashfs-tools squashfuse fuse3 fuse2fs fuse-overlayfs gocryptfs e2fsprogs
    # for podman-hpc: rootless podman with its network, and the tools that its scripts call
    podman crun passt netavark inotify-tools python3-venv python3-click python3-toml python3-yaml
    # qsub, qstat and qdel over Slurm, and the command module
    slurm-wlm-torque environment-modules
    # a registry for images, and a tool that pushes to it
    docker-registry skopeo
    # for inspection
    iproute2 iputils-ping procps ca-certificates
)

die() {
    echo "build_rootfs.sh: $*" >&2
    exit 1
}

# debian_mirror: print the URL of the host's Debian mirror, so that a site's own mirror is used here as well
debian_mirror() {
    local uri=
    if command -v apt-get >/dev/null; then
        # shellcheck disable=SC2016  # apt-get, not the shell, fills in REPO_URI
        uri=$(apt-get indextargets --format '$(REPO_URI)' \
            'Created-By: Packages' 'Origin: Debian' 'Label: Debian' | sort -u | head -n 1)
    fi
    echo "${uri:-http://deb.debian.org/debian/}"
}

# install_packages ROOT: make ROOT with all Debian packages
install_packages() {
    local debian keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    debian=$(debian_mirror)
    # trixie is the default release, so only apptainer, which trixie lacks, comes from sid. sid's index is
    # valid for a week; an old mirror or a wrong clock must not stop the tests.
    # In its own mount namespace, because a killed build then leaves no mounts.
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

# install_podman_hpc ROOT: install NERSC's wrapper of podman
install_podman_hpc() {
    local root=$1 home=/opt/podman-hpc file
    chroot "$root" python3 -m venv --system-site-packages "$home"
    # pip runs in ROOT with the host names and certificates of this host, which are mounted only while it
    # runs.
    touch "$root/etc/hosts" "$root/etc/resolv.conf"
    echo 'podman-hpc==1.2.2 --hash=sha256:e83201400609e82eabf7aae0503ad36f2fbb34e70bcc0f12ea3ff19788af8d79' \
        >"$root/tmp/podman-hpc.lock"
    # shellcheck disable=SC2016  # the inner shell expands them
    PIP_CERT=/etc/ssl/certs/ca-certificates.crt unshare --mount --propagation private bash -euc '
        for file in /etc/{hosts,resolv.conf,ssl/certs}; do
            mount --bind "$file" "$1$file"
        done
        chroot "$1" "$2/bin/pip" install --quiet --no-deps --no-cache-dir --require-hashes \
            -r /tmp/podman-hpc.lock
    ' - "$root" "$home"
    rm "$root/tmp/podman-hpc.lock"
    chroot "$root" "$home/bin/pip" --quiet uninstall --yes pip
    cp -r "$root$home/etc/podman_hpc" "$root/etc/podman_hpc"
    for file in podman-hpc hook_tool fuse-overlayfs-wrap; do
        ln -s "$home/bin/$file" "$root/usr/bin/$file"
    done
    chroot "$root" "$home/bin/python" -m podman_hpc.configure_hooks --hooksd /usr/share/containers/oci/hooks.d
    make_static_mksquashfs "$root"
}

# make_static_mksquashfs ROOT: podman-hpc runs mksquashfs inside the image that it squashes, so it must not
# need a library of the image. Debian has no static mksquashfs; this script contains the dynamic one with its
# libraries.
make_static_mksquashfs() {
    local root=$1
    cat >"$root/usr/bin/mksquashfs.static" <<'END'
#!/bin/sh
# mksquashfs and its libraries are a tar after the last line of this script.
mkdir /.mksquashfs
sed '1,/^exit/d' "$0" | tar -x -C /.mksquashfs
/.mksquashfs/ld-linux-x86-64.so.2 --library-path /.mksquashfs /.mksquashfs/mksquashfs "$@" -e /.mksquashfs
exit
END
    # shellcheck disable=SC2016  # the inner shell expands them
    chroot "$root" sh -c 'tar -c --dereference --transform "s|.*/||" \
        /usr/bin/mksquashfs $(ldd /usr/bin/mksquashfs | grep -o "/[^ ]*") 2>/dev/null' \
        >>"$root/usr/bin/mksquashfs.static"
    chmod 755 "$root/usr/bin/mksquashfs.static"
}

# add_users ROOT: add ordinary users who can start containers (useradd gives each a range of subordinate ids)
# and can log in to every node by ssh. A cluster starts with a copy of this /home.
add_users() {
    local root=$1 user
    for user in alice:1000 bob:1001; do
        # The password is '*', because for sshd the default '!' is a locked account.
        chroot "$root" useradd --create-home --shell /bin/bash --uid "${user#*:}" --password '*' "${user%:*}"
        user=${user%:*}
        chroot "$root" install -d -m 700 "/home/$user/.ssh"
        chroot "$root" ssh-keygen -q -t ed25519 -N '' -C "$user" -f "/home/$user/.ssh/id_ed25519"
        cp "$root/home/$user/.ssh/id_ed25519.pub" "$root/home/$user/.ssh/authorized_keys"
        chroot "$root" chown -R "$user:$user" "/home/$user"
    done
    # apptainer's --fakeroot needs a range for root as well.
    chroot "$root" usermod --add-subuids 1000000-1065535 --add-subgids 1000000-1065535 root
}

# configure ROOT: write the configuration that all nodes of all clusters share
configure() {
    local root=$1
    # All nodes have the same known host key, so ssh never asks about an unknown host.
    sed 's/^/login,n* /' "$root/etc/ssh/ssh_host_ed25519_key.pub" >"$root/etc/ssh/ssh_known_hosts"
    printf '%s\n' 'UsePAM no' 'PasswordAuthentication no' >"$root/etc/ssh/sshd_config.d/cluster.conf"
    # By default apptainer passes on all capabilities, which fails for a root without some of them, as in a
    # container.
    sed -i 's/^root default capabilities.*/root default capabilities = file/' \
        "$root/etc/apptainer/apptainer.conf"
    # The nodes have no fabric. With Open MPI 5's default, which includes ofi and uct, some starts of Horovod
    # hung.
    echo 'btl = tcp,self,sm' >>"$root/etc/openmpi/openmpi-mca-params.conf"
    # cluster/slurm/qsub comes before Slurm's own in PATH.
    ln -s /etc/slurm/qsub "$root/usr/local/bin/qsub"
    # A module as a site offers one: the image's environment, which extract_environment.sh puts on the nodes.
    printf '%s\n' '#%Module' 'module-whatis {PyTorch, Horovod and hpctrain}' \
        'prepend-path PATH /opt/hpctrain/bin' \
        >"$root/usr/share/modules/modulefiles/pytorch"
    # Each node writes its own host name, and there is no DNS.
    rm -f "$root/etc/hostname" "$root/etc/resolv.conf"
    touch "$root/etc/resolv.conf"
}

case ${1-} in
    -h | --help) echo "$usage" && exit 0 ;;
    '' | -*) die "$usage" ;;
esac
[[ $# -eq 1 ]] || die "$usage"
[[ $EUID -eq 0 ]] || die "needs root; run it as root or with sudo"
command -v mmdebstrap >/dev/null || die "mmdebstrap is not installed; apt-get install mmdebstrap"

dir=$(realpath -m -- "$1")
part=$dir.part
version=$(sha256sum <"${BASH_SOURCE[0]}")
stamp=etc/hpctrain-rootfs

mkdir -p "$(dirname "$dir")"
exec 9>"$dir.lock"
flock 9 # so that two tests at once build it only once
if [[ -e $dir/$stamp && $(<"$dir/$stamp") == "$version" ]]; then
    exit 0
fi
if grep -qs -- "lowerdir=$dir," /proc/[0-9]*/mountinfo; then
    die "$dir is out of date, and a cluster is running from it; stop that cluster first with cluster.sh down"
fi

trap 'rm -rf --one-file-system "$part"' EXIT
umask 022
# A mirror drops some of some hundred downloads now and then, more often than apt-get tries again.
for attempt in 1 2 3; do
    rm -rf --one-file-system "$part"
    ! install_packages "$part" >&2 || break
    ((attempt < 3)) ||
        die "mmdebstrap failed three times, see above; check the network and the mirror $(debian_mirror)"
    echo "build_rootfs.sh: mmdebstrap failed; trying again" >&2
done
install_podman_hpc "$part" >&2
add_users "$part"
configure "$part"
echo "$version" >"$part/$stamp"
rm -rf --one-file-system "$dir"
mv "$part" "$dir"
echo "build_rootfs.sh: made $dir ($(du -sm "$dir" | cut -f 1) MB)" >&2
