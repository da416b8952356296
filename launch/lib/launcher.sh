# The launchers: what starts a copy of the program for each rank. Sourced by launch/lib/main.sh, and by launch/lib/task.sh in each task.
#
# To add one, write a function launch_with_NAME and a row. The function fills
#   LAUNCH               the words before the command of a rank; they end with "$TASK" NAME, or "$TASK" none for
#                        a program that starts the ranks of its node itself
#   LAUNCHER_TEXT        for the log
# and, if it needs to,
#   PYTHON               what starts the words of PROGRAM, instead of python
#   COMMAND_IN_VARIABLE  not empty: the command of a rank goes to the tasks in HPCTRAIN_COMMAND, not on the command line
#   CLEAN_UP+=(FUNCTION) ends the processes that outlive a failed job
# A function task_NAME, where there is one, runs in each task before it enters the image. Without one the task gets the variables
# of torchrun, by which hpctrain (src/hpctrain/distributed/world.py) detects its rank.
# shellcheck shell=bash
# shellcheck disable=SC2034 # the variables in capitals are read by main.sh and task.sh

# A row for each launcher: its name, and the variables that hold a task's rank, its local rank and the number of its node.
# "-" is for a launcher that fills one node after the other and does not number them.
LAUNCHERS=(
    'srun        SLURM_PROCID          SLURM_LOCALID               SLURM_NODEID'
    'torchrun'
    'mpi         SLURM_PROCID          SLURM_LOCALID               SLURM_NODEID'
    'mpirun      OMPI_COMM_WORLD_RANK  OMPI_COMM_WORLD_LOCAL_RANK  -'
    'horovodrun  HOROVOD_RANK          HOROVOD_LOCAL_RANK          HOROVOD_CROSS_RANK'
)

# use_launcher NAME [ARGUMENT]...
use_launcher() {
    LAUNCHER_USED=("$@") LAUNCH=() PYTHON=(python) COMMAND_IN_VARIABLE='' MPI_HINT=''
    "launch_with_$1" "${@:2}"
}

# ---- srun ----

launch_with_srun() {
    LAUNCHER_TEXT='srun, one task per rank'
    set_mpi_hint
    set_srun "$TASKS"
    LAUNCH+=("$TASK" srun)
}

# set_mpi_hint: fill MPI_HINT, the last line of a job that fails, if the program is a script for MPI. Without a PMI, Open MPI ends it
# with the advice to build Slurm again.
set_mpi_hint() {
    local name
    [[ ${PROGRAM[0]:-} == *.py ]] || return 0
    name=$(grep -Eom1 '^[[:blank:]]*(import|from)[[:blank:]]+(horovod|mpi4py|dask_mpi)\b' "${PROGRAM[0]}") || return 0
    MPI_HINT="if MPI did not start above: ${PROGRAM[0]} imports ${name##*[[:blank:]]}, so submit it by launch/apptainer_mpi.sh or"
    MPI_HINT+=' launch/apptainer_horovod.sh'
}

# set_srun TASKS_PER_NODE [OPTION]...: fill LAUNCH. When a task fails, srun kills the others at once. When one ends without an
# error, the others may take any time: rank 0 of a script may evaluate or save after the others.
set_srun() {
    local nodelist
    LAUNCH=(srun --nodes="$NODES" --ntasks=$((NODES * $1)) --ntasks-per-node="$1" --cpus-per-task=$((THREADS * TASKS / $1))
        --kill-on-bad-exit=1 --wait=0 --label "${@:2}")
    if ((SPARE_NODES)); then
        printf -v nodelist '%s,' "${HOSTS[@]}"
        LAUNCH+=(--nodelist="${nodelist%,}")
    fi
}

# A Lightning script reads its rank from Slurm's variables, unless the job has a name that salloc gives.
task_srun() {
    [[ ${SLURM_JOB_NAME:-} != @(interactive|bash) ]] || ! is_users_script || export SLURM_JOB_NAME=hpctrain
}

# ---- torchrun: one on each node, which starts the ranks there, and starts all of them again when one dies ----

launch_with_torchrun() {
    local rendezvous
    LAUNCHER_TEXT="torchrun on each node, at most $(counted "$MAX_RESTARTS" restart)"
    if [[ ${HOSTS[0]} == localhost ]]; then
        rendezvous=(--standalone)
    else
        set_srun 1
        set_mpi_hint
        rendezvous=(--rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" --rdzv-id="$JOB")
        # Without it the workers share the store of the rendezvous, and no restart over two nodes recovered (torch 2.13).
        export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    fi
    LAUNCH+=("$TASK" none)
    resolve_folder "$ROOT" # the name by which it is bound
    PYTHON=(python "$REPLY/launch/lib/torchrun.py" --nnodes="$NODES" --nproc-per-node="$TASKS" --max-restarts="$MAX_RESTARTS"
        "${rendezvous[@]}")
}

# ---- MPI: srun with a PMI, or the host's mpirun ----

# launch_with_mpi HOW: mpirun, or srun with that PMI; "auto" or nothing: the PMI of the MPI library in the image
launch_with_mpi() {
    local how=${1:-${HPCTRAIN_MPI:-auto}} library offered
    library=$("${CONTAINER[@]}" ${SIF:+"$SIF"} python -c '
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(*MPI.Get_library_version().split(",")[0].splitlines()[0].split())' 2>&1 | tail -n 1) || true
    [[ $how == @(auto|mpirun) ]] || command -v srun >/dev/null ||
        die "there is no srun on the PATH of $(hostname), which starts the ranks with --mpi=$how: run this where Slurm is, or use --mpi=mpirun"
    offered=$(srun --mpi=list 2>&1 | tr -s '\n\t ' ' ' || true)
    if [[ $how == auto ]]; then
        case "$library:$offered" in
        "Open MPI"*\ pmix*) how=pmix ;;
        *MPICH*\ cray_shasta\ *) how=$([[ -e /opt/cray ]] && echo cray_shasta || echo pmi2) ;; # listed without a Cray, too
        *MPICH*\ pmi2\ * | Intel*\ pmi2\ *) how=pmi2 ;;
        "Open MPI"*) how=mpirun ;;
        *) die "$HPCTRAIN_IMAGE has no MPI library that srun or mpirun can start here ($library): use another image, or apptainer_ddp.sh" ;;
        esac
    fi
    export HPCTRAIN_MPI_LIBRARY=$library
    if [[ $how == mpirun ]]; then
        use_launcher mpirun
    else
        [[ " $offered " == *" $how "* || " $offered " == *" ${how}_v"* ]] ||
            die "srun does not offer --mpi=$how here: choose one of these: ${offered##*are... }"
        LAUNCHER_TEXT="srun --mpi=$how for $library"
        set_srun "$TASKS" --mpi="$how"
        LAUNCH+=("$TASK" mpi)
    fi
    [[ -n $DRY_RUN ]] || check_mpi_world "$library" "${LAUNCHER_TEXT%% for *}"
}

task_mpi() {
    task_srun
}

# check_mpi_world LIBRARY LAUNCHER: check that MPI gives one world of all ranks, before the long job. A launcher and a library
# without a common PMI give N worlds of one rank each, which run, and end with exit status 0.
check_mpi_world() {
    local status=0 output
    compose python -c '
import os
from mpi4py import MPI
size, wanted = MPI.COMM_WORLD.size, int(os.environ["HPCTRAIN_WORLD_SIZE"])
raise SystemExit(0 if size == wanted else f"MPI: {size} of {wanted}")'
    output=$(timeout 60 "${COMMAND[@]}" 2>&1) || status=$?
    ((status != 0)) || return 0
    printf '%s\n' "$output" | tail -n 8 >&2
    case $output in
    *"MPI: 1 of"*)
        die "each of $HPCTRAIN_WORLD_SIZE ranks is rank 0 of 1: $1 does not support the PMI of $2:" \
            "try another --mpi= (srun --mpi=list shows them; or mpirun)"
        ;;
    *)
        die "MPI does not start ($1 with $2, exit status $status; its last lines are above):" \
            "try another --mpi= (srun --mpi=list shows them; or mpirun)"
        ;;
    esac
}

launch_with_mpirun() {
    local name version
    command -v mpirun >/dev/null || die "there is no mpirun on the PATH of $(hostname): load an Open MPI module (HPCTRAIN_MODULES)"
    version=$(mpirun --version 2>&1 | head -n 1) || true
    [[ $version == *"Open MPI"* || $version == *OpenRTE* ]] ||
        die "$(command -v mpirun) is not Open MPI's, whose options this script uses: load an Open MPI module, or use srun"
    LAUNCHER_TEXT="mpirun, $version"
    LAUNCH=(mpirun -np $((NODES * TASKS)) --map-by "ppr:$TASKS:node" --bind-to none)
    [[ -z ${PBS_NODEFILE:-} ]] || LAUNCH+=(--hostfile "$PBS_NODEFILE")
    while read -r name; do
        LAUNCH+=(-x "$name")
    done < <(forwarded_names)
    LAUNCH+=("$TASK" mpirun)
}

# Open MPI 4 in the image under mpirun 5 of the host. The first variable names the host's plugins, which are not in the image.
# Without the second Open MPI 4 starts as a singleton, rank 0 of 1. Open MPI 5 in the image ignores both.
task_mpirun() {
    unset OMPI_MCA_mca_base_component_path
    if [[ -n ${PMIX_SERVER_URI3:-} ]]; then
        export OMPI_MCA_orte_local_daemon_uri=${OMPI_MCA_orte_local_daemon_uri:-$PMIX_SERVER_URI3}
    fi
    ! is_users_script || export_torchrun_env
}

# ---- horovodrun, in the image of the first node; it reaches the other nodes over ssh, which ends outside of any container ----

launch_with_horovodrun() {
    local places
    [[ -z $BROADCAST ]] || die "--broadcast does not work with horovodrun: use --launcher=srun or mpirun"
    LAUNCHER_TEXT='horovodrun over ssh'
    places=$(printf "%s:$TASKS," "${HOSTS[@]}")
    # horovodrun parses words of the command as its own options where they look like one (--network=host).
    COMMAND_IN_VARIABLE=1
    # --network-interface, because it would look for common ones by running Python outside of the containers.
    LAUNCH=("$TASK" none "${CONTAINER[@]}" ${SIF:+"$SIF"} -- horovodrun -np $((NODES * TASKS)) -H "${places%,}" --gloo
        --network-interface "${HPCTRAIN_INTERFACE:-$(find_interface)}" "$TASK" horovodrun)
    export HPCTRAIN_HOST_PATH=$PATH
    CLEAN_UP+=(kill_horovod_ranks)
    [[ -n $DRY_RUN ]] || hide_secrets
}

# horovodrun writes its whole environment on the command lines of ssh, which every user of a node can read. Variables that may be
# secrets travel in a file for this user alone.
hide_secrets() {
    local name line lines
    lines="# $(random_hex)"$'\n'
    for name in $(compgen -e); do
        if [[ $name == HPCTRAIN_SECRETS ]] || ! is_secret "$name"; then continue; fi
        printf -v line 'export %s=%q\n' "$name" "${!name}"
        lines+=$line
        unset "$name"
    done
    HPCTRAIN_SECRETS=$PWD/.hpctrain-$JOB.$(digest_of "$lines")
    export HPCTRAIN_SECRETS
    CLEAN_UP+=(remove_secrets)
    trap clean_up EXIT
    # Opened once, by noclobber as a new file. Where others can write this folder, they can replace it, also by a link to a file of
    # this user, or by a pipe. So its name says what it has.
    (umask 077 && set -C && printf %s "$lines" >"$HPCTRAIN_SECRETS") || die "$PWD: cannot be written: submit from a folder of your own"
}

digest_of() {
    printf %s "$1" | sha256sum | cut -c -32
}

remove_secrets() {
    rm -f "$HPCTRAIN_SECRETS"
}

task_horovodrun() {
    local lines
    if [[ -n ${HPCTRAIN_SECRETS:-} ]]; then
        lines=$(timeout 10 head -c 10000000 "$HPCTRAIN_SECRETS" && echo .) || true
        lines=${lines%.}
        [[ $HPCTRAIN_SECRETS == *."$(digest_of "$lines")" ]] ||
            die "$HPCTRAIN_SECRETS is not the file that this job wrote: submit from a folder of your own"
        eval "$lines"
    fi
    eval "WORDS=($HPCTRAIN_COMMAND)" # words quoted by printf %q
    if [[ ${HPCTRAIN_CONTAINER_ON:-} == "$(uname -n)" ]]; then
        WORDS=(-- "${WORDS[@]:$(index_of_command)}") # the ranks on the first node are in the container of horovodrun
    else
        PATH=$HPCTRAIN_HOST_PATH # that of the container, which horovodrun passes on, need not have the runtime
    fi
    # horovodrun's ssh command has set the variables of that container here.
    # shellcheck disable=SC2086 # a list of names
    unset ${HPCTRAIN_CONTAINER_VARIABLES:-}
    # Each task has its own ssh connection and its own container, so podman-hpc counts one task.
    HPCTRAIN_NODE_TASK=0 HPCTRAIN_NODE_TASKS=1
    ! is_users_script || export_torchrun_env
    # ssh exits with 255 after every signal, so task.sh waits for the command and reports the signal.
    WAIT_AND_REPORT=1
}

# Processes that horovodrun started over ssh keep running when the connection ends. A job that a rank has submitted has the variables
# of the rank, but a SLURM_JOB_ID of its own.
kill_horovod_ranks() {
    # shellcheck disable=SC2016 # the shells on the nodes expand them
    (($1 == 0)) || on_every_node bash -c '
        for process in /proc/[0-9]*; do
            if grep -qsz "^HOROVOD_RANK=" "$process/environ" && grep -qszx "SLURM_JOB_ID=$HPCTRAIN_JOB" "$process/environ"; then
                kill -KILL "${process#/proc/}" 2>/dev/null
            fi
        done
        true'
}

# find_interface: print the network interface of this node that has the address MASTER_ADDR
find_interface() {
    local address
    address=$(getent ahostsv4 "$MASTER_ADDR" | awk '{ print $1; exit }')
    ip -o -4 address show | awk -v a="$address" 'index($4, a "/") == 1 { print $2; exit }'
}

# ---- in a task ----

# index_of_command: print where the command begins in WORDS, which hold the words that enter the image, --, and the command
index_of_command() {
    local index=0
    while [[ ${WORDS[index]} != -- ]]; do
        index=$((index + 1))
    done
    echo $((index + 1))
}

# Whether the task runs a script of the user's, which may read its rank from the launcher's variables.
is_users_script() {
    local program=("${WORDS[@]:$(index_of_command) + 1}")
    [[ ${program[0]:-} == *.py || (${program[0]:-} == -m && ${program[1]:-} != hpctrain) ]]
}

# Set the variables by which Lightning and hpctrain detect torchrun. Lightning checks them before Slurm's, in which every task of
# mpirun is rank 0.
export_torchrun_env() {
    export TORCHELASTIC_RUN_ID=$MASTER_PORT GROUP_RANK=$NODE_RANK
    export GROUP_WORLD_SIZE=$((HPCTRAIN_WORLD_SIZE / HPCTRAIN_TASKS_PER_NODE))
}
