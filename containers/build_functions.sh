# Functions of the scripts that build images, here and in apptainer/. Sourced from the repository's root,
# never run.
# shellcheck shell=bash
export LC_ALL=C # image_tool looks for messages in English
# shellcheck source=containers/install/step_functions.sh
source containers/install/step_functions.sh

# parse_options NAME... -- ARGUMENT...: set the variable NAME for each --NAME VALUE among the arguments;
# --help ends the script.
parse_options() {
    local names=' '
    while [[ $1 != -- ]]; do
        names+="--$1 "
        shift
    done
    shift
    while (($#)); do
        [[ $1 != -h && $1 != --help ]] || { usage && exit; }
        [[ $names == *" $1 "* ]] || die "unknown argument $1 (see --help)"
        [[ -n ${2:-} ]] || die "$1 needs a value (see --help)"
        declare -g "${1#--}=$2"
        shift 2
    done
}

# attend SCRIPT ARGUMENT...: let a signal that ends this script end its children, too. bash by itself ends
# without them, and pip or mksquashfs runs on. So the script runs once more, as a child of this process, which
# only waits.
attend() {
    local child ended=0 signal=
    [[ -z ${BUILD_ATTENDED:-} ]] || return 0
    export BUILD_ATTENDED=yes
    "$@" <&0 &
    child=$!
    trap 'signal=130; end_tree "$child"' INT
    trap 'signal=143; end_tree "$child"' TERM HUP
    until wait "$child" || ended=$?; ! kill -0 "$child" 2>/dev/null; do :; done
    exit "${signal:-$ended}"
}

# list_tree PID: print this process and all below it, parents first
list_tree() {
    local child children=()
    echo "$1"
    read -ra children 2>/dev/null <"/proc/$1/task/$1/children" || true
    for child in "${children[@]}"; do list_tree "$child"; done
}

# end_tree PID: end this process and all below it. PID itself may then take its time to remove files.
end_tree() {
    local tree
    mapfile -t tree < <(list_tree "$1")
    kill -TERM "${tree[@]}" 2>/dev/null || true
    tree=("${tree[@]:1}")
    for _ in {1..50}; do
        ((${#tree[@]})) && kill -0 "${tree[@]}" 2>/dev/null || return 0
        sleep 0.1
    done
    kill -KILL "${tree[@]}" 2>/dev/null || true
}

# check_python: the scripts in Python here come last in a build, and their error must not.
check_python() {
    local least=9
    python3 -c "import sys; sys.exit(sys.version_info < (3, $least))" 2>/dev/null ||
        die "python3 is missing or older than 3.$least; put a newer one first in PATH," \
            "such as that of a module"
}

# ca_bundle: print the file of certificates that this machine trusts. A build gets it as a secret: pip has its
# own list and would not trust a network that rewrites TLS.
ca_bundle() {
    local file
    [[ -z ${SSL_CERT_FILE:-} || -s $SSL_CERT_FILE ]] ||
        die "SSL_CERT_FILE=$SSL_CERT_FILE is missing or empty; set it to a file of certificates, or unset it"
    for file in "${SSL_CERT_FILE:-}" /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt; do
        if [[ -s $file ]]; then
            printf '%s' "$file"
            return
        fi
    done
}

# image_name FLAVOR MPI: print the tag of the image, which its files are named after: cpu, or cpu-mpich.
image_name() {
    [[ -f containers/locks/$1.lock ]] || die "there is no flavor $1, as there is no containers/locks/$1.lock"
    case $2 in
        openmpi) printf '%s' "$1" ;;
        mpich) printf '%s' "$1-mpich" ;;
        *) die "--mpi must be openmpi or mpich, not $2" ;;
    esac
}

# registry_answers: succeed if the registry of the pinned base can be reached. Without a login it answers 401,
# which will do.
registry_answers() {
    curl -s -m 5 -o /dev/null https://registry-1.docker.io/v2/
}

# The time of every file in an image, the same for all commits: a layer that a commit did not change keeps its
# digest, from a cache or built again. (With the commit's time, buildah would take a cached layer with another
# time.)
export SOURCE_DATE_EPOCH=1767225600 # 2026-01-01

# commit_date: print the date of the commit, for the label of an image.
commit_date() {
    date -u -d "@$(git log -1 --format=%ct 2>/dev/null || printf %s "$SOURCE_DATE_EPOCH")" +%FT%TZ
}

# image_tool COMMAND...: run a tool that builds, writes or reads an image. If it fails, its output stays on
# the screen and our last line explains it: with the message of the install step that failed, if one did.
image_tool() {
    local output step
    if output=$("$@" 2>&1 | sed 'w /dev/stderr'); then return; fi # as in run_pip
    step=$(grep -oE '\b[a-z_]+\.sh: .*' <<<"$output" | tail -n 1 || true)
    [[ -z $step ]] || die "the build failed: $step"
    case ${output,,} in
        *"no space left"* | *"quota exceeded"* | *"storing layer"*"closed pipe"*)
            # The last is buildah's message if TMPDIR is full.
            die "the build failed: the disk is full, of the image store, of TMPDIR (${TMPDIR:-/var/tmp})" \
                "or of the result; free some space" ;;
        *"temporary failure resolving"* | *"could not resolve"* | *"failed to fetch"* | *"dial tcp"*)
            die "the build failed: cannot reach the address above; check the network and try again" ;;
    esac
    die "the build failed; see above"
}
