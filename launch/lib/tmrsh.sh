#!/bin/bash
# What mpirun calls instead of ssh in a PBS job. By pbs_tmrsh the processes on the other nodes are a part of
# the job: PBS makes TMPDIR there, counts them, and ends them with the job. And many sites close ssh.
#
# usage: tmrsh.sh [OPTION OF SSH]... HOST COMMAND...
set -euo pipefail

[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit; }
while [[ ${1:-} == -* ]]; do shift; done
(($# > 1)) || { echo 'hpctrain: error: tmrsh.sh needs HOST COMMAND...: see --help' >&2 && exit 2; }
# mpirun leaves the domain out, and pbs_tmrsh wants the name as PBS has it.
host=$(grep -m 1 -xE "${1//./\\.}(\..*)?" "${PBS_NODEFILE:-/dev/null}") || host=$1
shift
# Without a login, the other node knows no modules. PBS gives it the variables that qsub had, also those that
# the launch script has taken away since, such as APPTAINER_CONTAINALL.
# shellcheck disable=SC2016 # the other node expands it
exec pbs_tmrsh "$host" /usr/bin/env "PATH=$PATH" ${LD_LIBRARY_PATH:+"LD_LIBRARY_PATH=$LD_LIBRARY_PATH"} \
    /bin/bash -c 'for name in $(compgen -e); do [[ $0 == *" $name "* ]] || unset "$name"; done; eval "$1"' \
    " $(compgen -e | tr '\n' ' ')" "$*"
