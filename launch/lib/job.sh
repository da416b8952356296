# What the scheduler granted, and the environment of every rank. Sourced by launch/lib/main.sh.
# shellcheck shell=bash
# shellcheck disable=SC2034 # the variables in capitals are read by main.sh and its other parts

STEP_OPTIONS=() # for srun
TASKS_OPTION=--ntasks-per-node # what gives TASKS
REQUEST='' # for each node, for the job and for each task, 400 characters each
SPARE_NODES=0 # nodes of the job that are idle, for when one of HOSTS fails
JOB_HOSTS=() JOB_TASKS=0 # what the scheduler granted, of which HOSTS and TASKS may be a part

# Slurm's variables that stay: what Slurm sets anew in each job, and options for srun that the user may give.
# All others are unset. In a shell inside a job they are of a step, or of another job, and srun would take
# them for options: memory, CPUs, bindings, folders.
KEPT_VARIABLES=(SLURM_CONF SLURM_CLUSTER_NAME 'SLURM_JOB_*' SLURM_JOBID SLURM_NODELIST SLURM_NNODES
    SLURM_NTASKS SLURM_NPROCS SLURM_TASKS_PER_NODE SLURM_CPUS_ON_NODE SLURM_NODEID SLURM_PROCID SLURM_LOCALID
    SLURM_GTIDS 'SLURM_SUBMIT_*' SLURM_TASK_PID SLURM_TMPDIR 'SLURM_TOPOLOGY_*' 'SLURM_HET_*' 'SLURM_ARRAY_*'
    SLURM_RESTART_COUNT 'SLURM_GPUS*' SLURM_MPI_TYPE SLURM_NETWORK SLURM_HINT SLURM_THREADS_PER_CORE
    SLURM_DISTRIBUTION SLURM_GPU_BIND SLURM_GPU_FREQ SLURM_CPU_FREQ_REQ SLURM_PROFILE SLURM_DEBUG
    SLURM_CPU_BIND SLURM_OVERCOMMIT)
# These go without a line in the log, because every job has them, and srun gets its own.
USUAL_VARIABLES=(SLURM_OPEN_MODE 'SLURM_MEM_PER_*' 'SLURM_CPUS_PER_*' 'SLURM_TRES_PER_*'
    'SLURM_NTASKS_PER_*' SLURM_EXPORT_ENV SLURM_PRIO_PROCESS SLURM_UMASK SLURM_OOM_KILL_STEP
    SLURM_SCRIPT_CONTEXT SLURM_GET_USER_ENV)

read_job() {
    if [[ -n ${PBS_NODEFILE:-} ]]; then
        read_pbs_job
    else
        read_slurm_job
    fi
}

# A Slurm job, from sbatch or in the shell of salloc or srun --pty.
read_slurm_job() {
    local spread folder timeout
    if [[ -n ${SLURM_JOB_ID:-} ]]; then
        JOB=$SLURM_JOB_ID
        check_numbers SLURM_GPUS_ON_NODE
        if is_in_step; then
            # The srun of each task would wait for the others until the time limit.
            if [[ ${SLURM_STEP_NUM_TASKS:-1} != 1 ]]; then
                [[ ${SLURM_PROCID:-0} == 0 ]] || exit 2
                die "srun started this script $SLURM_STEP_NUM_TASKS times:" \
                    "submit it with sbatch launch/$SCRIPT, or run it inside salloc"
            fi
            STEP_OPTIONS=(--overlap) # the step of this shell has the job's CPUs
        fi
        # Slurm starts the script in the job's folder (sbatch --chdir), or else in /tmp.
        # All tasks of an array have the same, and squeue shows all of them for the number of the last one.
        folder=$(squeue --noheader --jobs="$JOB" --format=%Z 2>/dev/null | sed q) || true
        [[ -d ${folder:=${SLURM_SUBMIT_DIR:-$PWD}} && -x $folder ]] ||
            die "$folder, where you submitted, is not on $(hostname):" \
                'submit from a folder that all nodes share'
        keep_own_slurm_variables
        [[ ! -v SLURM_HET_SIZE ]] ||
            die "this job has $SLURM_HET_SIZE components, and all ranks would be on the first one:" \
                "submit one that gives all nodes the same options, without a colon"
        # On the host, because there is no scontrol in the image.
        mapfile -t HOSTS < <(scontrol show hostnames "${SLURM_JOB_NODELIST:-}" 2>/dev/null)
        ((${#HOSTS[@]})) ||
            die "scontrol names no nodes for SLURM_JOB_NODELIST='${SLURM_JOB_NODELIST:-}':" \
                "run this in a job, and in no container"
        SPARE_NODES=${OPTION[spare-nodes]:-0}
        ((SPARE_NODES < ${#HOSTS[@]})) ||
            die "--spare-nodes=$SPARE_NODES of the job's $(counted ${#HOSTS[@]} node):" \
                "ask for more (sbatch --nodes)"
        JOB_HOSTS=("${HOSTS[@]}")
        HOSTS=("${HOSTS[@]:0:${#HOSTS[@]}-SPARE_NODES}")
        # Passed to srun again: without it Slurm packs the first node full, 3 + 1 tasks on nodes of 3 slots.
        spread=${SLURM_TASKS_PER_NODE:-1}
        [[ $spread =~ ^([1-9][0-9]*)(\(x[0-9]+\))?$ ]] ||
            die "Slurm would put $spread tasks on the nodes, not the same number on each:" \
                "give --ntasks-per-node"
        TASKS=${BASH_REMATCH[1]}
        GPUS=${SLURM_GPUS_ON_NODE:-$(gpus_of_request)}
        count_slurm_cpus
    elif [[ -n ${OPTION[dry-run]:-} ]]; then
        fake_allocation SBATCH --nodes --ntasks-per-node
        THREADS=1 GPUS=0
    else
        die "this is not a Slurm job: submit it with sbatch launch/$SCRIPT, or run it inside salloc"
    fi
    # Then Slurm has noticed that a node is dead, and requeues the job. The watchdog waits for that.
    timeout=$(scontrol show config 2>/dev/null | awk '$1 == "SlurmdTimeout" { print $3 + 60 }') || true
    export HPCTRAIN_NODE_TIMEOUT=${HPCTRAIN_NODE_TIMEOUT:-$timeout}
    choose_ranks
    load_site
    export_job_env
    open_control
    ((SPARE_NODES == 0)) || [[ -n ${OPTION[dry-run]:-}${HPCTRAIN_CONTROL:-} ]] ||
        die "--spare-nodes is for jobs of sbatch: leave it out"
}

# is_in_step: whether srun started this shell. The variables of a step also reach the jobs that are submitted
# in it, so slurmd is asked for the step of the task that this shell is.
is_in_step() {
    local step
    step=$(scontrol listpids "$JOB" 2>/dev/null |
        awk -v task="${SLURM_TASK_PID:-}" '$1 == task { print $3; exit }') || true
    [[ -n $step || $0 == */slurm_script ]] || step=${SLURM_STEP_ID:-}
    [[ $step == [0-9]* ]]
}

# keep_own_slurm_variables: unset Slurm's variables that are not this job's
keep_own_slurm_variables() {
    local name restarts
    drop 'PYXIS_*' # every step would be in that image
    # The number of a mask is right in one step alone.
    [[ ! -v SLURM_CPU_BIND_TYPE && ${SLURM_CPU_BIND:-} != *@(mask|map)* ]] || drop 'SLURM_CPU_BIND*'
    # What Slurm sets in some jobs only may be of another one.
    [[ $(squeue --noheader --jobs="$JOB" --Format=ArrayTaskID 2>/dev/null) != N/A* ]] || drop 'SLURM_ARRAY_*'
    [[ ! -v SLURM_HET_SIZE || $(job_field HetJobOffset) != N/A ]] || drop 'SLURM_HET_*'
    restarts=$(job_field RestartCnt)
    [[ -z $restarts ]] || SLURM_RESTART_COUNT=$restarts
    ATTEMPT=${SLURM_RESTART_COUNT:-0}
    [[ ${SLURM_RESTART_COUNT:-0} != 0 ]] || unset SLURM_RESTART_COUNT
    REQUEST=$(job_field 'tres-per-node:400,tres-per-job:400,tres-per-task:400,tres-per-socket')
    case $REQUEST in
    '' | *gpu*) ;;
    *) [[ ! -v SLURM_GPUS_ON_NODE ]] || drop 'SLURM_GPUS*' SLURM_JOB_GPUS CUDA_VISIBLE_DEVICES ;;
    esac
    while read -r name; do
        if ! is_one_of "$name" "${KEPT_VARIABLES[@]}"; then
            is_one_of "$name" "${USUAL_VARIABLES[@]}" || DROPPED+=("$name")
            unset "$name"
        fi
    done < <(compgen -e SLURM_)
}

# gpus_of_request: print how many GPUs of each node the job has asked for. A command of salloc runs on the
# login node, where Slurm does not set SLURM_GPUS_ON_NODE.
gpus_of_request() {
    local field item count gpus=(0 0 0) # of a node, of the job, of a task
    for field in 0 1 2; do
        for item in $(tr , ' ' <<<"${REQUEST:field*400:400}"); do
            [[ $item =~ ^(gres[:/])?gpu([:=].*)?$ ]] || continue
            count=${item##*[:=]}
            [[ $count != *[!0-9]* ]] || count=1
            gpus[field]=$((gpus[field] + count))
        done
    done
    echo $((gpus[0] ? gpus[0] : gpus[1] ? gpus[1] / (${#HOSTS[@]} + SPARE_NODES) : gpus[2] * TASKS))
}

# count_slurm_cpus: fill THREADS with the CPUs of a task: those that the user has asked for with -c, or a
# task's part of what Slurm has granted (--cpus-per-gpu, --exclusive, a node's default)
count_slurm_cpus() {
    local node granted='' asked
    asked=$(job_field cpus-per-task)
    THREADS=${asked:-1}
    for node in ${SLURM_JOB_CPUS_PER_NODE:+${SLURM_JOB_CPUS_PER_NODE//,/ }}; do
        node=${node%%(*}
        [[ ! $node =~ ^[1-9][0-9]{0,5}$ ]] || ((${granted:-node} < node)) || granted=$node
    done
    [[ -n $granted && $THREADS =~ ^[1-9][0-9]{0,5}$ ]] || return 0
    # Slurm counts the second thread of a core as granted even if the tasks may not use it.
    if ((THREADS == 1)) && [[ ${SLURM_HINT:-} != nomultithread && ${SLURM_THREADS_PER_CORE:-} != 1 ]]; then
        THREADS=$((granted / TASKS > 0 ? granted / TASKS : 1))
    fi
    check_cpus "$granted" '--cpus-per-task'
}

# check_cpus GRANTED OPTION: warn if CPUs of a node stay idle, or if ranks share one
check_cpus() {
    local used=$((TASKS * THREADS))
    if ((used < $1)); then
        say "warning: $(counted "$(($1 - used))" CPU) of $1 per node will be idle: give more with $2"
    elif ((TASKS > $1)); then
        say "warning: $(counted "$TASKS" task) share $(counted "$1" CPU) per node: ask for more with $2"
    fi
}

# choose_ranks: leave in HOSTS those that --hosts names, in the order of the job, by which srun numbers ranks,
# and in TASKS the number of --ranks-per-node
choose_ranks() {
    local name host names named=() hosts=()
    ((${#JOB_HOSTS[@]})) || JOB_HOSTS=("${HOSTS[@]}")
    JOB_TASKS=$TASKS
    TASKS=${OPTION[ranks-per-node]:-$TASKS}
    ((TASKS >= 1 && TASKS <= JOB_TASKS)) ||
        die "--ranks-per-node=$TASKS, but the job has $(counted "$JOB_TASKS" task) per node:" \
            "give a number from 1 to $JOB_TASKS, or ask for more with $TASKS_OPTION"
    THREADS=$((THREADS * JOB_TASKS / TASKS))
    [[ -n ${OPTION[hosts]:-} ]] || return 0
    ((SPARE_NODES == 0)) || die '--hosts names all nodes that are to be used: leave --spare-nodes out'
    IFS=, read -ra names <<<"${OPTION[hosts]}"
    for name in "${names[@]}"; do
        [[ $name != localhost ]] || name=${SLURMD_NODENAME:-$(uname -n)}
        is_one_of "${name%%.*}" "${HOSTS[@]%%.*}" ||
            die "--hosts=${OPTION[hosts]}: $name is no node of this job: choose from ${HOSTS[*]}," \
                'and give the number of ranks with --ranks-per-node'
        named+=("${name%%.*}")
    done
    for host in "${HOSTS[@]}"; do
        ! is_one_of "${host%%.*}" "${named[@]}" || hosts+=("$host")
    done
    HOSTS=("${hosts[@]}")
}

# This machine alone: HPCTRAIN_TASKS ranks; by default one per GPU, or one.
make_local_job() {
    JOB=$$
    TASKS_OPTION=HPCTRAIN_TASKS
    HOSTS=(localhost)
    GPUS=$(visible_gpus)
    TASKS=${HPCTRAIN_TASKS:-$((GPUS > 0 ? GPUS : 1))}
    [[ $TASKS =~ ^[1-9][0-9]{0,5}$ ]] || die "HPCTRAIN_TASKS is '$TASKS': set it to a number of ranks"
    THREADS=$(($(nproc) / TASKS > 0 ? $(nproc) / TASKS : 1))
    load_site
    export_job_env
}

# load_site: set the defaults of HPCTRAIN_SITE, or of the detected site; variables of the user win. OWN_FLAVOR
# is the flavor that the user has chosen.
load_site() {
    local name
    # bash leaves ~ in sbatch --export=ALL,HPCTRAIN_CACHE=~/cache
    for name in HPCTRAIN_{ROOT,IMAGE,CACHE,PACKAGES,PYTHON_ENV}; do
        # shellcheck disable=SC2088
        [[ ${!name:-} != '~/'* ]] || export "$name=$HOME/${!name:2}"
    done
    export HPCTRAIN_ROOT=${HPCTRAIN_ROOT:-$ROOT}
    OWN_FLAVOR=${HPCTRAIN_FLAVOR:-}
    hpctrain_load_site "$ROOT" job "${HPCTRAIN_SITE:-}" || exit 2
}

# fake_allocation KIND NODES TASKS: for a dry run without a job, read these numbers from the #KIND lines
fake_allocation() {
    say "no job: the numbers come from the #$1 lines of $0, and the node names are made up"
    JOB=0
    mapfile -t HOSTS < <(seq -f node%.0f "$(sed -n "s/^#$1 .*$2=\([0-9]*\).*/\1/p" "$0")")
    TASKS=$(sed -n "s/^#$1 .*$3=\([0-9]*\).*/\1/p" "$0")
}

# visible_gpus: print how many GPUs this machine has, or how many of them CUDA_VISIBLE_DEVICES leaves
visible_gpus() {
    local count visible
    count=$({ nvidia-smi --list-gpus 2>/dev/null || true; } | grep -c GPU) || true
    if ((count)) && [[ -v CUDA_VISIBLE_DEVICES ]]; then
        visible=${CUDA_VISIBLE_DEVICES%%-1*}
        count=$(tr , '\n' <<<"$visible" | grep -c .) || true
    fi
    echo "$count"
}

# export_job_env: export what every job has, such as the world size and the address of the rendezvous
export_job_env() {
    local number port
    NODES=${#HOSTS[@]}
    check_numbers HPCTRAIN_RESTARTS SLURM_RESTART_COUNT
    [[ $JOB =~ ^[][A-Za-z0-9_-]+$ ]] ||
        die "'$JOB' is not the number of a job:" \
            "unset SLURM_JOB_ID or PBS_JOBID, if the scheduler has not set it"
    ((GPUS == 0 || GPUS == TASKS)) || script_is jupyter.sh || [[ -n ${OPTION[ranks-per-node]:-} ]] ||
        say "warning: $(counted "$GPUS" GPU) but $(counted "$TASKS" task) per node: give $TASKS_OPTION=$GPUS"
    drop_other_job "$JOB"
    # As ~/.bashrc has it, after a tutorial
    [[ -z ${MASTER_ADDR:-} ]] || is_of_first_node "$MASTER_ADDR" || drop MASTER_ADDR
    export HPCTRAIN_JOB=$JOB HPCTRAIN_WORLD_SIZE=$((NODES * TASKS)) HPCTRAIN_TASKS_PER_NODE=$TASKS
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$THREADS}
    # By them the OpenMP of torch binds the main thread of each rank, and so its DataLoader workers, to the
    # first of the CPUs that the rank may use, which is the same one for all ranks of a node.
    [[ ${OMP_PROC_BIND:-false} == [Ff]* ]] || drop OMP_PROC_BIND
    drop OMP_PLACES GOMP_CPU_AFFINITY KMP_AFFINITY
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
    [[ $MASTER_PORT =~ ^[1-9][0-9]{0,4}$ && $MASTER_PORT -lt 65536 ]] ||
        die "MASTER_PORT=$MASTER_PORT: a port is a number from 1 to 65535: unset it, or give another"
    # The ranks sign with it that they are of this job. The commands of a dry run need none.
    [[ -n ${OPTION[dry-run]:-} ]] ||
        export HPCTRAIN_JOB_SECRET=${HPCTRAIN_JOB_SECRET:-$(random_hex)$(random_hex)}
    # torch warns about every address without a name; real problems arrive as errors.
    export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}
    # Otherwise print() of a rank fills a buffer, which is lost when the job is canceled.
    export PYTHONUNBUFFERED=${PYTHONUNBUFFERED-1}
    # Users empty it to disable a site's, but NCCL takes an empty value for a network's name, and fails.
    [[ -n ${NCCL_NET-unset} ]] || unset NCCL_NET
}

# refuse_copies: die if mpirun has started this script several times. Its variables alone do not say so: the
# jobs that a rank submits have them, too.
refuse_copies() {
    local parent='' size=${OMPI_COMM_WORLD_SIZE:-${PMI_SIZE:-1}} rank=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}}
    { read -r parent <"/proc/$PPID/comm"; } 2>/dev/null || true # process 0 started it in another namespace
    [[ $size != 1 && $parent == @(mpi*|orted|prte*|hydra*) ]] || return 0
    [[ $rank == 0 ]] || exit 0 # or mpirun would end rank 0 before it has said why
    die "mpirun started this script $size times, and it starts all ranks itself: leave mpirun out"
}

# is_of_first_node ADDRESS: whether rank 0 can listen there, and all nodes reach it
is_of_first_node() {
    local address name
    name=$(uname -n)
    address=$(getent ahostsv4 "$1" | awk '{ print $1; exit }') || true
    if [[ ${name%%.*} != "${HOSTS[0]%%.*}" ]]; then # in salloc, or with --hosts
        [[ $1 != @(localhost|127.*|::1) ]] && ! has_address "$address"
    else
        ((NODES == 1)) || [[ $1 != @(localhost|127.*|::1) ]] || return 1
        [[ -n $address ]] && has_address "$address"
    fi
}

# has_address ADDRESS: whether an interface of this node has it; 2 if the kernel does not say
has_address() {
    grep -qsFw "$1" /proc/net/fib_trie
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
