#!/bin/bash
# horovod.sh PREFIX FLAVOR: build Horovod with MPI and Gloo for the torch in PREFIX, and install it there.
# It needs PREFIX from python.sh, a C++17 compiler, cmake, make, patch and an MPI library with its headers.
#   DESTDIR=FOLDER  write below FOLDER instead of /, for a layer that holds Horovod and nothing else

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
[[ -x $prefix/bin/python ]] || die "there is no Python in $prefix; run python.sh $prefix $flavor first"
for tool in c++ cmake make mpicxx patch; do
    command -v "$tool" >/dev/null || die "$tool is not there; install it (in Debian: see debian.sh build)"
done
use_ca
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

pip=("$prefix/bin/python" -m pip)
# Horovod knows no build requirements of its own: it takes setuptools and torch from the environment it is built for.
"${pip[@]}" download --no-cache-dir --progress-bar off --no-deps --no-build-isolation --require-hashes --no-binary :all: \
    --dest "$work" -r "$here/../locks/horovod.lock"
mkdir "$work/horovod"
tar -xf "$work"/horovod-*.tar.gz -C "$work/horovod" --strip-components 1
for file in "$here"/../patches/horovod-*.patch; do
    patch -d "$work/horovod" -p1 <"$file"
done

export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1
export HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
# cmake 4 refuses the cmake_minimum_required of Horovod's own copy of Gloo without this.
export CMAKE_POLICY_VERSION_MINIMUM=3.5
MAKEFLAGS=-j$(nproc)
export MAKEFLAGS
# Without these, 75 MB of debug information, the path of this folder, and thousands of warnings about third parties.
export LDFLAGS=-s CXXFLAGS="-w -ffile-prefix-map=$work=."
PATH=$prefix/bin:$PATH "${pip[@]}" wheel --no-cache-dir --no-deps --no-build-isolation --no-index --verbose \
    --wheel-dir "$work" "$work/horovod"
root=${DESTDIR:-}
"${pip[@]}" install --no-cache-dir --no-deps --no-index --no-compile --no-warn-script-location \
    ${root:+--root "$root"} "$work"/horovod-*.whl
compile_bytecode "$prefix/bin/python" "$root$prefix/lib/python3.11/site-packages/horovod" unchecked-hash
