# The command line of a launch script: options, --help, program. Sourced by launch/lib/main.sh.
# shellcheck shell=bash
# shellcheck disable=SC2034 # the variables in capitals are read by main.sh and its other parts
# shellcheck disable=SC2054 # commas within words

# Three words for each option: its name, the scripts that have it (patterns, separated by commas), its text of
# --help. =N stands for a number, another = for a word.
OPTIONS=(
    --dry-run '*'
    'print the commands, to paste into the shell of a job, and run nothing'

    --broadcast 'apptainer_*.sh,jupyter.sh'
    'first copy the SIF to the local disk of each node (sbcast): faster on many nodes'

    --mpi=HOW apptainer_mpi.sh
    'mpirun, or a PMI that srun offers (srun --mpi=list): pmix, pmi2, cray_shasta. Default: the PMI of the MPI
    library in the image if srun offers it, else, for Open MPI, mpirun. HPCTRAIN_MPI sets it for a site.'

    --launcher=HOW apptainer_horovod.sh
    'srun, mpirun or horovodrun. With srun and mpirun, a script of your own connects its ranks over MPI, and
    train_horovod over Gloo. With horovodrun both use Gloo, and the nodes need ssh without a password.
    Default: srun if it offers the PMI of the MPI library in the image, else mpirun.'

    --max-restarts=N apptainer_torchrun.sh
    'when a rank dies, restart all ranks, at most N times (default 0). The bundled trainers, and
    scripts of your own that do, load their last checkpoint.'

    --ranks-per-node=N '!(local.sh,jupyter.sh)'
    'start N ranks on each node, of those that the job has (--ntasks-per-node); together they have all CPUs'

    --hosts=NAME,NAME '!(local.sh,jupyter.sh)'
    'start ranks on these nodes of the job only; localhost is this one'

    --spare-nodes=N apptainer_ddp.sh,modules_ddp.sh,podman_hpc_ddp.sh,shifter_ddp.sh
    'keep N nodes of the job idle. When another node fails, the job goes on at once with one of them.
    Submit with sbatch --no-kill and N more --nodes'

    --port jupyter.sh
    'listen on a port of the node as well, for sites that close ssh to the nodes, and for PuTTY. Other users
    of the cluster reach it; they lack the token.'

    --help '*'
    'print this text'
)
# The values of those that were given, by name: OPTION[max-restarts]. An option without a value has 1.
declare -gA OPTION=()
OPTIONS_GIVEN=() ARGUMENTS=()

# list_names NAME...: as in "a, b or c"
list_names() {
    local text
    printf -v text ', %s' "$@"
    text=${text#, }
    printf %s "${text%, *} or ${text##*, }"
}

# Three words for each variable that the user may set, in the same way.
SETTINGS=(
    HPCTRAIN_IMAGE '!(modules_ddp.sh)'
    'the image: a SIF or a sandbox folder; for podman-hpc and shifter a name; for pyxis a .sqsh
    file, or a name'

    HPCTRAIN_FLAVOR '!(modules_ddp.sh)'
    'the flavor of the default image: hpctrain-FLAVOR.sif or hpctrain:FLAVOR (default cpu)'

    HPCTRAIN_RUNTIME '!(modules_ddp.sh,podman_hpc_ddp.sh,shifter_ddp.sh)'
    "the runtime: $(list_names "${RUNTIMES[@]}") (default apptainer)"

    HPCTRAIN_BIND '!(modules_ddp.sh,shifter_ddp.sh)'
    'folders below /opt, /var or /usr of the host to show in the image, separated by spaces; missing ones are
    skipped, and all other folders are there anyway'

    HPCTRAIN_PACKAGES '!(modules_ddp.sh)'
    'one folder, of your own packages on top of the image; see hpctrain add --help'

    HPCTRAIN_MODULES '*'
    'modules to load first, separated by spaces, such as apptainer; without a container
    such as cuda and pytorch'

    HPCTRAIN_PODMAN_MODULES '!(modules_ddp.sh,shifter_ddp.sh)'
    'for podman-hpc: its modules, separated by spaces, such as: gpu nccl'

    HPCTRAIN_SHIFTER_MODULES '!(modules_ddp.sh,podman_hpc_ddp.sh)'
    'for shifter: its modules, separated by commas, such as: gpu,nccl-plugin'

    HPCTRAIN_PYTHON_ENV '!(podman_hpc_ddp.sh,shifter_ddp.sh)'
    'without a container: the folder of a venv, or the name or folder of a conda environment'

    HPCTRAIN_MPI apptainer_mpi.sh,apptainer_horovod.sh
    'the --mpi of a site, where none is given'

    HPCTRAIN_INTERFACE apptainer_horovod.sh
    "for horovodrun: the network interface (default: that of the first node's address)"

    HPCTRAIN_LOGIN_HOST jupyter.sh
    'the name by which your own machine knows the login node, for the command in the log'

    HPCTRAIN_TASKS local.sh
    'the number of ranks (default: one per GPU, or one)'

    HPCTRAIN_REQUEUES '!(local.sh,jupyter.sh)'
    'how often a job is requeued after a fault (default 10)'

    HPCTRAIN_CONTINUES '!(local.sh,jupyter.sh)'
    'the ended job whose Trainers of Lightning go on'

    HPCTRAIN_CACHE '*'
    'the folder of caches (default: cache in SCRATCH, or without that in /tmp of each node)'

    HPCTRAIN_NODE_TIMEOUT '!(local.sh,pbs_ddp.sh)'
    'seconds after which Slurm has noticed a dead node (default: its SlurmdTimeout + 60)'

    HPCTRAIN_SITE '*'
    'the site whose defaults to use: a file of launch/sites (default: detected)'

    SBATCH_... '!(local.sh,pbs_ddp.sh)'
    'any default for sbatch, such as SBATCH_ACCOUNT or SBATCH_PARTITION; set it before sbatch'
)

# parse_options SCRIPT [OPTION]... [TRAINER | SCRIPT.py | -m MODULE] [ARGUMENT]...
# SCRIPT is the name of the launch script, because Slurm runs a copy of it under another name.
parse_options() {
    SCRIPT=$1
    shift
    while [[ ${1:-} == -* && $1 != -m && ! ($1 == -- && $SCRIPT == jupyter.sh) ]]; do
        [[ $1 != -h && $1 != --help ]] || { usage && exit; }
        parse_option "$1"
        OPTIONS_GIVEN+=("$1")
        shift
    done
    ARGUMENTS=("$@")
    refuse_copies
}

# parse_option WORD: write its value to OPTION
parse_option() {
    local row option='' name=${1%%=*} value=1
    for ((row = 0; row < ${#OPTIONS[@]}; row += 3)); do
        option=${OPTIONS[row]}
        [[ ${option%%=*} != "$name" ]] || break
    done
    [[ ${option%%=*} == "$name" ]] ||
        die "unknown option $1: a trainer's options come after its name; --help lists those of this script"
    script_is "${OPTIONS[row + 1]}" || die "this script has no option $name; --help lists those that it has"
    if [[ $option == *=* ]]; then
        value=${1#"$name"} && value=${value#=}
        [[ -n $value && ($option != *=N || $value =~ ^(0|[1-9][0-9]{0,8})$) ]] ||
            die "$1: write $option; --help explains it"
    elif [[ $1 == *=* ]]; then
        die "$1: $option takes no value"
    fi
    OPTION[${name#--}]=$value
}

# script_is PATTERN[,PATTERN]...: whether the name of the launch script is one of those
script_is() {
    [[ $SCRIPT == @(${1//,/|}) ]]
}

# The text of --help: the comment at the head of the script without #SBATCH and #PBS lines, options, settings.
usage() {
    sed -n '2,/^[^#]/{/^#\(SBATCH\|PBS\)/d;s/^# \{0,1\}//p}' "$0"
    echo 'Options, before the name of the trainer or script:'
    print_rows 20 "${OPTIONS[@]}"
    printf '\nSettings, from the environment (source launch/site.sh sets those of your site):\n'
    print_rows 26 "${SETTINGS[@]}"
    printf '\n%s %s\n' 'Start from the hpctrain folder, or from anywhere with HPCTRAIN_ROOT set to it.' \
        'Paths are relative to where you start.'
    ! grep -q '^#SBATCH --requeue' "$0" ||
        echo 'A job of sbatch saves a checkpoint before its time limit, and Slurm requeues it:' \
            'docs/guides/results.md.'
}

# print_rows WIDTH [NAME SCRIPTS TEXT]...: print the rows of this script; their first column has this width
print_rows() {
    local width=$1 indent
    printf -v indent '%*s' $((width + 2)) ''
    shift
    while (($#)); do
        if script_is "$2"; then
            printf '  %-*s' "$width" "$1"
            fold -s -w $((118 - width)) <<<"$(tr -s ' \n' ' ' <<<"$3")" | sed "s/ *\$//;2,\$s/^/$indent/"
        fi
        shift 3
    done
}

# set_program [TRAINER]: fill PROGRAM with Python's arguments: a bundled trainer, a .py file or -m MODULE
set_program() {
    ((${#ARGUMENTS[@]})) || ARGUMENTS=("${1:-train_ddp}")
    case ${ARGUMENTS[0]} in
    *.py)
        [[ -r ${ARGUMENTS[0]} ]] ||
            die "${ARGUMENTS[0]}: no such script in $PWD: paths are relative to where you submit"
        PROGRAM=("${ARGUMENTS[@]}")
        ;;
    -m)
        ((${#ARGUMENTS[@]} > 1)) || die '-m: give the name of a module after it, as for python -m'
        ! is_one_of "${ARGUMENTS[1]}" torch.distributed.run torch.distributed.launch 'accelerate.*' \
            'lightning.fabric*' 'deepspeed*' ||
            die "-m ${ARGUMENTS[1]}: this script starts all ranks itself: write $(program_alone 2)"
        PROGRAM=("${ARGUMENTS[@]}")
        ;;
    */* | python* | *.sh | bash | sh | torchrun | accelerate | fabric | deepspeed | composer | \
        mpirun | mpiexec | srun | horovodrun)
        die "${ARGUMENTS[0]}: this script starts Python and all ranks itself: write $(program_alone)"
        ;;
    *)
        check_command "${ARGUMENTS[0]}"
        PROGRAM=(-m hpctrain "${ARGUMENTS[@]}")
        # Otherwise python -m imports a token.py or random.py of the current folder instead of Python's.
        export PYTHONSAFEPATH=1
        ;;
    esac
}

# check_command NAME: die if hpctrain has no such command, before ranks start
check_command() {
    local names
    mapfile -t names <"$ROOT/launch/lib/commands.txt"
    is_one_of "$1" "${names[@]}" ||
        die "there is no command '$1': choose from $(list_names "${names[@]}"), or give a .py file"
}

# program_alone [FIRST]: print the command line without the words of a launcher that ARGUMENTS has before its
# program, which begins at word FIRST or later
program_alone() {
    local index word
    for ((index = ${1:-0}; index < ${#ARGUMENTS[@]}; index++)); do
        word=${ARGUMENTS[index]}
        [[ $word == *.py || ($word == -m && -n ${ARGUMENTS[index + 1]:-}) ]] || continue
        echo "launch/$SCRIPT$(printf ' %q' "${ARGUMENTS[@]:index}")"
        return 0
    done
    echo "launch/$SCRIPT SCRIPT.py"
}
