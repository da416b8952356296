# Functions of the install steps. Sourced, never run. A change here repeats the long steps of an image build, so functions
# that only the build scripts need are in containers/build_functions.sh.
# shellcheck shell=bash

die() {
    echo "${0##*/}: $*" >&2
    exit 1
}

# usage: print the comment at the head of the script, which is its --help.
usage() {
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
}

# wheels_folder: print the folder of wheels to use before the index: $WHEELS, else the first local folder in pip's
# configuration, else nothing. An empty WHEELS= means no folder.
wheels_folder() {
    local folder
    if [[ -n ${WHEELS+set} ]]; then
        [[ -z $WHEELS || -d $WHEELS ]] || die "WHEELS=$WHEELS is not a folder; set it to a folder of wheels, or unset it"
        printf '%s' "$WHEELS"
        return
    fi
    for folder in ${PIP_FIND_LINKS:-} $(pip config get global.find-links 2>/dev/null || true); do
        folder=${folder#file://}
        if [[ -d $folder ]]; then
            printf '%s' "$folder"
            return
        fi
    done
}

# use_ca: inside an image build, let pip trust the host's certificates. Elsewhere pip keeps its own configuration.
use_ca() {
    if [[ -s /run/secrets/ca.crt ]]; then
        export PIP_CERT=/run/secrets/ca.crt
    fi
}

# run_pip LOCK COMMAND...: run pip for the packages of LOCK. If it fails, its output stays on the screen and our last line
# explains it. The order of the cases matters: after most other errors pip ends with "No matching distribution" as well.
run_pip() {
    local lock=$1 output package
    shift
    # sed copies the output to the stderr it was given; tee /dev/stderr would open that file again, which may be forbidden.
    if output=$("$@" 2>&1 | sed 'w /dev/stderr'); then return; fi
    package=$(sed -n 's/^ERROR: No matching distribution found for //p' <<<"$output" | head -n 1)
    case ${output,,} in
        *"do not match the hashes"*)
            die "$lock: the hash of a file differs from the lock, see above; use another index, or run make lock if the file is right" ;;
        *"no space left"* | *"quota exceeded"*)
            die "$lock: the disk is full, where the packages go or in TMPDIR (${TMPDIR:-/tmp}); free some space" ;;
        *"ca certificate bundle"*)
            die "$lock: there is no certificate file ${PIP_CERT:-of that name}; set PIP_CERT to one" ;;
        *certificate_verify_failed* | *x509*)
            die "$lock: the certificate of the index is not signed by any in ${PIP_CERT:-the list of pip}; set PIP_CERT to the file of your" \
                "network's certificates, or SSL_CERT_FILE for an image build" ;;
        *"connection broken"* | *"connection error"* | *"timed out"* | *"incomplete-download"*)
            die "$lock: cannot reach the index above; check the network, or set WHEELS to a folder of wheels" ;;
        *"invalid requirement"* | *"hashes are required"* | *"have their versions pinned"*)
            die "$lock: invalid line, see above; restore the file from git, or run make lock" ;;
    esac
    [[ -z $package ]] || die "$lock: neither the index above nor WHEELS has $package; use another index, or run make lock"
    die "$lock: pip failed; see above"
}

# compile_bytecode PYTHON FOLDER MODE: write the .pyc files, because an image is read-only when it runs. They hold the hash of
# their source instead of its time, so every build writes the same bytes; -f rewrites those that pip wrote while it ran. A
# file in the syntax of a newer Python is skipped (torch has one).
compile_bytecode() {
    local output
    if output=$("$1" -m compileall -f -q -j 0 --invalidation-mode "$3" "$2" 2>&1); then return; fi
    output=$(grep -E -m 1 '\[Errno|BrokenProcessPool|Traceback' <<<"$output" || true)
    [[ -z $output ]] || die "cannot write the bytecode of $2: $output"
}

# horovod_key PREFIX FLAVOR CONTAINERS: print the name of what Horovod is compiled from: the recipe in the folder CONTAINERS, torch
# and the other wheels that it is linked with, and the versions of all Debian packages, which include the compiler.
horovod_key() {
    local digest
    digest=$(
        cd "$3"
        {
            printf '%s\n' "$1" "$2" "$(uname -m)"
            sha256sum install/horovod.sh install/nvcc.sh locks/horovod.lock patches/*
            find locks -name "$2-build*.lock" -exec sha256sum {} + | sort
            grep -E '^(torch|nvidia-[^\t]*|mpich|setuptools)\b' "$1/wheels.tsv"
            dpkg-query --show
        } | sha256sum
    ) || return
    printf 'horovod-%s' "${digest:0:16}"
}
