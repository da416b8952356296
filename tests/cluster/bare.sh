#!/bin/bash
# bare.sh SIF DIR - take the Python environment of an image out of it, for nodes that run it without a container.
#
# DIR/opt/hpctrain, DIR/usr/bin/python3.11 and DIR/usr/lib/python3.11, shown at the same paths on a node of the test
# cluster, are what a centre's PyTorch module would bring: the very packages of the image, on the node's own C library
# and MPI. It takes 5 seconds and 1.4 GB. DIR appears only when it is complete; where it is newer than SIF, nothing happens.
set -euo pipefail

usage='usage: bare.sh SIF DIR    take the Python environment of SIF out into DIR (needs root and the rootfs of the test cluster)'

die() {
    echo "bare.sh: $*" >&2
    exit 1
}

case ${1-} in
    -h | --help) echo "$usage" && exit 0 ;;
    '' | -*) die "$usage" ;;
esac
[[ $# -eq 2 ]] || die "$usage"
[[ -f $1 ]] || die "$1: no such image: make sif"

here=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
sif=$(realpath -- "$1")
dir=$(realpath -m -- "$2")
part=$dir.part

mkdir -p "$(dirname "$dir")"
exec 9>"$dir.lock"
flock 9 # two tests that both need it make it once
if [[ $dir -nt $sif && $dir -nt ${BASH_SOURCE[0]} ]]; then
    exit 0
fi

trap 'rm -rf --one-file-system "$part"' EXIT
umask 022
rm -rf --one-file-system "$part"
mkdir "$part"
# In a throw-away machine of the test cluster, which has the tools. The line of the list that matters is
# "4 |1 |NONE |40960-463036416 |FS (Squashfs/*System/amd64)": where in the file the squashfs begins.
# shellcheck disable=SC2016  # the machine's shell expands them
"$here/cluster.sh" run -b "$sif:/bare/image.sif" -b "$part:/bare/root" -- sh -euc '
    offset=$(apptainer sif list /bare/image.sif | sed -n "s/.*|\([0-9]*\)-[0-9]* *|FS (Squashfs.*/\1/p")
    unsquashfs -quiet -no-progress -force -offset "$offset" -dest /bare/root /bare/image.sif \
        opt/hpctrain usr/bin/python3.11 usr/lib/python3.11 >/dev/null
' || die "$sif holds no Python environment that can be unpacked: make sif"
rm -rf --one-file-system "$dir"
touch "$part"
mv "$part" "$dir"
echo "bare.sh: made $dir ($(du -sm "$dir" | cut -f 1) MB)" >&2
