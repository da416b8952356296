# The functions of the launch scripts, which source this file on the first node of a job.
#
# A script calls them in this order. Each one fills the variables in capitals that the later ones read:
#   parse_options    the words of its command line           SCRIPT OPTION OPTIONS_GIVEN ARGUMENTS
#   read_slurm_job   the job that the scheduler granted      JOB HOSTS NODES TASKS THREADS GPUS
#                    (or read_pbs_job, read_job for either, make_local_job)
#   use_runtime      the words that enter the image          CONTAINER SIF RUNTIME_VERSION DIGEST
#   set_program      the command that runs in the image      PROGRAM
#   use_launcher     the words that start it for each rank   LAUNCH PYTHON LAUNCHER_TEXT
#   launch           compose the command, print it, run it   COMMAND
# Commands are arrays and never strings to split again, so a user's arguments arrive unchanged.
# shellcheck shell=bash

# shellcheck source=launch/lib/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

BEGAN=$(date +%s%3N) # in ms; EPOCHREALTIME needs bash 5, and RHEL 8 has 4.4
unset CDPATH # cd would print folders that it finds there
unset HPCTRAIN_CONTROL # that of a job around this one
EARLY_STOP=${HPCTRAIN_EARLY_STOP:-} # not empty: check.sh, or this script, got the signal
unset HPCTRAIN_EARLY_STOP
trap 'EARLY_STOP=1' USR1 # until open_control; Slurm sends it at once where the time limit is short
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# shellcheck disable=SC2034 # launchers/ read it
TASK=$ROOT/launch/lib/task.sh

# Functions to run when the script ends, with its exit status. If there are any, launch waits for the job.
CLEAN_UP=()
# A step beside the ranks, without memory or GPUs of its own. SLURM_GPUS* would ask for GPUs, too.
SIDE_STEP=(env --unset=SLURM_GPUS --unset=SLURM_GPUS_PER_NODE --unset=SLURM_GPUS_PER_TASK
    srun --overlap --mem=0 --gres=none --export=ALL)
WITHIN=60 # seconds for on_every_node: a node may be dead, and Slurm not know it yet
SIF_COPY='' # on each node, with --broadcast

# Names of files and values of variables may contain line breaks and control characters of terminals.
say() {
    printf 'hpctrain: %s\n' "${*//[[:cntrl:]]/?}"
}

die() {
    say "error: $*" | hide_secrets >&2 || true
    exit 2
}

# hide_secrets: a filter for lines with words of the user, which others may read in the log
hide_secrets() {
    local names=$ROOT/src/hpctrain/files/secret_names.txt
    [[ -r $names ]] || names=/dev/null
    LC_ALL=C awk -f "$ROOT/launch/lib/redaction.awk" "$names" -
}

# quote_words WORD...: print the words for a shell, with a space after each. A space in a word has a \ before
# it, by which hide_secrets knows the end of the word.
quote_words() {
    local word
    for word in "$@"; do
        printf -v word %q "$word"
        [[ $word != \$* ]] || word=${word// /\\x20} # $'...'
        printf '%s ' "$word"
    done
}

# bash calls it. Slurm runs a launch script as it was when the job was submitted, with the functions of today.
command_not_found_handle() {
    say "error: there is no $1 on $(uname -n):" \
        "load its module, or submit again if $ROOT/launch is newer than the job" >&2
    return 127
}

# counted NUMBER NOUN: print "1 node" or "2 nodes"
counted() {
    printf '%s %s' "$1" "$2"
    (($1 == 1)) || printf s
}

# shellcheck source=launch/lib/trust.sh
source "$ROOT/launch/lib/trust.sh"
# shellcheck source=launch/lib/control.sh
source "$ROOT/launch/lib/control.sh"
# shellcheck source=launch/lib/site.sh
source "$ROOT/launch/lib/site.sh"
# shellcheck source=launch/lib/job.sh
source "$ROOT/launch/lib/job.sh"
# shellcheck source=launch/lib/pbs.sh
source "$ROOT/launch/lib/pbs.sh"
# shellcheck source=launch/lib/digest.sh
source "$ROOT/launch/lib/digest.sh"
# shellcheck source=launch/lib/runtime.sh
source "$ROOT/launch/lib/runtime.sh"
# shellcheck source=launch/lib/launcher.sh
source "$ROOT/launch/lib/launcher.sh"
# shellcheck source=launch/lib/requeue.sh
source "$ROOT/launch/lib/requeue.sh"
# shellcheck source=launch/lib/options.sh
source "$ROOT/launch/lib/options.sh"

# launch: print the summary and run the job. exec replaces this script, unless something is to do after the
# job: functions of CLEAN_UP, or in a batch job the decision whether it goes on.
launch() {
    local status=0
    [[ -z ${OPTION[broadcast]:-} ]] || SIF_COPY=${SLURM_TMPDIR:-/tmp}/hpctrain-$JOB-$(random_hex).sif
    set_command
    [[ -z ${OPTION[dry-run]:-} ]] || { print_commands && exit; }
    [[ -z ${OPTION[broadcast]:-} ]] || broadcast_sif
    [[ -z $DIGEST_PENDING ]] || hash_in_background "$HPCTRAIN_IMAGE"
    [[ -z ${HPCTRAIN_NODE_CONTAINER:-} || -z ${HPCTRAIN_CONTROL:-} ]] || CLEAN_UP+=(remove_node_containers)
    [[ -n ${HPCTRAIN_CONTROL:-} ]] || ((${#CLEAN_UP[@]})) || [[ -n $MPI_HINT ]] || exec "${COMMAND[@]}"
    trap clean_up EXIT
    if [[ -n ${HPCTRAIN_CONTROL:-} ]]; then
        guard_batch_script
        until run_launcher || { status=$? && ! replace_nodes; }; do status=0; done
    else
        "${COMMAND[@]}" || status=$?
    fi
    exit $status
}

# set_command: fill COMMAND with what runs PROGRAM, and print the summary
set_command() {
    compose "${PYTHON[@]}" "${PROGRAM[@]}"
    print_summary
}

# compose WORD...: fill COMMAND with the launcher's command line that runs the words in the image of each rank
compose() {
    local in_image=("${CONTAINER[@]}" ${SIF:+"${SIF_COPY:-$SIF}"} -- "$@")
    # Nobody can know this name before the folder is there.
    [[ -z ${HPCTRAIN_NODE_CONTAINER:-} ]] ||
        HPCTRAIN_NODE_CONTAINER=/tmp/hpctrain-container-$JOB-$(random_hex)
    if [[ -n $COMMAND_IN_VARIABLE ]]; then
        HPCTRAIN_COMMAND=$(printf '%q ' "${in_image[@]}")
        export HPCTRAIN_COMMAND
        COMMAND=("${LAUNCH[@]}")
    else
        COMMAND=("${LAUNCH[@]}" "${in_image[@]}")
    fi
}

random_hex() {
    od -An -N8 -tx1 /dev/urandom | tr -d ' \n'
}

# print_summary: print what the script resolved: site, job, runtime, launcher, fabric variables, command
print_summary() {
    summarize | hide_secrets
}

summarize() {
    local name words fabric=''
    for name in $(compgen -e); do
        [[ $name != @(NCCL|FI|UCX|GLOO)_* ]] || fabric+=" $name=${!name}"
    done
    say "site $HPCTRAIN_SITE, job $JOB${SLURM_RESTART_COUNT:+ (restart $SLURM_RESTART_COUNT)}," \
        "$(counted "$NODES" node) x $(counted "$TASKS" task) x $(counted "$THREADS" thread)," \
        "$(counted "$GPUS" GPU) per node, on ${HOSTS[*]}"
    say "runtime $RUNTIME ($RUNTIME_VERSION), image $HPCTRAIN_IMAGE${DIGEST:+ $DIGEST}"
    say "launcher $LAUNCHER_TEXT, rendezvous $MASTER_ADDR:$MASTER_PORT"
    say "fabric variables:${fabric:- none}"
    ((${#DROPPED[@]} == 0)) ||
        say "not passed on to the ranks: $(printf '%s\n' "${DROPPED[@]}" | sort -u | paste -sd,)"
    say "began $(date -d "@${BEGAN::-3}.${BEGAN: -3}" +%FT%T.%3N), ready $(($(date +%s%3N) - BEGAN)) ms later"
    words=$(quote_words "${COMMAND[@]}")
    say "command: ${words% }"
}

# print_commands: print commands that start the same ranks from the shell of a job (--dry-run)
print_commands() {
    local name
    printf 'cd %q\n' "$PWD"
    while read -r name; do
        # The user's own are in that shell, too, and may hold secrets.
        [[ -v HPCTRAIN_BEFORE[$name] && ${HPCTRAIN_BEFORE[$name]} == "${!name}" ]] ||
            printf 'export %s=%q\n' "$name" "${!name}"
    done < <(forwarded_names)
    [[ -z ${OPTION[broadcast]:-} ]] || printf 'sbcast --compress=none %q %q\n' "$SIF" "$SIF_COPY"
    printf '%q ' "${COMMAND[@]}"
    printf '\n'
}

broadcast_sif() {
    trap clean_up EXIT
    CLEAN_UP+=(remove_sif_copies)
    # A SIF is compressed already; slurm.conf may have Compression=lz4 (benchmarks/scale.md). Not --force:
    # others see the name in ps, and could put a file or link of theirs there, which they can change after the
    # copy.
    if sbcast --compress=none "$SIF" "$SIF_COPY"; then
        # With spare nodes other ranks may need it, after these have ended.
        ((SPARE_NODES)) || export HPCTRAIN_SIF_COPY=$SIF_COPY
        return 0
    fi
    say "warning: sbcast could not copy $SIF to $SIF_COPY on every node, so they read $SIF itself" >&2
    remove_sif_copies || true
    SIF_COPY=''
    set_command
}

# Tasks that srun kills because another one has failed leave the folders of node_container.sh.
remove_node_containers() {
    # shellcheck disable=SC2016 # the shells on the nodes expand it
    (($1 == 0)) || WITHIN=10 on_every_node bash -c 'rm -rf "/tmp/hpctrain-container-$HPCTRAIN_JOB"-*'
}

remove_sif_copies() {
    [[ -z $SIF_COPY ]] || on_every_node rm -f "$SIF_COPY"
}

clean_up() {
    local status=$? step
    for step in "${CLEAN_UP[@]}"; do
        "$step" "$status" || true
    done
    if [[ -n ${HPCTRAIN_CONTROL:-} ]]; then
        if conclude "$status"; then status=0; else status=$?; fi
        rm -rf "$HPCTRAIN_CONTROL"
    fi
    [[ -z ${MPI_HINT:-} ]] || ((status == 0)) || say "$MPI_HINT"
    await_end
    exit $status
}

# on_every_node COMMAND...: run this program on the nodes of the job that are left
on_every_node() {
    local count
    if [[ -n ${SLURM_JOB_ID:-} ]]; then
        is_current && count=$(nodes_left | wc -l) && ((count)) || return 1
        timeout "$WITHIN" "${SIDE_STEP[@]}" --nodes="$count" --ntasks="$count" --quiet "$@"
    elif [[ -n ${PBS_NODEFILE:-} ]]; then
        on_nodes_of_pbs "$@"
    else
        "$@"
    fi
}
