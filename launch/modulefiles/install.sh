#!/bin/bash
# install.sh PREFIX [SIF]: install hpctrain for all users of a site, as `make install PREFIX=...` does.
# Without a SIF it only checks that PREFIX can be written, before make builds one.
#
#   PREFIX/hpctrain/VERSION/      launch/, examples/, notebooks/, docs/ and what they name, bin/hpctrain,
#                                 and the SIF with its SBOM and provenance where these are at hand; a second
#                                 run adds another SIF
#   PREFIX/modulefiles/hpctrain/  a modulefile for Lmod, and one for Environment Modules
#
# Users run `module use PREFIX/modulefiles` and `module load hpctrain`.
set -euo pipefail
source_folder=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

# shellcheck source=launch/lib/trust.sh
source "$source_folder/launch/lib/trust.sh"
# shellcheck source=launch/lib/digest.sh
source "$source_folder/launch/lib/digest.sh"

die() {
    echo "${0##*/}: ${*//[[:cntrl:]]/?}" >&2
    exit 1
}

write_command() {
    cat <<'END'
#!/bin/bash
# hpctrain: run a command of hpctrain in the image of this installation. `make install` has written this file.
#
# HPCTRAIN_FLAVOR chooses one of several installed images by its name, such as cpu or cpu-mpich.
# HPCTRAIN_IMAGE is the path of any other.
set -euo pipefail

die() {
    echo "hpctrain: error: ${*//[[:cntrl:]]/?}" >&2
    exit 1
}

root=$(dirname "$(dirname "$(readlink -f "$0")")")
image=${HPCTRAIN_IMAGE:-} images=("$root"/hpctrain-*.sif)
if [[ -z $image && -n ${HPCTRAIN_FLAVOR:-} ]]; then
    image=$root/hpctrain-$HPCTRAIN_FLAVOR.sif
elif [[ -z $image ]]; then
    flavors=("${images[@]##*/hpctrain-}")
    ((${#images[@]} == 1)) ||
        die "several images are installed: set HPCTRAIN_FLAVOR to one of ${flavors[*]%.sif}"
    image=${images[0]}
fi
[[ -r $image ]] ||
    die "$image: no such image: set HPCTRAIN_IMAGE to a SIF, or HPCTRAIN_FLAVOR to a flavor in $root"
runtime=$(command -v apptainer || command -v singularity) ||
    die "there is no apptainer on the PATH of $(hostname): load its module"
gpu=()
[[ ! -e /dev/nvidiactl ]] || gpu=(--nv)
exec "$runtime" exec "${gpu[@]}" "$image" hpctrain "$@"
END
}

case ${1:-} in
    -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0" && exit ;;
    '' | -*) die "give PREFIX, the folder to install into: make install PREFIX=/opt (see --help)" ;;
esac
[[ $# == 1 || ($# == 2 && -r $2) ]] || die "give PREFIX and a SIF that exists (see --help)"
[[ $1 == /* ]] || die "$1: give PREFIX as an absolute path"
prefix=$1 sif=${2:-}
version=$(sed -nE 's/^version = "(.*)"$/\1/p' "$source_folder/pyproject.toml")
root=$prefix/hpctrain/$version
unwritable="PREFIX=$prefix cannot be written: give a folder of your own, or run as a user who may write there"
umask 022 # all users read what is made here
mkdir -p "$prefix"/{,modulefiles/}hpctrain 2>/dev/null || die "$unwritable"
# Whoever can change what is here has scripts that run as each user of the module.
for folder in "$prefix"{,/modulefiles}; do
    ! is_open_to_all "$folder" ||
        die "$folder: everybody can exchange what is in it: chmod o-w $folder, or give another PREFIX"
done
for folder in "$prefix"/{,modulefiles/}hpctrain "$root"; do
    [[ ! -e $folder ]] || only_writable_by d "$folder" "$UID" 0 ||
        die "$folder: another user made it, or can change it: remove it, or give another PREFIX"
done
new=$(mktemp -d "$prefix/hpctrain/.new.XXXXXX" 2>/dev/null) || die "$unwritable"
trap 'rm -rf "$new"' EXIT
[[ -n $sif ]] || exit 0
chmod 755 "$new"

# Jobs read these files, so nothing is replaced.
if [[ ! -e $root ]]; then
    # With the pages that they name; docs/site* are for who publishes the pages. Of a clone only the files of
    # the project: a user's own ones below them, such as runs, are for nobody else.
    (
        cd "$source_folder"
        paths=(launch examples notebooks docs README.md CONTRIBUTING.md CHANGELOG.md SECURITY.md LICENSE
            cluster/README.md tests/scripts/tutorials tests/tools/faults.md benchmarks
            src/hpctrain/vision src/hpctrain/files/secret_names.txt)
        # root installs from somebody else's clone, too
        {
            git -c safe.directory='*' ls-files -z --error-unmatch "${paths[@]}" 2>/dev/null ||
                find "${paths[@]}" -type f -print0
        } | xargs -0 cp --parents -t "$new"
    )
    rm "$new"/docs/site.*
    mkdir "$new/bin"
    write_command >"$new/bin/hpctrain"
    chmod 755 "$new/bin/hpctrain"
    chmod -R a+rX,go-w "$new"
    mv -T "$new" "$root"
    mkdir "$new"
elif ! diff --recursive --brief "$source_folder/launch" "$root/launch" >/dev/null; then
    echo "${0##*/}: the scripts in $root/launch are of another commit and stay, as jobs may read them:" \
        "for those of this commit remove $root first, when no job uses it" >&2
fi
[[ ! -e $root/${sif##*/} ]] ||
    die "$root has ${sif##*/} already: remove that folder first, when no job uses it"
cp "$sif" "$new/image"
chmod 644 "$new/image"
mv -T "$new/image" "$root/${sif##*/}"
# As apptainer/build_sif.sh does: users cannot write it here, and each would hash the image.
digest_record "$root/${sif##*/}" >"$root/${sif##*/}.digest"
for kind in spdx provenance; do
    for folder in "$(dirname "$sif")" "$source_folder/build"; do
        record=$folder/$(basename "$sif" .sif).$kind.json
        [[ ! -r $record ]] || { install -m 644 "$record" "$root/" && break; }
    done
done
cp "$source_folder/launch/modulefiles/hpctrain.lua" "$prefix/modulefiles/hpctrain/$version.lua"
cp "$source_folder/launch/modulefiles/hpctrain.tcl" "$prefix/modulefiles/hpctrain/$version"
chmod 644 "$prefix/modulefiles/hpctrain/$version"*
echo "installed ${sif##*/} in $root; users run:" \
    "module use $prefix/modulefiles && module load hpctrain/$version"
