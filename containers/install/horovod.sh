#!/bin/bash
# horovod.sh PREFIX FLAVOR: build Horovod with MPI and Gloo for the torch in PREFIX, and install it there. It
# needs PREFIX from python.sh with its MPI, a C++17 compiler, cmake, make and patch.
#   DESTDIR=FOLDER  write below FOLDER instead of /, for a layer that holds Horovod and nothing else
#   COMPILED_WHEELS=FOLDER  compiled wheels of earlier builds. A wheel that was built from the same inputs is
#                   installed as it is; else the new wheel is put there, if the folder is writable. By
#                   default, always compile

set -euo pipefail
umask 022
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=containers/install/step_functions.sh
source "$here/step_functions.sh"

case "$#:${1:-}" in
    1:-h | 1:--help) usage && exit ;;
    2:[!-]*) prefix=$1 flavor=$2 ;;
    *) die "give PREFIX and FLAVOR (see --help)" ;;
esac
[[ -x $prefix/bin/python ]] || die "$prefix has no Python; run python.sh $prefix $flavor first"
PATH=$prefix/bin:$PATH # for MPI's compiler
for tool in c++ cmake make mpicxx patch; do
    command -v "$tool" >/dev/null ||
        die "$tool is not installed; install it (on Debian: the packages of debian.sh build)"
done
use_ca
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip=("$prefix/bin/python" -m pip)

recipe=(install/horovod.sh install/nvcc.sh locks/horovod.lock)
for file in "${here%/*}"/patches/horovod-* "${here%/*}/locks/$flavor"-build*.lock; do
    [[ ! -f $file ]] || recipe+=("${file#"${here%/*}/"}")
done
key=$(compiled_key horovod "$prefix" "$flavor" "${here%/*}" "${recipe[@]}")
if kept_wheel horovod "$key" "$prefix"; then exit; fi

# Horovod declares no build requirements: it takes setuptools and torch from the environment it is built for.
lock=${here%/*}/locks/horovod.lock
run_pip "$lock" "${pip[@]}" download --no-cache-dir --progress-bar off --no-deps --no-build-isolation \
    --require-hashes --no-binary :all: --dest "$work" -r "$lock"
mkdir "$work/horovod"
tar -xf "$work"/horovod-*.tar.gz -C "$work/horovod" --strip-components 1
for file in "$here"/../patches/horovod-*.patch; do
    patch -d "$work/horovod" -p1 <"$file"
done

# For CUDA, make a CUDA_HOME like the one of NVIDIA's installer: the compiler from the flavor's own locks,
# over the headers and libraries that came with torch. The wheels of CUDA 13 share one folder, those of CUDA
# 12 have a folder each.
locks=${here%/*}/locks/$flavor-build
if [[ -f $locks.lock ]]; then
    run_pip "$locks.lock" "${pip[@]}" install --no-cache-dir --progress-bar off --no-deps --no-compile \
        --require-hashes --target "$work/compiler" -r "$locks.lock"
    mkdir "$work/cuda"
    for folder in "$prefix"/lib/python3.11/site-packages/nvidia/*/; do
        cp -rsf "$folder." "$work/cuda"
    done
    for folder in "$work"/compiler/nvidia/*/; do
        cp -r --remove-destination "$folder." "$work/cuda"
    done
    if [[ -f $locks-debian.lock ]]; then
        "$here/nvcc.sh" "$locks-debian.lock" "$work/cuda"
        # cmake always links this library, and no wheel of CUDA 12 has it. An empty one will do: no kernel of
        # Horovod starts another.
        ar cr "$work/cuda/lib/libcudadevrt.a"
    fi
    ln -s lib "$work/cuda/lib64"
    for library in libcudart libnccl; do
        (cd "$work/cuda/lib" && ln -s "$library".so.* "$library.so")
    done
    # The architectures that torch has kernels for (torch.cuda.get_arch_list() is empty on a machine without a
    # GPU), of those that this nvcc knows: for the others the driver compiles the PTX of the newest one.
    HOROVOD_BUILD_CUDA_CC_LIST=$("$prefix/bin/python" -c \
        'import torch; print(*torch._C._cuda_getArchFlags().split(), sep="\n")' |
        grep -xFf <("$work/cuda/bin/nvcc" --list-gpu-code) | sed 's/^sm_//' | paste -sd,)
    export HOROVOD_BUILD_CUDA_CC_LIST HOROVOD_GPU=CUDA HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_LINK=SHARED
    export HOROVOD_CUDA_HOME=$work/cuda HOROVOD_NCCL_HOME=$work/cuda PATH=$work/cuda/bin:$PATH
    # Otherwise cmake would write this folder into Horovod's RUNPATH. It is in /tmp, where anyone could later
    # put a library. At run time Horovod finds NCCL and the CUDA runtime because torch has loaded its own.
    export LIBRARY_PATH=$work/cuda/lib
    # cmake tests the compiler with nvcc's default, a static runtime, which not all wheels have.
    export CUDAFLAGS=--cudart=shared
fi
export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1
export HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
# By default Horovod picks these flags by the build machine's CPU, and then two machines would build different
# code.
[[ $(uname -m) != x86_64 ]] || export HOROVOD_BUILD_ARCH_FLAGS="-mf16c -mavx -mfma"
# Without this, cmake 4 refuses the cmake_minimum_required of Horovod's own copy of Gloo.
export CMAKE_POLICY_VERSION_MINIMUM=3.5
MAKEFLAGS=-j$(nproc)
export MAKEFLAGS
# -s and -ffile-prefix-map: no symbols, and no path of this folder. -w: no thousands of warnings about
# third-party code. SKIP_MPICXX: Horovod does not use MPI's C++ interface, and a site's MPI may lack it.
# MPI's compiler adds PREFIX/lib to the RUNPATH, which the loader searches after
# LD_LIBRARY_PATH.
export LDFLAGS="-s -Wl,--as-needed"
export CXXFLAGS="-w -DOMPI_SKIP_MPICXX -DMPICH_SKIP_MPICXX -ffile-prefix-map=$work=."
"${pip[@]}" wheel --no-cache-dir --no-deps --no-build-isolation --no-index --verbose \
    --wheel-dir "$work" "$work/horovod" ||
    die "cannot build Horovod; see above, and check that TMPDIR (${TMPDIR:-/tmp}) has free space"
install_wheel horovod "$prefix" "$work"
keep_wheel "$key" "$work"
