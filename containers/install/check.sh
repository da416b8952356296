#!/bin/bash
# check.sh: prove that this image works; run it inside. The build ends with it, and so can you begin with it on a new
# machine. Two processes must find each other and add their numbers, over Gloo and over MPI; exit 0 alone proves
# nothing, because a wrong MPI setup gives two worlds of one process, each content with itself.

set -euo pipefail
prefix=/opt/hpctrain

die() {
    echo "${0##*/}: $*" >&2
    exit 1
}
case "$#:${1:-}" in
    0:) ;;
    1:-h | 1:--help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0" && exit ;;
    *) die "takes no arguments (see --help)" ;;
esac

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Everything that is written goes here, because the image and the home may be read-only.
export TMPDIR=$work HOME=$work
cd "$work"
# OpenMPI refuses to run as root. That is right for users; a build is root and has no one else.
if [[ $(id -u) == 0 ]]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi

[[ $(command -v python) == "$prefix/bin/python" ]] || die "python is $(command -v python), not the image's; set PATH"
# All of the image, without what is mounted over it (-xdev would take a folder of the same disk for a part of it).
mounted=()
while read -r _ _ _ _ at _; do
    [[ $at == / ]] || mounted+=(-path "$at" -prune -o)
done </proc/self/mountinfo
privileged=$(find / -xdev "${mounted[@]}" -type f -perm /6000 -print -quit 2>/dev/null || true)
[[ -z $privileged ]] || die "$privileged is setuid or setgid"
open=$(find / -xdev "${mounted[@]}" -perm -0002 ! -type l ! \( -type d -perm -1000 \) -print -quit 2>/dev/null || true)
[[ -z $open ]] || die "everybody can write to $open"
closed=$(find "$prefix" ! -type l ! -perm -o=r -print -quit)
[[ -z $closed ]] || die "an ordinary user cannot read $closed"
for tool in cc c++ gcc g++ make cmake; do
    if command -v "$tool"; then die "$tool is in the image"; fi
done

parts=(PyTorch MPI Gloo)
cuda=$(python -c 'import torch; print(torch.version.cuda or "")')
if [[ -n $cuda ]]; then
    parts+=(NCCL)
    # A second copy could be the one that is loaded.
    for library in nccl cudart cudnn cublas; do
        copies=$(find / -xdev -name "lib$library.so*" -type f 2>/dev/null)
        [[ $(wc -l <<<"$copies") == 1 && -n $copies ]] || die "one lib$library expected, and there is: $copies"
    done
    echo "check: CUDA $cuda, one libnccl, libcudart, libcudnn and libcublas"
fi
built=$(horovodrun --check-build)
for part in "${parts[@]}"; do
    grep -qE "^ *\[X\] $part *$" <<<"$built" || die "Horovod is built without $part; it says: $built"
done
echo "check: Horovod has ${parts[*]}"

cat >import_all.py <<'PY'
import importlib
import importlib.metadata

# pip is a program, no library: importing it takes distutils away from setuptools, on purpose.
names = importlib.metadata.packages_distributions().keys() - {"pip"}
modules = sorted(name for name in names if name.isidentifier() and name[0] != "_")
for module in modules:
    importlib.import_module(module)
print(f"check: {len(modules)} packages import")
PY
python import_all.py

cat >torch_sum.py <<'PY'
import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
print(f"size {dist.get_world_size()} sum {total.item()}", flush=True)
os._exit(0)  # the threads of Gloo can crash or block a process that ends; see process_group() of hpctrain.world
PY
cat >mpi4py_sum.py <<'PY'
from mpi4py import MPI

world = MPI.COMM_WORLD
print(f"size {world.size} sum {world.allreduce(world.rank + 1)}", flush=True)
PY
cat >horovod_sum.py <<'PY'
import horovod.torch as hvd
import torch

hvd.init()
total = hvd.allreduce(torch.tensor([hvd.rank() + 1]), op=hvd.Sum)
print(f"size {hvd.size()} sum {total.item()}", flush=True)
PY

# two WHAT COMMAND...: COMMAND starts two processes. Both must see a world of two, and 1 + 2.
two() {
    local what=$1 said
    shift
    said=$(timeout 120 "$@" 2>errors) || die "$what: failed: $(tail -n 20 errors)"
    # Not by lines: two processes can print between each other's text and its line end.
    [[ $(grep -o 'size 2 sum 3' <<<"$said" | wc -l) == 2 ]] || die "$what: two times 'size 2 sum 3' expected, got: $said"
    echo "check: $what: size 2, sum 3"
}
# Horovod's Gloo does not say so, it crashes.
getent hosts "$(hostname)" >/dev/null || die "this machine's name, $(hostname), has no address; add it to /etc/hosts"
# All of it over the loopback interface, which every machine has.
export GLOO_SOCKET_IFNAME=lo
torchrun=(torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2)
two "torch over Gloo, torchrun" "${torchrun[@]}" torch_sum.py
library=$(python -c 'from mpi4py import MPI; print(*MPI.Get_library_version().split(",")[0].splitlines()[0].split())')
mpirun=(mpirun -np 2)
if [[ $(mpirun --version) == *"Open MPI"* ]]; then
    mpirun+=(--oversubscribe)
    fabric=$(ompi_info --parsable | grep -oE '^mca:(pml:ucx|mtl:ofi|pmix:ext3x):version:"component' || true)
    [[ $(wc -l <<<"$fabric") == 3 ]] || die "Open MPI is built without UCX, libfabric or PMIx: it has $fabric"
else
    fabric=$(mpichversion --device)
    [[ $fabric == *ucx* && $fabric == *ofi* ]] || die "MPICH is built without UCX or libfabric: $fabric"
fi
echo "check: MPI is $library, with UCX and libfabric"
two "mpi4py, mpirun" "${mpirun[@]}" python mpi4py_sum.py
two "Horovod over MPI, mpirun" "${mpirun[@]}" python horovod_sum.py
two "Horovod over Gloo, horovodrun" horovodrun --gloo --network-interfaces lo -np 2 python horovod_sum.py
timeout 120 "${torchrun[@]}" -m hpctrain check >said 2>errors ||
    die "hpctrain check, torchrun: failed: $(tail -n 20 errors)"
grep -o 'check passed: 2 ranks.*' said || die "hpctrain check, torchrun: two ranks expected, got: $(<said)"
echo "check: the image works"
