#!/bin/bash
# reproduce.sh [--flavor FLAVOR] [--mpi openmpi|mpich]: build the image twice, each time in a store of its own that begins
# empty, and a SIF of it twice, and say whether they are the same, byte for byte (make reproduce). As root with the test
# cluster's file system, the second SIF is made by an ordinary user. Where two differ, what differs is named: the files with
# their mode, owner, time and hash, or the configuration; and the exit status is 1.
# The result is build/hpctrain-FLAVOR.tar with its record, as containers/build.sh leaves them. It takes as long as two builds
# with nothing cached, and room for both: for the cpu flavour 12 minutes on 2 idle cores, 15 GB.
#   TMPDIR=FOLDER  where the stores are (/tmp by default)

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=containers/lib.sh
source containers/lib.sh

flavor=cpu mpi=openmpi
while (($#)); do
    case $1 in
        -h | --help) usage && exit ;;
        --flavor | --mpi)
            [[ -n ${2:-} ]] || die "$1 needs a value (see --help)"
            declare "${1#--}=$2"
            shift 2
            ;;
        *) die "unknown argument $1 (see --help)" ;;
    esac
done
name=hpctrain-$(image_name "$flavor" "$mpi")
command -v buildah >/dev/null || die "buildah is not there, which can have a store of its own; apt-get install buildah"
work=$(mktemp -d)
trap clean EXIT

# store TURN COMMAND...: run a command with the store of this turn
store() {
    CONTAINERS_STORAGE_CONF=$work/$1/storage.conf "${@:2}"
}

# A build that failed leaves a container with its files mounted.
clean() {
    for turn in "$work"/[12]; do
        [[ ! -f $turn/storage.conf ]] || store "$(basename "$turn")" buildah rm --all >/dev/null 2>&1 || true
    done
    chmod -R u+w "$work" && rm -rf "$work"
}

# listing ARCHIVE: its configuration, and the files of each layer with what tar knows of them and a hash of their content
listing() {
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
    printf '[storage]\ndriver = "overlay"\ngraphroot = "%s/graph"\nrunroot = "%s/run"\n' "$work/$turn" "$work/$turn" \
        >"$work/$turn/storage.conf"
    echo "reproduce: build $turn of $name, in an empty store"
    store "$turn" containers/build.sh --flavor "$flavor" --mpi "$mpi" --tool buildah >"$work/$turn.log" 2>&1 ||
        die "build $turn failed: $(tail -n 20 "$work/$turn.log")"
    cp "build/$name.tar" "$work/$turn.tar"
    cp "build/$name.provenance.json" "$work/$turn.json"
    store "$turn" buildah rmi --all --force >/dev/null 2>&1 || true
    echo "reproduce: image $turn is $(<"build/$name.digest")"
done
if ! cmp -s "$work/1.tar" "$work/2.tar"; then
    diff <(listing "$work/1.tar") <(listing "$work/2.tar") | head -n 100
    die "the two images differ, in what is above, or if that is nothing, in their compression"
fi
diff "$work/1.json" "$work/2.json" || die "the two provenances differ"

# Whoever makes it: the second one another user, where there can be one.
mkdir "$work/sif"
makers=(apptainer/build.sh)
if [[ $(id -u) == 0 && -d build/cluster/rootfs ]]; then
    chmod 755 "$work"
    chown 1000:1000 "$work/sif"
    makers=("${makers[@]}" "tests/cluster/cluster.sh run -u alice -b $work/sif -- apptainer/build.sh")
else
    makers=("${makers[@]}" "${makers[@]}")
fi
for turn in 1 2; do
    read -ra maker <<<"${makers[turn - 1]}"
    "${maker[@]}" --flavor "$flavor" --mpi "$mpi" --output "$work/sif/$turn.sif" >"$work/$turn.log" 2>&1 ||
        die "SIF $turn failed: $(tail -n 20 "$work/$turn.log")"
    echo "reproduce: SIF $turn, by user $(stat -c %u "$work/sif/$turn.sif"), is sha256:$(sha256sum "$work/sif/$turn.sif" | cut -d' ' -f1)"
done
cmp "$work/sif/1.sif" "$work/sif/2.sif" || die "the two SIFs differ"
echo "reproduce: the same bits, twice"
