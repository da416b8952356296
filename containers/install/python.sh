#!/bin/bash
# python.sh PREFIX FLAVOR: make the Python environment at PREFIX from containers/locks/FLAVOR.lock, and mpich.lock.
# It is the same in the image (PREFIX=/opt/hpctrain) and on a host without containers (any folder).
# Every wheel must have the hash that the lock states.
#   MPI=openmpi|mpich  openmpi, which is Debian's, by default; MPICH is a wheel
#   PYTHON=python3.11  the interpreter; the lock is for 3.11
#   WHEELS=FOLDER      wheels used before the index; by default the local folder that pip is configured with

set -euo pipefail
umask 022
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=containers/install/lib.sh
source "$here/lib.sh"

case "$#:${1:-}" in
    1:-h | 1:--help) usage && exit ;;
    2:[!-]*) prefix=$1 flavor=$2 ;;
    *) die "give PREFIX and FLAVOR (see --help)" ;;
esac
lock=$here/../locks/$flavor.lock locks=(-r "$here/../locks/$flavor.lock")
[[ -f $lock ]] || die "there is no flavour $flavor; it would be $lock"
case ${MPI:-openmpi} in
    openmpi) ;;
    mpich) locks+=(-r "$here/../locks/mpich.lock") ;;
    *) die "MPI is openmpi or mpich, not $MPI" ;;
esac
[[ ! -e $prefix ]] || die "$prefix exists; remove it or give another PREFIX"
python=${PYTHON:-python3.11}
"$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null ||
    die "$python is no Python 3.11 with venv; install python3.11-venv or set PYTHON"
wheels=$(wheels_folder)
use_ca

# An environment cannot be made elsewhere and renamed (its scripts name its path), so a failed one is removed.
trap '[[ $? == 0 ]] || { rm -rf "$prefix"; echo "${0##*/}: failed; removed $prefix" >&2; }' EXIT
"$python" -m venv "$prefix"

pip=("$prefix/bin/python" -m pip install --no-cache-dir --no-compile --progress-bar off --require-hashes)
work=$(mktemp -d)

# A build of torch that is not on PyPI (2.13.0+cpu) first and alone: its index, named for all packages, would be asked about
# each of them, and retried for each of them where it cannot be reached.
sed -n '/^torch==/,/[^\\]$/p' "$lock" >"$work/torch.lock"
read -r torch _ <"$work/torch.lock"
if [[ $torch != *+* ]]; then
    wheels= # a build for the CPU in it would be taken for torch itself
elif [[ -n $wheels ]] && compgen -G "$wheels/torch-${torch#torch==}-*.whl" >/dev/null; then
    "${pip[@]}" --no-deps --no-index --find-links "$wheels" -r "$work/torch.lock"
else
    index=https://download.pytorch.org/whl/$flavor
    "${pip[@]}" --no-deps --index-url "$index" -r "$work/torch.lock" ||
        die "no $torch from $index; where that cannot be reached, name a folder that holds its wheel with WHEELS="
fi
"${pip[@]}" ${wheels:+--find-links "$wheels"} "${locks[@]}" ||
    die "a package of $flavor.lock could not be installed; is PyPI, or the index that pip is configured with, reachable?"
rm -r "$work"

"$prefix/bin/python" -m pip check
site=$prefix/lib/python3.11/site-packages

# The packages' own tests, a fifth of all there is. numpy.testing and torch.testing are libraries, and stay; of torch's
# programs, torch starts one itself.
find "$site" -type d \( -name tests -o -name test \) -prune -exec rm -rf {} +
find "$site/torch/bin" -type f ! -name torch_shm_manager -delete
compile_bytecode "$prefix/bin/python" "$site" unchecked-hash
