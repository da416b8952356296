# Functions of the launch scripts. Sourced by them on the first node of a job, never run.
#
# A script calls them in this order; each fills the variables in capitals that the later ones use:
#   options       what stands before the trainer's name            DRY_RUN BROADCAST MPI LAUNCHER MAX_RESTARTS ARGUMENTS
#   slurm_job     what the scheduler gave (or pbs_job, local_job)  JOB HOSTS NODES TASKS THREADS GPUS MASTER_ADDR MASTER_PORT
#   runtime       how to get into the image                        CONTAINER
#   trainer       what to run in there                             COMMAND
#   by_srun       what starts it (or by_torchrun, by_mpi, ...)     LAUNCH
#   go            say all of that, and do it
# Commands are arrays and never strings that a shell would split again, so a user's arguments stay the words that they are.
# shellcheck shell=bash

BEGAN=$EPOCHREALTIME
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() {
    printf 'hpctrain: %s\n' "$*"
}

die() {
    printf 'hpctrain: error: %s\n' "$*" >&2
    exit 2
}

# The text of --help is the comment at the head of the script, without its #SBATCH and #PBS lines, and what all share.
usage() {
    sed -n '2,/^[^#]/{/^#\(SBATCH\|PBS\)/d;s/^# \{0,1\}//p}' "$0"
    cat <<'END'
Options, before the name of the trainer:
  --dry-run     say what would be done, as commands that can be pasted into the job's shell, and do nothing
  --broadcast   copy the SIF to the disk of each node first (sbcast), for start-up at scale
  --help        this text

Settings, from the environment (source a file of launch/sites for your site's):
  HPCTRAIN_IMAGE    the image: a SIF or a sandbox folder; for podman-hpc and shifter a name
  HPCTRAIN_RUNTIME  apptainer, podman-hpc, shifter or none, instead of the apptainer of the apptainer_* scripts
  HPCTRAIN_BIND     folders to show in the image beside the home and the one you submit from, those that exist
  HPCTRAIN_PACKAGES folder of packages of your own on top of the image; hpctrain add --help
  HPCTRAIN_MODULES  modules to load first, such as apptainer, or without a container cuda and pytorch
  HPCTRAIN_ENV      without a container: folder of a venv, or name or folder of a conda environment
  SBATCH_...        any default for sbatch, such as SBATCH_ACCOUNT or SBATCH_PARTITION

Submit from the hpctrain folder, or from anywhere with HPCTRAIN_ROOT set to it; paths are taken from where you submit.
END
}

# options [OPTION]... [TRAINER | SCRIPT.py] [ARGUMENT]...
options() {
    DRY_RUN='' BROADCAST='' MPI=${HPCTRAIN_MPI:-auto} LAUNCHER=auto MAX_RESTARTS=0 ARGUMENTS=()
    [[ -n ${HPCTRAIN_SITE:-} ]] || source "$ROOT/launch/sites/generic.env"
    while [[ ${1:-} == -* ]]; do
        # shellcheck disable=SC2034 # LAUNCHER is read by apptainer_horovod.sh
        case $1 in
        -h | --help) usage && exit ;;
        --dry-run) DRY_RUN=1 ;;
        --broadcast) BROADCAST=1 ;;
        --mpi=?*) MPI=${1#*=} ;;
        --launcher=?*) LAUNCHER=${1#*=} ;;
        --max-restarts=[0-9]*) MAX_RESTARTS=${1#*=} ;;
        *) die "unknown option $1: a trainer's options come after its name; --help lists those of this script" ;;
        esac
        # An option that this script does not mention in its head is for another one.
        [[ $(usage) == *"${1%%=*}"* ]] || die "this script has no option ${1%%=*}; --help lists those that it has"
        shift
    done
    ARGUMENTS=("$@")
}

# ---- the job: what the scheduler gave ----

not_shared() {
    die "$1, where you submitted, is not on $(hostname): submit from a folder that all nodes share"
}

# planned KIND NODES TASKS: for a dry run outside of any job, what the #KIND lines of the script ask for under these two names
planned() {
    say "no job: the numbers are those of the #$1 lines of $0, and the names of the nodes are made up"
    JOB=0
    mapfile -t HOSTS < <(seq -f node%.0f "$(sed -n "s/^#$1 .*$2=\([0-9]*\).*/\1/p" "$0")")
    TASKS=$(sed -n "s/^#$1 .*$3=\([0-9]*\).*/\1/p" "$0")
}

# A Slurm job, by sbatch or in the shell of salloc.
slurm_job() {
    local spread
    if [[ -n ${SLURM_JOB_ID:-} ]]; then
        cd "${SLURM_SUBMIT_DIR:?}" || not_shared "$SLURM_SUBMIT_DIR"
        JOB=$SLURM_JOB_ID
        # Here on the host, because there is no scontrol inside a container.
        mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
        # Given to srun again, because without it Slurm packs the first node full: 3 + 1 tasks on two nodes of three slots.
        spread=${SLURM_NTASKS_PER_NODE:-${SLURM_TASKS_PER_NODE:-1}}
        TASKS=${spread%%(*}
        [[ $TASKS =~ ^[0-9]+$ ]] ||
            die "Slurm would put $spread tasks on the nodes, not the same number on each: give --ntasks-per-node"
    elif [[ -n $DRY_RUN ]]; then
        planned SBATCH --nodes --ntasks-per-node
    else
        die "this is no Slurm job: submit it by sbatch $0, or run it inside salloc"
    fi
    THREADS=${SLURM_CPUS_PER_TASK:-1}
    GPUS=${SLURM_GPUS_ON_NODE:-0}
    a_job
}

# A PBS job: PBS_NODEFILE names each host once for every slot (mpiprocs of the select line).
pbs_job() {
    if [[ -n ${PBS_NODEFILE:-} ]]; then
        cd "${PBS_O_WORKDIR:?}" || not_shared "$PBS_O_WORKDIR"
        [[ -r $PBS_NODEFILE ]] || die "$PBS_NODEFILE, the PBS_NODEFILE of this job, cannot be read on $(hostname)"
        JOB=${PBS_JOBID%%.*}
        mapfile -t HOSTS < <(awk '!seen[$1]++ { print $1 }' "$PBS_NODEFILE")
        TASKS=$(grep -c . "$PBS_NODEFILE")
        ((TASKS % ${#HOSTS[@]} == 0)) ||
            die "PBS gave ${#HOSTS[@]} nodes $TASKS slots, not the same number each: give select=N:mpiprocs=M (or nodes=N:ppn=M)"
        TASKS=$((TASKS / ${#HOSTS[@]}))
    elif [[ -n $DRY_RUN ]]; then
        planned PBS select mpiprocs
    else
        die "this is no PBS job: submit it by qsub $0, or run it inside qsub -I"
    fi
    THREADS=${NCPUS:-${OMP_NUM_THREADS:-1}}
    GPUS=$(visible_gpus)
    a_job
}

# This machine alone: a rank for each GPU, or as many as you say.
local_job() {
    JOB=$$
    HOSTS=(localhost)
    GPUS=$(visible_gpus)
    TASKS=${HPCTRAIN_TASKS:-$((GPUS > 0 ? GPUS : 1))}
    [[ $TASKS =~ ^[1-9][0-9]*$ ]] || die "HPCTRAIN_TASKS is '$TASKS' and should be a number of ranks"
    THREADS=$(($(nproc) / TASKS > 0 ? $(nproc) / TASKS : 1))
    a_job
}

visible_gpus() {
    { nvidia-smi --list-gpus 2>/dev/null || true; } | grep -c GPU || true
}

# a_job: what every kind of job has: the size that each rank insists on, and where the ranks meet.
a_job() {
    NODES=${#HOSTS[@]}
    ((GPUS == 0 || GPUS == TASKS)) || say "warning: $GPUS GPUs but $TASKS tasks on each node: give as many tasks (--ntasks-per-node)"
    export HPCTRAIN_JOB=$JOB HPCTRAIN_WORLD_SIZE=$((NODES * TASKS)) HPCTRAIN_TASKS_PER_NODE=$TASKS
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$THREADS}
    export MASTER_ADDR=${MASTER_ADDR:-${HOSTS[0]}}
    # Another port for each job, so that two on a node do not collide, and for each restart, whose old port may still
    # linger. Below 32768, where the kernel begins to hand out ports of its own.
    export MASTER_PORT=${MASTER_PORT:-$((20000 + (JOB * 8 + ${SLURM_RESTART_COUNT:-0}) % 12000))}
    # torch warns about every address that has no name; what matters comes as an error.
    export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}
    export PYTHONNOUSERSITE=1
    # Set to nothing, so that a site's file does not set it: NCCL would look for a network of no name, and give up.
    [[ -n ${NCCL_NET-unset} ]] || unset NCCL_NET
}

# ---- the runtime: how a task gets into the image ----

# runtime apptainer|podman-hpc|shifter|none
runtime() {
    RUNTIME=$1
    CONTAINER=()
    DIGEST=''
    load_modules
    if [[ -n ${HPCTRAIN_PACKAGES:-} ]]; then
        [[ $RUNTIME != none ]] || die "HPCTRAIN_PACKAGES is for images: unset it, and pip install into the environment itself"
        [[ -d $HPCTRAIN_PACKAGES ]] ||
            die "HPCTRAIN_PACKAGES=$HPCTRAIN_PACKAGES is no folder on $(hostname): hpctrain add, in the image, makes it"
        HPCTRAIN_PACKAGES=$(cd "$HPCTRAIN_PACKAGES" && pwd -P) # the name that `binds` gives it
    fi
    case $RUNTIME in
    apptainer) apptainer_command ;;
    podman-hpc) podman_hpc_command ;;
    shifter) shifter_command ;;
    none) environment ;;
    *) die "HPCTRAIN_RUNTIME is '$RUNTIME': choose apptainer, podman-hpc, shifter or none" ;;
    esac
    [[ -z $DIGEST ]] || export HPCTRAIN_IMAGE_DIGEST=$DIGEST
    [[ -z $BROADCAST || $RUNTIME:${SLURM_JOB_ID:-$DRY_RUN} == apptainer:?* ]] ||
        die "--broadcast copies a SIF to the nodes of a Slurm job, and this is ${SLURM_JOB_ID:+one with }$RUNTIME: leave it out"
}

load_modules() {
    local name
    [[ -n ${HPCTRAIN_MODULES:-} ]] || return 0
    type module >/dev/null 2>&1 ||
        die "HPCTRAIN_MODULES is '$HPCTRAIN_MODULES', but there is no module command here: submit from a login shell, or unset it"
    set +u # the scripts of modules read variables that are not set
    for name in $HPCTRAIN_MODULES; do
        # module returns 0 for a module that does not exist; what it says then goes to stderr.
        module load "$name" || die "module load $name failed: module avail lists what there is"
        [[ :${LOADEDMODULES:-}: == *":${name%%/*}"[:/]* ]] || die "module load $name loaded nothing: module avail lists what there is"
    done
    set -u
}

# binds: the folders of the host that the image is to show, those that exist, each once
binds() {
    local path
    for path in "$PWD" "$ROOT" "${HPCTRAIN_PACKAGES:-}" ${HPCTRAIN_BIND:-}; do
        [[ ! -d $path ]] || (cd "$path" && pwd -P)
    done | sort -u
}

# A PYTHONPATH that a module of the host has set would put the host's packages before the image's.
# One for the inside is APPTAINERENV_PYTHONPATH.
forget_host_python() {
    unset PYTHONPATH PYTHONHOME
}

apptainer_command() {
    local program path
    program=$(command -v apptainer || command -v singularity) ||
        die "neither apptainer nor singularity is on the PATH of $(hostname): load your site's module (HPCTRAIN_MODULES)"
    : "${HPCTRAIN_IMAGE:=$ROOT/hpctrain-$HPCTRAIN_FLAVOR.sif}"
    [[ -e $HPCTRAIN_IMAGE ]] || die "$HPCTRAIN_IMAGE: no such image: run make sif, or set HPCTRAIN_IMAGE to yours"
    export HPCTRAIN_IMAGE
    if [[ -f $HPCTRAIN_IMAGE ]]; then
        DIGEST=sha256:$(sha256sum "$HPCTRAIN_IMAGE" | cut -d ' ' -f 1)
    fi
    RUNTIME_VERSION=$("$program" --version)
    CONTAINER=("${program##*/}" exec)
    # --nv has to come before the image; without a GPU it says nothing and does nothing, so only where one was given.
    ((GPUS == 0)) || CONTAINER+=(--nv)
    while read -r path; do
        CONTAINER+=(--bind "$path")
    done < <(binds)
    CONTAINER+=("$HPCTRAIN_IMAGE")
    forget_host_python
}

shifter_command() {
    command -v shifter >/dev/null || die "there is no shifter on the PATH of $(hostname): shifter_ddp.sh is for sites that have it"
    : "${HPCTRAIN_IMAGE:=hpctrain:$HPCTRAIN_FLAVOR}"
    DIGEST=$(shifterimg lookup "$HPCTRAIN_IMAGE" 2>/dev/null) ||
        die "$HPCTRAIN_IMAGE: shifter has no such image: shifterimg pull it, or set HPCTRAIN_IMAGE (shifterimg images lists yours)"
    export HPCTRAIN_IMAGE
    RUNTIME_VERSION=shifter
    # The home and the file systems of the site are there as they are; no --volume needed.
    CONTAINER=(shifter "--image=$HPCTRAIN_IMAGE" ${HPCTRAIN_SHIFTER_MODULES:+"--module=$HPCTRAIN_SHIFTER_MODULES"})
    forget_host_python
}

# One container on each node, which all tasks of the node enter: with a container each, MPI's ranks would not find each other.
podman_hpc_command() {
    local path name module
    command -v podman-hpc >/dev/null || die "there is no podman-hpc on the PATH of $(hostname): podman_hpc_ddp.sh is for sites that have it"
    : "${HPCTRAIN_IMAGE:=hpctrain:$HPCTRAIN_FLAVOR}"
    export HPCTRAIN_IMAGE
    DIGEST=$(podman-hpc images --format '{{.Digest}}' "$HPCTRAIN_IMAGE" 2>&1 | tail -n 1) || true
    [[ $DIGEST == sha256:* ]] ||
        die "$HPCTRAIN_IMAGE: podman-hpc has no such image on $(hostname): podman-hpc pull it" \
            "(after podman-hpc build or load: podman-hpc migrate), or set HPCTRAIN_IMAGE"
    # an image that was loaded as well as pulled has two: this is the one by which it was asked for, and found
    [[ $HPCTRAIN_IMAGE != *@* ]] || DIGEST=${HPCTRAIN_IMAGE#*@}
    RUNTIME_VERSION=$(podman --version)
    # keep-id: files in shared folders stay the user's own, and PMIx knows its caller. /tmp: where PMIx meets.
    CONTAINER=(podman-hpc shared-run --label "hpctrain.job=$JOB" --userns=keep-id --network=host --ipc=host
        --volume /tmp:/tmp --volume "$HOME:$HOME" --workdir "$PWD")
    for module in ${HPCTRAIN_PODMAN_MODULES:-}; do
        CONTAINER+=("--$module")
    done
    while read -r path; do
        [[ $path == "$HOME" || $path == "$HOME"/* ]] || CONTAINER+=(--volume "$path:$path")
    done < <(binds)
    forget_host_python
    # Not --env-host, which would replace the PATH of the image.
    for name in HOME "${INSIDE[@]}"; do
        CONTAINER+=(--env "$name")
    done
    CONTAINER+=("$HPCTRAIN_IMAGE")
}

# No container: what modules, a venv or a conda environment put on the PATH.
environment() {
    local env=${HPCTRAIN_ENV:-}
    if [[ -n $env && -r $env/bin/activate && ! -d $env/conda-meta ]]; then
        # shellcheck source=/dev/null
        source "$env/bin/activate"
    elif [[ -n $env ]]; then
        command -v conda >/dev/null ||
            die "HPCTRAIN_ENV=$env is no venv, and there is no conda on the PATH: load conda's module (HPCTRAIN_MODULES)"
        set +u # conda's scripts read variables that are not set
        eval "$(conda shell.bash hook)"
        conda activate "$env" || die "conda activate $env failed: conda env list shows those that there are"
        set -u
    fi
    python -c 'import torch' 2>/dev/null ||
        die "$(command -v python || echo python) on $(hostname) has no torch: set HPCTRAIN_MODULES or HPCTRAIN_ENV to what has it"
    RUNTIME_VERSION=$(python --version)
    HPCTRAIN_IMAGE=$(command -v python)
    # A site's PyTorch has no hpctrain in it; what it has is not hidden by this folder, where nothing else lies.
    export PYTHONPATH=$ROOT/src${PYTHONPATH:+:$PYTHONPATH}
}

# ---- the command that runs in there ----

# trainer: the words of ARGUMENTS as a command: a bundled trainer by its name, or a .py file of the user's
trainer() {
    ((${#ARGUMENTS[@]})) || ARGUMENTS=(train_ddp)
    case ${ARGUMENTS[0]} in
    *.py)
        [[ -r ${ARGUMENTS[0]} ]] || die "${ARGUMENTS[0]}: no such script under $PWD: the path is taken from where you submit"
        COMMAND=(python "${ARGUMENTS[@]}")
        ;;
    *) COMMAND=(python -m hpctrain "${ARGUMENTS[@]}") ;;
    esac
}

# ---- the launcher: what starts a copy of the command for each task ----

# with_srun TASKS_PER_NODE [OPTION]...: the common part. When one task fails the others are killed at once, when one ends
# early the others have 60 s.
with_srun() {
    LAUNCH=(srun --nodes="$NODES" --ntasks-per-node="$1" --cpus-per-task=$((THREADS * TASKS / $1))
        --kill-on-bad-exit=1 --wait=60 --label "${@:2}")
}

by_srun() {
    LAUNCHED_BY='srun, a task for each rank'
    with_srun "$TASKS"
    LAUNCH+=("$ROOT/launch/task.sh" slurm)
}

# One torchrun on each node, which starts the ranks there and starts all of them anew when one dies.
by_torchrun() {
    local meet
    LAUNCHED_BY="torchrun on each node, at most $MAX_RESTARTS restarts"
    if [[ ${HOSTS[0]} == localhost ]]; then
        LAUNCH=("$ROOT/launch/task.sh" none)
        meet=(--standalone)
    else
        with_srun 1
        LAUNCH+=("$ROOT/launch/task.sh" none)
        meet=(--rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" --rdzv-id="$JOB")
        # Without it the workers share the store of the rendezvous, and no restart over two nodes recovered (torch 2.13).
        export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    fi
    # COMMAND begins with python, which torchrun puts there itself.
    COMMAND=(python -m torch.distributed.run --nnodes="$NODES" --nproc-per-node="$TASKS" --max-restarts="$MAX_RESTARTS"
        "${meet[@]}" "${COMMAND[@]:1}")
}

# by_mpi HOW: mpirun of the host, or srun with that PMI; auto: with the one that the MPI library in there speaks
by_mpi() {
    local how=$1 library offered
    library=$("${CONTAINER[@]}" python -c '
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(*MPI.Get_library_version().split(",")[0].splitlines()[0].split())' 2>&1 | tail -n 1) || true
    offered=$(srun --mpi=list 2>&1 | tr -s '\n\t ' ' ' || true)
    if [[ $how == auto ]]; then
        case "$library:$offered" in
        "Open MPI"*\ pmix*) how=pmix ;;
        *MPICH*\ cray_shasta\ *) how=$([[ -e /opt/cray ]] && echo cray_shasta || echo pmi2) ;; # listed without a Cray, too
        *MPICH*\ pmi2\ * | Intel*\ pmi2\ *) how=pmi2 ;;
        "Open MPI"*) how=mpirun ;;
        *) die "no MPI library answers in $HPCTRAIN_IMAGE ($library): take another image, or a script that needs no MPI" ;;
        esac
    fi
    if [[ $how == mpirun ]]; then
        by_mpirun
    else
        [[ " $offered " == *" $how "* || " $offered " == *" ${how}_v"* ]] ||
            die "srun here does not speak --mpi=$how; it offers: ${offered##*are... }"
        LAUNCHED_BY="srun --mpi=$how for $library"
        with_srun "$TASKS" --mpi="$how"
        LAUNCH+=("$ROOT/launch/task.sh" slurm)
    fi
    export HPCTRAIN_MPI_LIBRARY=$library
    [[ -n $DRY_RUN ]] || one_world "$library"
}

by_mpirun() {
    local name version
    command -v mpirun >/dev/null || die "there is no mpirun on the PATH of $(hostname): load an Open MPI module (HPCTRAIN_MODULES)"
    version=$(mpirun --version 2>&1 | head -n 1) || true
    [[ $version == *"Open MPI"* || $version == *OpenRTE* ]] ||
        die "$(command -v mpirun) is not Open MPI's, whose options this script uses: load an Open MPI module, or take srun"
    LAUNCHED_BY="mpirun, $version"
    LAUNCH=(mpirun -np $((NODES * TASKS)) --map-by "ppr:$TASKS:node" --bind-to none)
    [[ -z ${PBS_NODEFILE:-} ]] || LAUNCH+=(--hostfile "$PBS_NODEFILE")
    while read -r name; do
        LAUNCH+=(-x "$name")
    done < <(forwarded)
    LAUNCH+=("$ROOT/launch/task.sh" mpi)
}

# Variables that matter inside the image; apptainer and shifter show all of them there, podman-hpc these.
INSIDE=('CUDA_*' 'FI_*' 'GLOO_*' 'GROUP_*' 'HF_*' 'HOROVOD_*' 'HPCTRAIN_*' 'MASTER_*' MPLCONFIGDIR 'NCCL_*' 'OMP_*' 'OMPI_*' 'PBS_*'
    'PMI_*' 'PMIX_*' 'PYTHON*' RANK LOCAL_RANK NODE_RANK WORLD_SIZE LOCAL_WORLD_SIZE SCRATCH 'SLINGSHOT_*' 'SLURM_*' SQUASH_DIR
    'TORCH*' 'UCX_*')

# forwarded: the names of the variables that a task needs and mpirun does not take to the other nodes
forwarded() {
    local name pattern
    for name in $(compgen -e); do
        for pattern in "${INSIDE[@]}" PATH LD_LIBRARY_PATH 'APPTAINER*' 'SINGULARITY*'; do
            # shellcheck disable=SC2053 # a pattern
            [[ $name == $pattern ]] || continue
            # What a launcher says to one task is not for the others.
            case $name in
            SLURM_JOB_ID | SLURM_ARRAY_* | SLURM_RESTART_COUNT) echo "$name" ;;
            SLINGSHOT_* | SLURM_* | OMPI_* | PMI_* | PMIX_* | *RANK) ;;
            *) echo "$name" ;;
            esac
            break
        done
    done
}

# one_world LIBRARY: see that MPI really gives one world of all ranks, before the long job: a launcher and a library that do
# not understand each other give N worlds of one rank each, which run, and end with exit status 0.
one_world() {
    local status=0 output
    output=$(timeout 60 "${LAUNCH[@]}" "${CONTAINER[@]}" -- python -c '
import os
from mpi4py import MPI
size, wanted = MPI.COMM_WORLD.size, int(os.environ["HPCTRAIN_WORLD_SIZE"])
raise SystemExit(0 if size == wanted else f"MPI: {size} of {wanted}")' 2>&1) || status=$?
    if ((status != 0)); then
        printf '%s\n' "$output" | tail -n 8 >&2
        case $output in
        *"MPI: 1 of"*)
            die "$HPCTRAIN_WORLD_SIZE ranks all say rank 0 of 1: $1 does not speak the PMI of ${LAUNCHED_BY%% for *}:" \
                "try another --mpi= (srun --mpi=list shows them; or mpirun)"
            ;;
        *)
            die "MPI does not start ($1 by ${LAUNCHED_BY%% for *}, exit status $status; its last words are above):" \
                "try another --mpi= (srun --mpi=list shows them; or mpirun)"
            ;;
        esac
    fi
}

# horovodrun in the image of the first node; to the other nodes it goes by ssh, whose far end is not in a container.
by_horovodrun() {
    local places
    [[ -z $BROADCAST ]] || die "--broadcast does not go with horovodrun: take --launcher=srun or mpirun"
    LAUNCHED_BY='horovodrun over ssh'
    places=$(printf "%s:$TASKS," "${HOSTS[@]}")
    # It takes what comes after its own options for options of its own where it can (--network=host), so the command goes
    # to the ranks as a variable, each word quoted.
    HPCTRAIN_COMMAND=$(printf '%q ' "${CONTAINER[@]}" -- "${COMMAND[@]}")
    export HPCTRAIN_COMMAND
    # --network-interface, because it would look for common ones by running Python on the bare nodes.
    LAUNCH=("$ROOT/launch/task.sh" none "${CONTAINER[@]}" -- horovodrun -np $((NODES * TASKS)) -H "${places%,}" --gloo
        --network-interface "${HPCTRAIN_INTERFACE:-$(interface)}" "$ROOT/launch/task.sh" horovodrun)
    CONTAINER=() COMMAND=()
}

# interface: the network interface of this node by which the others reach it
interface() {
    local address
    address=$(getent ahostsv4 "$MASTER_ADDR" | awk '{ print $1; exit }')
    ip -o -4 address show | awk -v a="$address" 'index($4, a "/") == 1 { print $2; exit }'
}

# ---- and go ----

# resolved: what this job will do, before it does it
resolved() {
    say "site $HPCTRAIN_SITE, job $JOB${SLURM_RESTART_COUNT:+ (restart $SLURM_RESTART_COUNT)}," \
        "$NODES nodes x $TASKS tasks x $THREADS threads, $GPUS GPUs a node, on ${HOSTS[*]}"
    say "runtime $RUNTIME ($RUNTIME_VERSION), image $HPCTRAIN_IMAGE $DIGEST"
    say "rendezvous $MASTER_ADDR:$MASTER_PORT, by $LAUNCHED_BY"
    say "fabric variables: $(env | grep -E '^(NCCL|FI|UCX|GLOO)_' | sort | tr '\n' ' ' || echo none)"
    say "began $(date -d "@$BEGAN" +%FT%T.%3N), ready $(((${EPOCHREALTIME//[.,]/} - ${BEGAN//[.,]/}) / 1000)) ms later"
    say "command:$(printf ' %q' "${LAUNCH[@]}" "${CONTAINER[@]}" -- "${COMMAND[@]}")"
}

go() {
    local name status=0 copy=${SLURM_TMPDIR:-/tmp}/hpctrain-$JOB.sif
    [[ -z $BROADCAST ]] || CONTAINER[-1]=$copy
    resolved
    if [[ -n $DRY_RUN ]]; then
        printf 'cd %q\n' "$PWD"
        while read -r name; do
            printf 'export %s=%q\n' "$name" "${!name}"
        done < <(forwarded)
        [[ -z $BROADCAST ]] || printf 'sbcast --force %q %q\n' "$HPCTRAIN_IMAGE" "$copy"
        printf '%q ' "${LAUNCH[@]}" "${CONTAINER[@]}" -- "${COMMAND[@]}"
        printf '\n'
        exit
    fi
    # Where something is left to clean up, this shell has to outlive the job's step.
    case $RUNTIME:$LAUNCHED_BY:$BROADCAST in
    podman-hpc:*:* | *:horovodrun*:*) trap clean_up EXIT ;;
    *:*:1)
        # shellcheck disable=SC2064 # the value of now
        trap "on_every_node rm -f '$copy'" EXIT
        sbcast --force "$HPCTRAIN_IMAGE" "$copy" ||
            die "sbcast could not copy $HPCTRAIN_IMAGE to $copy on every node: is there room?"
        ;;
    *) exec "${LAUNCH[@]}" "${CONTAINER[@]}" -- "${COMMAND[@]}" ;;
    esac
    "${LAUNCH[@]}" "${CONTAINER[@]}" -- "${COMMAND[@]}" || status=$?
    exit $status
}

on_every_node() {
    srun --overlap --mem=0 --nodes="$NODES" --ntasks="$NODES" --quiet "$@"
}

# clean_up: when a rank has failed, end what the launcher could not: what runs in podman-hpc's containers goes on when srun ends
# its clients, and what horovodrun started by ssh goes on when the connection ends
clean_up() {
    local status=$?
    # shellcheck disable=SC2016 # the shells on the nodes expand them
    ((status == 0)) || on_every_node bash -c '
        [[ $1 != podman-hpc ]] || podman-hpc rm --force --time 0 --filter "label=hpctrain.job=$HPCTRAIN_JOB" >/dev/null
        for process in /proc/[0-9]*; do
            if grep -qsz "^HOROVOD_RANK=" "$process/environ" && grep -qszx "HPCTRAIN_JOB=$HPCTRAIN_JOB" "$process/environ"; then
                kill -KILL "${process#/proc/}" 2>/dev/null
            fi
        done
        true' - "$RUNTIME" || true
    exit $status
}
