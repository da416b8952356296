# Functions of the scripts that build images, here and in apptainer/. Sourced, never run, from the repository's root.
# shellcheck shell=bash
# shellcheck source=containers/install/lib.sh
source containers/install/lib.sh

# The certificates that this machine trusts. A build gets them as a secret, because pip brings its own list and would
# not trust a network that rewrites TLS.
ca_bundle() {
    local file
    [[ -z ${SSL_CERT_FILE:-} || -s $SSL_CERT_FILE ]] ||
        die "SSL_CERT_FILE=$SSL_CERT_FILE is not there, or empty; name a file of certificates, or unset it"
    for file in "${SSL_CERT_FILE:-}" /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt; do
        if [[ -s $file ]]; then
            printf '%s' "$file"
            return
        fi
    done
}

# image_name FLAVOR MPI: the tag of the image, and what its files are called by: cpu, or cpu-mpich.
image_name() {
    [[ -f containers/locks/$1.lock ]] || die "there is no flavour $1; it would be containers/locks/$1.lock"
    case $2 in
        openmpi) printf '%s' "$1" ;;
        mpich) printf '%s' "$1-mpich" ;;
        *) die "--mpi is openmpi or mpich, not $2" ;;
    esac
}

# Whether the registry of the pinned base can be reached. Its answer to a stranger is 401; any answer will do.
registry_answers() {
    curl -s -m 5 -o /dev/null https://registry-1.docker.io/v2/
}

# The date of every file that goes into an image, whatever the commit: so a layer that a commit did not change is the same
# layer, whether a store still has it or it is built anew. (buildah takes a layer with another date from its store.)
export SOURCE_DATE_EPOCH=1767225600 # 2026-01-01

# When the source is from, which an image says in a label.
commit_date() {
    date -u -d "@$(git log -1 --format=%ct 2>/dev/null || printf %s "$SOURCE_DATE_EPOCH")" +%FT%TZ
}

# image_tool COMMAND...: run the tool that builds an image, writes or reads one. Where it fails, all that it said stays above,
# and the last line says why: in the words of the install step that failed, if one did.
image_tool() {
    local said step
    if said=$("$@" 2>&1 | sed 'w /dev/stderr'); then return; fi # as in run_pip
    step=$(grep -oE '\b[a-z]+\.sh: .*' <<<"$said" | tail -n 1 || true)
    [[ -z $step ]] || die "the build failed: $step"
    case ${said,,} in
        *"no space left"* | *"quota exceeded"* | *"storing layer"*"closed pipe"*) # the last is buildah's word for a full TMPDIR
            die "the build failed: no room where images are kept, in TMPDIR (${TMPDIR:-/var/tmp}) or for the result; make some" ;;
        *"temporary failure resolving"* | *"could not resolve"* | *"failed to fetch"* | *"dial tcp"*)
            die "the build failed: what it names above cannot be reached from here; try again where it can" ;;
    esac
    die "the build failed; see above"
}
