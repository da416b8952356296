# Functions of the scripts that build images, here and in apptainer/. Sourced, never run, from the repository's root.
# shellcheck shell=bash
# shellcheck source=containers/install/lib.sh
source containers/install/lib.sh

# The certificates that this machine trusts. A build gets them as a secret, because pip brings its own list and would
# not trust a network that rewrites TLS.
ca_bundle() {
    local file
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

# One date for every file that a build makes, so that the same commit gives the same image.
source_date_epoch() {
    printf '%s' "${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 1767225600)}"
}
