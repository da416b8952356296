#!/bin/bash
# debian.sh runtime|build|list: install the Debian packages of the image, as root, in the image.
#   runtime  what runs in the image: Python, ssh (for mpirun and horovodrun), and Open MPI with UCX and PMIx (for srun
#            --mpi=pmix). MPICH comes as a wheel, by python.sh
#   build    the compilers and headers that Horovod is built with; they stay in the build stage
#   list     install nothing, and print the names of all of these
# Versions that are not those of the record, containers/locks/MPI-ARCHITECTURE.debian, are printed. What is installed then
# stands in /usr/share/hpctrain/debian.tsv: package, version, architecture and the SHA-256 of its .deb, which is empty where
# the archive has that version no longer.
#   MPI=openmpi|mpich         openmpi by default
#   DEBIAN_SNAPSHOT=TIMESTAMP install what Debian had at that time, from snapshot.debian.org: 20261101T000000Z, say. By
#                             default, what the image's own sources have today

set -euo pipefail
umask 022
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
mpi=${MPI:-openmpi} snapshot=${DEBIAN_SNAPSHOT:-}

die() {
    echo "${0##*/}: $*" >&2
    exit 1
}

runtime=(ca-certificates openssh-client python3.11 python3.11-venv)
build=(cmake g++ make patch python3.11-dev)
case $mpi in
    openmpi) runtime+=(libpmix2 openmpi-bin) build+=(libopenmpi-dev) ;;
    mpich) ;;
    *) die "MPI is openmpi or mpich, not $mpi" ;;
esac
case "$#:${1:-}" in
    1:runtime) packages=("${runtime[@]}") ;;
    1:build) packages=("${build[@]}") ;;
    1:list) printf '%s\n' "${runtime[@]}" "${build[@]}" && exit ;;
    1:-h | 1:--help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0" && exit ;;
    *) die "say runtime, build or list (see --help)" ;;
esac

# An archive that does not answer is an error, as a stale list is none to install from.
apt=(apt-get -q -o APT::Update::Error-Mode=any)
archive="the sources of the base image"
if [[ -n $snapshot ]]; then
    [[ $snapshot =~ ^[0-9]{8}T[0-9]{6}Z$ ]] || die "DEBIAN_SNAPSHOT is a time like 20261101T000000Z, not $snapshot"
    # For these commands only: who adds packages to the image later gets them, and their repairs, from today's archive.
    # By http, because a plain Debian has no certificates; apt checks the signatures. They expire, which is the point here.
    archive=http://snapshot.debian.org/archive
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    cat >"$work/sources.list" <<END
deb $archive/debian/$snapshot bookworm main
deb $archive/debian/$snapshot bookworm-updates main
deb $archive/debian-security/$snapshot bookworm-security main
END
    apt+=(-o "Dir::Etc::SourceList=$work/sources.list" -o Dir::Etc::SourceParts=- -o Acquire::Check-Valid-Until=false)
fi
"${apt[@]}" update ||
    die "no package lists from $archive${snapshot:+; leave DEBIAN_SNAPSHOT out where it cannot be reached}"
"${apt[@]}" install -y --no-install-recommends "${packages[@]}" ||
    die "a package could not be installed from $archive; see apt's message above"

# The bytecode that comes with Python names the date of its source. In an image all files have one date, so Python would take
# none of it, and compile half its library at every start. The hash of the source, which it is to trust, is always right.
python3.11 -m compileall -f -q --invalidation-mode unchecked-hash /usr/lib/python3.11 /usr/share/python3

# Nobody changes user in this image, so nothing in it needs setuid or setgid. (Not all of /: Apptainer's build binds
# the host's /tmp, with this very image in it.)
find /etc /opt /usr /var -xdev -perm /6000 -type f -exec chmod a-s {} +

# What is installed, with the hashes that apt's lists know.
list=/usr/share/hpctrain/debian.tsv
mkdir -p "${list%/*}"
"${apt[@]}" indextargets --format "\$(FILENAME)" 'Created-By: Packages' | xargs -r /usr/lib/apt/apt-helper cat-file |
    awk -v OFS='\t' '
        !installed && /^(Package|Version|Architecture|SHA256): / { field[$1] = $2 }
        !installed && /^$/ { hash[field["Package:"], field["Version:"], field["Architecture:"]] = field["SHA256:"] }
        installed { print $1, $2, $3, hash[$1, $2, $3] }
    ' - installed=yes <(dpkg-query --show --showformat '${Package} ${Version} ${Architecture}\n' | sort) >"$list"

record=$here/../locks/$mpi-$(dpkg --print-architecture).debian
if [[ -f $record ]]; then
    awk '!installed { recorded[$1] = $2; next }
        recorded[$1] != $2 { print $1 ": recorded " (recorded[$1] ? recorded[$1] : "nothing") ", installed " $2; others++ }
        END { print "debian: " others + 0 " of " FNR " packages are not as recorded" }' "$record" installed=yes "$list"
else
    echo "debian: no versions are recorded for $mpi on $(dpkg --print-architecture); see containers/lock.sh --help"
fi

# What differs between two installs of the same packages.
apt-get clean
rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/ldconfig/aux-cache /var/cache/debconf/*-old \
    /var/lib/dpkg/*-old /var/log/apt /var/log/dpkg.log /var/log/alternatives.log
