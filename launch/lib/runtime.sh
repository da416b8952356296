# The runtimes: how a task enters the image. Sourced by launch/lib/main.sh.
#
# To add one, write runtimes/NAME.sh with a function NAME_command (podman_hpc for podman-hpc), which fills
#   CONTAINER          the words that enter the image, before the command
#   SIF                the image, if it is a file that --broadcast may copy; it follows these words
#   HPCTRAIN_IMAGE     the image, as the log and config.json name it
#   DIGEST             sha256:... where it is known
#   RUNTIME_VERSION    for the log
# and, if it needs to,
#   HPCTRAIN_GPU_OPTION           what hpctrain check recommends where no GPU is visible in the container
#   HPCTRAIN_CONTAINER_VARIABLES  variables that the runtime sets inside and that are wrong on another node
#   HPCTRAIN_NODE_CONTAINER       not empty: the tasks of a node may share a container (node_container.sh)
#   HPCTRAIN_END_TASK             a command that ends what survives the process that enters the image
#   SRUN_ENTERS                   not empty: STEP_OPTIONS let srun enter the image, and task.sh runs inside
#   CLEAN_UP+=(FUNCTION)          ends the processes that outlive a failed job
# shellcheck shell=bash
# shellcheck disable=SC2034 # the variables in capitals are read by main.sh and its other parts

SRUN_ENTERS=''
RUNTIMES=("$ROOT"/launch/lib/runtimes/*.sh)
RUNTIMES=("${RUNTIMES[@]##*/}")
RUNTIMES=("${RUNTIMES[@]%.sh}")
RUNTIMES=("${RUNTIMES[@]//_/-}")

# use_runtime NAME
use_runtime() {
    local name=${1//-/_}
    RUNTIME=$1
    CONTAINER=() SIF='' DIGEST='' DIGEST_PENDING=''
    unset HPCTRAIN_IMAGE_DIGEST HPCTRAIN_IMAGE_DIGEST_FILE HPCTRAIN_GPU_OPTION HPCTRAIN_CONTAINER_VARIABLES
    unset HPCTRAIN_END_TASK HPCTRAIN_NODE_CONTAINER
    [[ $RUNTIME != *[!a-z0-9-]* && -r $ROOT/launch/lib/runtimes/$name.sh ]] ||
        die "HPCTRAIN_RUNTIME is '$RUNTIME': choose $(list_names "${RUNTIMES[@]}")"
    # shellcheck source=/dev/null
    source "$ROOT/launch/lib/runtimes/$name.sh"
    load_modules
    [[ -z ${HPCTRAIN_PACKAGES:-} || $RUNTIME == none ]] || resolve_packages
    [[ ${HPCTRAIN_IMAGE:-} != *$'\n'* ]] ||
        die "$HPCTRAIN_IMAGE: an image cannot have a line break in its name: rename it"
    [[ ${HPCTRAIN_IMAGE:-} != -* ]] || HPCTRAIN_IMAGE=./$HPCTRAIN_IMAGE # or it would be an option
    "${name}_command"
    [[ $RUNTIME == none ]] || ((GPUS == 0)) || check_driver
    [[ -z $DIGEST ]] || export HPCTRAIN_IMAGE_DIGEST=$DIGEST
    export HPCTRAIN_IMAGE
    [[ -z ${OPTION[broadcast]:-} || (-n $SIF && -n ${SLURM_JOB_ID:-${OPTION[dry-run]:-}}) ]] ||
        die "--broadcast copies a SIF to the nodes of a Slurm job, and this is" \
            "${SLURM_JOB_ID:+one with }$RUNTIME: leave it out"
}

load_modules() {
    local name names
    [[ -n ${HPCTRAIN_MODULES:-} ]] || return 0
    type module >/dev/null 2>&1 ||
        die "HPCTRAIN_MODULES is '$HPCTRAIN_MODULES', but there is no module command here:" \
            "submit from a login shell, or unset it"
    set +u # the scripts of modules read variables that are not set
    split_list "$HPCTRAIN_MODULES" names
    for name in "${names[@]}"; do
        # module returns 0 for a module that does not exist; only stderr has the error.
        module load "$name" || die "module load $name failed: module avail lists the modules"
        [[ :${LOADEDMODULES:-}: == *":${name%%/*}"[:/]* ]] ||
            die "module load $name loaded nothing: module avail lists the modules"
    done
    set -u
}

# resolve_packages: set HPCTRAIN_PACKAGES to the name by which the folder is bound
resolve_packages() {
    [[ $HPCTRAIN_PACKAGES != *[,:]* ]] ||
        die "HPCTRAIN_PACKAGES=$HPCTRAIN_PACKAGES: give one folder, whose name holds no comma or colon"
    [[ -d $HPCTRAIN_PACKAGES ]] ||
        die "HPCTRAIN_PACKAGES=$HPCTRAIN_PACKAGES is not a folder on $(hostname):" \
            "create it with hpctrain add, in the image"
    resolve "$HPCTRAIN_PACKAGES"
    HPCTRAIN_PACKAGES=$REPLY
}

# ---- what several runtimes use ----

# check_flavor: where its image is missing, die if HPCTRAIN_FLAVOR is not the name of a flavor. The project
# has a .in file for each flavor, an installation its SIFs.
check_flavor() {
    local known
    mapfile -t known < <(cd "$ROOT" && {
        grep -ls '^torch==' containers/locks/*.in | sed 's/\.in$//p;s/$/-mpich/' || true
        compgen -G 'hpctrain-*.sif'
    } | sed 's/.*\///;s/^hpctrain-//;s/\.sif$//' | sort -u)
    ((${#known[@]} == 0)) || [[ " ${known[*]} " == *" $HPCTRAIN_FLAVOR "* ]] ||
        die "HPCTRAIN_FLAVOR is '$HPCTRAIN_FLAVOR': choose one of ${known[*]}"
}

# find_image KIND: set HPCTRAIN_IMAGE to a file, by default one that ends with this, or say how to make it
find_image() {
    local make="make $1"
    [[ -z ${HPCTRAIN_IMAGE:-} || -e $HPCTRAIN_IMAGE ]] ||
        die "$HPCTRAIN_IMAGE: no such image: set HPCTRAIN_IMAGE to yours," \
            "or unset it for hpctrain-$HPCTRAIN_FLAVOR.$1"
    if [[ -z $OWN_FLAVOR ]] && _hpctrain_has_one_image "$ROOT"; then
        HPCTRAIN_FLAVOR=$(echo "$ROOT"/hpctrain-*.sif)
        HPCTRAIN_FLAVOR=${HPCTRAIN_FLAVOR##*/hpctrain-}
        HPCTRAIN_FLAVOR=${HPCTRAIN_FLAVOR%.sif}
    fi
    : "${HPCTRAIN_IMAGE:=$ROOT/hpctrain-$HPCTRAIN_FLAVOR.$1}"
    [[ ! -e $HPCTRAIN_IMAGE ]] || return 0
    check_flavor
    [[ ${HPCTRAIN_FLAVOR%-mpich} == cpu ]] || make+=" FLAVOR=${HPCTRAIN_FLAVOR%-mpich}"
    [[ $HPCTRAIN_FLAVOR != *-mpich ]] || make+=' MPI=mpich'
    die "$HPCTRAIN_IMAGE: no such image: run $make, or set HPCTRAIN_IMAGE to yours"
}

# check_driver: die if the driver of this node is too old for the image, going by the image's name
check_driver() {
    local name=${HPCTRAIN_IMAGE##*/} driver oldest
    local advice='no image of hpctrain runs with it: ask your site for a newer one'
    [[ ! $name =~ (^|[:_-])cpu([-.]|$) ]] ||
        say "warning: $HPCTRAIN_IMAGE is for CPUs, and this job has $(counted "$GPUS" GPU) per node:" \
            "set HPCTRAIN_FLAVOR to cu130 or cu128"
    [[ $name =~ (^|[:_-])cu1([23]) ]] || return 0
    oldest=$((BASH_REMATCH[2] == 3 ? 580 : 525)) # for all of CUDA 12, by its minor-version compatibility
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) || true
    [[ $driver =~ ^([1-9][0-9]{1,3})\. ]] || return 0
    ((BASH_REMATCH[1] < 525)) || advice='take the image cu128, which needs 525 (HPCTRAIN_FLAVOR=cu128)'
    ((BASH_REMATCH[1] >= oldest)) ||
        die "$HPCTRAIN_IMAGE needs NVIDIA's driver $oldest or newer, and $(hostname) has $driver: $advice"
}

# in_image WORD...: run these words in the image, on a node of the job
in_image() {
    if [[ -n $SRUN_ENTERS ]]; then
        "${SIDE_STEP[@]}" --nodes=1 --ntasks=1 --quiet "${STEP_OPTIONS[@]}" "$@"
    else
        "${CONTAINER[@]}" ${SIF:+"$SIF"} "$@"
    fi
}

# find_folders_to_bind: fill BINDS with folders of the host, as PATH or TARGET:PATH, so that a path of the
# user's shell is right in the image, too. Those are the folders at the top of the host's file system, except
# those that an image has itself, and /cvmfs, whose programs are for the host; and below these, those that the
# job names.
find_folders_to_bind() {
    local path paths named entries
    BINDS=()
    [[ ${HPCTRAIN_BIND:-} != *[,:]* ]] ||
        die "HPCTRAIN_BIND=$HPCTRAIN_BIND: separate folders by spaces, not by commas or colons;" \
            "each keeps its path in the image"
    split_list "${HPCTRAIN_BIND:-}" named
    IFS=: read -r -d '' -a entries < <(printf '%s:\0' "${PYTHONPATH:-}") || true
    # With timeout, because a file server may not answer.
    mapfile -d '' paths < <(
        timeout 20 find / -mindepth 1 -maxdepth 1 -xtype d -executable -print0 2>/dev/null
    )
    for path in "${paths[@]}"; do
        is_in_image "$path" || [[ $path == @(/tmp|*[,:$'\n']*) ]] || bind_path "$path"
    done
    for path in "$HOME" "$PWD" "$ROOT" "${HPCTRAIN_PACKAGES:-}" "${SCRATCH:-}" "${TMPDIR:-}" "${named[@]}" \
        "${entries[@]}" "${SSL_CERT_FILE:-}" "${SSL_CERT_DIR:-}" "${REQUESTS_CA_BUNDLE:-}" \
        "${CURL_CA_BUNDLE:-}" "${PBS_NODEFILE:-}"; do
        [[ -e $path ]] || continue
        [[ $path == /* ]] || path=$PWD/$path
        refuse_separators "$path"
        # Programs also ask for the name without links, as in os.getcwd().
        resolve "$path"
        refuse_separators "$REPLY"
        ! is_in_image "$path" || bind_path "$path"
        resolve "$path"
        ! is_in_image "$REPLY" || bind_path "$REPLY"
    done
}

# is_in_image PATH: whether it is in a folder that images have themselves, or in /cvmfs, which they do
# without. /tmp is the host's in all runtimes.
is_in_image() {
    local top=${1#/}
    [[ ${top%%/*} == @(bin|boot|cvmfs|dev|etc|lib*|opt|proc|root|run|sbin|sys|usr|var|.*) ]]
}

# bind_path PATH: add it to BINDS, with what it points to if it is a link. Not a whole folder of the image, as
# /etc is.
bind_path() {
    local bind=$1
    [[ $1 == /*/* || $1 == /cvmfs ]] || ! is_in_image "$1" || return 0
    resolve "$1"
    [[ $REPLY == "$1" ]] || bind=$REPLY:$1
    [[ " ${BINDS[*]@Q} " == *" ${bind@Q} "* ]] || BINDS+=("$bind")
}

# split_list TEXT ARRAY: fill ARRAY with the words of TEXT, without expanding patterns to file names
split_list() {
    read -r -d '' -a "$2" <<<"$1" || true
}

# resolve PATH: set REPLY to its name without links
resolve() {
    REPLY=$(readlink -f -- "$1" && echo .) # a line break at the end of the name is kept
    REPLY=${REPLY%$'\n.'}
}

# refuse_separators FOLDER: of a folder and its place in the image; apptainer has no escape for them
refuse_separators() {
    [[ $1 != *[,:$'\n']* ]] ||
        die "$(printf %q "$1"): a container cannot have a folder whose name holds a comma, a colon" \
            "or a line break: rename it, or submit from another one"
}
