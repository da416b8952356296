#!/bin/bash
# push.sh --registry NAME [--flavor FLAVOR]: push build/hpctrain-FLAVOR.tar to a registry (make push), as NAME:FLAVOR-VERSION
# and as NAME:FLAVOR; NAME is such as ghcr.io/somebody/hpctrain or localhost:5000/hpctrain. The last line that it prints
# is NAME@sha256:..., which always means this image, whatever is pushed later.
# Log in first where the registry asks for it: skopeo login ghcr.io. Only localhost may speak plain http.
# It needs skopeo.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=containers/lib.sh
source containers/lib.sh

flavor=cpu registry=
while (($#)); do
    case $1 in
        -h | --help) usage && exit ;;
        --flavor | --registry)
            [[ -n ${2:-} ]] || die "$1 needs a value (see --help)"
            declare "${1#--}=$2"
            shift 2
            ;;
        *) die "unknown argument $1 (see --help)" ;;
    esac
done
[[ -n $registry ]] || die "give --registry NAME (make push REGISTRY=NAME), such as ghcr.io/somebody/hpctrain"
[[ $registry =~ ^[A-Za-z0-9.-]+(:[0-9]+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)+$ ]] ||
    die "--registry $registry is not HOST[:PORT]/PATH in small letters, without a tag, such as ghcr.io/somebody/hpctrain"
tar=build/hpctrain-$flavor.tar
[[ -s $tar ]] || die "there is no $tar; make it with containers/build.sh (make image FLAVOR=$flavor)"
command -v skopeo >/dev/null || die "skopeo is not there; apt-get install skopeo"

host=${registry%%/*}
tls=true
[[ ${host%:*} != localhost && ${host%:*} != 127.0.0.1 ]] || tls=false
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# push FROM TAG: skopeo's own errors are long lines of a log
push() {
    local said
    echo "push: $registry:$2"
    if ! skopeo copy --quiet --src-tls-verify=$tls --dest-tls-verify=$tls --preserve-digests --digestfile "$work/digest" \
        "$1" "docker://$registry:$2" 2>"$work/errors"; then
        said=$(sed -n '$s/.*level=fatal msg="\(.*\)"$/\1/;$p' "$work/errors" | tail -n 1)
        case $said in
            *"connection refused"* | *"no such host"* | *"i/o timeout"* | *"no route to host"* | *"Temporary failure"*)
                die "the registry $host does not answer: ${said##*: }"
                ;;
            *unauthorized* | *denied* | *"authentication required"* | *orbidden*)
                die "$host does not let you push to $registry: skopeo login $host"
                ;;
            *"gave HTTP response to HTTPS"*) die "$host speaks plain http, which only localhost may: give it a certificate" ;;
            *) die "$tar was not pushed to $registry:$2: $said" ;;
        esac
    fi
}
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
push "oci-archive:$tar" "$flavor-$version"
digest=$(<"$work/digest")
# what is there already is not sent again
push "docker://$registry@$digest" "$flavor"
echo "$registry@$digest"
