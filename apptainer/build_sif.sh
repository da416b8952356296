#!/bin/bash
# build_sif.sh [--from image|def] [--flavor FLAVOR] [--mpi openmpi|mpich] [--output FILE]: build the SIF (make
# sif).
#   --from image  from build/hpctrain-FLAVOR.tar, which containers/build_image.sh makes: the default, under a
#                 minute
#   --from def    from a plain Debian with apptainer/hpctrain.def, without docker, podman or buildah
#   --output      hpctrain-FLAVOR.sif by default, or hpctrain-FLAVOR-mpich.sif. The file appears when it is
#                 complete
# It uses this machine's apptainer or singularity, else (root only) the one in the test cluster's file system.
#   BASE_IMAGE=NAME, DEBIAN_SNAPSHOT=TIMESTAMP, WHEELS=FOLDER, COMPILED_WHEELS=FOLDER  for --from def, as for
#                            containers/build_image.sh
#   APPTAINER_TMPDIR=FOLDER  where to unpack, about 3 GB; /tmp by default

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=containers/build_functions.sh
source containers/build_functions.sh
attend apptainer/build_sif.sh "$@"

flavor=cpu mpi=openmpi from=image output=
parse_options flavor mpi from output -- "$@"
[[ $from == image || $from == def ]] || die "--from must be image or def, not $from"
name=$(image_name "$flavor" "$mpi")
output=$(realpath -m "${output:-hpctrain-$name.sif}")
[[ -w $(dirname "$output") ]] || die "cannot write to $(dirname "$output"); give another --output"

check_python

# The work folder is beside the final file, so that the last step is a rename.
work=$(mktemp -d "$(dirname "$output")/.sif.XXXXXX") ||
    die "cannot write to $(dirname "$output"); free some space, or give another --output"
trap 'rm -rf "$work"' EXIT
wheels=$(wheels_folder)
kept=
if [[ $from == def && ${COMPILED_WHEELS-build/compiled} ]]; then
    kept=${COMPILED_WHEELS:-build/compiled}
    { mkdir -p "$kept" && kept=$(realpath "$kept"); } ||
        die "cannot make COMPILED_WHEELS=$kept; set it to a folder that you can write"
fi

# The one in the test cluster's file system sees only the current folder and the folders that -b names.
if runtime=$(command -v apptainer || command -v singularity); then
    apptainer=("$runtime")
elif [[ $(id -u) == 0 && -d build/cluster/rootfs ]]; then
    apptainer=(cluster/cluster.sh run -b "$work" ${wheels:+-b "$wheels"} ${kept:+-b "$kept"}
        -e "SOURCE_DATE_EPOCH=$SOURCE_DATE_EPOCH" -- apptainer)
else
    die "apptainer or singularity is not installed; install one, or as root run cluster/build_rootfs.sh" \
        "build/cluster/rootfs"
fi

# Every node decompresses the SIF at every start, and zstd is several times as fast as gzip. Its level 9 takes
# some 20 s more than level 3 and saves 8 %. -all-root: the owner does not depend on who builds.
arguments=(--force --disable-cache --mksquashfs-args "-comp zstd -Xcompression-level 9 -all-root -no-xattrs")
# Otherwise Apptainer writes the time of the build into this label.
date=$(date -u -d "@$SOURCE_DATE_EPOCH" +%FT%TZ)

if [[ $from == image ]]; then
    image=build/hpctrain-$name.tar
    [[ -s $image ]] ||
        die "there is no $image; build it with containers/build_image.sh (make image), or use --from def"
    # All but %labels, which the image has already.
    {
        printf 'Bootstrap: oci-archive\nFrom: %s\n\n' "$image"
        sed -n '/^%runscript/,$p' apptainer/hpctrain.def | sed '/^%labels/,/^$/d'
        printf '\n%%labels\n    org.label-schema.build-date %s\n' "$date"
    } >"$work/image.def"
    # The build of the image has run this test.
    arguments+=(--notest)
    def=$work/image.def
else
    def=apptainer/hpctrain.def
    arguments+=(--build-arg "flavor=$flavor" --build-arg "mpi=$mpi"
        --build-arg "snapshot=${DEBIAN_SNAPSHOT:-}"
        --build-arg "date=$date" --build-arg "version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)"
        --build-arg "revision=$(git rev-parse --verify --quiet HEAD 2>/dev/null || true)")
    if [[ -n ${BASE_IMAGE:-} ]]; then
        arguments+=(--build-arg bootstrap=docker --build-arg "from=$BASE_IMAGE")
    elif ! registry_answers; then
        containers/build_base.sh
        arguments+=(--build-arg bootstrap=docker-archive --build-arg from=build/base-bookworm.tar)
    fi
    # %post finds the wheels in /mnt, the certificates in /media and compiled wheels in /srv.
    mkdir "$work/ca" "$work/no-wheels" "$work/none-kept"
    ca=$(ca_bundle)
    [[ -z $ca ]] || cp "$ca" "$work/ca/ca.crt"
    arguments+=(--bind "${wheels:-$work/no-wheels}:/mnt:ro" --bind "$work/ca:/media:ro"
        --bind "${kept:-$work/none-kept}:/srv")
    # A root without all capabilities, as in a container and some virtual machines, has to build like an
    # ordinary user.
    capabilities=$(sed -n 's/^CapEff:\t/0x/p' /proc/self/status)
    if [[ $(id -u) == 0 ]] && ! ((capabilities >> 24 & 1)); then # CAP_SYS_RESOURCE
        arguments+=(--fakeroot)
    fi
fi

echo "build: $output from $from, with ${apptainer[*]}, wheels from ${wheels:-the index}"
# Apptainer after 1.4 can omit the time and the random number itself; sif.py then changes nothing.
if [[ $("${apptainer[@]}" build --help) == *--reproducible* ]]; then
    arguments+=(--reproducible)
fi
image_tool "${apptainer[@]}" build "${arguments[@]}" "$work/image.sif" "$def"
python3 containers/sif.py "$work/image.sif" || die "cannot normalize the header of the SIF; see above"
record=build/hpctrain-$name.provenance.json
if [[ $from == image && -f $record && -w build ]]; then
    builder=$("${apptainer[@]}" --version)
    python3 containers/record.py sif "$work/image.sif" "$image" "$record" --builder "$builder" ||
        die "cannot add the SIF to the record of the image; see above, or rebuild the image with" \
            "containers/build_image.sh"
fi
# What launch/lib/digest.sh reads, so that no job has to hash the SIF: its digest, size and time of change.
sha256=$(sha256sum <"$work/image.sif" | cut -d ' ' -f 1)
printf 'sha256:%s %s\n' "$sha256" "$(LC_ALL=C stat -c '%s %.9Y' "$work/image.sif")" >"$work/digest"
mv "$work/image.sif" "$output"
mv "$work/digest" "$output.digest"
echo "build: made $output ($(du -h --apparent-size "$output" | cut -f1))"
