#!/bin/bash
# build.sh [--from image|def] [--flavor FLAVOR] [--mpi openmpi|mpich] [--output FILE]: make the SIF (make sif).
#   --from image  from build/hpctrain-FLAVOR.tar, which containers/build.sh makes: the default, under a minute
#   --from def    from a plain Debian by apptainer/hpctrain.def, with no Docker, podman or buildah anywhere
#   --output      hpctrain-FLAVOR.sif by default, or hpctrain-FLAVOR-mpich.sif; it appears when it is complete
# It uses this machine's apptainer or singularity, else (root only) the one in the test cluster's file system.
#   BASE_IMAGE=NAME  for --from def, and
#   DEBIAN_SNAPSHOT=TIMESTAMP, WHEELS=FOLDER  likewise: as for containers/build.sh
#   APPTAINER_TMPDIR=FOLDER  where to unpack, about 3 GB; /tmp by default

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=containers/lib.sh
source containers/lib.sh

flavor=cpu mpi=openmpi from=image output=
while (($#)); do
    case $1 in
        -h | --help) usage && exit ;;
        --flavor | --mpi | --from | --output)
            [[ -n ${2:-} ]] || die "$1 needs a value (see --help)"
            declare "${1#--}=$2"
            shift 2
            ;;
        *) die "unknown argument $1 (see --help)" ;;
    esac
done
[[ $from == image || $from == def ]] || die "--from is image or def, not $from"
name=$(image_name "$flavor" "$mpi")
output=$(realpath -m "${output:-hpctrain-$name.sif}")
[[ -w $(dirname "$output") ]] || die "cannot write to $(dirname "$output"); give another --output"

command -v python3 >/dev/null || die "there is no python3, for containers/sif.py; install one"

# Beside the final file, so that the last step is a rename.
work=$(mktemp -d "$(dirname "$output")/.sif.XXXXXX") ||
    die "cannot write to $(dirname "$output"); make room, or give another --output"
trap 'rm -rf "$work"' EXIT
wheels=$(wheels_folder)

# The runtime. In the test cluster's file system, it sees only the folders that are named here.
if runtime=$(command -v apptainer || command -v singularity); then
    apptainer=("$runtime")
elif [[ $(id -u) == 0 && -d build/cluster/rootfs ]]; then
    apptainer=(tests/cluster/cluster.sh run -b "$work" ${wheels:+-b "$wheels"}
        -e "SOURCE_DATE_EPOCH=$SOURCE_DATE_EPOCH" -- apptainer)
else
    die "there is no apptainer or singularity; install one, or as root make tests/cluster's with tests/cluster/rootfs.sh"
fi

# zstd unpacks several times as fast as gzip, which every node does at every start. Its level 9 takes 14 s more than
# level 3, for 8 % less.
# The owner is root, whoever builds.
arguments=(--force --disable-cache --mksquashfs-args "-comp zstd -Xcompression-level 3 -all-root -no-xattrs")
# Apptainer would write the time of the build there.
date=$(date -u -d "@$SOURCE_DATE_EPOCH" +%FT%TZ)

if [[ $from == image ]]; then
    image=build/hpctrain-$name.tar
    [[ -s $image ]] || die "there is no $image; make it with containers/build.sh (make image), or use --from def"
    # The image has its labels already.
    {
        printf 'Bootstrap: oci-archive\nFrom: %s\n\n' "$image"
        sed -n '/^%runscript/,$p' apptainer/hpctrain.def | sed '/^%labels/,/^$/d'
        printf '\n%%labels\n    org.label-schema.build-date %s\n' "$date"
    } >"$work/image.def"
    # The image ended its own build with this test.
    arguments+=(--notest)
    def=$work/image.def
else
    def=apptainer/hpctrain.def
    arguments+=(--build-arg "flavor=$flavor" --build-arg "mpi=$mpi" --build-arg "snapshot=${DEBIAN_SNAPSHOT:-}"
        --build-arg "date=$date" --build-arg "version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)"
        --build-arg "revision=$(git rev-parse --verify --quiet HEAD 2>/dev/null || true)")
    if [[ -n ${BASE_IMAGE:-} ]]; then
        arguments+=(--build-arg bootstrap=docker --build-arg "from=$BASE_IMAGE")
    elif ! registry_answers; then
        containers/base.sh
        arguments+=(--build-arg bootstrap=docker-archive --build-arg from=build/base-bookworm.tar)
    fi
    # For %post: wheels in /mnt, certificates in /media.
    mkdir "$work/ca" "$work/no-wheels"
    ca=$(ca_bundle)
    [[ -z $ca ]] || cp "$ca" "$work/ca/ca.crt"
    arguments+=(--bind "${wheels:-$work/no-wheels}:/mnt:ro" --bind "$work/ca:/media:ro")
    # A root without all capabilities (in a container, in some virtual machines) builds as an ordinary user does.
    capabilities=$(sed -n 's/^CapEff:\t/0x/p' /proc/self/status)
    if [[ $(id -u) == 0 ]] && ! ((capabilities >> 24 & 1)); then # CAP_SYS_RESOURCE
        arguments+=(--fakeroot)
    fi
fi

echo "build: $output from $from, by ${apptainer[*]}, wheels from ${wheels:-the index}"
# Apptainer after 1.4 can leave out the time and the random number by itself; sif.py then finds nothing to change.
if [[ $("${apptainer[@]}" build --help) == *--reproducible* ]]; then
    arguments+=(--reproducible)
fi
image_tool "${apptainer[@]}" build "${arguments[@]}" "$work/image.sif" "$def"
python3 containers/sif.py "$work/image.sif" || die "the header of the SIF could not be normalised; see above"
record=build/hpctrain-$name.provenance.json
if [[ $from == image && -f $record && -w build ]]; then
    python3 containers/record.py sif "$work/image.sif" "$image" "$record" --builder "$("${apptainer[@]}" --version)" ||
        die "the record of the image does not fit; see above, or make the image anew with containers/build.sh"
fi
mv "$work/image.sif" "$output"
echo "build: $output ($(du -h --apparent-size "$output" | cut -f1))"
