#!/bin/bash
# build_base.sh [--force]: make build/base-bookworm.tar, a Debian 12 base image from a Debian mirror, for
# machines that cannot reach a container registry (make base). The tar is a docker-archive, which docker,
# podman, buildah and Apptainer read, of localhost/hpctrain-base:bookworm. An existing tar is kept, unless
# --force is given. It needs mmdebstrap, and root or a range in /etc/subuid.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=containers/build_functions.sh
source containers/build_functions.sh
attend containers/build_base.sh "$@"

case "$#:${1:-}" in
    0: | 1:--force) ;;
    1:-h | 1:--help) usage && exit ;;
    *) die "unknown arguments $* (see --help)" ;;
esac
tar=build/base-bookworm.tar
if [[ -s $tar && ${1:-} != --force ]]; then
    echo "base: $tar exists"
    exit
fi
command -v mmdebstrap >/dev/null || containers/install_host_packages.sh mmdebstrap
mkdir -p build
work=$(mktemp -d -p build base.XXXXXX) || die "cannot write to build/; free some space there"
trap 'rm -rf "$work"' EXIT

# Without device nodes an ordinary user can unpack it as well. dpkg keeps these options: later packages also
# leave out their manuals. The hook removes this machine's host name and name server, which mmdebstrap copies.
# With a /usr merged from the start, nothing installs usrmerge, which needs all of Perl.
# shellcheck disable=SC2016  # the hook's shell expands $1
mmdebstrap --variant=minbase --skip=output/dev --format=tar --aptopt='Acquire::Languages "none"' \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
    --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr \
    --customize-hook='rm -f "$1/etc/hostname" "$1/etc/resolv.conf"' \
    bookworm "$work/layer.tar" ||
    die "mmdebstrap failed; see above, check the network, and the free space in build/ and TMPDIR"

layer=$(sha256sum "$work/layer.tar")
created=$(date -u -d "@$SOURCE_DATE_EPOCH" +%FT%TZ)
printf '{"architecture":"%s","os":"linux","created":"%s","config":{"Env":["PATH=%s"],"Cmd":["bash"]},%s,%s}' \
    "$(dpkg --print-architecture)" "$created" /usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    "\"rootfs\":{\"type\":\"layers\",\"diff_ids\":[\"sha256:${layer%% *}\"]}" \
    "\"history\":[{\"created\":\"$created\",\"created_by\":\"mmdebstrap\"}]" >"$work/config.json"
id=$(sha256sum "$work/config.json")
id=${id%% *}
mv "$work/config.json" "$work/$id.json"
printf '[{"Config":"%s.json","RepoTags":["localhost/hpctrain-base:bookworm"],"Layers":["layer.tar"]}]' "$id" \
    >"$work/manifest.json"
tar --create --file "$work/base.tar" --sort=name --mtime="@$SOURCE_DATE_EPOCH" \
    --owner=0 --group=0 --numeric-owner \
    --directory "$work" manifest.json "$id.json" layer.tar ||
    die "cannot write $tar; see above, and free some space in build/"
mv "$work/base.tar" "$tar"
echo "base: made $tar ($(du -h "$tar" | cut -f1))"
