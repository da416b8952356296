# The site files: launch/sites/NAME.env, read as data and never executed. Sourced by launch/lib/main.sh in a
# job, and by launch/site.sh in the user's shell, which may be zsh.
#
# A line is KEY=VALUE, a comment (#) or empty. In a VALUE, $NAME and ${NAME} stand for variables; no quotes.
# - What the user has set wins, also if it is empty (an empty folder or name counts as not set).
# - A line that refers to a variable that is not set is skipped; a later line with the same key may apply.
# - A key that a site does not set gets its value from generic.env.
# - SITE_DETECT identifies the site: VARIABLE=PATTERN, HOST=PATTERN, or CLUSTER=PATTERN (Slurm's ClusterName).
# shellcheck shell=bash

# _hpctrain_kind KEY: set _hpctrain_reply to the kind of a key: site, sbatch, text or list; fails for a key
# that no site file may have. This is the one list of keys; programs' variables go by their prefix.
_hpctrain_kind() {
    case $1 in
    *[!A-Za-z0-9_]*) return 1 ;; # the shell would evaluate NCCL_X[$(COMMAND)]
    SITE_DETECT) _hpctrain_reply=site ;;
    # read by sbatch itself, so a job is too late for them
    SBATCH_ACCOUNT | SBATCH_CONSTRAINT | SBATCH_CPUS_PER_GPU | SBATCH_EXCLUSIVE | SBATCH_GPUS | \
        SBATCH_GPUS_PER_NODE | SBATCH_GRES | SBATCH_MEM_PER_NODE | SBATCH_PARTITION | SBATCH_QOS | \
        SBATCH_SIGNAL | SBATCH_TIMELIMIT) _hpctrain_reply=sbatch ;;
    # a name or a folder, which cannot be empty
    APPTAINER_CACHEDIR | APPTAINER_TMPDIR | HF_HOME | HPCTRAIN_CACHE | HPCTRAIN_FLAVOR | \
        HPCTRAIN_LOGIN_HOST | HPCTRAIN_MPI | HPCTRAIN_RUNTIME | MPLCONFIGDIR | SCRATCH | TORCH_HOME | \
        XDG_CACHE_HOME) _hpctrain_reply=text ;;
    HPCTRAIN_BIND | HPCTRAIN_MODULES | HPCTRAIN_PODMAN_MODULES | HPCTRAIN_SHIFTER_MODULES | \
        HPCTRAIN_INTERFACE | SLURM_CPU_BIND | FI_?* | GLOO_?* | HDF5_?* | NCCL_?* | OMPI_MCA_?* | \
        PMIX_MCA_?* | UCX_?*) _hpctrain_reply=list ;;
    *) return 1 ;;
    esac
}

# _hpctrain_error TEXT [TEXT]: print an error in one line, whatever characters the names of files hold
_hpctrain_error() {
    local text=$1${2:+ $2}
    printf 'hpctrain: error: %s\n' "${text//[[:cntrl:]]/?}" >&2
}

# _hpctrain_value NAME: set _hpctrain_reply to the value of the variable of that name
_hpctrain_value() {
    if [ -n "${ZSH_VERSION:-}" ]; then
        # eval, because bash cannot parse this zsh syntax; the text is constant
        eval '_hpctrain_reply=${(P)1-}'
    else
        _hpctrain_reply=${!1-}
    fi
}

# _hpctrain_expand VALUE: set _hpctrain_reply to VALUE with its references replaced, and _hpctrain_missing if
# one is not set; USER and UID always are. Fails where VALUE contains characters of the shell's syntax.
_hpctrain_expand() {
    local rest=$1 text='' name value brace='{'
    case $rest in
    *[\`\"\'\\\;\&\|\<\>]*) return 1 ;;
    esac
    while [ "${rest#*\$}" != "$rest" ]; do
        text=$text${rest%%\$*}
        rest=${rest#*\$}
        if [ "${rest#"$brace"}" != "$rest" ]; then
            rest=${rest#"$brace"}
            name=${rest%%\}*}
            [ "$name" != "$rest" ] || return 1
            rest=${rest#*\}}
        else
            name=${rest%%[!A-Za-z0-9_]*}
            rest=${rest#"$name"}
        fi
        case $name in
        '' | [0-9]* | *[!A-Za-z0-9_]*) return 1 ;;
        UID) value=$(id -u) ;;
        USER) value=${USER:-$(id -un 2>/dev/null)} ;;
        *) _hpctrain_value "$name" && value=$_hpctrain_reply ;;
        esac
        [ -n "$value" ] || _hpctrain_missing=1
        text=$text$value
    done
    _hpctrain_reply=$text$rest
}

# _hpctrain_set KEY VALUE KIND: export KEY, with VALUE unless the user has set it; note it in _hpctrain_new
_hpctrain_set() {
    if [[ -v $1 ]]; then
        # shellcheck disable=SC2163 # the variable that $1 names
        export "$1"
        _hpctrain_value "$1"
        [[ $3 == text && -z $_hpctrain_reply ]] || return 0
    fi
    export "$1=$2"
    _hpctrain_new="${_hpctrain_new:+$_hpctrain_new, }$1=$2"
}

# _hpctrain_read FILE check|shell|job|detect: check each line; export the values (in a job without sbatch's)
# or set _hpctrain_reply to the value of SITE_DETECT
_hpctrain_read() {
    local line key kind number=0 cr detect=''
    cr=$(printf '\r')
    while IFS= read -r line || [ -n "$line" ]; do
        number=$((number + 1))
        line=${line%"$cr"}
        case $line in '' | '#'*) continue ;; esac
        key=${line%%=*}
        if [ "$key" = "$line" ]; then
            _hpctrain_error "$1:$number: '$line' is neither KEY=VALUE nor a comment: correct it"
            return 1
        elif ! _hpctrain_kind "$key"; then
            _hpctrain_error "$1:$number: no site file may set '$key':" \
                'correct it, or add the key to launch/lib/site.sh'
            return 1
        fi
        kind=$_hpctrain_reply
        [ "$2" != detect ] || [ "$kind" = site ] || continue
        _hpctrain_missing=''
        if ! _hpctrain_expand "${line#*=}"; then
            _hpctrain_error "$1:$number: the value of $key is not plain text with \$NAME in it:" \
                'remove quotes and shell syntax'
            return 1
        fi
        case $2:$kind in
        detect:*) detect=$_hpctrain_reply ;;
        check:* | *:site | job:sbatch) ;;
        *) [ -n "$_hpctrain_missing" ] || [ "$key" = "$_hpctrain_not" ] ||
            _hpctrain_set "$key" "$_hpctrain_reply" "$kind" ;;
        esac
    done <"$1"
    _hpctrain_reply=$detect
}

# _hpctrain_detect FOLDER: set _hpctrain_reply to the site and _hpctrain_why to its sign, or generic and ''
_hpctrain_detect() {
    local file entry entries value IFS=' '
    for file in "$1"/*.env; do
        _hpctrain_read "$file" detect || return 1
        entries=$_hpctrain_reply
        set -f # do not expand the patterns to file names
        for entry in $entries; do
            case ${entry%%=*} in
            "$entry" | '' | [0-9]* | *[!A-Za-z0-9_]*)
                _hpctrain_error "$file: '$entry' in SITE_DETECT is not VARIABLE=PATTERN: correct it"
                return 1
                ;;
            HOST) value=$(uname -n) ;;
            CLUSTER)
                value=${SLURM_CLUSTER_NAME:-}
                [ -n "$value" ] ||
                    value=$(scontrol show config 2>/dev/null | sed -n 's/^ClusterName *= *//p')
                ;;
            *) _hpctrain_value "${entry%%=*}" && value=$_hpctrain_reply ;;
            esac
            # shellcheck disable=SC2254 # a pattern
            case $value in
            '') ;;
            ${entry#*=})
                set +f
                _hpctrain_why=${entry%%=*}=$value
                _hpctrain_reply=${file##*/}
                _hpctrain_reply=${_hpctrain_reply%.env}
                return 0
                ;;
            esac
        done
        set +f
    done
    _hpctrain_why='' _hpctrain_reply=generic
}

# _hpctrain_keep_caches: models and a login that the user's own tools have put into their default folders
# count, wherever the site has its caches
_hpctrain_keep_caches() {
    local cache=${XDG_CACHE_HOME:-${HOME:-}/.cache}
    if [ -z "${HF_HOME:-}" ]; then
        if ls -d "$cache"/huggingface/hub/*--* >/dev/null 2>&1; then
            export HF_HOME="$cache/huggingface"
        elif [ -z "${HF_TOKEN_PATH:-}" ] && [ -e "$cache/huggingface/token" ]; then
            export HF_TOKEN_PATH="$cache/huggingface/token"
        fi
    fi
    if [ -z "${TORCH_HOME:-}" ] && [ -d "$cache/torch/hub" ]; then
        export TORCH_HOME="$cache/torch"
    fi
}

# _hpctrain_has_one_image ROOT: whether one SIF is there. Jobs and bin/hpctrain take it, whatever the default
# of the site, unless the user has chosen a flavor.
_hpctrain_has_one_image() {
    set -- "$1"/hpctrain-*.sif
    [ $# = 1 ] && [ -e "$1" ]
}

# hpctrain_load_site ROOT shell|job [NAME]: set the defaults of this or the detected site, or print an error
hpctrain_load_site() {
    # Until this function returns, zsh has words, patterns and arrays as in sh, and expands file names
    if [ -n "${ZSH_VERSION:-}" ]; then
        emulate -L sh
    else
        local -
        set +f
    fi
    local sites=$1/launch/sites name=${3:-} file known own
    local _hpctrain_reply _hpctrain_missing _hpctrain_new='' _hpctrain_why=named
    local _hpctrain_not='' # a key that is not set
    if [ -z "$name" ]; then
        _hpctrain_detect "$sites" || return 1
        name=$_hpctrain_reply
    fi
    case $name in
    *[!A-Za-z0-9_-]*) file='' ;;
    *) file=$sites/$name.env ;;
    esac
    if [ ! -r "$file" ]; then
        known=$(builtin cd "$sites" >/dev/null && printf '%s ' *.env | sed 's/\.env//g')
        _hpctrain_error "no site '$name': choose one of ${known% }, or write launch/sites/$name.env"
        return 1
    elif [ "$2" = shell ] && [ -n "${HPCTRAIN_SITE:-}" ] && [ "$HPCTRAIN_SITE" != "$name" ]; then
        _hpctrain_error "this shell has the values of site $HPCTRAIN_SITE already: open a new shell for $name"
        return 1
    fi
    _hpctrain_keep_caches
    [ "$2" != shell ] || ! _hpctrain_has_one_image "$1" || _hpctrain_not=HPCTRAIN_FLAVOR
    # All lines are checked before the first one is applied.
    _hpctrain_read "$file" check && _hpctrain_read "$sites/generic.env" check || return 1
    _hpctrain_read "$file" "$2" && _hpctrain_read "$sites/generic.env" "$2" || return 1
    export HPCTRAIN_SITE="$name"
    # What this shell starts reads models and texts there. Jobs take another one in /tmp (launch/lib/task.sh).
    own=''
    case $2:${HPCTRAIN_CACHE:-}:$_hpctrain_new in
    "shell:/tmp/hpctrain-$UID/"*) own=/tmp/hpctrain-$UID ;;
    *":/tmp/hpctrain-$UID/"*) ;;
    *HPCTRAIN_CACHE=*) own=$HPCTRAIN_CACHE ;;
    esac
    [ -z "$own" ] || mkdir -m 700 "$own" 2>/dev/null || [ ! -e "$own" ] ||
        { [ -O "$own" ] && [ "$(stat -c %u "$own")" = "$UID" ]; } || # the second of a link itself
        printf 'hpctrain: warning: %s belongs to somebody else: set %s to others\n' \
            "$own" 'HPCTRAIN_CACHE, HF_HOME, TORCH_HOME and MPLCONFIGDIR' >&2
    # Silent where it is sourced again, as by the .bashrc of each shell in a shell.
    if [ "$2" = shell ] && [ "$_hpctrain_why$_hpctrain_new" != named ]; then
        known=$(builtin cd "$sites" >/dev/null && printf '%s ' *.env | sed 's/\.env//g; s/generic //')
        _hpctrain_why=" (${_hpctrain_why:-detected none of ${known% }})"
        known="site $name${_hpctrain_why# (named)}${_hpctrain_new:+: $_hpctrain_new}"
        printf 'hpctrain: %s\n' "${known//[[:cntrl:]]/?}" >&2
    fi
}
