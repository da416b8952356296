#!/bin/bash
# debian.sh runtime|build: install the Debian packages of the image, as root, in the image.
#   runtime  what runs in the image: Python, OpenMPI and PMIx (for srun --mpi=pmix), ssh (for mpirun and horovodrun)
#   build    the compilers and headers that Horovod is built with; they stay in the build stage

set -euo pipefail
umask 022
export DEBIAN_FRONTEND=noninteractive

case "$#:${1:-}" in
    1:runtime) packages=(ca-certificates libpmix2 openmpi-bin openssh-client python3.11 python3.11-venv) ;;
    1:build) packages=(cmake g++ libopenmpi-dev make patch python3.11-dev) ;;
    1:-h | 1:--help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0" && exit ;;
    *) echo "${0##*/}: say runtime or build (see --help)" >&2 && exit 2 ;;
esac

apt-get update -q
apt-get install -y -q --no-install-recommends "${packages[@]}"

# The bytecode that comes with Python names the date of its source. In an image all files have one date, so Python would take
# none of it, and compile half its library at every start. The hash of the source, which it is to trust, is always right.
python3.11 -m compileall -f -q --invalidation-mode unchecked-hash /usr/lib/python3.11 /usr/share/python3

# Nobody changes user in this image, so nothing in it needs setuid or setgid. (Not all of /: Apptainer's build binds
# the host's /tmp, with this very image in it.)
find /etc /opt /usr /var -xdev -perm /6000 -type f -exec chmod a-s {} +

# What differs between two installs of the same packages.
apt-get clean
rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/ldconfig/aux-cache /var/cache/debconf/*-old \
    /var/lib/dpkg/*-old /var/log/apt /var/log/dpkg.log /var/log/alternatives.log
