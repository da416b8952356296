# What of the user's environment reaches the ranks. Sourced first by launch/lib/main.sh, and by
# launch/lib/task.sh.
#
# All that the user has exported does, except what belongs to the host (HOST_VARIABLES, and folders of
# packages in PYTHONPATH), what a job around this one has left, and what would keep the rest out
# (drop_isolation_settings). docs/guides/cluster.md says so to users; a line of the log names what is dropped.
# shellcheck shell=bash
# shellcheck disable=SC2034 # the variables in capitals are read by main.sh and its other parts

# sbatch --export=NIL gives a job neither of them.
export PATH HOME=${HOME:-$(getent passwd "$(id -u)" | cut -d: -f6)}

# A user may export TASK=mrpc for the program. Bash would export its own TASK instead. These names are written
# by a test: pytest tests/launch/test_own_names.py --write-table
OWN_NAMES='ALIVE ARGUMENTS ASKED ATTEMPT BEGAN BINDS CHILD CLEAN_UP COMMAND COMMAND_IN_VARIABLE CONTAINER
    DIGEST DIGEST_FILE DIGEST_PENDING DIGEST_STAMP DROPPED EARLY_STOP GPUS HIDDEN HOSTS HOST_VARIABLES JOB
    JOB_HOSTS JOB_TASKS KEPT_VARIABLES KILLED KILL_AT LATER_VARIABLES LAUNCH LAUNCHED LAUNCHER_TEXT
    LAUNCHER_USED LC_ALL LOG_BEGAN MPI_HINT NODES NOTICE OF_ONE_JOB OF_ONE_TASK OF_OWN_SCRIPT OF_SELECT OPTION
    OPTIONS OPTIONS_GIVEN OWN_FLAVOR PROGRAM PYTHON QSTAT QSUB_OPTIONS RANK_VARIABLES REQUEST REQUEUED
    RESTARTS ROOT RUNTIME RUNTIMES RUNTIME_VERSION SCRIPT SETTINGS SHELL_ENDS SIDE_STEP SIF SIF_COPY
    SPARE_NODES SRUN_ENTERS STEP_OPTIONS STOPPING STOP_AT TASK TASKS TASKS_OPTION THREADS TIMER UNREACHED
    USUAL_VARIABLES WAIT_AND_REPORT WALLTIME WITHIN WORDS'

# They travel as HPCTRAIN_OWN_TASK, and task.sh gives them to the program. HPCTRAIN_BEFORE gets all that the
# user has exported, for print_commands.
declare -gA HPCTRAIN_BEFORE=()
stash_users_variables() {
    local name
    while read -r name; do
        HPCTRAIN_BEFORE[$name]=${!name}
        if [[ " ${OWN_NAMES//[[:space:]]/ } " == *" $name "* ]]; then
            export "HPCTRAIN_OWN_$name=${!name}"
            export -n "${name?}"
        fi
    done < <(compgen -e)
}
stash_users_variables

# restore_users_variables: the last step before exec, because the functions read variables of these names
restore_users_variables() {
    local name
    while read -r name; do
        unset "${name#HPCTRAIN_OWN_}" # an array cannot be exported
        export "${name#HPCTRAIN_OWN_}=${!name}"
        unset "$name"
    done < <(compgen -e HPCTRAIN_OWN_)
}

# ---- on the first node ----

DROPPED=() # for the log

# They are for programs of the host: an image has its own. LD_PRELOAD names libraries that it does not have.
HOST_VARIABLES=(PATH 'LD_*' PYTHONHOME)

# What says who a rank is and where it meets the others. Each launcher sets these anew, or, as torchrun from
# PET_*, takes them for its options.
RANK_VARIABLES=(RANK LOCAL_RANK NODE_RANK GROUP_RANK ROLE_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE
    ROLE_WORLD_SIZE 'TORCHELASTIC_*' 'PET_*' 'OMPI_COMM_WORLD_*' OMPI_UNIVERSE_SIZE 'PMI_*' 'PMIX_[!M]*'
    HOROVOD_RANK HOROVOD_SIZE 'HOROVOD_LOCAL_*' 'HOROVOD_CROSS_*')

# Variables of a process, a login or a task, which are wrong on another node
OF_ONE_TASK=("${RANK_VARIABLES[@]}" _ SHLVL PWD OLDPWD HOSTNAME HOST 'SSH_*' 'XDG_RUNTIME_DIR' 'XDG_SESSION_*'
    'DBUS_*' 'SLURM*' 'SLINGSHOT_*' 'PMIX_*' 'OMPI_*' PBS_NODENUM PBS_TASKNUM PBS_VNODENUM)

# is_one_of PATTERN...
is_one_of() {
    local name=$1 pattern
    for pattern in "${@:2}"; do
        # shellcheck disable=SC2053 # a pattern
        [[ $name != $pattern ]] || return 0
    done
    return 1
}

# drop PATTERN...: unset the exported variables of these names, and remember them for the log
drop() {
    local name
    while read -r name; do
        if is_one_of "$name" "$@"; then
            DROPPED+=("$name")
            unset "$name"
        fi
    done < <(compgen -e)
}

# drop_other_job JOB: A job that is submitted from inside another one has the variables of both. Of those of
# hpctrain and of the ranks around it none is right here.
drop_other_job() {
    if [[ -n ${HPCTRAIN_JOB:-} && $HPCTRAIN_JOB != "$1" ]]; then
        unset OMP_NUM_THREADS HPCTRAIN_WORLD_SIZE HPCTRAIN_TASKS_PER_NODE HPCTRAIN_JOB_SECRET HPCTRAIN_JOB
        drop MASTER_ADDR MASTER_PORT HPCTRAIN_NODE_TASK HPCTRAIN_NODE_TASKS HPCTRAIN_CONTAINER_ON
    fi
    drop "${RANK_VARIABLES[@]}"
}

# drop_isolation_settings: unset the settings of Apptainer by which the user's variables, home and folders, or
# the other ranks, are not there. Without variables each rank would train alone.
drop_isolation_settings() {
    drop {APPTAINER,SINGULARITY}_{CLEANENV,COMPAT,CONTAIN,CONTAINALL,NO_HOME,NO_MOUNT,PWD,CWD,FAKEROOT,BOOT} \
        {APPTAINER,SINGULARITY}_{PID,UNSHARE_PID,NET,UNSHARE_NET,NETWORK,IPC,UNSHARE_IPC,UTS,UNSHARE_UTS} \
        {APPTAINER,SINGULARITY}_{HOSTNAME,WRITABLE}
}

# separate_host_variables: for an image, drop what belongs to the host from the environment that enters it.
# The folders of PYTHONPATH stay, except the host's: packages for another Python, which a module has set.
# Those of pip install --user are for it, too.
separate_host_variables() {
    local entry entries kept=''
    [[ -z ${PYTHONUSERBASE:-} ]] ||
        say "warning: the image does not read PYTHONUSERBASE, $PYTHONUSERBASE, where pip install --user" \
            "puts packages: install them with hpctrain add into a folder that HPCTRAIN_PACKAGES names"
    drop LD_PRELOAD LD_AUDIT PYTHONHOME PYTHONUSERBASE
    export PYTHONNOUSERSITE=1
    [[ -n ${PYTHONPATH:-} ]] || return 0
    IFS=: read -r -d '' -a entries < <(printf '%s:\0' "$PYTHONPATH") || true
    for entry in "${entries[@]}"; do
        case $entry in
        */site-packages | */site-packages/* | */dist-packages | */dist-packages/* | */lib/python3* | \
            /usr/* | /opt/* | /lib*) DROPPED+=("$entry of PYTHONPATH") ;;
        *)
            kept+=:$entry
            [[ ! -e ${entry:-.}/torch/__init__.py ]] ||
                say "warning: ${entry:-.} of PYTHONPATH hides the torch of the image: remove it from there"
            ;;
        esac
    done
    PYTHONPATH=${kept#:}
    [[ -n $kept ]] || unset PYTHONPATH
}

# image_variables: print the names of the variables that enter an image
image_variables() {
    local name
    while read -r name; do
        name=${name#HPCTRAIN_OWN_}
        is_one_of "$name" "${HOST_VARIABLES[@]}" _ SHLVL PWD OLDPWD HOSTNAME 'APPTAINER*' 'SINGULARITY*' \
            'PODMANHPC_*' || printf '%s\n' "$name"
    done < <(compgen -e)
}

# forwarded_names: print the variables that a task needs and that mpirun does not send by itself
forwarded_names() {
    local name
    while read -r name; do
        case $name in
        SLURM_JOB_ID | SLURM_ARRAY_* | SLURM_RESTART_COUNT) printf '%s\n' "$name" ;;
        *) is_one_of "$name" "${OF_ONE_TASK[@]}" || printf '%s\n' "$name" ;;
        esac
    done < <(compgen -e)
}
