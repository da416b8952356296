#!/bin/bash
# lock.sh [--flavor FLAVOR] [--upgrade]: write containers/locks/FLAVOR.lock and horovod.lock (make lock).
# Every package is pinned with the hashes of its files, for Python 3.11 on x86_64 Linux. A pin that is there stays
# unless --upgrade is given or pyproject.toml and FLAVOR.in exclude it.
# It needs uv (pip install uv).
#   WHEELS=FOLDER  where torch's wheel is; by default the local folder that pip is configured with, else PyTorch's index

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=containers/lib.sh
source containers/lib.sh

flavor=cpu upgrade=()
while (($#)); do
    case $1 in
        -h | --help) usage && exit ;;
        --flavor)
            [[ -n ${2:-} ]] || die "--flavor needs a value (see --help)"
            flavor=$2
            shift 2
            ;;
        --upgrade) upgrade=(--upgrade) && shift ;;
        *) die "unknown argument $1 (see --help)" ;;
    esac
done
PATH=$PWD/.venv/bin:$PATH
command -v uv >/dev/null || die "uv is not there; pip install uv"
locks=containers/locks
[[ -f $locks/$flavor.in ]] || die "there is no $locks/$flavor.in"

torch=$(wheels_folder)
torch=${torch:-https://download.pytorch.org/whl/$flavor/torch/}
# The lock must be the same wherever it is made: no index, folder or command line in it.
compile=(uv pip compile --quiet --no-config --python-version 3.11 --python-platform x86_64-manylinux_2_28
    --generate-hashes --find-links "$torch" --no-emit-find-links --no-emit-index-url --no-header --no-annotate
    "${upgrade[@]}")

# write NAME ARGUMENT...: compile into locks/NAME, which is replaced only by a complete file.
write() {
    local lock=$locks/$1 new
    shift
    new=$(mktemp --suffix=.lock)
    # uv keeps the pins that it finds in its output file.
    if [[ -f $lock ]]; then cp "$lock" "$new"; fi
    "${compile[@]}" "$@" --output-file "$new" || die "uv found no solution; see its message above"
    { echo "# Made by containers/lock.sh (make lock). Do not edit."; grep -v '^#' "$new"; } >"$lock.new"
    rm "$new"
    mv "$lock.new" "$lock"
    echo "$lock: $(grep -c '^[a-z].*==' "$lock") packages"
}
write "$flavor.lock" pyproject.toml --extra image "$locks/$flavor.in" --no-emit-package horovod
write horovod.lock --no-deps <(grep '^horovod==' "$locks/$flavor.in")
