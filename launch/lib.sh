# Functions of the launch scripts. Sourced by them on the first node of a job, never run.
# shellcheck shell=bash

say() {
    printf 'hpctrain: %s\n' "$*"
}

die() {
    printf 'hpctrain: error: %s\n' "$*" >&2
    exit 2
}

# The text of --help is the comment at the head of the script, without its #SBATCH lines.
usage() {
    sed -n '2,/^[^#]/{/^#SBATCH/d;s/^# \{0,1\}//p}' "$0"
}

# trainer_command [TRAINER | SCRIPT.py] [ARGUMENT]...: put the command that runs inside the container into COMMAND.
# The arguments stay the words that they are: an array and "$@", never a string that a shell splits again.
trainer_command() {
    case ${1:-train_ddp} in
    *.py)
        [[ -r $1 ]] || die "$1: no such script under $PWD: the path is taken from where you submit"
        COMMAND=(python "$@")
        ;;
    -*) die "unknown option $1: first the name of a trainer or a .py file, then its options; --help shows how" ;;
    *) COMMAND=(hpctrain "${@:-train_ddp}") ;;
    esac
}

# slurm_job: what Slurm gave this job, in NODES, TASKS_PER_NODE and THREADS; every rank refuses another world size.
slurm_job() {
    [[ -n ${SLURM_JOB_ID:-} ]] || die "this is no Slurm job: submit it by sbatch $0, or run it inside salloc"
    NODES=$SLURM_JOB_NUM_NODES
    # Given to srun again, because without it Slurm packs the first node full: 3 + 1 tasks on two nodes of three slots.
    TASKS_PER_NODE=${SLURM_NTASKS_PER_NODE:-1}
    THREADS=${SLURM_CPUS_PER_TASK:-1}
    export HPCTRAIN_WORLD_SIZE=$((NODES * TASKS_PER_NODE))
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$THREADS}
}

# rendezvous: where the ranks meet. Resolved here on the host, because there is no scontrol inside a container.
rendezvous() {
    local first
    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    export MASTER_ADDR=${MASTER_ADDR:-$first}
    # Another port for each job, so that two on a node do not collide, and for each restart, whose old port may still
    # linger. Below 32768, where the kernel begins to hand out ports of its own.
    export MASTER_PORT=${MASTER_PORT:-$((20000 + (SLURM_JOB_ID * 8 + ${SLURM_RESTART_COUNT:-0}) % 12000))}
}

# apptainer_command: put the command that enters the image into CONTAINER, and the digest of the image into the environment.
apptainer_command() {
    local runtime path
    runtime=$(command -v apptainer || command -v singularity) ||
        die "neither apptainer nor singularity is on the PATH of $(hostname): load the module of your site before sbatch"
    [[ -e $HPCTRAIN_IMAGE ]] || die "$HPCTRAIN_IMAGE: no such image: run make sif, or set HPCTRAIN_IMAGE to yours"
    CONTAINER=("${runtime##*/}" exec)
    # --nv has to come before the image; without a GPU it says nothing and does nothing, so only where one was given.
    [[ -z ${SLURM_GPUS_ON_NODE:-} ]] || CONTAINER+=(--nv)
    for path in "$PWD" $HPCTRAIN_BIND; do
        [[ ! -d $path ]] || CONTAINER+=(--bind "$path")
    done
    CONTAINER+=("$HPCTRAIN_IMAGE")
    if [[ -f $HPCTRAIN_IMAGE ]]; then
        HPCTRAIN_IMAGE_DIGEST=sha256:$(sha256sum "$HPCTRAIN_IMAGE" | cut -d ' ' -f 1)
        export HPCTRAIN_IMAGE_DIGEST
    fi
    # A PYTHONPATH that a module of the host has set would put the host's packages before the image's.
    # One for the inside is APPTAINERENV_PYTHONPATH.
    unset PYTHONPATH PYTHONHOME
    export PYTHONNOUSERSITE=1
    # torch warns about every address that has no name; what matters comes as an error.
    export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}
}

# resolved: say what this job will do before it does it.
resolved() {
    say "site $HPCTRAIN_SITE, job $SLURM_JOB_ID${SLURM_RESTART_COUNT:+ (restart $SLURM_RESTART_COUNT)}," \
        "$NODES nodes x $TASKS_PER_NODE tasks x $OMP_NUM_THREADS threads on $SLURM_JOB_NODELIST"
    say "image $HPCTRAIN_IMAGE ${HPCTRAIN_IMAGE_DIGEST:-}, $("${CONTAINER[0]}" --version)"
    say "rendezvous $MASTER_ADDR:$MASTER_PORT"
    say "command:$(printf ' %q' "${CONTAINER[@]}" "${COMMAND[@]}")"
}

# run_tasks COMMAND...: one copy of the command for each task, on all nodes; ends as the job ends.
# When one task fails the others are killed at once (--kill-on-bad-exit), when one ends early they have 60 s.
run_tasks() {
    # Plain PyTorch scripts look for torchrun's names. The text between the quotes is constant, for each task's own shell
    # to expand; the command comes after it as words of its own.
    export WORLD_SIZE=$HPCTRAIN_WORLD_SIZE LOCAL_WORLD_SIZE=$TASKS_PER_NODE
    # shellcheck disable=SC2016
    exec srun --nodes="$NODES" --ntasks-per-node="$TASKS_PER_NODE" --cpus-per-task="$THREADS" \
        --kill-on-bad-exit=1 --wait=60 --label \
        bash -c '
            export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID NODE_RANK=$SLURM_NODEID
            command -v "$1" >/dev/null || {
                echo "hpctrain: error: rank $RANK: there is no $1 on the PATH of $(hostname): load its module before sbatch" >&2
                exit 127
            }
            exec "$@"' task "$@"
}
