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
lock=${here%/*}/locks/horovod.lock
run_pip "$lock" "${pip[@]}" download --no-cache-dir --progress-bar off --no-deps --no-build-isolation --require-hashes \
    --no-binary :all: --dest "$work" -r "$lock"
mkdir "$work/horovod"
tar -xf "$work"/horovod-*.tar.gz -C "$work/horovod" --strip-components 1
for file in "$here"/../patches/horovod-*.patch; do
    patch -d "$work/horovod" -p1 <"$file"
done

# For CUDA, a home as its installer would make it: the compiler of the flavour's own locks, which stays here, over the
# headers and libraries that torch brought. Wheels for CUDA 13 lie in one folder, those for CUDA 12 in a folder each.
locks=${here%/*}/locks/$flavor-build
if [[ -f $locks.lock ]]; then
    run_pip "$locks.lock" "${pip[@]}" install --no-cache-dir --progress-bar off --no-deps --no-compile --require-hashes \
        --target "$work/compiler" -r "$locks.lock"
    mkdir "$work/cuda"
    for folder in "$prefix"/lib/python3.11/site-packages/nvidia/*/; do
        cp -rsf "$folder." "$work/cuda"
    done
    for folder in "$work"/compiler/nvidia/*/; do
        cp -r --remove-destination "$folder." "$work/cuda"
    done
    if [[ -f $locks-debian.lock ]]; then
        "$here/nvcc.sh" "$locks-debian.lock" "$work/cuda"
        # No wheel for CUDA 12 has this, which cmake always links; an empty one will do, as no kernel of Horovod starts another.
        ar cr "$work/cuda/lib/libcudadevrt.a"
    fi
    ln -s lib "$work/cuda/lib64"
    for library in libcudart libnccl; do
        (cd "$work/cuda/lib" && ln -s "$library".so.* "$library.so")
    done
    # For the GPUs that torch itself is for. torch.cuda.get_arch_list() says nothing on a machine without a GPU.
    HOROVOD_BUILD_CUDA_CC_LIST=$("$prefix/bin/python" -c \
        'import re, torch; print(",".join(re.findall(r"sm_(\d+)", torch._C._cuda_getArchFlags())))')
    export HOROVOD_BUILD_CUDA_CC_LIST HOROVOD_GPU=CUDA HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_LINK=SHARED
    export HOROVOD_CUDA_HOME=$work/cuda HOROVOD_NCCL_HOME=$work/cuda PATH=$work/cuda/bin:$PATH
    # Or cmake would have Horovod look for NCCL and the runtime in this folder, in /tmp, where anyone could put them later. They
    # are found because torch has loaded its own.
    export LIBRARY_PATH=$work/cuda/lib
    # cmake tries the compiler with nvcc's default, which is a static library that not all wheels have.
    export CUDAFLAGS=--cudart=shared
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
    --wheel-dir "$work" "$work/horovod" ||
    die "Horovod could not be built; see above, and whether TMPDIR (${TMPDIR:-/tmp}) has room"
root=${DESTDIR:-}
# by name: of a file, pip would write down the path
"${pip[@]}" install --no-cache-dir --no-deps --no-index --no-compile --no-warn-script-location \
    ${root:+--root "$root"} --find-links "$work" horovod || die "pip could not install Horovod in $root$prefix; see above"
if grep -rqF "$work" "$root$prefix/lib/python3.11/site-packages/horovod"; then
    die "Horovod has the folder of its build, $work, written into it; see the RUNPATH that readelf -d shows"
fi
compile_bytecode "$prefix/bin/python" "$root$prefix/lib/python3.11/site-packages/horovod" unchecked-hash
