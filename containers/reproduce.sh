#!/bin/bash
# reproduce.sh [--flavor FLAVOR] [--mpi openmpi|mpich]: build the image twice, each time in an empty store of
# its own, and its SIF twice, and compare them byte for byte (make reproduce). As root with the test cluster's
# file system, an ordinary user builds the second SIF. If two differ, it prints the difference (files with
# mode, owner, time and hash, or the configuration) and exits with status 1. The result is
# build/hpctrain-FLAVOR.tar with its record, as containers/build_image.sh makes them. It takes the time and
# the space of two builds without a cache: for the cpu flavor 12 minutes on 2 idle cores and 15 GB.
#   TMPDIR=FOLDER  where the stores go (/tmp by default)

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=containers/build_functions.sh
source containers/build_functions.sh
attend containers/reproduce.sh "$@"

flavor=cpu mpi=openmpi
parse_options flavor mpi -- "$@"
name=hpctrain-$(image_name "$flavor" "$mpi")
command -v buildah >/dev/null ||
    die "buildah is not installed, the tool that can use a separate store; apt-get install buildah"
work=$(mktemp -d)
trap clean_up EXIT

# with_store TURN COMMAND...: run a command with the store of this turn
with_store() {
    CONTAINERS_STORAGE_CONF=$work/$1/storage.conf "${@:2}"
}

# clean_up: a failed build leaves a container with its files mounted
clean_up() {
    for turn in "$work"/[12]; do
        [[ ! -f $turn/storage.conf ]] ||
            with_store "$(basename "$turn")" buildah rm --all >/dev/null 2>&1 || true
    done
    chmod -R u+w "$work" && rm -rf "$work"
}

# list_archive ARCHIVE: print its configuration, and the files of each layer with tar's listing and the hash
# of their content
list_archive() {
    local part paths folder=$1.files
    mkdir "$folder"
    tar -xf "$1" -C "$folder"
    mapfile -t paths < <(grep -o 'blobs/sha256/[0-9a-f]*' "$folder/manifest.json")
    python3 -m json.tool "$folder/${paths[0]}"
    for part in "${paths[@]:1}"; do
        tar --utc --full-time -tvf "$folder/$part"
        mkdir "$folder/content"
        tar -xf "$folder/$part" -C "$folder/content" --no-same-owner --no-same-permissions
        (cd "$folder/content" && find . -type f -print0 | sort -z | xargs -0 -r sha256sum)
        chmod -R u+w "$folder/content" && rm -rf "$folder/content"
    done
}

for turn in 1 2; do
    mkdir "$work/$turn"
    printf '[storage]\ndriver = "overlay"\ngraphroot = "%s/graph"\nrunroot = "%s/run"\n' \
        "$work/$turn" "$work/$turn" \
        >"$work/$turn/storage.conf"
    echo "reproduce: build $turn of $name, in an empty store"
    COMPILED_WHEELS='' with_store "$turn" containers/build_image.sh --flavor "$flavor" --mpi "$mpi" \
        --tool buildah >"$work/$turn.log" 2>&1 ||
        die "build $turn failed: $(tail -n 20 "$work/$turn.log")"
    cp "build/$name.tar" "$work/$turn.tar"
    cp "build/$name.provenance.json" "$work/$turn.json"
    with_store "$turn" buildah rmi --all --force >/dev/null 2>&1 || true
    echo "reproduce: image $turn is $(<"build/$name.digest")"
done
if ! cmp -s "$work/1.tar" "$work/2.tar"; then
    diff <(list_archive "$work/1.tar") <(list_archive "$work/2.tar") | head -n 100
    die "the two images differ, see above; if nothing is listed, they differ in their compression"
fi
diff "$work/1.json" "$work/2.json" || die "the two provenance files differ, see above"

# The SIF must not depend on the user, so another user builds the second one if possible.
mkdir "$work/sif"
makers=(apptainer/build_sif.sh)
if [[ $(id -u) == 0 && -d build/cluster/rootfs ]]; then
    chmod 755 "$work"
    chown 1000:1000 "$work/sif"
    makers=("${makers[@]}" "cluster/cluster.sh run -u alice -b $work/sif -- apptainer/build_sif.sh")
else
    makers=("${makers[@]}" "${makers[@]}")
fi
for turn in 1 2; do
    read -ra maker <<<"${makers[turn - 1]}"
    "${maker[@]}" --flavor "$flavor" --mpi "$mpi" --output "$work/sif/$turn.sif" >"$work/$turn.log" 2>&1 ||
        die "SIF $turn failed: $(tail -n 20 "$work/$turn.log")"
    sha256=$(sha256sum "$work/sif/$turn.sif" | cut -d' ' -f1)
    echo "reproduce: SIF $turn, by user $(stat -c %u "$work/sif/$turn.sif"), is sha256:$sha256"
done
cmp "$work/sif/1.sif" "$work/sif/2.sif" ||
    die "the two SIFs differ, but the images do not; compare the versions of apptainer and mksquashfs"
echo "reproduce: both builds are identical"
