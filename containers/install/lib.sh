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

# compile_bytecode PYTHON FOLDER MODE: write the .pyc files now, because an image is read-only when it runs. They name
# the hash of their source, not its date, so they come out the same in every build; those of pip and what it uses, which
# it has written as it ran, are written anew. Some packages carry a file in the syntax of a newer Python (torch does): that
# one is left out.
compile_bytecode() {
    "$1" -m compileall -f -qq -j 0 --invalidation-mode "$3" "$2" || true
}
