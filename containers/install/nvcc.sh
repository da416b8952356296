#!/bin/bash
# nvcc.sh LOCK HOME: unpack nvcc into HOME/bin from the Debian package that LOCK names, without installing the
# package. horovod.sh calls it for flavors whose nvcc is not on PyPI. LOCK is
# containers/locks/FLAVOR-build-debian.lock, and HOME has the rest of CUDA.

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
for tool in dpkg dpkg-deb; do
    command -v "$tool" >/dev/null ||
        die "$tool is not installed, and $lock names a Debian package;" \
            "run this on Debian, or build the whole image"
done
machine=$(dpkg --print-architecture)
read -r _ path sha256 date < <(grep "^$machine " "$lock") ||
    die "$lock names no package for $machine; add a line for it"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fetch_debian "$lock" "$path" "$sha256" "$date" "$work/nvcc.deb"
dpkg-deb -x "$work/nvcc.deb" "$work/package"
mkdir -p "$home/bin"
mv "$work"/package/usr/bin/{cudafe++,fatbinary,nvlink,ptxas} \
    "$work"/package/usr/lib/nvidia-cuda-toolkit/bin/{nvcc,cicc,crt} \
    "$home/bin"
# Debian's own profile names folders in /usr.
cat >"$home/bin/nvcc.profile" <<'PROFILE'
TOP = $(_HERE_)/..
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH += $(_HERE_):
INCLUDES += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES =+ $(_SPACE_) "-L$(TOP)/lib"
PROFILE
