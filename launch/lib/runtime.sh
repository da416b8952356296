# The runtimes: how a task enters the image. Sourced by launch/lib/main.sh.
#
# To add one, write a function and its row. The function fills
#   CONTAINER          the words that enter the image, before the command
#   SIF                the image, if it is a file that --broadcast may copy; it becomes the last of these words
#   HPCTRAIN_IMAGE     the image, as the log and config.json name it
#   DIGEST             sha256:... where it is known
#   RUNTIME_VERSION    for the log
# and, if it needs to,
#   HPCTRAIN_GPU_OPTION           what hpctrain check recommends where no GPU is visible in the container
#   HPCTRAIN_CONTAINER_VARIABLES  variables that the runtime sets inside and that are wrong on another node
#   RUNTIME_VARIABLES             variables of its own that it needs on every node
#   HPCTRAIN_NODE_CONTAINER       not empty: the tasks of a node may share a container (node_container.sh)
#   HPCTRAIN_END_TASK             a command that ends, on its node, what survives the process that enters the image
#   CLEAN_UP+=(FUNCTION)          ends the processes that outlive a failed job
# shellcheck shell=bash
# shellcheck disable=SC2034 # the variables in capitals are read by main.sh and its other parts

# A row for each runtime: its name, and the function.
RUNTIMES=(
    'apptainer    apptainer_command'
    'podman-hpc   podman_hpc_command'
    'shifter      shifter_command'
    'none         bare_command'
)

RUNTIME_VARIABLES=()

# use_runtime NAME
use_runtime() {
    local row name function
    RUNTIME=$1
    CONTAINER=() SIF='' DIGEST='' DIGEST_PENDING=''
    unset HPCTRAIN_IMAGE_DIGEST HPCTRAIN_IMAGE_DIGEST_FILE HPCTRAIN_GPU_OPTION HPCTRAIN_CONTAINER_VARIABLES HPCTRAIN_END_TASK HPCTRAIN_NODE_CONTAINER
    for row in "${RUNTIMES[@]}" ''; do
        read -r name function <<<"$row"
        [[ $name != "$RUNTIME" ]] || break
    done
    [[ -n $function ]] || die "HPCTRAIN_RUNTIME is '$RUNTIME': choose $(list_names "${RUNTIMES[@]}")"
    load_modules
    if [[ -n ${HPCTRAIN_PACKAGES:-} && $RUNTIME != none ]]; then
        [[ $HPCTRAIN_PACKAGES != *[,:]* ]] || die "HPCTRAIN_PACKAGES=$HPCTRAIN_PACKAGES: give one folder, whose name holds no comma or colon"
        [[ -d $HPCTRAIN_PACKAGES ]] ||
            die "HPCTRAIN_PACKAGES=$HPCTRAIN_PACKAGES is not a folder on $(hostname): create it with hpctrain add, in the image"
        resolve_folder "$HPCTRAIN_PACKAGES"
        HPCTRAIN_PACKAGES=$REPLY # the name by which it is bound
    fi
    [[ ${HPCTRAIN_IMAGE:-} != *$'\n'* ]] || die "$HPCTRAIN_IMAGE: an image cannot have a line break in its name: rename it"
    [[ ${HPCTRAIN_IMAGE:-} != -* ]] || HPCTRAIN_IMAGE=./$HPCTRAIN_IMAGE # or it would be an option
    "$function"
    [[ $RUNTIME == none ]] || ((GPUS == 0)) || check_driver
    [[ -z $DIGEST ]] || export HPCTRAIN_IMAGE_DIGEST=$DIGEST
    export HPCTRAIN_IMAGE
    [[ -z $BROADCAST || (-n $SIF && -n ${SLURM_JOB_ID:-$DRY_RUN}) ]] ||
        die "--broadcast copies a SIF to the nodes of a Slurm job, and this is ${SLURM_JOB_ID:+one with }$RUNTIME: leave it out"
}

load_modules() {
    local name names
    [[ -n ${HPCTRAIN_MODULES:-} ]] || return 0
    type module >/dev/null 2>&1 ||
        die "HPCTRAIN_MODULES is '$HPCTRAIN_MODULES', but there is no module command here: submit from a login shell, or unset it"
    set +u # the scripts of modules read variables that are not set
    split_list "$HPCTRAIN_MODULES" names
    for name in "${names[@]}"; do
        # module returns 0 for a module that does not exist; only stderr has the error.
        module load "$name" || die "module load $name failed: module avail lists the modules"
        [[ :${LOADEDMODULES:-}: == *":${name%%/*}"[:/]* ]] || die "module load $name loaded nothing: module avail lists the modules"
    done
    set -u
}

apptainer_command() {
    local program path make='make sif'
    find_folders_to_bind
    program=$(command -v apptainer || command -v singularity) ||
        die "neither apptainer nor singularity is on the PATH of $(hostname): load your site's module (HPCTRAIN_MODULES)," \
            "or export HPCTRAIN_RUNTIME=none to run without a container"
    [[ -z ${HPCTRAIN_IMAGE:-} || -e $HPCTRAIN_IMAGE ]] ||
        die "$HPCTRAIN_IMAGE: no such image: set HPCTRAIN_IMAGE to yours, or unset it for hpctrain-$HPCTRAIN_FLAVOR.sif"
    : "${HPCTRAIN_IMAGE:=$ROOT/hpctrain-$HPCTRAIN_FLAVOR.sif}"
    if [[ ! -e $HPCTRAIN_IMAGE ]]; then
        check_flavor
        [[ ${HPCTRAIN_FLAVOR%-mpich} == cpu ]] || make+=" FLAVOR=${HPCTRAIN_FLAVOR%-mpich}"
        [[ $HPCTRAIN_FLAVOR != *-mpich ]] || make+=' MPI=mpich'
        die "$HPCTRAIN_IMAGE: no such image: run $make, or set HPCTRAIN_IMAGE to yours"
    fi
    RUNTIME_VERSION=$("$program" --version)
    CONTAINER=("${program##*/}" exec)
    # --nv goes before the image. Without a GPU it has no effect and no message, so it is given only if the job has GPUs.
    ((GPUS == 0)) || CONTAINER+=(--nv)
    for path in "${FOLDERS[@]}"; do
        CONTAINER+=(--bind "$path")
    done
    if [[ -f $HPCTRAIN_IMAGE ]]; then
        SIF=$HPCTRAIN_IMAGE
        find_digest "$SIF"
        # compose gives it its value. A dry run prints commands that may run twice.
        if [[ -z $DRY_RUN && $RUNTIME_VERSION =~ ^apptainer\ version\ ([0-9]+)\.([0-9]+) ]] &&
            ((BASH_REMATCH[1] > 1 || BASH_REMATCH[2] > 2)); then
            export HPCTRAIN_NODE_CONTAINER=1
        fi
    else # a sandbox folder
        CONTAINER+=("$HPCTRAIN_IMAGE")
    fi
    export HPCTRAIN_GPU_OPTION='--nv before the image (apptainer)'
    RUNTIME_VARIABLES=('APPTAINER*' 'SINGULARITY*')
    export HPCTRAIN_CONTAINER_VARIABLES='APPTAINER_BIND SINGULARITY_BIND'
    unset_host_python
}

shifter_command() {
    command -v shifter >/dev/null || die "there is no shifter on the PATH of $(hostname): use a launch script for a runtime of this site"
    : "${HPCTRAIN_IMAGE:=hpctrain:$HPCTRAIN_FLAVOR}"
    # It prints nothing about an image that it does not have, and on stdout that its gateway does not answer ("ERROR: ...", "err 28").
    DIGEST=$(shifterimg lookup "$HPCTRAIN_IMAGE" 2>/dev/null) || [[ -z $DIGEST ]] ||
        die "shifterimg lookup: ${DIGEST%.}: the gateway of the images does not answer, so try again later"
    [[ $DIGEST || $HPCTRAIN_IMAGE != "hpctrain:${HPCTRAIN_FLAVOR:-}" ]] || check_flavor
    [[ $DIGEST =~ ^(sha256:)?[0-9a-f]+$ ]] ||
        die "$HPCTRAIN_IMAGE: shifter has no such image: shifterimg pull it, or set HPCTRAIN_IMAGE (shifterimg images lists yours)"
    DIGEST=sha256:${DIGEST#sha256:}
    RUNTIME_VERSION=shifter
    # The home and the file systems of the site are there without --volume. By its id, no rank asks the gateway for the image, and
    # all have the one that the name means now.
    CONTAINER=(shifter "--image=id:${DIGEST#sha256:}" ${HPCTRAIN_SHIFTER_MODULES:+"--module=$HPCTRAIN_SHIFTER_MODULES"})
    export HPCTRAIN_GPU_OPTION='--module=gpu (shifter; HPCTRAIN_SHIFTER_MODULES)'
    unset_host_python
}

# One container per node, which all tasks of the node enter: MPI ranks in separate containers do not find each other.
podman_hpc_command() {
    local path name module modules
    find_folders_to_bind
    command -v podman-hpc >/dev/null ||
        die "there is no podman-hpc on the PATH of $(hostname): use a launch script for a runtime of this site"
    : "${HPCTRAIN_IMAGE:=hpctrain:$HPCTRAIN_FLAVOR}"
    DIGEST=$(podman-hpc images --format '{{.Digest}}' "$HPCTRAIN_IMAGE" 2>&1 | tail -n 1) || true
    [[ $DIGEST == sha256:* || $HPCTRAIN_IMAGE != "hpctrain:${HPCTRAIN_FLAVOR:-}" ]] || check_flavor
    [[ $DIGEST == sha256:* ]] ||
        die "$HPCTRAIN_IMAGE: podman-hpc has no such image on $(hostname): podman-hpc pull it" \
            "(after podman-hpc build or load: podman-hpc migrate), or set HPCTRAIN_IMAGE"
    # An image that was both loaded and pulled has two digests; the one that the user named was found.
    [[ $HPCTRAIN_IMAGE != *@* ]] || DIGEST=${HPCTRAIN_IMAGE#*@}
    RUNTIME_VERSION=$(podman --version)
    # keep-id: files in shared folders stay the user's own, and PMIx accepts the caller. /tmp: for the sockets of PMIx.
    CONTAINER=(podman-hpc shared-run --label "hpctrain.job=$JOB" --userns=keep-id --network=host --ipc=host
        --volume /tmp:/tmp --volume "$HOME:$HOME" --workdir "$PWD")
    refuse_separators "$HOME"
    split_list "${HPCTRAIN_PODMAN_MODULES:-}" modules
    for module in "${modules[@]}"; do
        CONTAINER+=("--$module")
    done
    for path in "${FOLDERS[@]}"; do
        [[ $path == "$HOME" || $path == "$HOME"/* ]] || CONTAINER+=(--volume "$path:$path")
    done
    # Not --env-host, which would replace the PATH of the image.
    for name in HOME "${FORWARDED_VARIABLES[@]}"; do
        CONTAINER+=(--env "$name")
    done
    CONTAINER+=("$HPCTRAIN_IMAGE")
    # Which of the tasks that one launcher started on this node makes the container, and how many enter it; task.sh sets both.
    export PODMANHPC_LOCALID_VAR=HPCTRAIN_NODE_TASK PODMANHPC_TASKS_PER_NODE_VAR=HPCTRAIN_NODE_TASKS
    # Its unmount of the image gives up after five seconds by default, and a busy node takes longer.
    export UMOUNT_WAIT_RETRIES=${UMOUNT_WAIT_RETRIES:-60}
    RUNTIME_VARIABLES=('PODMANHPC_*' UMOUNT_WAIT_RETRIES)
    export HPCTRAIN_GPU_OPTION='--gpu (podman-hpc; HPCTRAIN_PODMAN_MODULES)'
    unset_host_python
    # Processes in its containers keep running when podman-hpc is ended: by the task itself, where Slurm ends the job and lets
    # it start nothing more, and after srun has killed the tasks, where one of them failed. podman run ignores SIGTERM: while one
    # still makes a container (a second on a busy node), rm would not see it.
    HPCTRAIN_END_TASK="for i in {1..40}; do pgrep -u $UID -f '[p]odman run .*--label hpctrain.job=$JOB ' >/dev/null && sleep 0.1 || break; done"
    export HPCTRAIN_END_TASK+="; podman-hpc rm --force --time 0 --filter label=hpctrain.job=$JOB"
    CLEAN_UP+=(remove_podman_containers)
}

remove_podman_containers() {
    (($1 == 0)) || on_every_node bash -c "$HPCTRAIN_END_TASK" >/dev/null
}

# No container: the python that modules, a venv or a conda environment put on the PATH.
bare_command() {
    local env=${HPCTRAIN_PYTHON_ENV:-}
    [[ $env != -* ]] || env=./$env
    [[ -z ${HPCTRAIN_PACKAGES:-} ]] || die "HPCTRAIN_PACKAGES is for images: unset it, and pip install into the environment itself"
    if [[ -n $env && -r $env/bin/activate && ! -d $env/conda-meta ]]; then
        # shellcheck source=/dev/null
        source "$env/bin/activate"
    elif [[ -n $env ]]; then
        command -v conda >/dev/null ||
            die "HPCTRAIN_PYTHON_ENV=$env is not a venv, and there is no conda on the PATH: load conda's module (HPCTRAIN_MODULES)"
        set +u # conda's scripts read variables that are not set
        eval "$(conda shell.bash hook)"
        conda activate "$env" || die "conda activate $env failed: conda env list shows the environments"
        set -u
    fi
    python -c 'import importlib.util as u; raise SystemExit(u.find_spec("torch") is None)' 2>/dev/null ||
        die "$(command -v python || echo python) on $(hostname) has no torch: set HPCTRAIN_MODULES or HPCTRAIN_PYTHON_ENV to one that has it"
    RUNTIME_VERSION=$(python --version)
    HPCTRAIN_IMAGE=$(command -v python)
    # A site's PyTorch does not include hpctrain. This folder holds nothing else, so it hides nothing.
    export PYTHONPATH=$ROOT/src${PYTHONPATH:+:$PYTHONPATH}
}

# ---- what several runtimes use ----

# check_flavor: where its image is missing, die if HPCTRAIN_FLAVOR is not the name of a flavor. The project has a .in file for each
# flavor, an installation its SIFs.
check_flavor() {
    local known
    mapfile -t known < <(cd "$ROOT" && {
        grep -ls '^torch==' containers/locks/*.in | sed 's/\.in$//p;s/$/-mpich/' || true
        compgen -G 'hpctrain-*.sif'
    } | sed 's/.*\///;s/^hpctrain-//;s/\.sif$//' | sort -u)
    ((${#known[@]} == 0)) || [[ " ${known[*]} " == *" $HPCTRAIN_FLAVOR "* ]] ||
        die "HPCTRAIN_FLAVOR is '$HPCTRAIN_FLAVOR': choose one of ${known[*]}"
}

# check_driver: die if the driver of this node is too old for the image. Only the image's name says here what it was built for.
check_driver() {
    local name=${HPCTRAIN_IMAGE##*/} driver oldest advice='no image of hpctrain runs with it: ask your site for a newer one'
    if [[ $name =~ (^|[:_-])cpu([-.]|$) ]]; then
        say "warning: $HPCTRAIN_IMAGE is for CPUs, and this job has $(counted "$GPUS" GPU) per node: set HPCTRAIN_FLAVOR to cu130 or cu126"
    fi
    [[ $name =~ (^|[:_-])cu1([23]) ]] || return 0
    oldest=$((BASH_REMATCH[2] == 3 ? 580 : 525)) # for all of CUDA 12, by its minor-version compatibility
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) || true
    [[ $driver =~ ^([1-9][0-9]{1,3})\. ]] || return 0
    ((BASH_REMATCH[1] < 525)) || advice='take the image cu126, which needs 525 (HPCTRAIN_FLAVOR=cu126)'
    ((BASH_REMATCH[1] >= oldest)) ||
        die "$HPCTRAIN_IMAGE needs NVIDIA's driver $oldest or newer, and $(hostname) has $driver: $advice"
}

# find_folders_to_bind: fill FOLDERS with the folders of the host to bind into the image, those that the user can enter, each once
find_folders_to_bind() {
    local path paths
    FOLDERS=()
    [[ ${HPCTRAIN_BIND:-} != *[,:]* ]] ||
        die "HPCTRAIN_BIND=$HPCTRAIN_BIND: separate folders by spaces, not by commas or colons; each keeps its path in the image"
    split_list "${HPCTRAIN_BIND:-}" paths
    for path in "$PWD" "$ROOT" "${HPCTRAIN_PACKAGES:-}" "${paths[@]}"; do
        [[ -d $path && -x $path ]] || continue
        resolve_folder "$path"
        refuse_separators "$REPLY"
        [[ " ${FOLDERS[*]@Q} " == *" ${REPLY@Q} "* ]] || FOLDERS+=("$REPLY")
    done
}

# split_list TEXT ARRAY: fill ARRAY with the words of TEXT; patterns in them are not expanded to the names of files
split_list() {
    read -r -d '' -a "$2" <<<"$1" || true
}

# resolve_folder FOLDER: set REPLY to its name without links
resolve_folder() {
    [[ $1 == /* ]] || set -- "$PWD/$1" # cd would take -P for an option, and - for the folder before this one
    REPLY=$(cd "$1" && pwd -P && echo .) # a line break at the end of the name is kept
    REPLY=${REPLY%$'\n.'}
}

# refuse_separators FOLDER: to apptainer and podman they separate a folder from its place in the image; apptainer has no escape for them
refuse_separators() {
    [[ $1 != *[,:$'\n']* ]] ||
        die "$(printf %q "$1"): a container cannot have a folder whose name holds a comma, a colon or a line break:" \
            "rename it, or submit from another one"
}

# A PYTHONPATH of the host's modules would put the host's packages before the image's. APPTAINERENV_PYTHONPATH sets one inside.
unset_host_python() {
    unset PYTHONPATH PYTHONHOME
}
