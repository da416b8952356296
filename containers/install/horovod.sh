#!/bin/bash
# horovod.sh PREFIX FLAVOR: build Horovod with MPI and Gloo for the torch in PREFIX, and install it there.
# It needs PREFIX from python.sh, a C++17 compiler, cmake, make, patch and an MPI library with its headers: MPICH in PREFIX,
# or Debian's Open MPI.
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
PATH=$prefix/bin:$PATH # MPICH's compiler is there, too
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

# For CUDA, a home as its installer would make it: the compiler of the flavour's own lock, which stays here, over the
# headers and libraries that torch brought.
if [[ -f $here/../locks/$flavor-build.lock ]]; then
    "${pip[@]}" install --no-cache-dir --progress-bar off --no-deps --no-compile --require-hashes \
        --target "$work/compiler" -r "$here/../locks/$flavor-build.lock"
    nvidia=$prefix/lib/python3.11/site-packages/nvidia
    cp -rs "$nvidia/cu13" "$work/cuda"
    cp -r --remove-destination "$work/compiler/nvidia/cu13/." "$work/cuda"
    ln -s lib "$work/cuda/lib64"
    ln -s libcudart.so.13 "$work/cuda/lib/libcudart.so"
    mkdir -p "$work/nccl/lib"
    ln -s "$nvidia/nccl/include" "$work/nccl/include"
    ln -s "$nvidia/nccl/lib/libnccl.so.2" "$work/nccl/lib/libnccl.so"
    export HOROVOD_GPU=CUDA HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_CUDA_HOME=$work/cuda HOROVOD_NCCL_HOME=$work/nccl
    export HOROVOD_NCCL_LINK=SHARED HOROVOD_BUILD_CUDA_CC_LIST=80,90,100 PATH=$work/cuda/bin:$PATH
fi
export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1
export HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
# Horovod asks the CPU that it is built on; all that run it are to get the same. (The others have no such flags.)
[[ $(uname -m) != x86_64 ]] || export HOROVOD_BUILD_ARCH_FLAGS="-mf16c -mavx -mfma"
# cmake 4 refuses the cmake_minimum_required of Horovod's own copy of Gloo without this.
export CMAKE_POLICY_VERSION_MINIMUM=3.5
MAKEFLAGS=-j$(nproc)
export MAKEFLAGS
# Without these, 75 MB of debug information, the path of this folder, and thousands of warnings about third parties; and MPI's
# C++ interface, which Horovod does not use, and which the host's MPI may not have: Open MPI 5, for one.
# MPICH's compiler adds PREFIX/lib to the RUNPATH, where the loader looks after LD_LIBRARY_PATH.
export LDFLAGS="-s -Wl,--as-needed" CXXFLAGS="-w -DOMPI_SKIP_MPICXX -DMPICH_SKIP_MPICXX -ffile-prefix-map=$work=."
"${pip[@]}" wheel --no-cache-dir --no-deps --no-build-isolation --no-index --verbose \
    --wheel-dir "$work" "$work/horovod"
root=${DESTDIR:-}
# by name: of a file, pip would write down the path
"${pip[@]}" install --no-cache-dir --no-deps --no-index --no-compile --no-warn-script-location \
    ${root:+--root "$root"} --find-links "$work" horovod
compile_bytecode "$prefix/bin/python" "$root$prefix/lib/python3.11/site-packages/horovod" unchecked-hash
