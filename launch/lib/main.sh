# Functions of the launch scripts. Sourced by them on the first node of a job, never run.
#
# A script calls them in this order. Each one fills the variables in capitals that the later ones read:
#   parse_options    the options before the program            DRY_RUN BROADCAST MPI LAUNCHER MAX_RESTARTS SPARE_NODES ARGUMENTS
#   read_slurm_job   the job that the scheduler granted        JOB HOSTS NODES TASKS THREADS GPUS MASTER_ADDR MASTER_PORT
#                    (or read_pbs_job, make_local_job)
#   use_runtime      the words that enter the image            CONTAINER SIF RUNTIME_VERSION DIGEST
#   set_program      the command that runs in the image        PROGRAM
#   use_launcher     the words that start it for each rank     LAUNCH PYTHON LAUNCHER_TEXT
#   launch           compose the command, print it, run it     COMMAND
# Commands are arrays and never strings that a shell would split again, so a user's arguments arrive unchanged.
# shellcheck shell=bash

# shellcheck source=launch/lib/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

BEGAN=$(date +%s%3N) # in ms; EPOCHREALTIME needs bash 5, and RHEL 8 has 4.4
unset CDPATH # cd would print folders that it finds there
unset HPCTRAIN_CONTROL # that of a job around this one
EARLY_STOP=''
trap 'EARLY_STOP=1' USR1 # until open_control; Slurm sends it at once where the time limit is short
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
TASK=$ROOT/launch/lib/task.sh

# Functions to run when the script ends, with its exit status as argument. If there are any, launch waits for the job.
CLEAN_UP=()
WITHIN=60 # seconds for on_every_node: a node may be dead, and Slurm not know it yet

# Names of files and values of variables may hold line breaks, and what controls a terminal.
say() {
    printf 'hpctrain: %s\n' "${*//[[:cntrl:]]/?}"
}

die() {
    say "error: $*" >&2
    exit 2
}

# counted NUMBER NOUN: print "1 node" or "2 nodes"
counted() {
    printf '%s %s' "$1" "$2"
    (($1 == 1)) || printf s
}

# shellcheck source=launch/lib/site.sh
source "$ROOT/launch/lib/site.sh"
# shellcheck source=launch/lib/job.sh
source "$ROOT/launch/lib/job.sh"
# shellcheck source=launch/lib/digest.sh
source "$ROOT/launch/lib/digest.sh"
# shellcheck source=launch/lib/runtime.sh
source "$ROOT/launch/lib/runtime.sh"
# shellcheck source=launch/lib/launcher.sh
source "$ROOT/launch/lib/launcher.sh"
# shellcheck source=launch/lib/requeue.sh
source "$ROOT/launch/lib/requeue.sh"

# ---- options ----

# list_names ROW...: the first word of each row, as in "a, b or c"
list_names() {
    local text
    text=$(printf ', %s' "${@%% *}")
    text=${text#, }
    printf %s "${text%, *} or ${text##*, }"
}

# A row for each option: the option, the scripts that have it (patterns, with commas), and its line of --help.
# --max-restarts=3 sets MAX_RESTARTS=3; an option without a value sets 1.
OPTIONS=(
    '--dry-run | * | print the commands, to paste into the shell of a job, and run nothing'
    '--broadcast | apptainer_*.sh,jupyter.sh | first copy the SIF to the local disk of each node (sbcast): faster on many nodes'
    '--mpi=HOW | apptainer_mpi.sh | mpirun, or a PMI that srun offers (srun --mpi=list): pmix, pmi2, cray_shasta. Default: the PMI
        of the MPI library in the image if srun offers it, else, for Open MPI, mpirun. HPCTRAIN_MPI sets it for a site.'
    '--launcher=HOW | apptainer_horovod.sh | srun, mpirun or horovodrun. With srun and mpirun, a script of your own connects its
        ranks over MPI, and train_horovod over Gloo. With horovodrun both use Gloo, and the nodes need ssh without a password.
        Default: srun if it offers the PMI of the MPI library in the image, else mpirun.'
    '--max-restarts=N | apptainer_torchrun.sh | when a rank dies, restart all ranks, at most N times (default 0). The bundled
        trainers, and scripts of your own that do, load their last checkpoint.'
    '--spare-nodes=N | apptainer_ddp.sh,modules_ddp.sh,podman_hpc_ddp.sh,shifter_ddp.sh | keep N nodes of the job idle. When another
        node fails, the job goes on at once with one of them. Submit with sbatch --no-kill and N more --nodes'
    '--help | * | print this text'
)
# A row for each variable that the user may set, in the same way.
SETTINGS=(
    "HPCTRAIN_IMAGE | !(modules_ddp.sh) | the image: a SIF or a sandbox folder; for podman-hpc and shifter a name"
    "HPCTRAIN_FLAVOR | !(modules_ddp.sh) | the flavor of the default image: hpctrain-FLAVOR.sif or hpctrain:FLAVOR (default cpu)"
    "HPCTRAIN_RUNTIME | !(modules_ddp.sh,podman_hpc_ddp.sh,shifter_ddp.sh) | the runtime: $(list_names "${RUNTIMES[@]}") (default apptainer)"
    "HPCTRAIN_BIND | !(modules_ddp.sh,shifter_ddp.sh) | folders to bind into the image beside the home and the current folder,
        separated by spaces; missing ones are skipped"
    "HPCTRAIN_PACKAGES | !(modules_ddp.sh) | one folder, of your own packages on top of the image; see hpctrain add --help"
    "HPCTRAIN_MODULES | * | modules to load first, separated by spaces, such as apptainer; without a container such as cuda and pytorch"
    "HPCTRAIN_PODMAN_MODULES | !(modules_ddp.sh,shifter_ddp.sh) | for podman-hpc: its modules, separated by spaces, such as: gpu nccl"
    "HPCTRAIN_SHIFTER_MODULES | !(modules_ddp.sh,podman_hpc_ddp.sh) | for shifter: its modules, separated by commas, such as: gpu,nccl-plugin"
    "HPCTRAIN_PYTHON_ENV | !(podman_hpc_ddp.sh,shifter_ddp.sh) | without a container: the folder of a venv, or the name or folder
        of a conda environment"
    "HPCTRAIN_MPI | apptainer_mpi.sh,apptainer_horovod.sh | the --mpi of a site, where none is given"
    "HPCTRAIN_INTERFACE | apptainer_horovod.sh | for horovodrun: the network interface (default: that of the first node's address)"
    "HPCTRAIN_TASKS | local.sh | the number of ranks (default: one per GPU, or one)"
    "HPCTRAIN_REQUEUES | !(local.sh,jupyter.sh) | how often a job is requeued after a fault (default 10)"
    "HPCTRAIN_CACHE | * | the folder of caches (default: cache in SCRATCH, or without that in /tmp of each node)"
    "HPCTRAIN_NODE_TIMEOUT | !(local.sh,pbs_ddp.sh) | seconds after which Slurm has noticed a dead node (default: its SlurmdTimeout + 60)"
    "HPCTRAIN_SITE | * | the site whose defaults to use: a file of launch/sites (default: detected)"
    "SBATCH_... | !(local.sh,pbs_ddp.sh) | any default for sbatch, such as SBATCH_ACCOUNT or SBATCH_PARTITION; set it before sbatch"
)
# shellcheck disable=SC2034 # MPI and LAUNCHER are read by the scripts
DRY_RUN='' BROADCAST='' MPI='' LAUNCHER=auto MAX_RESTARTS=0 SPARE_NODES=0 OPTIONS_GIVEN=() ARGUMENTS=() SIF_COPY=''

# parse_options SCRIPT [OPTION]... [TRAINER | SCRIPT.py | -m MODULE] [ARGUMENT]...
# SCRIPT is the name of the launch script, because Slurm runs a copy of it under another name.
parse_options() {
    local row option scripts help value name found
    SCRIPT=$1
    shift
    while [[ ${1:-} == -* && $1 != -m ]]; do
        [[ $1 != -h && $1 != --help ]] || { usage && exit; }
        found=''
        for row in "${OPTIONS[@]}"; do
            read_row "$row"
            [[ ${option%%=*} == "${1%%=*}" ]] || continue
            found=1
            script_has "$scripts" ||
                die "this script has no option ${1%%=*}; --help lists those that it has"
            value=1
            if [[ $option == *=* ]]; then
                value=${1#"${1%%=*}"} && value=${value#=}
                [[ -n $value && ($option != *=N || $value =~ ^(0|[1-9][0-9]{0,8})$) ]] || die "$1: write $option; --help explains it"
            elif [[ $1 == *=* ]]; then
                die "$1: $option takes no value"
            fi
            name=${option%%=*} && name=${name#--} && name=${name^^}
            printf -v "${name//-/_}" %s "$value"
        done
        [[ -n $found ]] || die "unknown option $1: a trainer's options come after its name; --help lists those of this script"
        OPTIONS_GIVEN+=("$1")
        shift
    done
    ARGUMENTS=("$@")
}

# read_row ROW: its columns, in the caller's variables
read_row() {
    IFS='|' read -r -d '' option scripts help <<<"$1" || true
    option=${option// /} scripts=${scripts// /}
    help=$(tr -s ' \n' ' ' <<<"$help")
    help=${help# }
}

# script_has PATTERN[,PATTERN]...: whether the name of the launch script is one of those
script_has() {
    [[ $SCRIPT == @(${1//,/|}) ]]
}

# print_rows WIDTH ROW...: print those of the script, with a first column of this width
print_rows() {
    local row option scripts help width=$1
    for row in "${@:2}"; do
        read_row "$row"
        script_has "$scripts" || continue
        printf '  %-*s' "$width" "$option"
        fold -s -w $((118 - width)) <<<"$help" | sed "s/ *\$//;2,\$s/^/$(printf '%*s' $((width + 2)) '')/"
    done
}

# The text of --help: the comment at the head of the script without its #SBATCH and #PBS lines, its options, and the settings.
usage() {
    sed -n '2,/^[^#]/{/^#\(SBATCH\|PBS\)/d;s/^# \{0,1\}//p}' "$0"
    echo 'Options, before the name of the trainer or script:'
    print_rows 18 "${OPTIONS[@]}"
    printf '\nSettings, from the environment (source launch/site.sh sets those of your site):\n'
    print_rows 26 "${SETTINGS[@]}"
    printf '\n%s\n' 'Start from the hpctrain folder, or from anywhere with HPCTRAIN_ROOT set to it. Paths are relative to where you start.'
    ! grep -q '^#SBATCH --requeue' "$0" ||
        echo 'A job of sbatch saves a checkpoint before its time limit, and Slurm requeues it: docs/results.md.'
}

# load_site: set the defaults of HPCTRAIN_SITE, or of the detected site, for variables that the user has not set
load_site() {
    export HPCTRAIN_ROOT=${HPCTRAIN_ROOT:-$ROOT}
    hpctrain_load_site "$ROOT" job "${HPCTRAIN_SITE:-}" || exit 2
}

# ---- the program ----

# set_program [TRAINER]: fill PROGRAM with Python's arguments for ARGUMENTS: a bundled trainer by its name, or the user's .py file or
# -m MODULE
set_program() {
    ((${#ARGUMENTS[@]})) || ARGUMENTS=("${1:-train_ddp}")
    case ${ARGUMENTS[0]} in
    *.py)
        [[ -r ${ARGUMENTS[0]} ]] || die "${ARGUMENTS[0]}: no such script in $PWD: paths are relative to where you submit"
        PROGRAM=("${ARGUMENTS[@]}")
        ;;
    -m)
        ((${#ARGUMENTS[@]} > 1)) || die '-m: give the name of a module after it, as for python -m'
        PROGRAM=("${ARGUMENTS[@]}")
        ;;
    python* | */python* | torchrun | accelerate | fabric | deepspeed | composer | mpirun | mpiexec | srun | horovodrun)
        die "${ARGUMENTS[0]}: this script starts Python and all ranks itself: write $(program_alone)"
        ;;
    *)
        PROGRAM=(-m hpctrain "${ARGUMENTS[@]}")
        # Otherwise python -m would import a token.py or random.py of the current folder in place of Python's own.
        export PYTHONSAFEPATH=1
        ;;
    esac
}

# program_alone: print the command line without the words of a launcher that ARGUMENTS has before its program
program_alone() {
    local index
    for index in "${!ARGUMENTS[@]}"; do
        if [[ ${ARGUMENTS[index]} == *.py || (${ARGUMENTS[index]} == -m && -n ${ARGUMENTS[index + 1]:-}) ]]; then
            echo "launch/$SCRIPT$(printf ' %q' "${ARGUMENTS[@]:index}")"
            return
        fi
    done
    echo "launch/$SCRIPT SCRIPT.py"
}

# ---- launch ----

# compose WORD...: fill COMMAND with the launcher's command line that runs the words in the image, once for each rank
compose() {
    local in_image=("${CONTAINER[@]}" ${SIF:+"${SIF_COPY:-$SIF}"} -- "$@")
    # Nobody can know this name before the folder is there.
    [[ -z ${HPCTRAIN_NODE_CONTAINER:-} ]] || HPCTRAIN_NODE_CONTAINER=/tmp/hpctrain-container-$JOB-$(random_hex)
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
    local name fabric=''
    for name in $(compgen -e); do
        [[ $name != @(NCCL|FI|UCX|GLOO)_* ]] || fabric+=" $name=${!name}"
    done
    say "site $HPCTRAIN_SITE, job $JOB${SLURM_RESTART_COUNT:+ (restart $SLURM_RESTART_COUNT)}," \
        "$(counted "$NODES" node) x $(counted "$TASKS" task) x $(counted "$THREADS" thread), $(counted "$GPUS" GPU) per node, on ${HOSTS[*]}"
    say "runtime $RUNTIME ($RUNTIME_VERSION), image $HPCTRAIN_IMAGE${DIGEST:+ $DIGEST}"
    say "launcher $LAUNCHER_TEXT, rendezvous $MASTER_ADDR:$MASTER_PORT"
    say "fabric variables:${fabric:- none}"
    say "began $(date -d "@${BEGAN::-3}.${BEGAN: -3}" +%FT%T.%3N), ready $(($(date +%s%3N) - BEGAN)) ms later"
    say "command:$(printf ' %q' "${COMMAND[@]}")"
}

# print_commands: print commands that start the same ranks from the shell of a job (--dry-run)
print_commands() {
    local name left_out=''
    printf 'cd %q\n' "$PWD"
    while read -r name; do
        if is_secret "$name"; then
            left_out+=" $name"
        else
            printf 'export %s=%q\n' "$name" "${!name}"
        fi
    done < <(forwarded_names)
    [[ -z $left_out ]] || printf '# not printed, because they may be secrets:%s\n' "$left_out"
    [[ -z $BROADCAST ]] || printf 'sbcast --compress=none %q %q\n' "$SIF" "$SIF_COPY"
    printf '%q ' "${COMMAND[@]}"
    printf '\n'
}

# set_command: fill COMMAND with what runs PROGRAM, and print the summary
set_command() {
    compose "${PYTHON[@]}" "${PROGRAM[@]}"
    ((${#USERS_VARIABLES[@]} == 0)) || COMMAND=(env "${USERS_VARIABLES[@]}" "${COMMAND[@]}")
    print_summary
}

# launch: print the summary and run the job. exec replaces this script, unless something is to do after the job: functions of
# CLEAN_UP, or in a batch job the decision whether it goes on.
launch() {
    local status=0
    [[ -z $BROADCAST ]] || SIF_COPY=${SLURM_TMPDIR:-/tmp}/hpctrain-$JOB-$(random_hex).sif
    set_command
    [[ -z $DRY_RUN ]] || { print_commands && exit; }
    [[ -z $BROADCAST ]] || broadcast_sif
    [[ -z $DIGEST_PENDING ]] || hash_in_background "$SIF"
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

broadcast_sif() {
    trap clean_up EXIT
    CLEAN_UP+=(remove_sif_copies)
    # A SIF is compressed already; slurm.conf may have Compression=lz4 (docs/scale.md). Not --force: others see the name in ps, and
    # would get the image into a file or link of theirs, which they can change.
    if sbcast --compress=none "$SIF" "$SIF_COPY"; then
        # With spare nodes other ranks may need it, after these have ended.
        ((SPARE_NODES)) || export HPCTRAIN_SIF_COPY=$SIF_COPY
        return
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
        conclude "$status" || status=$?
        rm -rf "$HPCTRAIN_CONTROL"
    fi
    [[ -z ${MPI_HINT:-} ]] || ((status == 0)) || say "$MPI_HINT"
    exit $status
}

# on_every_node COMMAND...: run this program on the nodes of the job that are left
on_every_node() {
    local count
    if [[ -n ${SLURM_JOB_ID:-} ]]; then
        count=$(nodes_left | wc -l)
        timeout "$WITHIN" srun --overlap --mem=0 --nodes="$count" --ntasks="$count" --quiet "$@"
    else
        "$@"
    fi
}
