#!/bin/bash
# torchvision.sh PREFIX FLAVOR: build torchvision for the torch in PREFIX from Debian's source package, and
# install it there. The wheel on PyPI needs the CUDA build of torch: a flavor with CUDA has it in its lock,
# and this script then does nothing. It needs PREFIX from python.sh, a C++20 compiler, and the headers of
# libjpeg and libpng.
#   DESTDIR, COMPILED_WHEELS  as for horovod.sh

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
if grep -q '^torchvision==' "${here%/*}/locks/$flavor.lock"; then
    echo "torchvision: the wheel of the lock"
    exit
fi
for tool in c++ cc make; do
    command -v "$tool" >/dev/null ||
        die "$tool is not installed; install it (on Debian: the packages of debian.sh build)"
done
lock=${here%/*}/locks/torchvision.lock
key=$(compiled_key torchvision "$prefix" "$flavor" "${here%/*}" install/torchvision.sh locks/torchvision.lock)
if kept_wheel torchvision "$key" "$prefix"; then exit; fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
read -r version path sha256 date < <(grep -v '^#' "$lock") || die "$lock is empty; restore it from git"
fetch_debian "$lock" "$path" "$sha256" "$date" "$work/source.tar.gz"
mkdir "$work/source"
tar -xf "$work/source.tar.gz" -C "$work/source" --strip-components 1
cd "$work/source"

# Its own setup.py compiles forty files, and for each the compiler reads all headers of torch, for ten
# seconds. As one file they take a fifth of the time; three kernels define functions of the same names, and
# stay apart.
for file in torchvision/csrc/{*.cpp,ops/*.cpp,ops/{autocast,autograd,cpu,quantized/cpu}/*.cpp}; do
    [[ $file == */cpu/@(ps_roi_pool|roi_align|roi_pool)_kernel.cpp ]] || echo "#include \"$file\""
done >operators.cpp
for file in torchvision/csrc/io/image/{*.cpp,cpu/*.cpp,cuda/*.cpp}; do
    echo "#include \"$file\""
done >image.cpp
cat >Makefile <<'MAKE'
FLAGS = -O2 -fPIC -w -ffile-prefix-map=$(CURDIR)=. -I. -Itorchvision/csrc
VPATH = torchvision/csrc/ops/cpu torchvision/csrc/io/image/cpu/giflib
all: torchvision/_C.so torchvision/image.so
torchvision/_C.so: operators.o ps_roi_pool_kernel.o roi_align_kernel.o roi_pool_kernel.o
torchvision/image.so: image.o dgif_lib.o gif_hash.o gifalloc.o openbsd-reallocarray.o
torchvision/image.so: CODECS = -lpng -ljpeg
%.so: ; c++ -shared -s -o $@ $^ -L$(TORCH)/lib -ltorch -ltorch_cpu -lc10 $(CODECS)
INCLUDES = -I$(TORCH)/include -I$(TORCH)/include/torch/csrc/api/include
%.o: %.cpp ; c++ -std=c++20 -DPNG_FOUND=1 -DJPEG_FOUND=1 $(FLAGS) $(INCLUDES) -c $< -o $@
%.o: %.c ; cc $(FLAGS) -c $< -o $@
MAKE
make -j "$(nproc)" "TORCH=$prefix/lib/python3.11/site-packages/torch" ||
    die "cannot compile torchvision; see above, and check that TMPDIR (${TMPDIR:-/tmp}) has free space"
echo "__version__ = '$version'" >torchvision/version.py
cat >setup.py <<PY
from setuptools import Distribution, find_packages, setup

Distribution.has_ext_modules = lambda self: True
setup(
    name="torchvision", version="$version", packages=find_packages(include=["torchvision*"]),
    package_data={"torchvision": ["*.so"]}, license="BSD-3-Clause", license_files=["LICENSE"],
    install_requires=["numpy", "torch", "pillow>=5.3"],
)
PY
rm -f pyproject.toml setup.cfg
"$prefix/bin/python" -m pip wheel --no-cache-dir --no-deps --no-build-isolation --no-index \
    --wheel-dir "$work" . ||
    die "cannot make a wheel of torchvision; see above"
install_wheel torchvision "$prefix" "$work"
keep_wheel "$key" "$work"
