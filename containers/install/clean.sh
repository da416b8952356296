#!/bin/bash
# clean.sh PREFIX: remove from PREFIX what nothing in the image uses: what is for a compiler, which the image does not have
# (headers, static libraries, cmake files), and libraries of CUDA that no other file names. On a host, leave them.

set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=containers/install/lib.sh
source "$here/lib.sh"

case "$#:${1:-}" in
    1:-h | 1:--help) usage && exit ;;
    1:[!-]*) site=$1/lib/python3.11/site-packages ;;
    *) die "give PREFIX (see --help)" ;;
esac
[[ -d $site/torch ]] || die "there is no torch in $1; clean.sh is for an environment that python.sh made"

rm -rf "$site"/torch/{include,share} "$site"/numpy/_core/{include,lib} "$site"/mpi4py/include "$site"/nvidia/*/include
rm -f "$1"/include/mpi*.h "$1"/bin/mpi{cc,cxx,c++} "$1"/lib/libmpi.so # MPICH's
find "$site" \( -name '*.a' -o -name '*.pyx' -o -name '*.pxd' \) -type f -delete
# cuSOLVER over several GPUs, and a second NVRTC
rm -f "$site"/nvidia/*/lib/lib{cusolverMg,nvrtc.alt,nvrtc-builtins.alt}.so*
