# What the user exported under a name that these scripts use as well, and the user's folder in /tmp. Sourced
# first by launch/lib/main.sh, and by launch/lib/task.sh.
# shellcheck shell=bash

# A user may export TASK=mrpc for the program. Bash would export its own TASK instead.
OWN_NAMES='ALIVE ARGUMENTS ASKED ATTEMPT BEGAN CHILD CLEAN_UP COMMAND COMMAND_IN_VARIABLE CONTAINER DIGEST
    DIGEST_FILE DIGEST_PENDING DIGEST_STAMP EARLY_STOP FOLDERS FORWARDED_VARIABLES GPUS HOSTS JOB KILL_AT
    LAUNCH LAUNCHER_TEXT LAUNCHER_USED MPI_HINT NODES OPTION OPTIONS OPTIONS_GIVEN PROGRAM PYTHON ROOT
    RUNTIME RUNTIMES RUNTIME_VARIABLES RUNTIME_VERSION SCRIPT SETTINGS SHIELDED SIF SIF_COPY SPARE_NODES
    STOPPING STOP_AT TASK TASKS THREADS TIMER UNREACHED WAIT_AND_REPORT WALLTIME WITHIN WORDS'

# Fills USERS_VARIABLES with NAME=value, for env to give them to the program.
USERS_VARIABLES=()
keep_users_variables() {
    local name
    while read -r name; do
        if [[ " ${OWN_NAMES//[[:space:]]/ } " == *" $name "* ]]; then
            USERS_VARIABLES+=("$name=${!name}")
            export -n "${name?}"
        fi
    done < <(compgen -e)
}
keep_users_variables

# make_own FOLDER: create it for this user alone, unless it exists. Fails if it belongs to somebody else.
make_own() {
    mkdir -m 700 "$1" 2>/dev/null || [[ ! -L $1 && (-O $1 || ! -e $1) ]]
}
