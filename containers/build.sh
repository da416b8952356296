#!/bin/bash
# build.sh [--flavor FLAVOR] [--mpi openmpi|mpich] [--tool docker|podman|buildah]: build the image (make image).
# It gives localhost/hpctrain:FLAVOR in the tool's own store, and build/hpctrain-FLAVOR.tar, an OCI archive that apptainer,
# `podman load`, `docker load` and registries take; with --mpi mpich both are called FLAVOR-mpich. Beside the archive is its
# record, with the digest of its manifest, by which a registry knows it, and which every build of a commit gives: docs/verify.md.
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
            image_tool buildah pull --quiet docker-archive:build/base-bookworm.tar
        else
            image_tool "$tool" load --quiet --input build/base-bookworm.tar
        fi
    fi
fi

wheels=$(wheels_folder)
ca=$(ca_bundle)
echo "build: tool $tool, base ${BASE_IMAGE:-as pinned}, wheels from ${wheels:-the index}"
mkdir -p build
work=$(mktemp -d -p build image.XXXXXX) || die "cannot write to build/; make room there"
trap 'rm -rf "$work"' EXIT
mkdir "$work/no-wheels"

# A label is public: no local paths, no credentials. The same repository has the same name, however it was cloned.
source=$(git config --get remote.origin.url 2>/dev/null | sed -E 's#^(ssh://)?git@([^:/]+)[:/]#https://\2/#; s#\.git$##' || true)
[[ $source =~ ^https://[^@]+$ ]] || source=
revision=$(git rev-parse --verify --quiet HEAD 2>/dev/null || true)
image=localhost/hpctrain:$name
arguments=(--file "$work/context/containers/Dockerfile" --tag "$image"
    --build-arg "FLAVOR=$flavor" --build-arg "MPI=$mpi" --build-arg "DEBIAN_SNAPSHOT=${DEBIAN_SNAPSHOT:-}"
    ${BASE_IMAGE:+--build-arg "BASE_IMAGE=$BASE_IMAGE"}
    --build-arg "VERSION=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)" --build-arg "CREATED=$(commit_date)"
    --build-arg "REVISION=$revision" --build-arg "SOURCE=$source"
    --build-context "wheels=${wheels:-$work/no-wheels}" ${ca:+--secret "id=ca,src=$ca"})

# A copy of what the image is made from, whose modes do not depend on the umask of who made this checkout.
mkdir "$work/context"
mapfile -t parts < <(sed -n 's/^!//p' .dockerignore)
parts+=(.dockerignore containers/Dockerfile)
changed=$(git status --porcelain -- "${parts[@]}" 2>/dev/null || true)
tar --create --mode=u=rwX,go=rX --mtime="@$SOURCE_DATE_EPOCH" "${parts[@]}" |
    tar --extract --preserve-permissions --directory "$work/context" || die "the build failed: no room in build/; see above"

mkdir "$work/oci"
if [[ $tool == docker ]]; then
    # Without attestations, which hold the time; with the date in the layers where BuildKit can do that.
    image_tool docker buildx build --provenance=false --output type=docker,rewrite-timestamp=true "${arguments[@]}" "$work/context"
    image_tool docker save --output "$work/docker.tar" "$image"
    tar --extract --file "$work/docker.tar" --directory "$work/oci"
    rm "$work/docker.tar"
    [[ -f $work/oci/index.json ]] || die "docker save wrote no OCI image; it does from docker 25 on, or use --tool buildah"
else
    # chroot needs no privileges that a container, a batch node or an ordinary user lacks; the image is the same.
    export BUILDAH_ISOLATION=${BUILDAH_ISOLATION:-chroot}
    image_tool "$tool" build --layers --format oci --identity-label=false --timestamp "$SOURCE_DATE_EPOCH" "${arguments[@]}" \
        "$work/context"
    image_tool "$tool" push --quiet "$image" "oci:$work/oci:$image"
fi
# What docker reads, whose load knows nothing else before the containerd store.
python3 containers/record.py docker-manifest "$work/oci" "$image" || die "the build failed: no room in build/; see above"
tar --create --file "$work/hpctrain-$name.tar" --sort=name --mode=u=rwX,go=rX --mtime="@$SOURCE_DATE_EPOCH" \
    --owner=0 --group=0 --numeric-owner --directory "$work/oci" oci-layout index.json manifest.json blobs ||
    die "the build failed: no room in build/ for the archive; see above"
python3 containers/record.py image "$work/hpctrain-$name.tar" --context "$work/context" --builder "$("$tool" --version)" \
    ${changed:+--dirty} || die "the build failed: the image got no record; see above"
mv "$work/hpctrain-$name".* build/
digest=$(<"build/hpctrain-$name.digest")
echo "build: $image, and build/hpctrain-$name.tar ($(du -h "build/hpctrain-$name.tar" | cut -f1)), $digest"
