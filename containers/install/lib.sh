# Functions of the install steps. Sourced, never run. A change here repeats the long steps of the image's build, so
# what only the build scripts need is in containers/lib.sh.
# shellcheck shell=bash

die() {
    echo "${0##*/}: $*" >&2
    exit 1
}

# The text of --help is the comment at the head of the script.
usage() {
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
}

# The folder of wheels to use before the index: $WHEELS, else the first local folder that this machine's pip is
# configured with, else nothing. WHEELS= (empty) asks for none.
wheels_folder() {
    local folder
    if [[ -n ${WHEELS+set} ]]; then
        [[ -z $WHEELS || -d $WHEELS ]] || die "WHEELS=$WHEELS is not a folder; name one that holds wheels"
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

# Inside a build, the certificates that the host trusts lie here; elsewhere pip is left as it is configured.
use_ca() {
    if [[ -s /run/secrets/ca.crt ]]; then
        export PIP_CERT=/run/secrets/ca.crt
    fi
}

# run_pip LOCK COMMAND...: run pip for the packages of LOCK. Where it fails, all that it said stays above, and our last line
# says what that means. The order matters: pip ends with "No matching distribution" after most other faults, too.
run_pip() {
    local lock=$1 said package
    shift
    if said=$("$@" 2>&1 | sed 'w /dev/stderr'); then return; fi # of GNU sed; tee would open it anew, which not all may
    package=$(sed -n 's/^ERROR: No matching distribution found for //p' <<<"$said" | head -n 1)
    case ${said,,} in
        *"do not match the hashes"*)
            die "$lock: a file has not the hash that was locked, see above; take another index, or if it is right, make lock" ;;
        *"no space left"* | *"quota exceeded"*)
            die "$lock: no room for its packages, in the folder they go to or in TMPDIR (${TMPDIR:-/tmp}); make some" ;;
        *"ca certificate bundle"*)
            die "$lock: the file of certificates, ${PIP_CERT:-which pip is configured with}, is not there; name one by PIP_CERT" ;;
        *certificate_verify_failed* | *x509*)
            die "$lock: the index's certificate is not signed by any in ${PIP_CERT:-the list of pip}; name the file of those that" \
                "your network uses by PIP_CERT, for an image by SSL_CERT_FILE" ;;
        *"connection broken"* | *"connection error"* | *"timed out"* | *"incomplete-download"*)
            die "$lock: the index above cannot be reached; try again where it can, or name a folder of wheels by WHEELS" ;;
        *"invalid requirement"* | *"hashes are required"* | *"have their versions pinned"*)
            die "$lock: is broken where it says above; get it back from git, or make lock" ;;
    esac
    [[ -z $package ]] || die "$lock: there is no $package in the index above or in WHEELS; take another index, or make lock"
    die "$lock: pip failed; see above"
}

# compile_bytecode PYTHON FOLDER MODE: write the .pyc files now, because an image is read-only when it runs. They name
# the hash of their source, not its date, so they come out the same in every build; those of pip and what it uses, which
# it has written as it ran, are written anew. Some packages carry a file in the syntax of a newer Python (torch does): that
# one is left out.
compile_bytecode() {
    local said
    if said=$("$1" -m compileall -f -q -j 0 --invalidation-mode "$3" "$2" 2>&1); then return; fi
    said=$(grep -E -m 1 '\[Errno|BrokenProcessPool|Traceback' <<<"$said" || true)
    [[ -z $said ]] || die "the bytecode of $2 could not be written: $said"
}
