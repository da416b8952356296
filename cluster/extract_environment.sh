#!/bin/bash
# extract_environment.sh SIF DIR - extract the Python environment of an image, for nodes that use it without a
# container.
#
# Mounted at the same paths on a node of the test cluster, DIR/opt/hpctrain, DIR/usr/bin/python3.11 and
# DIR/usr/lib/python3.11 are like a site's PyTorch module: the packages of the image, on the node's own C
# library and MPI. It takes 5 seconds and 1.4 GB. DIR appears when it is complete. If DIR is newer than SIF,
# nothing happens.
set -euo pipefail

usage='usage: extract_environment.sh SIF DIR
extract the Python environment of SIF into DIR (needs root and the test cluster)'

die() {
    echo "extract_environment.sh: $*" >&2
    exit 1
}

case ${1-} in
    -h | --help) echo "$usage" && exit 0 ;;
    '' | -*) die "$usage" ;;
esac
[[ $# -eq 2 ]] || die "$usage"
[[ -f $1 ]] || die "there is no image $1; run make sif"

here=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
sif=$(realpath -- "$1")
dir=$(realpath -m -- "$2")
part=$dir.part

mkdir -p "$(dirname "$dir")"
exec 9>"$dir.lock"
flock 9 # so that two tests at once extract it only once
if [[ $dir -nt $sif && $dir -nt ${BASH_SOURCE[0]} ]]; then
    exit 0
fi

trap 'rm -rf --one-file-system "$part"' EXIT
umask 022
rm -rf --one-file-system "$part"
mkdir "$part"
# In a temporary node of the test cluster, which has the tools. `apptainer sif list` prints the offset of the
# squashfs in the line "4 |1 |NONE |40960-463036416 |FS (Squashfs/*System/amd64)".
# shellcheck disable=SC2016  # the node's shell expands them
"$here/cluster.sh" run -b "$sif:/bare/image.sif" -b "$part:/bare/root" -- sh -euc '
    offset=$(apptainer sif list /bare/image.sif | sed -n "s/.*|\([0-9]*\)-[0-9]* *|FS (Squashfs.*/\1/p")
    unsquashfs -quiet -no-progress -force -offset "$offset" -dest /bare/root /bare/image.sif \
        opt/hpctrain usr/bin/python3.11 usr/lib/python3.11 >/dev/null
' || die "$sif has no Python environment, or is damaged; rebuild it with make sif"
rm -rf --one-file-system "$dir"
touch "$part"
mv "$part" "$dir"
echo "extract_environment.sh: made $dir ($(du -sm "$dir" | cut -f 1) MB)" >&2
