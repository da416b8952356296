#!/bin/bash
# build_sqsh.sh [--flavor FLAVOR] [--mpi openmpi|mpich] [--output FILE]: make the squashfs file from which
# Pyxis and enroot start the image (make sqsh), out of the SIF. enroot itself is not needed.
#   --output  hpctrain-FLAVOR.sqsh by default, or hpctrain-FLAVOR-mpich.sqsh. The file appears when complete
# It uses this machine's apptainer or singularity and mksquashfs, or, as root, those of the test cluster.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=containers/build_functions.sh
source containers/build_functions.sh
# shellcheck source=launch/lib/digest.sh
source launch/lib/digest.sh
attend containers/build_sqsh.sh "$@"

flavor=cpu mpi=openmpi output=
parse_options flavor mpi output -- "$@"
name=$(image_name "$flavor" "$mpi")
output=$(realpath -m "${output:-hpctrain-$name.sqsh}")
sif=hpctrain-$name.sif
[[ -s $sif ]] || die "there is no $sif; build it with apptainer/build_sif.sh (make sif)"
work=$(mktemp -d "$(dirname "$output")/.sif.XXXXXX") ||
    die "cannot write to $(dirname "$output"); free some space, or give another --output"
trap 'rm -rf "$work"' EXIT
node=()
if ! command -v mksquashfs >/dev/null || ! runtime=$(command -v apptainer || command -v singularity); then
    [[ $(id -u) == 0 && -d build/cluster/rootfs ]] ||
        die "apptainer (or singularity) and mksquashfs are not both installed; install them, or as root run" \
            "cluster/build_rootfs.sh build/cluster/rootfs"
    runtime=apptainer
    node=(cluster/cluster.sh run -b "$work" -b "$(realpath "$sif"):/image.sif" --)
    sif=/image.sif
fi

image_tool "${node[@]}" "$runtime" build --sandbox "$work/root" "$sif"
# What enroot reads: the variables of the image, and the command that it starts.
rm -rf "$work/root"/{.singularity.d,.exec,.run,.shell,.test,environment,singularity}
sed -n 's/^ENV //p' containers/Dockerfile >"$work/root/etc/environment"
cat >"$work/root/etc/rc" <<'END'
cd / || exit
[ $# -gt 0 ] || set -- hpctrain --help
exec "$@"
END
image_tool "${node[@]}" mksquashfs "$work/root" "$work/image.sqsh" -quiet -no-progress \
    -comp zstd -Xcompression-level 9 -all-root -no-xattrs
digest_record "$work/image.sqsh" >"$work/digest"
mv "$work/image.sqsh" "$output"
mv "$work/digest" "$output.digest"
echo "build: made $output ($(du -h --apparent-size "$output" | cut -f1))"
