#!/bin/bash
# The defaults of your site for this shell (bash or zsh), which sbatch and the launch scripts read.
#
#   source launch/site.sh perlmutter     those of launch/sites/perlmutter.env
#   source launch/site.sh                those of the site that is detected, or of generic.env
#   launch/site.sh --new NAME            write launch/sites/NAME.env from what this login node shows
#   launch/site.sh --new NAME --probe [OPTION OF sbatch OR qsub]...
#                                        and from what a compute node shows, in a job of a minute
#
# Variables that you have set always win; set one to an empty value to disable it (export NCCL_NET=).
# HPCTRAIN_ROOT is set as well, so jobs can be submitted from anywhere.
# shellcheck shell=bash

if [ -z "${BASH_VERSION:-}${ZSH_VERSION:-}" ]; then
    echo 'hpctrain: error: launch/site.sh is for bash and zsh: source it there' >&2
    return 1
fi
case ${1:-} in
-h | --help)
    sed -n '2,/^[^#]/{/^# shellcheck/d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]:-$0}"
    [ "${BASH_SOURCE[0]:-}" != "$0" ] || exit 0
    return 0
    ;;
--new)
    if bash "$(dirname "${BASH_SOURCE[0]:-$0}")/lib/new_site.sh" "${@:2}"; then set -- 0; else set -- 2; fi
    [ "${BASH_SOURCE[0]:-}" != "$0" ] || exit "$1"
    return "$1"
    ;;
esac
# Started as a program it would set the variables of a shell that ends at once. zsh has no BASH_SOURCE.
if [ "${BASH_SOURCE[0]:-}" = "$0" ]; then
    echo "hpctrain: error: $0 sets variables of your shell: run source $0${1:+ $1} in bash or zsh" >&2
    exit 2
fi
# Not the cd of the user, who may have a function of that name, or a CDPATH.
_hpctrain_root=$(CDPATH='' builtin cd "$(dirname "${BASH_SOURCE[0]:-$0}")/.." >/dev/null && pwd)
export HPCTRAIN_ROOT="${HPCTRAIN_ROOT:-$_hpctrain_root}"
# shellcheck source=launch/lib/site.sh
. "$_hpctrain_root/launch/lib/site.sh"
hpctrain_load_site "$_hpctrain_root" shell "${1:-${HPCTRAIN_SITE:-}}"
