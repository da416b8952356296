# What the scheduler granted, and the environment of every rank. Sourced by launch/lib/main.sh.
# shellcheck shell=bash
# shellcheck disable=SC2034 # the variables in capitals are read by main.sh and its other parts

SPARE_NODES=0 # nodes of the job that are idle, for when one of HOSTS fails

# A Slurm job, from sbatch or in the shell of salloc.
read_slurm_job() {
    local spread timeout
    if [[ -n ${SLURM_JOB_ID:-} ]]; then
        # The srun of each task would wait for the others until the time limit.
        if [[ ${SLURM_STEP_NUM_TASKS:-1} != 1 ]]; then
            [[ ${SLURM_PROCID:-0} == 0 ]] || exit 2
            die "srun started this script $SLURM_STEP_NUM_TASKS times:" \
                "submit it with sbatch launch/$SCRIPT, or run it inside salloc"
        fi
        enter_submit_folder "${SLURM_SUBMIT_DIR:?}"
        JOB=$SLURM_JOB_ID
        # On the host, because there is no scontrol in the image.
        mapfile -t HOSTS < <(scontrol show hostnames "${SLURM_JOB_NODELIST:-}" 2>/dev/null)
        ((${#HOSTS[@]})) ||
            die "scontrol names no nodes for SLURM_JOB_NODELIST='${SLURM_JOB_NODELIST:-}':" \
                "run this in a job, and in no container"
        SPARE_NODES=${OPTION[spare-nodes]:-0}
        ((SPARE_NODES < ${#HOSTS[@]})) ||
            die "--spare-nodes=$SPARE_NODES of the job's $(counted ${#HOSTS[@]} node):" \
                "ask for more (sbatch --nodes)"
        HOSTS=("${HOSTS[@]:0:${#HOSTS[@]}-SPARE_NODES}")
        # Passed to srun again: without it Slurm packs the first node full, 3 + 1 tasks on nodes of 3 slots.
        spread=${SLURM_NTASKS_PER_NODE:-${SLURM_TASKS_PER_NODE:-1}}
        TASKS=${spread%%(*}
        [[ $TASKS =~ ^[1-9][0-9]*$ ]] ||
            die "Slurm would put $spread tasks on the nodes, not the same number on each:" \
                "give --ntasks-per-node"
    elif [[ -n ${OPTION[dry-run]:-} ]]; then
        fake_allocation SBATCH --nodes --ntasks-per-node
    else
        die "this is not a Slurm job: submit it with sbatch launch/$SCRIPT, or run it inside salloc"
    fi
    THREADS=${SLURM_CPUS_PER_TASK:-1}
    GPUS=${SLURM_GPUS_ON_NODE:-0}
    # Then Slurm has noticed that a node is dead, and requeues the job. The watchdog waits for that.
    timeout=$(scontrol show config 2>/dev/null | awk '$1 == "SlurmdTimeout" { print $3 + 60 }') || true
    export HPCTRAIN_NODE_TIMEOUT=${HPCTRAIN_NODE_TIMEOUT:-$timeout}
    load_site
    export_job_env
    open_control
    ((SPARE_NODES == 0)) || [[ -n ${OPTION[dry-run]:-}${HPCTRAIN_CONTROL:-} ]] ||
        die "--spare-nodes is for jobs of sbatch: leave it out"
}

# A PBS job. PBS_NODEFILE names each host once per slot (mpiprocs of the select line).
read_pbs_job() {
    if [[ -n ${PBS_NODEFILE:-} ]]; then
        enter_submit_folder "${PBS_O_WORKDIR:?}"
        [[ -r $PBS_NODEFILE ]] ||
            die "$PBS_NODEFILE, the PBS_NODEFILE of this job, cannot be read on $(hostname):" \
                "run this on its first node"
        JOB=${PBS_JOBID%%.*}
        mapfile -t HOSTS < <(awk '!seen[$1]++ { print $1 }' "$PBS_NODEFILE")
        ((${#HOSTS[@]})) || die "$PBS_NODEFILE, the PBS_NODEFILE of this job, names no nodes: submit it again"
        TASKS=$(grep -c . "$PBS_NODEFILE")
        ((TASKS % ${#HOSTS[@]} == 0)) ||
            die "PBS gave $(counted ${#HOSTS[@]} node) $(counted "$TASKS" slot), not the same number each:" \
                "give select=N:mpiprocs=M (or nodes=N:ppn=M)"
        TASKS=$((TASKS / ${#HOSTS[@]}))
    elif [[ -n ${OPTION[dry-run]:-} ]]; then
        fake_allocation PBS select mpiprocs
    else
        die "this is not a PBS job: submit it with qsub launch/$SCRIPT, or run it inside qsub -I"
    fi
    THREADS=${NCPUS:-${OMP_NUM_THREADS:-1}}
    GPUS=$(visible_gpus)
    load_site
    export_job_env
    open_control
}

# This machine alone: HPCTRAIN_TASKS ranks; by default one per GPU, or one.
make_local_job() {
    JOB=$$
    HOSTS=(localhost)
    GPUS=$(visible_gpus)
    TASKS=${HPCTRAIN_TASKS:-$((GPUS > 0 ? GPUS : 1))}
    [[ $TASKS =~ ^[1-9][0-9]{0,5}$ ]] || die "HPCTRAIN_TASKS is '$TASKS': set it to a number of ranks"
    THREADS=$(($(nproc) / TASKS > 0 ? $(nproc) / TASKS : 1))
    load_site
    export_job_env
}

enter_submit_folder() {
    cd "$1" 2>/dev/null ||
        die "$1, where you submitted, is not on $(hostname): submit from a folder that all nodes share"
}

# load_site: set the defaults of HPCTRAIN_SITE, or of the detected site; variables of the user win
load_site() {
    export HPCTRAIN_ROOT=${HPCTRAIN_ROOT:-$ROOT}
    hpctrain_load_site "$ROOT" job "${HPCTRAIN_SITE:-}" || exit 2
}

# fake_allocation KIND NODES TASKS: for a dry run without a job, read these numbers from the #KIND lines
fake_allocation() {
    say "no job: the numbers come from the #$1 lines of $0, and the node names are made up"
    JOB=0
    mapfile -t HOSTS < <(seq -f node%.0f "$(sed -n "s/^#$1 .*$2=\([0-9]*\).*/\1/p" "$0")")
    TASKS=$(sed -n "s/^#$1 .*$3=\([0-9]*\).*/\1/p" "$0")
}

visible_gpus() {
    { nvidia-smi --list-gpus 2>/dev/null || true; } | grep -c GPU || true
}

# export_job_env: export what every job has, such as the world size and the address of the rendezvous
export_job_env() {
    local number port
    NODES=${#HOSTS[@]}
    check_numbers SLURM_CPUS_PER_TASK SLURM_GPUS_ON_NODE SLURM_RESTART_COUNT HPCTRAIN_RESTARTS
    [[ $JOB =~ ^[][A-Za-z0-9_-]+$ ]] ||
        die "'$JOB' is not the number of a job:" \
            "unset SLURM_JOB_ID or PBS_JOBID, if the scheduler has not set it"
    ((GPUS == 0 || GPUS == TASKS)) ||
        say "warning: $(counted "$GPUS" GPU) but $(counted "$TASKS" task) per node:" \
            "give --ntasks-per-node=$GPUS"
    export HPCTRAIN_JOB=$JOB HPCTRAIN_WORLD_SIZE=$((NODES * TASKS)) HPCTRAIN_TASKS_PER_NODE=$TASKS
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$THREADS}
    # Otherwise glibc returns the memory of large tensors to the kernel at every step, and the step takes a
    # fifth longer on a CPU. 32 MB is the largest threshold that glibc takes.
    export MALLOC_MMAP_THRESHOLD_=${MALLOC_MMAP_THRESHOLD_:-33554432}
    export MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-536870912}
    export MASTER_ADDR=${MASTER_ADDR:-${HOSTS[0]}}
    # Each job has its own port, so that two on a node do not collide, and each restart, as its old one may
    # linger; below the kernel's ephemeral ports (32768). The number of a PBS array job is like 123[4].
    number=${JOB//[!0-9]/}
    port=$((20000 + (10#0$number * 8 + ${SLURM_RESTART_COUNT:-0}) % 12000))
    export MASTER_PORT=${MASTER_PORT:-$(first_free_port "$port")}
    # The ranks sign with it that they are of this job. The commands of a dry run need none.
    [[ -n ${OPTION[dry-run]:-} ]] ||
        export HPCTRAIN_JOB_SECRET=${HPCTRAIN_JOB_SECRET:-$(random_hex)$(random_hex)}
    # torch warns about every address without a name; real problems arrive as errors.
    export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}
    export PYTHONNOUSERSITE=1
    # Users empty it to disable a site's, but NCCL takes an empty value for a network's name, and fails.
    [[ -n ${NCCL_NET-unset} ]] || unset NCCL_NET
}

# check_numbers NAME...: die unless these are numbers or unset. Arithmetic would run HOME[$(COMMAND)].
check_numbers() {
    local name
    for name in "$@"; do
        [[ ${!name:-0} =~ ^(0|[1-9][0-9]{0,8})$ ]] ||
            die "$name is '${!name}', not a number: unset it, if Slurm has not set it"
    done
}

# first_free_port PORT: print this port, or the next one that is free on this node, which is rank 0's
first_free_port() {
    local port
    for ((port = $1; port < $1 + 100; port++)); do
        # Lines as in proc(5): number, local address:port in hexadecimal, remote one, state (0A: listening).
        awk -v port="$(printf ':%04X' "$port")" '$4 == "0A" && $2 ~ port "$" { exit 1 }' \
            < <(cat /proc/net/tcp /proc/net/tcp6 2>/dev/null) && break
    done
    ((port == $1)) ||
        say "port $1 of $(hostname) is in use, so the rendezvous is at the next free one, $port" >&2
    echo "$port"
}

# The variables that the image needs. apptainer and shifter forward all variables, podman-hpc only these.
FORWARDED_VARIABLES=('CUDA_*' 'FI_*' 'GLOO_*' 'GROUP_*' 'HF_*' 'HOROVOD_*' 'HPCTRAIN_*' 'MALLOC_*' 'MASTER_*'
    MPLCONFIGDIR 'NCCL_*' 'OMP_*' 'OMPI_*' 'PBS_*' 'PMI_*' 'PMIX_*' 'PYTHON*' RANK LOCAL_RANK NODE_RANK
    WORLD_SIZE LOCAL_WORLD_SIZE SCRATCH 'SLINGSHOT_*' 'SLURM_*' SQUASH_DIR 'TORCH*' 'UCX_*')

# is_secret NAME: whether the value of this variable must not be printed. secret_names.txt has the rules.
is_secret() {
    local rule word name=${1^^}
    name=${name//-/_}
    while read -r rule word; do
        case $rule in
        ignore) name=${name//$word/.} ;;
        secret) [[ $name != *"$word"* ]] || return 0 ;;
        esac
    done <"$ROOT/launch/lib/secret_names.txt" || die "without that file, secrets would be printed: restore it"
    return 1
}

# forwarded_names: print the variables that a task needs and that mpirun does not send by itself
forwarded_names() {
    local name pattern
    for name in $(compgen -e); do
        for pattern in "${FORWARDED_VARIABLES[@]}" "${RUNTIME_VARIABLES[@]}" PATH LD_LIBRARY_PATH; do
            # shellcheck disable=SC2053 # a pattern
            [[ $name == $pattern ]] || continue
            case $name in
            SLURM_JOB_ID | SLURM_ARRAY_* | SLURM_RESTART_COUNT) echo "$name" ;;
            # A launcher sets these for one task, so they are wrong in the others.
            SLINGSHOT_* | SLURM_* | OMPI_* | PMI_* | PMIX_* | *RANK) ;;
            *) echo "$name" ;;
            esac
            break
        done
    done
}
