#!/bin/bash
# Write launch/sites/NAME.env from what the login node and its scheduler say, for launch/site.sh --new NAME.
#
# usage: new_site.sh NAME [--probe [OPTION OF sbatch OR qsub]...]
#
# The tables below have a fact a line: its name, and the command that shows it, which the file names as the
# source. A command that is not there, or fails, leaves its fact out. The function read_NAME reads the output
# in OUTPUT, and calls
#   sure KEY=VALUE     a value for the file
#   unsure KEY=VALUE   a value that a person has to decide on: a comment of the file
#   note TEXT          what no key can hold
set -euo pipefail
unset CDPATH
export LC_ALL=C

OF_SLURM='
config      scontrol show config
partitions  scontrol show partition --oneliner
gpus        sinfo --noheader --exact --format=%R:%G
pmi         srun --mpi=list 2>&1'

OF_PBS='
server      qstat -Bf
queues      qstat -Qf
nodes       pbsnodes -a'

# shellcheck disable=SC2016 # bash -c expands it
ON_LOGIN_NODE='
runtimes    type -P apptainer singularity podman-hpc shifter
modules     bash -lc "module --terse avail apptainer singularity" 2>&1
scratch     find "/scratch/$USER" "/scratch/users/$USER" -maxdepth 0 -writable
login       [[ -z $SSH_CONNECTION ]] || getent hosts $(cut -d" " -f3 <<<"$SSH_CONNECTION")'

# shellcheck disable=SC2016 # bash -c expands it
ON_COMPUTE_NODE='
driver      nvidia-smi --query-gpu=driver_version,name --format=csv,noheader
interfaces  ip -brief address show up
cards       ls /sys/class/cxi /sys/class/infiniband
libraries   find /opt -maxdepth 6 -regex ".*/\(libfabric.so.1\|libnccl-net[^/]*.so\)"
libraries   /sbin/ldconfig -p | grep -oE "/[^ ]*/(libfabric|libnccl-net[^ ]*|libcxi)[.]so[.0-9]*$"
disks       df --output=target,fstype,size -h /tmp "${TMPDIR:-/tmp}" "$HOME"
private     grep -E "^([^ ]+ ){4}/tmp " /proc/self/mountinfo
internet    timeout 5 bash -c "</dev/tcp/huggingface.co/443" && echo open || echo closed'

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# shellcheck source=launch/lib/site.sh
source "$ROOT/launch/lib/site.sh"
export USER=${USER:-$(id -un)} HOME=${HOME:-/}
SURE=() UNSURE=() NOTES=() # of one fact
SET=' '                    # the keys of the file
declare -A PARTITION=()    # the names of those that are up: their limits
# for the probe, and for the commands to try
DEFAULT='' GPU_COUNT='' QUEUE='' CHUNK='' RUNTIME='' ENFORCED='' ADVICE=() PROBE=()

die() {
    _hpctrain_error "$*"
    exit 2
}

sure() {
    # A value of another program may have what no site file can, or what a run must not do twice.
    if [[ $SET == *" ${1%%=*} "* ]] || ! _hpctrain_kind "${1%%=*}" || ! _hpctrain_expand "${1#*=}"; then
        unsure "$1"
    else
        SURE+=("$1")
        SET+="${1%%=*} "
    fi
}

unsure() {
    UNSURE+=("# $1")
}

note() {
    NOTES+=("# $*")
}

# read_facts TABLE: print a paragraph of the site file for each fact
read_facts() {
    local name command OUTPUT
    while read -r name command; do
        OUTPUT=$(timeout 20 bash -c "$command" 2>/dev/null) || true
        [[ -n $OUTPUT ]] || continue
        SURE=() UNSURE=() NOTES=()
        "read_$name" || true # what it does not find is not there
        print_fact "$command"
    done <<<"$1"
}

# print_fact SOURCE: print SURE, UNSURE and NOTES, if there are any, below the source
print_fact() {
    local month
    month=$(date +%Y-%m)
    if ((${#UNSURE[@]})); then
        print_paragraph "# $month, $1 ?" "${UNSURE[@]}"
    fi
    if ((${#SURE[@]} + ${#NOTES[@]})); then
        print_paragraph "# $month, $1" "${SURE[@]}" "${NOTES[@]}"
    fi
}

print_paragraph() {
    printf '\n'
    printf '%s\n' "${@//[[:cntrl:]]/ }"
}

# ---- Slurm ----

# setting NAME: set REPLY to the value in the output of scontrol show config
setting() {
    REPLY=$(sed -n "s/^$1 *= *//p" <<<"$OUTPUT" | head -n 1)
}

read_config() {
    local name values=''
    setting ClusterName
    case $REPLY in
    '') return 0 ;;
    cluster | linux | slurm | hpc | *[!A-Za-z0-9_.-]*) unsure "SITE_DETECT=CLUSTER=$REPLY" ;;
    *) sure "SITE_DETECT=CLUSTER=$REPLY" ;;
    esac
    for name in SLURM_VERSION TaskPlugin MpiDefault JobContainerType NamespaceType PreemptMode JobRequeue \
        KillWait; do
        setting "$name"
        [[ -z $REPLY || $REPLY == '(null)' ]] || values+=", $name $REPLY"
        case $name=$REPLY in
        *Type=*tmpfs*) note 'Each job has its own /tmp: for launch/jupyter.sh set TMPDIR elsewhere.' ;;
        PreemptMode=*REQUEUE*) note 'Jobs can be preempted: they save a checkpoint and resume.' ;;
        JobRequeue=0) note 'Jobs are requeued with sbatch --requeue only, as the scripts have it.' ;;
        esac
    done
    note "${values#, }"
    setting AccountingStorageEnforce
    [[ $REPLY != *associations* && $REPLY != *limits* && $REPLY != *safe* ]] || ENFORCED=1
}

# field NAME LINE: set REPLY to the value of NAME=VALUE
field() {
    REPLY=''
    [[ ! " $2" =~ \ $1=([^ ]*) ]] || REPLY=${BASH_REMATCH[1]}
}

read_partitions() {
    local line name limits what
    while read -r line; do
        field PartitionName "$line" && name=$REPLY
        field State "$line"
        [[ -n $name && $REPLY == UP ]] || continue
        field Default "$line" && [[ $REPLY != YES ]] || DEFAULT=$name
        limits=''
        for what in MaxTime DefaultTime MaxNodes AllowAccounts OverSubscribe PreemptMode; do
            field "$what" "$line"
            [[ -z $REPLY || $REPLY == @(UNLIMITED|NONE|ALL|NO|OFF) ]] || limits+=" $what=$REPLY"
        done
        PARTITION[$name]=$limits
    done <<<"$OUTPUT"
    [[ -z $DEFAULT ]] || note "The default partition is $DEFAULT, with${PARTITION[$DEFAULT]:- no limits}."
    advise "${PARTITION[${DEFAULT:-none}]:-}"
}

# advise LIMITS: say where the scripts ask for more than a partition has: two nodes for 30 minutes
advise() {
    ADVICE=()
    [[ $1 != *MaxNodes=1* || $1 == *MaxNodes=1[0-9]* ]] || ADVICE+=(--nodes=1)
    [[ ! $1 =~ MaxTime=00:([0-2][0-9]:[0-9]+) ]] || ADVICE+=("--time=00:${BASH_REMATCH[1]}")
}

read_gpus() {
    local name gres count limits several=()
    declare -A counts=()
    while IFS=: read -r name gres; do
        [[ -v PARTITION[$name] || ${#PARTITION[@]} == 0 ]] || continue # it is down, or hidden
        count=$(grep -oE '(^|,)gpu(:[^:,(]*)?:[0-9]+' <<<"$gres" | head -n 1) || continue
        count=${count##*:}
        [[ " ${counts[$name]:-} " == *" $count "* ]] || counts[$name]+="${counts[$name]:+ }$count"
    done <<<"$OUTPUT"
    mapfile -t several < <(printf '%s\n' "${!counts[@]}" | sort)
    [[ -n ${several[0]} ]] || return 0
    for name in "${several[@]}"; do
        limits=${PARTITION[$name]:-}
        note "partition $name: ${counts[$name]// / or } GPUs per node${limits:+,}$limits"
    done
    if [[ -n $DEFAULT && -v counts[$DEFAULT] ]]; then
        name=$DEFAULT
    elif ((${#several[@]} == 1)); then
        sure "SBATCH_PARTITION=$name"
        PROBE+=("--partition=$name")
        advise "${PARTITION[$name]:-}"
    else
        printf -v name '%s or ' "${several[@]}"
        unsure "SBATCH_PARTITION=${name% or }"
        return 0
    fi
    GPU_COUNT=${counts[$name]##* }
    PROBE+=(--gpus-per-node=1)
    if [[ ${counts[$name]} == *' '* ]]; then
        unsure "SBATCH_GPUS_PER_NODE=$GPU_COUNT"
    else
        sure "SBATCH_GPUS_PER_NODE=$GPU_COUNT"
    fi
}

read_pmi() {
    local offered
    offered=$(sed 's/^srun: //;/ are[.]*$/d;/ available:/d' <<<"$OUTPUT" | tr -s '\n\t ' ' ')
    offered=${offered# }
    note "srun --mpi= offers ${offered% }. launch/apptainer_mpi.sh takes the one of the MPI in the image."
}

# ---- PBS ----

read_server() {
    QUEUE=$(sed -n 's/^ *default_queue = //p' <<<"$OUTPUT")
    note "PBS reads no variables for its options: give them to qsub. Its default queue is ${QUEUE:-not set}."
    [[ $OUTPUT == *'flatuid = True'* ]] || note 'Without flatuid, a job may not call qsub ?:' \
        'then its last line has the command that continues the run.'
}

read_queues() {
    local line
    while read -r line; do
        note "queue $line"
    done < <(awk '
        function show() { if (open == 3) print name limits }
        $1 == "Queue:" { show(); name = $2; limits = ""; open = 0 }
        $1 == "queue_type" && $3 == "Execution" { open++ }
        ($1 == "enabled" || $1 == "started") && $3 == "True" { open++ }
        $1 ~ /^resources_(max|min|default)[.](walltime|ngpus|ncpus|nodect|mem|place)$/ {
            limits = limits " " $1 "=" $3
        }
        END { show() }' <<<"$OUTPUT")
}

read_nodes() {
    local line
    while read -r line; do
        [[ -n $CHUNK ]] || {
            [[ $line =~ ncpus=([0-9]+)\ ngpus=([0-9]*) ]] || continue
            CHUNK=ncpus=${BASH_REMATCH[1]} GPU_COUNT=${BASH_REMATCH[2]}
        }
        note "nodes: $line"
    done < <(awk '
        function add() {
            if (cpus != "") kinds["ncpus=" cpus " ngpus=" gpus + 0 " mem=" mem " sharing=" sharing]++
        }
        /^[^ \t]/ { add(); cpus = gpus = mem = sharing = "" }
        $1 == "resources_available.ncpus" { cpus = $3 }
        $1 == "resources_available.ngpus" { gpus = $3 }
        $1 == "resources_available.mem" { mem = $3 }
        $1 == "sharing" { sharing = $3 }
        END { add(); for (kind in kinds) print kinds[kind], "x", kind }' <<<"$OUTPUT" |
        sort -t= -k3,3nr -k2,2nr | head -n 10)
}

# ---- the login node ----

read_runtimes() {
    local path
    while read -r path; do
        note "$path$(timeout 5 "$path" --version 2>/dev/null | head -n 1 | sed 's/^/: /')"
        RUNTIME+=" ${path##*/}"
    done <<<"$OUTPUT"
    case $RUNTIME in
    *apptainer* | *singularity*) ;;
    *podman-hpc*) sure HPCTRAIN_RUNTIME=podman-hpc ;;
    *) sure HPCTRAIN_RUNTIME=shifter ;;
    esac
}

# Without a version, module load takes the site's default.
read_modules() {
    local module
    [[ -z $RUNTIME ]] || return 0
    module=$(grep -oE '^(apptainer|singularity)[a-zA-Z-]*' <<<"$OUTPUT" | sort | uniq | head -n 1) || return 0
    sure "HPCTRAIN_MODULES=$module"
    note "Versions: $(grep -oE '^(apptainer|singularity)[^ (]*' <<<"$OUTPUT" | tr '\n' ' ')"
}

read_scratch() {
    local folder
    folder=$(head -n 1 <<<"$OUTPUT")
    if [[ -n ${SCRATCH:-} ]]; then
        note "The site sets SCRATCH, here to $SCRATCH."
    else
        sure "SCRATCH=${folder%"$USER"}\$USER"
    fi
}

# The name by which ssh has come here: of an address that only the site itself knows it is not.
read_login() {
    local address name private='^((10|127)\.|192\.168\.|172\.(1[6-9]|2.|3[01])\.|::1$|fe80:|f[cd])'
    read -r address name _ <<<"$OUTPUT"
    if [[ $name == *.* && ! $address =~ $private ]]; then
        sure "HPCTRAIN_LOGIN_HOST=$name"
    else
        unsure "HPCTRAIN_LOGIN_HOST=$name"
    fi
}

# ---- a compute node ----

read_driver() {
    local driver=${OUTPUT%%.*}
    note "$(sort <<<"$OUTPUT" | uniq -c | sed 's/^ *//')"
    if [[ $driver == *[!0-9]* || -z $driver ]]; then
        NOTES=()
    elif ((driver >= 580)); then
        sure HPCTRAIN_FLAVOR=cu130
    elif ((driver >= 525)); then
        sure HPCTRAIN_FLAVOR=cu128
    else
        note 'This driver is too old for the images: they need 525 or newer.'
    fi
}

read_interfaces() {
    note "$(awk '$1 != "lo" { print $1, $3 }' <<<"$OUTPUT" | tr '\n' ',' | sed 's/,$//;s/,/, /g')"
    [[ $OUTPUT != *hsn0* ]] || sure NCCL_SOCKET_IFNAME=hsn
}

read_cards() {
    note "$(tr -s '\n' ' ' <<<"$OUTPUT")"
    [[ $OUTPUT != *cxi[0-9]* ]] ||
        note 'Slingshot needs a plugin of the site and variables, as in launch/sites/perlmutter.env ?'
}

read_libraries() {
    local path
    while read -r path; do
        note "$path"
    done <<<"$OUTPUT"
}

read_disks() {
    local line
    while read -r line; do
        note "$line"
    done < <(tail -n +2 <<<"$OUTPUT" | sort -u | tr -s ' ')
}

read_private() {
    local root
    root=$(awk '{ print $4 }' <<<"$OUTPUT" | tail -n 1)
    [[ $root == */ || $root == */tmp ]] ||
        note "Each job has its own /tmp ($root): for launch/jupyter.sh set TMPDIR elsewhere."
}

read_internet() {
    if [[ $OUTPUT == open ]]; then
        note 'Compute nodes reach the internet.'
    else
        note 'Compute nodes do not reach the internet: hpctrain fetch gets models on a login node.'
    fi
}

# ---- a short job, which shows a compute node ----

# probe OPTION...: print the facts of a compute node. OPTIONs are those of sbatch or qsub.
probe() {
    local folder job='' node
    folder=$(mktemp -d "$PWD/hpctrain-probe.XXXXXX") ||
        die "$PWD: no folder of yours: start this in one that you own and all nodes see"
    # shellcheck disable=SC2064 # the folder of now
    trap "end_probe $(printf %q "$folder")" EXIT
    cat >"$folder/job.sh" <<END
#!/bin/bash
cd $(printf %q "$folder") && uname -n >node
$(printf %q "$ROOT/launch/lib/new_site.sh") --facts >facts.new && mv facts.new facts
for second in {1..60}; do [[ ! -e seen ]] || break; sleep 1; done
touch ended
END
    chmod +x "$folder/job.sh"
    if type -P sbatch >/dev/null; then
        job=$(sbatch --parsable --job-name=hpctrain-probe --nodes=1 --ntasks=1 --time=00:05:00 \
            --output="$folder/log" "${PROBE[@]}" "$@" "$folder/job.sh") ||
            die 'sbatch refused the probe: give it options, such as --probe --account=NAME'
    else
        (($#)) || set -- -l select=1:ncpus=1${GPU_COUNT:+:ngpus=$((GPU_COUNT > 0))}
        job=$(qsub -N hpctrain-probe -l walltime=00:05:00 -j oe -o "$folder/log" "$@" "$folder/job.sh") ||
            die 'qsub refused the probe: give it options, such as --probe -A PROJECT -q QUEUE'
    fi
    job=${job%%;*}
    echo "$job" >"$folder/job"
    printf 'hpctrain: job %s looks at a compute node; Ctrl-C cancels it\n' "$job" >&2
    until [[ -e $folder/facts ]]; do
        is_known "$job" || [[ -e $folder/facts ]] ||
            die "job $job ended without an answer: $(tail -n 1 "$folder/log" 2>/dev/null)"
        sleep 2
    done
    cat "$folder/facts"
    read -r node <"$folder/node"
    SURE=() UNSURE=() NOTES=()
    if OUTPUT=$(ssh -o BatchMode=yes -o ConnectTimeout=10 -o StrictHostKeyChecking=no -o LogLevel=ERROR \
        -o UserKnownHostsFile=/dev/null "$node" true 2>&1); then
        note 'ssh reaches the nodes of your jobs.'
    else
        note "ssh did not reach the node of the job ?: ${OUTPUT:-no answer}"
        note 'Where it cannot: launch/jupyter.sh --port (docs/guides/jupyter.md).'
    fi
    print_fact "ssh $node true"
    touch "$folder/seen"
    for _ in {1..30}; do [[ ! -e $folder/ended ]] || break; sleep 1; done
}

is_known() {
    if type -P squeue >/dev/null; then
        [[ -n $(squeue --noheader --jobs="$1" --states=PD,CF,R 2>/dev/null) ]]
    else
        qstat "$1" >/dev/null 2>&1
    fi
}

# end_probe FOLDER: cancel the job if it has not ended, and remove the folder
end_probe() {
    local job
    if [[ ! -e $1/ended ]] && read -r job 2>/dev/null <"$1/job"; then
        if type -P scancel >/dev/null; then scancel "$job"; else qdel "$job"; fi >/dev/null 2>&1 || true
    fi
    rm -rf "$1"
}

# ---- the file ----

# what_to_try NAME: print the commands to try
what_to_try() {
    local script=apptainer_ddp.sh ranks=${GPU_COUNT:-2} options accounts
    case $RUNTIME in
    *apptainer* | *singularity*) ;;
    *podman*) script=podman_hpc_ddp.sh ;;
    *shifter*) script=shifter_ddp.sh ;;
    esac
    ((ranks)) || ranks=2
    printf '    source launch/site.sh %s\n    launch/%s --dry-run check\n' "$1" "$script"
    if type -P sinfo >/dev/null; then
        printf -v options ' %s' "${ADVICE[@]}" "--ntasks-per-node=$ranks"
        printf '    sbatch%s launch/%s check\n' "$options" "$script"
        printf '    sbatch%s launch/apptainer_mpi.sh check\n' "$options"
        [[ -n $ENFORCED ]] || return 0
        accounts=$(sacctmgr -nP show assoc user="$USER" format=account 2>/dev/null | sort -u | paste -sd' ')
        printf 'sbatch needs an account: export SBATCH_ACCOUNT=NAME before (yours: %s)\n' "${accounts:-?}"
    elif type -P qsub >/dev/null; then
        options="${QUEUE:+-q $QUEUE }-l select=2:${CHUNK:-ncpus=2}"
        ((${GPU_COUNT:-0} == 0)) || options+=":ngpus=$GPU_COUNT"
        # shellcheck disable=SC2016 # the user's shell expands it
        printf '    echo "$PWD/launch/pbs_ddp.sh check" | qsub -V %s -l place=scatter -j oe -k oed\n' \
            "$options:mpiprocs=$ranks"
    fi
}

if [[ ${1:-} == @(-h|--help) ]]; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
elif [[ ${1:-} == --facts ]]; then
    read_facts "$ON_COMPUTE_NODE"
    exit
fi
name=${1:-}
file=$ROOT/launch/sites/$name.env
[[ -n $name && $name != -* && $name != *[!A-Za-z0-9_-]* ]] ||
    die "--new '$name': give the site a name of letters, digits, - and _"
[[ ! -e $file ]] || die "$file exists: choose another name, or move it away"
[[ -w ${file%/*} ]] || die "${file%/*} is not writable: use a copy of hpctrain that is yours"
[[ $# == 1 || $2 == --probe ]] ||
    die "--new $name $2: only --probe can follow, then options of sbatch or qsub"
new=$(mktemp)
trap 'rm -f "$new"' EXIT
{
    printf '# Written on %s by launch/site.sh --new %s on %s.\n' "$(date +%F)" "$name" "$(uname -n)"
    printf '# Read it once: a "?" marks what is unsure, which is a comment until somebody knows.\n'
    if type -P sinfo >/dev/null; then read_facts "$OF_SLURM"; else read_facts "$OF_PBS"; fi
    read_facts "$ON_LOGIN_NODE"
} >"$new"
(($# == 1)) || (probe "${@:3}") >>"$new"
_hpctrain_read "$new" check
(set -o noclobber && cat "$new" >"$file") 2>/dev/null || die "$file cannot be written: choose another name"
printf 'hpctrain: %s (values: %s, to decide on: %s). Read it, then try:\n' \
    "$file" "$(grep -c '^[A-Z]' "$new")" "$(grep -c '^# [A-Z_]*=' "$new")"
what_to_try "$name"
