#!/bin/bash
# push.sh --registry NAME [--flavor FLAVOR] [--mpi openmpi|mpich]: push build/hpctrain-FLAVOR.tar (or
# hpctrain-FLAVOR-mpich.tar) to a registry as NAME:FLAVOR-VERSION and NAME:FLAVOR (make push). NAME is a
# repository such as ghcr.io/somebody/hpctrain or localhost:5000/hpctrain. The last line of the output is
# NAME@sha256:..., the name by digest, which no later push changes. If the registry needs a login, run skopeo
# login first, such as skopeo login ghcr.io. Plain http is for localhost only. It needs skopeo.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=containers/build_functions.sh
source containers/build_functions.sh

flavor=cpu mpi=openmpi registry=
parse_options flavor mpi registry -- "$@"
[[ -n $registry ]] || die "give --registry NAME (make push REGISTRY=NAME), such as ghcr.io/somebody/hpctrain"
[[ $registry =~ ^[A-Za-z0-9.-]+(:[0-9]+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)+$ ]] ||
    die "--registry $registry is not HOST[:PORT]/PATH in lower case without a tag, such as" \
        "ghcr.io/somebody/hpctrain"
name=$(image_name "$flavor" "$mpi")
tar=build/hpctrain-$name.tar
[[ -s $tar ]] || die "there is no $tar; build it: make image FLAVOR=$flavor MPI=$mpi"
command -v skopeo >/dev/null || die "skopeo is not installed; apt-get install skopeo"

host=${registry%%/*}
tls=true
[[ ${host%:*} != localhost && ${host%:*} != 127.0.0.1 ]] || tls=false
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# push_tag SOURCE TAG: push, with skopeo's log line as an error message
push_tag() {
    local message
    echo "push: $registry:$2"
    if ! skopeo copy --quiet --src-tls-verify=$tls --dest-tls-verify=$tls --preserve-digests \
        --digestfile "$work/digest" \
        "$1" "docker://$registry:$2" 2>"$work/errors"; then
        message=$(sed -n '$s/.*level=fatal msg="\(.*\)"$/\1/;$p' "$work/errors" | tail -n 1)
        case $message in
            *"connection refused"* | *"no such host"* | *"i/o timeout"* | *"no route to host"* | \
                *"Temporary failure"*)
                die "the registry $host does not answer: ${message##*: }"
                ;;
            *unauthorized* | *denied* | *"authentication required"* | *orbidden*)
                die "$host denies a push to $registry; run skopeo login $host"
                ;;
            *"gave HTTP response to HTTPS"*)
                die "$host uses plain http, which is for localhost only; give it a certificate" ;;
            *) die "cannot push $tar to $registry:$2: $message" ;;
        esac
    fi
}
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
push_tag "oci-archive:$tar" "$name-$version"
digest=$(<"$work/digest")
# The registry has all layers by now, so this sends only the tag.
push_tag "docker://$registry@$digest" "$name"
echo "$registry@$digest"
