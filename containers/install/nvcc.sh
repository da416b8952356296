#!/bin/bash
# nvcc.sh LOCK HOME: unpack nvcc into HOME/bin from the Debian package that LOCK names, without installing the package.
# horovod.sh calls it for flavors whose nvcc is not on PyPI. LOCK is containers/locks/FLAVOR-build-debian.lock, and HOME has
# the rest of CUDA. The package comes from apt's own mirrors, or from snapshot.debian.org if they have a newer version only.

set -euo pipefail
umask 022
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=containers/install/step_functions.sh
source "$here/step_functions.sh"

case "$#:${1:-}" in
    1:-h | 1:--help) usage && exit ;;
    2:[!-]*) lock=$1 home=$2 ;;
    *) die "give LOCK and HOME (see --help)" ;;
esac
fetch=/usr/lib/apt/apt-helper
for tool in apt-get "$fetch" dpkg dpkg-deb; do
    command -v "$tool" >/dev/null || die "$tool is not installed, and $lock names a Debian package; run this on Debian, or build the whole image"
done
machine=$(dpkg --print-architecture)
read -r _ path sha256 date < <(grep "^$machine " "$lock") || die "$lock names no package for $machine; add a line for it"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

mapfile -t mirrors < <(apt-get --print-uris update | sed -n "s,^'\(.*\)/dists/.*,\1,p" | uniq)
for from in "${mirrors[@]}" "http://snapshot.debian.org/archive/debian/$date"; do
    # By default apt drops root's privileges, and then cannot write here.
    if "$fetch" -o APT::Sandbox::User=root download-file "$from/$path" "$work/nvcc.deb"; then
        break
    fi
done
[[ -s $work/nvcc.deb ]] ||
    die "neither a mirror (${mirrors[*]}) nor snapshot.debian.org has ${path##*/}; put a version that they have into $lock"
sha256sum --status --check - <<<"$sha256  $work/nvcc.deb" ||
    die "the SHA-256 of ${path##*/} from $from differs from $lock; configure another mirror for apt"

dpkg-deb -x "$work/nvcc.deb" "$work/package"
mkdir -p "$home/bin"
mv "$work"/package/usr/bin/{cudafe++,fatbinary,nvlink,ptxas} "$work"/package/usr/lib/nvidia-cuda-toolkit/bin/{nvcc,cicc,crt} \
    "$home/bin"
# Debian's own profile names folders in /usr.
cat >"$home/bin/nvcc.profile" <<'PROFILE'
TOP = $(_HERE_)/..
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH += $(_HERE_):
INCLUDES += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES =+ $(_SPACE_) "-L$(TOP)/lib"
PROFILE
