#!/bin/bash
# python.sh PREFIX FLAVOR: make the Python environment PREFIX from containers/locks/FLAVOR.lock and
# MPI.lock. It is the same in the image (PREFIX=/opt/hpctrain) and on a host without containers (any
# folder). Every wheel must have a hash of the lock.
#   MPI=openmpi|mpich  openmpi by default
#   PYTHON=python3.11  the interpreter; the lock is for 3.11
#   WHEELS=FOLDER      wheels to use before the index; by default the local folder in pip's configuration

set -euo pipefail
umask 022
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=containers/install/step_functions.sh
source "$here/step_functions.sh"

case "$#:${1:-}" in
    1:-h | 1:--help) usage && exit ;;
    2:[!-]*) prefix=${1%/} flavor=$2 ;;
    *) die "give PREFIX and FLAVOR (see --help)" ;;
esac
mpi=${MPI:-openmpi} lock=${here%/*}/locks/$flavor.lock
[[ -f $lock ]] || die "there is no flavor $flavor, as there is no $lock; see containers/locks"
[[ $mpi == @(openmpi|mpich) ]] || die "MPI must be openmpi or mpich, not $mpi"
unfinished=$prefix.unfinished
[[ ! -e $prefix || -e $unfinished ]] || die "$prefix exists; remove it or give another PREFIX"
python=${PYTHON:-python3.11}
"$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null ||
    die "$python is not a Python 3.11 with venv; install python3.11-venv or set PYTHON"
wheels=$(wheels_folder)
use_ca

work=$(mktemp -d) ||
    die "cannot make a folder in TMPDIR (${TMPDIR:-/tmp}); set TMPDIR to a folder with free space"
trap 'rm -rf "$work"' EXIT
# A torch that is not on PyPI (2.13.0+cpu) is installed first and alone. With its index given for all
# packages, pip would ask that index about each package, and retry for each if it cannot be reached.
sed -n '/^torch==/,/[^\\]$/p' "$lock" >"$work/torch.lock"
# Then pip itself: Debian's takes 20 s of processor time more to compare the files of the index with the lock.
sed -n '/^pip==/,/[^\\]$/p' "$lock" >"$work/pip.lock"
# seqeval is on PyPI as source only. The packages of the lock build it, so it is installed when they are
# there.
sed -n '/^seqeval==/,/[^\\]$/p' "$lock" >"$work/seqeval.lock"
sed -E '/^(pip|seqeval)==/,/[^\\]$/d' "$lock" >"$work/wheels.lock"
read -r torch _ <"$work/torch.lock" ||
    die "$lock: no line torch==...; restore the file from git, or run make lock"

# An environment cannot be made elsewhere and renamed, because its scripts contain its path. So a file beside
# it marks it as unfinished. If this script stops early, it removes the environment (also after a signal, when
# $? is 0); after kill -9 the next run does.
trap 'rm -rf "$work"; [[ ! -e $unfinished ]] || rm -rf "$prefix" "$unfinished"' EXIT
mkdir -p "$(dirname "$prefix")" || die "cannot make the parent folder of $prefix; give another PREFIX"
touch "$unfinished" || die "cannot write beside $prefix; free some space, or give another PREFIX"
rm -rf "$prefix"
"$python" -m venv "$prefix" ||
    die "$python cannot make an environment in $prefix; see above, and check the free space there and in" \
        "TMPDIR (${TMPDIR:-/tmp})"
pip=("$prefix/bin/python" -m pip install --no-cache-dir --no-compile --progress-bar off --require-hashes)
if [[ $torch != *+* ]]; then
    wheels= # the folder may hold torch for the CPU, which pip would prefer to PyPI's
elif [[ -n $wheels ]] && compgen -G "$wheels/torch-${torch#torch==}-*.whl" >/dev/null; then
    run_pip "$lock" "${pip[@]}" --report "$work/torch.json" --no-deps --no-index --find-links "$wheels" \
        -r "$work/torch.lock"
else
    run_pip "$lock" "${pip[@]}" --report "$work/torch.json" --no-deps \
        --index-url "https://download.pytorch.org/whl/$flavor" -r "$work/torch.lock"
fi
[[ ! -s $work/pip.lock ]] ||
    run_pip "$lock" "${pip[@]}" --report "$work/pip.json" ${wheels:+--find-links "$wheels"} \
        -r "$work/pip.lock"
run_pip "$lock" "${pip[@]}" --report "$work/others.json" ${wheels:+--find-links "$wheels"} \
    -r "$work/wheels.lock" -r "${lock%/*}/$mpi.lock"
[[ ! -s $work/seqeval.lock ]] ||
    run_pip "$lock" "${pip[@]}" --report "$work/seqeval.json" --no-deps --no-build-isolation \
        -r "$work/seqeval.lock"
# For the SBOM, which of the files in the lock pip took: package, version, SHA-256, file.
"$prefix/bin/python" - "$work"/*.json >"$prefix/wheels.tsv" <<'PY' || die "cannot write $prefix/wheels.tsv"
import json
import sys

installed = [package for report in sys.argv[1:] for package in json.load(open(report))["install"]]
for package in sorted(installed, key=lambda package: package["metadata"]["name"].lower()):
    what, source = package["metadata"], package["download_info"]
    digest = source["archive_info"]["hash"].partition("sha256=")[2]
    file = source["url"].rpartition("/")[2].replace("%2B", "+")
    print(what["name"], what["version"], digest, file, sep="\t")
PY

site=$prefix/lib/python3.11/site-packages
# NVIDIA's wheel of cuSPARSELt for aarch64 names another platform inside than in the name of its file.
find "$site" -path '*/nvidia_cusparselt*.dist-info/WHEEL' -exec sed -i '/^Tag: /s/sbsa$/aarch64/' {} +
said=$("$prefix/bin/python" -m pip check) || die "$lock: its packages conflict, run make lock: $said"

# Remove the packages' own tests, a fifth of the environment. numpy.testing and torch.testing are libraries
# and stay. Of torch's programs, torch itself starts one.
find "$site" -type d \( -name tests -o -name test \) -prune -exec rm -rf {} +
find "$site/torch/bin" -type f ! -name torch_shm_manager -delete
compile_bytecode "$prefix/bin/python" "$site" unchecked-hash
rm "$unfinished"
