#!/bin/bash
# lock.sh [--flavor FLAVOR] [--platform x86_64|aarch64] [--upgrade|--check]: write containers/locks/FLAVOR.lock of all
# flavours, or of one, and mpich.lock and horovod.lock (make lock); lock.sh --debian: the records of Debian's versions.
# Every package is pinned with the hashes of its files, for Python 3.11 on Linux. A pin
# that is there stays unless --upgrade is given or pyproject.toml and FLAVOR.in exclude it.
#   --platform     x86_64 by default. The hashes are those of all files of a version, so the lock of a flavour that exists for
#                  both is the same for aarch64: that of cu130 is
#   --check        write nothing, and fail where a lock is not what would be written (make lock-check)
#   --debian       write containers/locks/MPI-ARCHITECTURE.debian: what Debian would install in the image and its build stage
#                  now. Their first line is the DEBIAN_SNAPSHOT that has these versions
# It needs uv (pip install uv), or mmdebstrap for --debian.
#   WHEELS=FOLDER  where the wheel of torch for the CPU is; by default the local folder that pip is configured with, else
#                  PyTorch's index

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=containers/lib.sh
source containers/lib.sh

flavors=() platform=x86_64 upgrade=() check="" debian=""
while (($#)); do
    case $1 in
        -h | --help) usage && exit ;;
        --flavor | --platform)
            [[ -n ${2:-} ]] || die "$1 needs a value (see --help)"
            if [[ $1 == --flavor ]]; then flavors=("$2"); else platform=$2; fi
            shift 2
            ;;
        --upgrade) upgrade=(--upgrade) && shift ;;
        --check) check=yes && shift ;;
        --debian) debian=yes && shift ;;
        *) die "unknown argument $1 (see --help)" ;;
    esac
done
locks=containers/locks
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if [[ -n $debian ]]; then
    command -v mmdebstrap >/dev/null || die "mmdebstrap is not there; apt-get install mmdebstrap"
    snapshot=$(date -u +%Y%m%dT%H%M%SZ)
    for mpi in openmpi mpich; do
        packages=$(MPI=$mpi containers/install/debian.sh list | paste -sd,)
        for architecture in amd64 arm64; do
            # What is only simulated need not run here, nor can it start from a merged /usr, as containers/base.sh does.
            mmdebstrap --variant=minbase --simulate --verbose --skip=check/qemu \
                --architectures="$architecture" --include="usr-is-merged,$packages" bookworm /dev/null >"$work/log" 2>&1 || die "mmdebstrap failed: $(tail -n 5 "$work/log")"
            record=$locks/$mpi-$architecture.debian
            {
                echo "# DEBIAN_SNAPSHOT=$snapshot"
                sed -n '/^Inst usrmerge /d; s/^Inst \([^ ]*\) .*(\([^ ]*\) .*/\1 \2/p' "$work/log" | LC_ALL=C sort -u
            } >"$work/record"
            cp "$work/record" "$record.new"
            mv "$record.new" "$record"
            echo "$record: $(grep -c '^[a-z]' "$record") packages"
        done
    done
    exit
fi

PATH=$PWD/.venv/bin:$PATH
command -v uv >/dev/null || die "uv is not there; pip install uv"
if ((!${#flavors[@]})); then
    flavors=("$locks"/*.in)
    flavors=("${flavors[@]##*/}")
    flavors=("${flavors[@]%.in}")
fi

# torch for the CPU has an index of its own; that for CUDA is on PyPI.
torch=$(wheels_folder)
torch=${torch:-https://download.pytorch.org/whl/cpu/torch/}
# The lock must be the same wherever it is made: no index, folder or command line in it.
compile=(uv pip compile --quiet --no-config --python-version 3.11 --python-platform "$platform-manylinux_2_28"
    --generate-hashes --no-emit-find-links --no-emit-index-url --no-header --no-annotate "${upgrade[@]}")

# write NAME ARGUMENT...: compile into locks/NAME, which is replaced only by a complete file.
write() {
    local lock=$locks/$1 new=$work/$1
    shift
    # uv keeps the pins that it finds in its output file.
    if [[ -f $lock ]]; then cp "$lock" "$new"; fi
    "${compile[@]}" "$@" --output-file "$new" || die "uv found no solution; see its message above"
    { echo "# Made by containers/lock.sh (make lock). Do not edit."; grep -v '^#' "$new"; } >"$work/new"
    if [[ -n $check ]]; then
        diff -u "$lock" "$work/new" >&2 || die "$lock is stale: make lock"
    else
        cp "$work/new" "$lock.new"
        mv "$lock.new" "$lock"
    fi
    echo "$lock: $(grep -c '^[a-z].*==' "$lock") packages"
}
for flavor in "${flavors[@]}"; do
    [[ -f $locks/$flavor.in ]] || die "there is no $locks/$flavor.in"
    case $flavor in
        cpu) from=(pyproject.toml --extra image --no-emit-package horovod --find-links "$torch") ;;
        *-build | mpich) from=(--no-deps) ;;
        *) from=(pyproject.toml --extra image --no-emit-package horovod) ;;
    esac
    write "$flavor.lock" "$locks/$flavor.in" "${from[@]}"
done
write horovod.lock --no-deps <(grep -h '^horovod==' "$locks/cpu.in")
