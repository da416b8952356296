#!/bin/bash
# package.sh PREFIX SOURCE: install hpctrain itself from the folder SOURCE (pyproject.toml, LICENSE, src/)
# into PREFIX, write the versions of all packages to PREFIX/versions.json, and let login shells find PREFIX.
#   DESTDIR=FOLDER  write below FOLDER instead of /, for a layer that holds hpctrain and nothing else
#   REVISION=COMMIT the commit of the source, for versions.json

set -euo pipefail
umask 022
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=containers/install/step_functions.sh
source "$here/step_functions.sh"

case "$#:${1:-}" in
    1:-h | 1:--help) usage && exit ;;
    2:[!-]*) prefix=$1 source=$2 ;;
    *) die "give PREFIX and SOURCE (see --help)" ;;
esac
[[ -x $prefix/bin/python ]] || die "$prefix has no Python; run python.sh $prefix FLAVOR first"
root=${DESTDIR:-}

"$prefix/bin/python" -m pip install --no-cache-dir --no-deps --no-build-isolation --no-index --no-compile \
    --no-warn-script-location ${root:+--root "$root"} "$source" ||
    die "pip cannot install $source in $root$prefix; see above, and check the free space there and in" \
        "${TMPDIR:-/tmp}"
site=$root$prefix/lib/python3.11/site-packages
# checked-hash: Python notices an edited source file, because users mount their own over it.
compile_bytecode "$prefix/bin/python" "$site/hpctrain" checked-hash
# Python runs this line when it starts: it appends the user's packages (hpctrain add) to sys.path.
add='__import__("hpctrain.commands.add").commands.add.add_to_sys_path()'
echo "import os; os.environ.get(\"HPCTRAIN_PACKAGES\") and $add" >"$site/hpctrain-packages.pth"
# Importing every command creates caches, which belong neither into the image nor into the home of whoever
# builds it.
home=$(mktemp -d)
HOME=$home PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$site "$prefix/bin/python" -m hpctrain completion \
    --write "$root$prefix" ||
    die "the shell completion could not be made; see above"
rm -rf "$home"

# In a login shell, by which enroot enters an image, Debian's /etc/profile sets PATH anew.
mkdir -p "$root/etc/profile.d"
echo "PATH=$prefix/bin:\$PATH" >"$root/etc/profile.d/hpctrain.sh"

PYTHONPATH=$site "$prefix/bin/python" - >"$root$prefix/versions.json" <<'PY'
import importlib.metadata
import json
import os
import platform

versions = {dist.name.lower(): dist.version for dist in importlib.metadata.distributions()}
versions["python"] = platform.python_version()
versions["revision"] = os.environ.get("REVISION") or None
print(json.dumps(versions, indent=1, sort_keys=True))
PY
