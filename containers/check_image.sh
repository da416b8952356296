#!/bin/bash
# check_image.sh: check that this image works. Run it inside the image; every build ends with it, and it is a
# good first step on a new machine. Two processes must find each other and sum their numbers, over Gloo and
# over MPI. An exit status of 0 would prove nothing: a wrong MPI setup starts two worlds of one process each,
# and both succeed.

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
# All output goes here, because the image and the home folder may be read-only.
export TMPDIR=$work HOME=$work
cd "$work"
# Open MPI refuses to run as root, which is right for users. An image build has no other user.
if [[ $(id -u) == 0 ]]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi

[[ $(command -v python) == "$prefix/bin/python" ]] ||
    die "python is $(command -v python), not $prefix/bin/python; put $prefix/bin first in PATH"
# Search the image without its mounts. -xdev alone would search a mounted folder of the same disk.
mounted=()
while read -r _ _ _ _ at _; do
    [[ $at == / ]] || mounted+=(-path "$at" -prune -o)
done </proc/self/mountinfo
privileged=$(find / -xdev "${mounted[@]}" -type f -perm /6000 -print -quit 2>/dev/null || true)
[[ -z $privileged ]] || die "$privileged is setuid or setgid"
open=$(find / -xdev "${mounted[@]}" -perm -0002 ! -type l ! \( -type d -perm -1000 \) -print -quit \
    2>/dev/null || true)
[[ -z $open ]] || die "$open is writable by everyone"
closed=$(find "$prefix" ! -type l ! -perm -o=r -print -quit)
[[ -z $closed ]] || die "$closed is not readable by ordinary users"

# The report of horovodrun --check-build. It starts a process for each of its lines, which here need not
# import torch again.
built=$(python -c '
import torch
from horovod.runner.launch import check_build
print("CUDA", torch.version.cuda, flush=True)
check_build(verbose=False)')
parts=(PyTorch MPI Gloo)
cuda=$(sed -n '/^CUDA None$/d; s/^CUDA //p' <<<"$built")
unwanted=(make cmake)
[[ -n $cuda ]] || unwanted+=(cc c++ gcc g++)
for tool in "${unwanted[@]}"; do
    if command -v "$tool"; then die "the image contains $tool, a build tool"; fi
done
if [[ -n $cuda ]]; then
    parts+=(NCCL)
    # With two copies the loader could take the wrong one.
    for library in nccl cudart cudnn cublas; do
        copies=$(find / -xdev -name "lib$library.so*" -type f 2>/dev/null)
        [[ $(wc -l <<<"$copies") == 1 && -n $copies ]] || die "expected one lib$library, found: $copies"
    done
    echo "check: CUDA $cuda, one libnccl, libcudart, libcudnn and libcublas"
    python - <<'PY' || die "torch.compile does not work; see above"
import torch

x = torch.arange(1000.0)
compiled = torch.compile(lambda x: (x * 2 + 1).sin().sum())
assert torch.allclose(compiled(x), (x * 2 + 1).sin().sum(), rtol=1e-4), compiled(x)
print("check: torch.compile on the CPU")
PY
fi
for part in "${parts[@]}"; do
    grep -qE "^ *\[X\] $part *$" <<<"$built" || die "Horovod is built without $part; its report: $built"
done
echo "check: Horovod has ${parts[*]}"

cat >import_all.py <<'PY'
import importlib
import importlib.metadata

# pip is a program, not a library: importing it removes the distutils of setuptools, on purpose.
names = importlib.metadata.packages_distributions().keys() - {"pip"}
modules = sorted(name for name in names if name.isidentifier() and name[0] != "_")
for module in modules:
    importlib.import_module(module)
print(f"check: {len(modules)} packages import")
PY
# Beside the sums below, as it takes one core for a third of the time of this check.
python import_all.py >imported 2>&1 &
imports=$!

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

# check_two NAME COMMAND...: COMMAND starts two processes. Both must see a world of size 2 and the sum 1 + 2.
check_two() {
    local name=$1 output
    shift
    output=$(timeout 600 "$@" 2>errors) || die "$name: failed: $(tail -n 20 errors)"
    # Not line by line: one process can print between the text and the newline of the other.
    [[ $(grep -o 'size 2 sum 3' <<<"$output" | wc -l) == 2 ]] ||
        die "$name: expected 'size 2 sum 3' twice, got: $output"
    echo "check: $name: size 2, sum 3"
}
# Without an address, Horovod's Gloo crashes without a message.
getent hosts "$(hostname)" >/dev/null || die "the host name $(hostname) has no address; add it to /etc/hosts"
# The loopback interface, because every machine has one.
export GLOO_SOCKET_IFNAME=lo
library=$(python -c 'from mpi4py import MPI; print(MPI.Get_library_version())' |
    sed 's/,.*//; s/[[:space:]]\+/ /g; q')
mpirun=(mpirun -np 2)
if [[ $(mpirun --version) == *"Open MPI"* ]]; then
    mpirun+=(--oversubscribe)
    fabric=$(ompi_info --parsable | grep -oE '^mca:(pml:ucx|mtl:ofi):version:"component' || true)
    [[ $(wc -l <<<"$fabric") == 2 ]] ||
        die "Open MPI is built without UCX or libfabric; it has: $fabric"
else
    fabric=$(mpichversion --device)
    [[ $fabric == *ucx* && $fabric == *ofi* ]] ||
        die "MPICH is built without UCX or libfabric; it has: $fabric"
fi
# UCX and libfabric load the parts for a card by themselves, and leave out without a word what does not load.
loaded=$(find "$prefix/lib" -path "$prefix/lib/python3.11" -prune -o -name '*.so*' -type f -print0 |
    xargs -0 ldd 2>&1 || true)
[[ $loaded == *"librdmacm.so.1 => /"* ]] || die "$prefix/lib has no part of the MPI library for InfiniBand"
missing=$(grep 'not found' <<<"$loaded" | sort -u || true)
[[ -z $missing ]] || die "the MPI library lacks libraries: $missing"
echo "check: MPI is $library, with UCX and libfabric"
check_two "mpi4py, mpirun" "${mpirun[@]}" python mpi4py_sum.py
check_two "Horovod over MPI, mpirun" "${mpirun[@]}" python horovod_sum.py
check_two "Horovod over Gloo, horovodrun" \
    horovodrun --gloo --network-interfaces lo -np 2 python horovod_sum.py
# It sums over Gloo, too.
timeout 600 torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 -m hpctrain check \
    >output 2>errors ||
    die "hpctrain check, torchrun: failed: $(tail -n 20 errors)"
grep -o 'check passed: 2 ranks.*' output ||
    die "hpctrain check, torchrun: expected two ranks, got: $(<output)"
wait "$imports" || die "a package cannot be imported: $(tail -n 20 imported)"
cat imported
echo "check: the image works"
