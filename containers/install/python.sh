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
    2:[!-]*) prefix=${1%/} flavor=$2 ;;
    *) die "give PREFIX and FLAVOR (see --help)" ;;
esac
lock=${here%/*}/locks/$flavor.lock locks=(-r "${here%/*}/locks/$flavor.lock")
[[ -f $lock ]] || die "there is no flavour $flavor; it would be $lock"
case ${MPI:-openmpi} in
    openmpi) ;;
    mpich) locks+=(-r "${here%/*}/locks/mpich.lock") ;;
    *) die "MPI is openmpi or mpich, not $MPI" ;;
esac
unfinished=$prefix.unfinished
[[ ! -e $prefix || -e $unfinished ]] || die "$prefix exists; remove it or give another PREFIX"
python=${PYTHON:-python3.11}
"$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null ||
    die "$python is no Python 3.11 with venv; install python3.11-venv or set PYTHON"
wheels=$(wheels_folder)
use_ca

work=$(mktemp -d) || die "no folder could be made in TMPDIR (${TMPDIR:-/tmp}); name one with room in TMPDIR"
trap 'rm -rf "$work"' EXIT
# A build of torch that is not on PyPI (2.13.0+cpu) first and alone: its index, named for all packages, would be asked about
# each of them, and retried for each of them where it cannot be reached.
sed -n '/^torch==/,/[^\\]$/p' "$lock" >"$work/torch.lock"
read -r torch _ <"$work/torch.lock" || die "$lock: has no line torch==...; get it back from git, or make lock"

# An environment cannot be made elsewhere and renamed, because its scripts name its path. So an unfinished one is marked by a
# file beside it. It is removed when this ends too soon (after a signal, too, when $? is 0), else when it is made again.
trap 'rm -rf "$work"; [[ ! -e $unfinished ]] || rm -rf "$prefix" "$unfinished"' EXIT
mkdir -p "$(dirname "$prefix")" || die "cannot make the folder of $prefix; give another PREFIX"
touch "$unfinished" || die "cannot write beside $prefix; make room, or give another PREFIX"
rm -rf "$prefix"
"$python" -m venv "$prefix" ||
    die "$python made no environment in $prefix; see above, and whether there and in TMPDIR (${TMPDIR:-/tmp}) is room"
pip=("$prefix/bin/python" -m pip install --no-cache-dir --no-compile --progress-bar off --require-hashes)
if [[ $torch != *+* ]]; then
    wheels= # a build for the CPU in it would be taken for torch itself
elif [[ -n $wheels ]] && compgen -G "$wheels/torch-${torch#torch==}-*.whl" >/dev/null; then
    run_pip "$lock" "${pip[@]}" --report "$work/torch.json" --no-deps --no-index --find-links "$wheels" -r "$work/torch.lock"
else
    run_pip "$lock" "${pip[@]}" --report "$work/torch.json" --no-deps --index-url "https://download.pytorch.org/whl/$flavor" \
        -r "$work/torch.lock"
fi
run_pip "$lock" "${pip[@]}" --report "$work/others.json" ${wheels:+--find-links "$wheels"} "${locks[@]}"
# Which of the files that the lock allows it was: package, version, SHA-256, file. For the list of what the image consists of.
"$prefix/bin/python" - "$work"/*.json >"$prefix/wheels.tsv" <<'PY' || die "$prefix/wheels.tsv could not be written; see above"
import json
import sys

installed = [package for report in sys.argv[1:] for package in json.load(open(report))["install"]]
for package in sorted(installed, key=lambda package: package["metadata"]["name"].lower()):
    what, source = package["metadata"], package["download_info"]
    digest = source["archive_info"]["hash"].partition("sha256=")[2]
    print(what["name"], what["version"], digest, source["url"].rpartition("/")[2].replace("%2B", "+"), sep="\t")
PY

"$prefix/bin/python" -m pip check || die "$lock: its packages do not fit together, see above; make lock"
site=$prefix/lib/python3.11/site-packages

# The packages' own tests, a fifth of all there is. numpy.testing and torch.testing are libraries, and stay; of torch's
# programs, torch starts one itself.
find "$site" -type d \( -name tests -o -name test \) -prune -exec rm -rf {} +
find "$site/torch/bin" -type f ! -name torch_shm_manager -delete
compile_bytecode "$prefix/bin/python" "$site" unchecked-hash
rm "$unfinished"
