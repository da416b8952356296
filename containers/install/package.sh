#!/bin/bash
# package.sh PREFIX SOURCE: install hpctrain itself from the folder SOURCE (pyproject.toml, LICENSE, src/)
# into PREFIX, and list what is there in PREFIX/versions.json.
#   DESTDIR=FOLDER  write below FOLDER instead of /, for a layer that holds hpctrain and nothing else
#   REVISION=COMMIT where the source is from, for versions.json

set -euo pipefail
umask 022
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=containers/install/lib.sh
source "$here/lib.sh"

case "$#:${1:-}" in
    1:-h | 1:--help) usage && exit ;;
    2:[!-]*) prefix=$1 source=$2 ;;
    *) die "give PREFIX and SOURCE (see --help)" ;;
esac
[[ -x $prefix/bin/python ]] || die "there is no Python in $prefix; run python.sh $prefix FLAVOR first"
root=${DESTDIR:-}

"$prefix/bin/python" -m pip install --no-cache-dir --no-deps --no-build-isolation --no-index --no-compile \
    --no-warn-script-location ${root:+--root "$root"} "$source" ||
    die "pip could not install $source in $root$prefix; see above, and whether there and ${TMPDIR:-/tmp} is room"
site=$root$prefix/lib/python3.11/site-packages
# Unlike the other packages, this one notices an edited source file: people bind their own over it.
compile_bytecode "$prefix/bin/python" "$site/hpctrain" checked-hash
# Python runs this line when it starts: what the user has added (hpctrain add) is found, after all that is here.
echo 'import os; os.environ.get("HPCTRAIN_PACKAGES") and __import__("hpctrain.packages").packages.show()' \
    >"$site/hpctrain-packages.pth"

PYTHONPATH=$site "$prefix/bin/python" - >"$root$prefix/versions.json" <<'PY'
import importlib.metadata
import json
import os
import platform
import re
import subprocess

mpirun = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True).stdout
versions = {dist.name.lower(): dist.version for dist in importlib.metadata.distributions()}
if "Open MPI" in mpirun:  # MPICH is one of the wheels
    versions["openmpi"] = re.search(r"\d+\.\d+\S*", mpirun).group()
versions["python"] = platform.python_version()
versions["revision"] = os.environ.get("REVISION") or None
print(json.dumps(versions, indent=1, sort_keys=True))
PY
