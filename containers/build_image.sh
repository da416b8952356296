#!/bin/bash
# build_image.sh [--flavor FLAVOR] [--mpi openmpi|mpich] [--tool docker|podman|buildah]: build the image (make
# image). It makes localhost/hpctrain:FLAVOR in the tool's own store, and build/hpctrain-FLAVOR.tar, an OCI
# archive for apptainer, `podman load`, `docker load` and registries. With --mpi mpich both are named
# FLAVOR-mpich. Beside the archive is its record (docs/reference/verify.md) with the digest of its manifest,
# which a registry shows and every build of a commit gives.
#   BASE_IMAGE=NAME  the Debian 12 image to start from. By default the one that containers/Dockerfile pins, or
#                    if no registry answers, the one that containers/build_base.sh makes from a Debian mirror
#   DEBIAN_SNAPSHOT=TIMESTAMP  see containers/install/debian.sh
#   WHEELS=FOLDER    wheels to use before the index; by default the local folder in pip's configuration
#   COMPILED_WHEELS=FOLDER  where compiled wheels are kept, for later builds from the same inputs.
#                           Default: build/compiled. Empty: compile

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=containers/build_functions.sh
source containers/build_functions.sh
attend containers/build_image.sh "$@"

flavor=cpu mpi=openmpi tool=
parse_options flavor mpi tool -- "$@"
name=$(image_name "$flavor" "$mpi")

# tool_works TOOL: a docker client alone is not enough. Its daemon must answer, and --build-context needs
# buildx.
tool_works() {
    case $1 in
        docker) timeout 10 docker info >/dev/null 2>&1 && docker buildx version >/dev/null 2>&1 ;;
        podman | buildah) command -v "$1" >/dev/null ;;
        *) die "--tool must be docker, podman or buildah, not $1" ;;
    esac
}
# choose_rootless_storage: for an ordinary user, buildah may choose vfs, which copies the whole image for each
# of thirty layers. With fuse-overlayfs it need not.
choose_rootless_storage() {
    local store free
    buildah unshare true 2>/dev/null ||
        die "buildah cannot make a user namespace for $(id -un); ask for a range in /etc/subuid and for" \
            "user namespaces, or build elsewhere and copy the SIF"
    [[ -z ${STORAGE_DRIVER:-} && $(buildah info --format '{{.store.GraphDriverName}}') == vfs ]] || return 0
    if command -v fuse-overlayfs >/dev/null; then
        STORAGE_OPTS=overlay.mount_program=$(command -v fuse-overlayfs)
        export STORAGE_DRIVER=overlay STORAGE_OPTS
        return
    fi
    store=$(buildah info --format '{{.store.GraphRoot}}')
    free=$(df --output=avail -BG "$store" | tail -n 1)
    ((${free//[!0-9]/} >= 40)) ||
        die "buildah's storage driver vfs needs 40 GB in $store, which has$free; install fuse-overlayfs," \
            "or point CONTAINERS_STORAGE_CONF to a larger disk"
}

for candidate in ${tool:-docker podman buildah}; do
    if tool_works "$candidate"; then
        tool=$candidate
        break
    elif [[ -n $tool ]]; then
        die "$tool does not work here (docker needs a daemon and buildx); install it, or omit --tool to" \
            "use another"
    fi
done
[[ -n $tool ]] || die "no docker, podman or buildah is installed; apt-get install buildah"

check_python
if [[ $tool == buildah && $(id -u) != 0 ]]; then choose_rootless_storage; fi

if [[ -z ${BASE_IMAGE:-} ]] && ! registry_answers; then
    containers/build_base.sh
    BASE_IMAGE=localhost/hpctrain-base:bookworm
    # The id of an image is the digest of its config, and manifest.json names the config.
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
echo "build: with $tool, from ${BASE_IMAGE:-the pinned base}, wheels from ${wheels:-the index}"
mkdir -p build
work=$(mktemp -d -p build image.XXXXXX) || die "cannot write to build/; free some space there"
trap 'rm -rf "$work"' EXIT
mkdir "$work/no-wheels"
kept=${COMPILED_WHEELS-build/compiled}
compiled=$work/no-wheels
if [[ -n $kept && -d $kept ]]; then compiled=$(realpath "$kept"); fi

# A label is public, so it holds no local path and no credentials. A clone over ssh gets the same label as one
# over https.
source=$(git config --get remote.origin.url 2>/dev/null |
    sed -E 's#^(ssh://)?git@([^:/]+)[:/]#https://\2/#; s#\.git$##' || true)
[[ $source =~ ^https://[^@]+$ ]] || source=
revision=$(git rev-parse --verify --quiet HEAD 2>/dev/null || true)
image=localhost/hpctrain:$name
arguments=(--file "$work/context/containers/Dockerfile"
    --build-arg "FLAVOR=$flavor" --build-arg "MPI=$mpi" --build-arg "DEBIAN_SNAPSHOT=${DEBIAN_SNAPSHOT:-}"
    ${BASE_IMAGE:+--build-arg "BASE_IMAGE=$BASE_IMAGE"}
    --build-arg "VERSION=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)"
    --build-arg "CREATED=$(commit_date)"
    --build-arg "REVISION=$revision" --build-arg "SOURCE=$source"
    --build-context "wheels=${wheels:-$work/no-wheels}" --build-context "kept=$compiled"
    ${ca:+--secret "id=ca,src=$ca"})

# A copy of the build context, with modes that do not depend on the umask of this checkout.
mkdir "$work/context"
mapfile -t parts < <(sed -n 's/^!//p' .dockerignore)
parts+=(.dockerignore containers/Dockerfile)
changed=$(git status --porcelain -- "${parts[@]}" 2>/dev/null || true)
tar --create --mode=u=rwX,go=rX --mtime="@$SOURCE_DATE_EPOCH" "${parts[@]}" |
    tar --extract --preserve-permissions --directory "$work/context" ||
        die "the build failed: the disk is full, of build/; free some space"

mkdir "$work/oci"
if [[ $tool == docker ]]; then
    # Without attestations, which contain the time of the build. BuildKit sets the time of files if its
    # version can.
    build=(docker buildx build --provenance=false "${arguments[@]}")
    image_tool "${build[@]}" --tag "$image" --output type=docker,rewrite-timestamp=true "$work/context"
    image_tool docker save --output "$work/docker.tar" "$image"
    tar --extract --file "$work/docker.tar" --directory "$work/oci"
    rm "$work/docker.tar"
    [[ -f $work/oci/index.json ]] ||
        die "docker save wrote no OCI image; use docker 25 or newer, or --tool buildah"
else
    # chroot works in a container, on a batch node and for ordinary users, and gives the same image. Two jobs:
    # stages that do not depend on each other are built at the same time.
    export BUILDAH_ISOLATION=${BUILDAH_ISOLATION:-chroot}
    build=("$tool" build --layers --jobs 2 --format oci --identity-label=false
        --timestamp "$SOURCE_DATE_EPOCH" "${arguments[@]}")
    image_tool "${build[@]}" --tag "$image" "$work/context"
    image_tool "$tool" push --quiet "$image" "oci:$work/oci:$image"
fi
if [[ -n $kept ]]; then # all steps of this are in the cache
    image_tool "${build[@]}" --quiet --target compiled \
        --output "type=local,dest=$work/compiled" "$work/context"
    { mkdir -p "$kept" && cp -r "$work/compiled/." "$kept"; } ||
        die "cannot write to COMPILED_WHEELS=$kept; set it to another folder"
fi
# docker load reads this file only, unless docker uses the containerd store.
python3 containers/record.py docker-manifest "$work/oci" "$image" ||
    die "the build failed: the disk is full, of build/; free some space"
tar --create --file "$work/hpctrain-$name.tar" --sort=name --mode=u=rwX,go=rX --mtime="@$SOURCE_DATE_EPOCH" \
    --owner=0 --group=0 --numeric-owner --directory "$work/oci" oci-layout index.json manifest.json blobs ||
    die "the build failed: the disk is full, of build/; free some space"
python3 containers/record.py image "$work/hpctrain-$name.tar" --context "$work/context" \
    --builder "$("$tool" --version)" \
    ${changed:+--dirty} || die "the build failed: cannot write the record of the image; see above"
mv "$work/hpctrain-$name".* build/
digest=$(<"build/hpctrain-$name.digest")
size=$(du -h "build/hpctrain-$name.tar" | cut -f1)
echo "build: made $image and build/hpctrain-$name.tar ($size), $digest"
