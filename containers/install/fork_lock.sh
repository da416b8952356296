#!/bin/bash
# fork_lock.sh PREFIX: compile fork_lock.c, which works around a fault of Debian's Python, and let each Python
# of PREFIX load it. It needs a C compiler and the headers of that Python.
#   DESTDIR=FOLDER  write below FOLDER instead of /, for a layer that holds this module and nothing else

set -euo pipefail
umask 022
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=containers/install/step_functions.sh
source "$here/step_functions.sh"

case "$#:${1:-}" in
    1:-h | 1:--help) usage && exit ;;
    1:[!-]*) site=${DESTDIR:-}$1/lib/python3.11/site-packages ;;
    *) die "give PREFIX (see --help)" ;;
esac
mkdir -p "$site"
# The headers must be those of the Python that loads it: the place of the lock in memory is no public
# interface.
cc -O2 -shared -fPIC -s -I/usr/include/python3.11 -o "$site/hpctrain_fork_lock.so" "$here/fork_lock.c" ||
    die "cannot compile fork_lock.c; see above (on Debian: the packages of debian.sh build)"
echo 'import hpctrain_fork_lock' >"$site/hpctrain-fork-lock.pth"
