#!/bin/bash
# reproduce.sh [--flavor FLAVOR]: build the image twice, each time in a store of its own that begins empty, and a SIF of
# each, and say whether all layers and both SIFs are the same, byte for byte (make reproduce). The image's configuration is
# not compared: buildah writes the random number of a container into it.
# Where they are not, the files that differ are named, and the exit status is 1.
# It takes as long as two builds with nothing cached, and room for both: for the cpu flavour 10 minutes on 2 cores, 15 GB.
#   TMPDIR=FOLDER  where the stores are (/tmp by default)

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=containers/lib.sh
source containers/lib.sh

flavor=cpu
while (($#)); do
    case $1 in
        -h | --help) usage && exit ;;
        --flavor)
            [[ -n ${2:-} ]] || die "--flavor needs a value (see --help)"
            flavor=$2
            shift 2
            ;;
        *) die "unknown argument $1 (see --help)" ;;
    esac
done
command -v buildah >/dev/null || die "buildah is not there, which can have a store of its own; apt-get install buildah"
work=$(mktemp -d)
trap 'chmod -R u+w "$work" && rm -rf "$work"' EXIT

# The list of files of each layer of an image, with what tar knows of them and a hash of their content.
listing() {
    mkdir "$1.files"
    tar -xf "$1" -C "$1.files"
    local layer
    while read -r layer; do
        tar --utc --full-time -tvf "$1.files/$layer"
        mkdir "$1.files/content"
        tar -xf "$1.files/$layer" -C "$1.files/content" --no-same-owner --no-same-permissions
        (cd "$1.files/content" && find . -type f -print0 | sort -z | xargs -0 -r sha256sum)
        chmod -R u+w "$1.files/content" && rm -rf "$1.files/content"
    done < <(grep -o '[^"]*\.tar' "${1%.tar}.layers")
}

for turn in 1 2; do
    mkdir "$work/$turn"
    printf '[storage]\ndriver = "overlay"\ngraphroot = "%s/graph"\nrunroot = "%s/run"\n' "$work/$turn" "$work/$turn" \
        >"$work/$turn/storage.conf"
    echo "reproduce: build $turn of hpctrain:$flavor, in an empty store"
    CONTAINERS_STORAGE_CONF=$work/$turn/storage.conf containers/build.sh --flavor "$flavor" --tool buildah >"$work/$turn.log" 2>&1 ||
        die "build $turn failed: $(tail -n 20 "$work/$turn.log")"
    cp "build/hpctrain-$flavor.tar" "$work/$turn.tar"
    CONTAINERS_STORAGE_CONF=$work/$turn/storage.conf buildah rmi --all --force >/dev/null 2>&1 || true
    # the layers are named by their hash
    tar -xOf "$work/$turn.tar" manifest.json | grep -o '"Layers":\[[^]]*\]' >"$work/$turn.layers"
    echo "reproduce: the layers of image $turn are sha256:$(sha256sum "$work/$turn.layers" | cut -d' ' -f1) together"
done
if ! cmp -s "$work/1.layers" "$work/2.layers"; then
    diff <(listing "$work/1.tar") <(listing "$work/2.tar") | head -n 100
    die "the two images differ, in the files above"
fi

for turn in 1 2; do
    cp "$work/$turn.tar" "build/hpctrain-$flavor.tar"
    apptainer/build.sh --flavor "$flavor" --output "$work/$turn.sif" >"$work/$turn.log" 2>&1 ||
        die "SIF $turn failed: $(tail -n 20 "$work/$turn.log")"
    echo "reproduce: SIF $turn is sha256:$(sha256sum "$work/$turn.sif" | cut -d' ' -f1)"
done
cmp "$work/1.sif" "$work/2.sif" || die "the two SIFs differ"
echo "reproduce: the same bits, twice"
