#!/bin/bash
# need.sh PACKAGE...: install the Debian packages that a step needs, those that are not there: as root by apt-get,
# saying which; otherwise stop with the line that installs them.

set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=containers/install/lib.sh
source "$here/install/lib.sh"

case ${1:-} in
    -h | --help) usage && exit ;;
    '' | -*) die "give the names of packages (see --help)" ;;
esac

missing=()
for package in "$@"; do
    dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
done
[[ ${#missing[@]} -gt 0 ]] || exit 0

command -v apt-get >/dev/null || die "this needs what Debian calls ${missing[*]}: install it with this system's own tool"
[[ $(id -u) == 0 ]] || die "this needs packages that are not there: sudo apt-get install --no-install-recommends ${missing[*]}"
echo "installing with apt-get: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq || die "apt-get could not read its mirror; see above, and try again where that can be reached"
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null ||
    die "apt-get could not install ${missing[*]}; see above"
