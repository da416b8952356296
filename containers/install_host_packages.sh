#!/bin/bash
# install_host_packages.sh PACKAGE...: install the missing ones of these Debian packages. As root it runs
# apt-get and prints their names; for other users it stops with the command that installs them. A package is
# not missing if a command of its name is there, from wherever it came.

set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=containers/install/step_functions.sh
source "$here/install/step_functions.sh"

case ${1:-} in
    -h | --help) usage && exit ;;
    '' | -*) die "give the names of packages (see --help)" ;;
esac

# Targets of make run at the same time, and apt-get update fails if another one is running.
exec 9<"${BASH_SOURCE[0]}"
flock 9
missing=()
for package in "$@"; do
    command -v "$package" >/dev/null ||
        dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null |
        grep -qx installed || missing+=("$package")
done
[[ ${#missing[@]} -gt 0 ]] || exit 0

command -v apt-get >/dev/null ||
    die "missing packages, by their names in Debian: ${missing[*]}; install them with the package manager" \
        "of this system"
[[ $(id -u) == 0 ]] || die "missing packages: sudo apt-get install --no-install-recommends ${missing[*]}"
echo "installing with apt-get: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
# Without file 9, as a daemon that a package starts would keep the lock.
apt-get update -qq 9<&- || die "apt-get cannot reach its mirror; see above, check the network and try again"
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null 9<&- ||
    die "apt-get cannot install ${missing[*]}; see above"
