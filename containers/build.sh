#!/bin/bash
# build.sh [--flavor FLAVOR] [--mpi openmpi|mpich] [--tool docker|podman|buildah]: build the image (make image).
# It gives localhost/hpctrain:FLAVOR in the tool's own store, and build/hpctrain-FLAVOR.tar (a docker-archive), which
# apptainer/build.sh, `podman load` and `docker load` take; with --mpi mpich both are called FLAVOR-mpich.
#   BASE_IMAGE=NAME  the Debian 12 image to start from. By default the one that containers/Dockerfile pins; where no
#                    registry answers, the one that containers/base.sh makes from a Debian mirror
#   DEBIAN_SNAPSHOT=TIMESTAMP  see containers/install/debian.sh
#   WHEELS=FOLDER    wheels to use before the index; by default the local folder that pip is configured with

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=containers/lib.sh
source containers/lib.sh

flavor=cpu mpi=openmpi tool=
while (($#)); do
    case $1 in
        -h | --help) usage && exit ;;
        --flavor | --mpi | --tool)
            [[ -n ${2:-} ]] || die "$1 needs a value (see --help)"
            declare "${1#--}=$2"
            shift 2
            ;;
        *) die "unknown argument $1 (see --help)" ;;
    esac
done
name=$(image_name "$flavor" "$mpi")

# A docker client alone is no docker: its daemon must answer, and buildx must be there for --build-context.
works() {
    case $1 in
        docker) timeout 10 docker info >/dev/null 2>&1 && docker buildx version >/dev/null 2>&1 ;;
        podman | buildah) command -v "$1" >/dev/null ;;
        *) die "--tool is docker, podman or buildah, not $1" ;;
    esac
}
for candidate in ${tool:-docker podman buildah}; do
    if works "$candidate"; then
        tool=$candidate
        break
    elif [[ -n $tool ]]; then
        die "$tool does not work here (docker needs a daemon and buildx); leave --tool out to take one that does"
    fi
done
[[ -n $tool ]] || die "there is no docker, podman or buildah; apt-get install buildah"

if [[ -z ${BASE_IMAGE:-} ]] && ! registry_answers; then
    containers/base.sh
    BASE_IMAGE=localhost/hpctrain-base:bookworm
    # An image's id is the digest of its config, which the archive names.
    id=$(tar -xOf build/base-bookworm.tar manifest.json | sed -E 's/.*"Config":"([0-9a-f]+).*/\1/')
    if [[ $("$tool" images --quiet --no-trunc "$BASE_IMAGE" 2>/dev/null) != *"$id"* ]]; then
        if [[ $tool == buildah ]]; then
            buildah pull --quiet docker-archive:build/base-bookworm.tar
        else
            "$tool" load --quiet --input build/base-bookworm.tar
        fi
    fi
fi

wheels=$(wheels_folder)
ca=$(ca_bundle)
echo "build: tool $tool, base ${BASE_IMAGE:-as pinned}, wheels from ${wheels:-the index}"
mkdir -p build
work=$(mktemp -d -p build image.XXXXXX)
trap 'rm -rf "$work"' EXIT
mkdir "$work/no-wheels"

source=$(git config --get remote.origin.url 2>/dev/null || true)
[[ $source =~ ^https://[^@]+$ ]] || source= # a label is public: no local paths, no credentials
image=localhost/hpctrain:$name
arguments=(--file containers/Dockerfile --tag "$image"
    --build-arg "FLAVOR=$flavor" --build-arg "MPI=$mpi" --build-arg "DEBIAN_SNAPSHOT=${DEBIAN_SNAPSHOT:-}"
    ${BASE_IMAGE:+--build-arg "BASE_IMAGE=$BASE_IMAGE"}
    --build-arg "VERSION=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)"
    --build-arg "REVISION=$(git rev-parse --verify --quiet HEAD 2>/dev/null || true)" --build-arg "SOURCE=$source"
    --build-context "wheels=${wheels:-$work/no-wheels}" ${ca:+--secret "id=ca,src=$ca"})
SOURCE_DATE_EPOCH=$(source_date_epoch)
export SOURCE_DATE_EPOCH

if [[ $tool == docker ]]; then
    docker buildx build --load "${arguments[@]}" . || die "the build failed; its error is above"
    docker save --output "$work/image.tar" "$image"
else
    # chroot needs no privileges that a container, a batch node or an ordinary user lacks; the image is the same.
    export BUILDAH_ISOLATION=${BUILDAH_ISOLATION:-chroot}
    "$tool" build --layers --format docker --timestamp "$SOURCE_DATE_EPOCH" "${arguments[@]}" . ||
        die "the build failed; its error is above"
    if [[ $tool == buildah ]]; then
        buildah push --quiet "$image" "docker-archive:$work/image.tar:$image"
    else
        podman save --quiet --format docker-archive --output "$work/image.tar" "$image"
    fi
fi
mv "$work/image.tar" "build/hpctrain-$name.tar"
echo "build: $image, and build/hpctrain-$name.tar ($(du -h "build/hpctrain-$name.tar" | cut -f1))"
