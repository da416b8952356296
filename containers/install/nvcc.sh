#!/bin/bash
# nvcc.sh LOCK HOME: put nvcc, of the Debian package that LOCK names, into HOME/bin; nothing is installed. horovod.sh calls
# it for flavours whose nvcc is not on PyPI. LOCK is containers/locks/FLAVOR-build-debian.lock, and HOME has the rest of CUDA.
# The package comes from a mirror that apt is configured with; where they have moved on, from snapshot.debian.org.

set -euo pipefail
umask 022
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=containers/install/lib.sh
source "$here/lib.sh"

case "$#:${1:-}" in
    1:-h | 1:--help) usage && exit ;;
    2:[!-]*) lock=$1 home=$2 ;;
    *) die "give LOCK and HOME (see --help)" ;;
esac
fetch=/usr/lib/apt/apt-helper
for tool in apt-get "$fetch" dpkg dpkg-deb; do
    command -v "$tool" >/dev/null || die "$tool is not there, and $lock names a package of Debian; build on Debian, or the whole image"
done
machine=$(dpkg --print-architecture)
read -r _ path sha256 date < <(grep "^$machine " "$lock") || die "$lock names no package for $machine; add a line"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

mapfile -t mirrors < <(apt-get --print-uris update | sed -n "s,^'\(.*\)/dists/.*,\1,p" | uniq)
for from in "${mirrors[@]}" "http://snapshot.debian.org/archive/debian/$date"; do
    # apt would give root's rights away, and could not write here
    if "$fetch" -o APT::Sandbox::User=root download-file "$from/$path" "$work/nvcc.deb"; then
        break
    fi
done
[[ -s $work/nvcc.deb ]] ||
    die "no mirror (${mirrors[*]}) and not snapshot.debian.org gave ${path##*/}; put a version that is there into $lock"
sha256sum --status --check - <<<"$sha256  $work/nvcc.deb" ||
    die "what $from gave as ${path##*/} has not the SHA-256 that $lock states; set another mirror for apt"

dpkg-deb -x "$work/nvcc.deb" "$work/package"
mkdir -p "$home/bin"
mv "$work"/package/usr/bin/{cudafe++,fatbinary,nvlink,ptxas} "$work"/package/usr/lib/nvidia-cuda-toolkit/bin/{nvcc,cicc,crt} \
    "$home/bin"
# Debian's names its own folders, in /usr.
cat >"$home/bin/nvcc.profile" <<'PROFILE'
TOP = $(_HERE_)/..
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH += $(_HERE_):
INCLUDES += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES =+ $(_SPACE_) "-L$(TOP)/lib"
PROFILE
