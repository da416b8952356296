#!/bin/bash
# Copy the host's NCCL plugin, its libfabric and what they load into a folder that an image can use, and print
# the variables to set.
#
# usage: collect.sh FOLDER [PLUGIN.so | libfabric.so.1]...
#
# Start it as launch/check.sh --collect FOLDER, on a compute node or on a login node with the same libraries.
# Without names it takes the plugin and the libfabric of LD_LIBRARY_PATH, of the loader's cache, or of /opt:
# load the site's module first, if there is one. FOLDER must be new or empty, where all nodes see it.
set -euo pipefail
unset CDPATH
export LC_ALL=C

[[ ${1:-} != @(-h|--help) ]] || { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit; }
IMAGE_GLIBC=2.36 # of Debian 12
# Those of the image, and the driver's, which --nv brings. The loader must be the one of its C library.
OWN='^(ld-linux.*|lib(c|m|mvec|dl|rt|pthread|resolv|util|nsl|anl|gcc_s|stdc[+][+]|cuda|nvidia-.*)[.]so.*)$'

say() {
    printf 'hpctrain: %s\n' "${*//[[:cntrl:]]/?}"
}

die() {
    say "error: $*" >&2
    exit 2
}

# candidates PATTERN: print the libraries of that name, in the order in which to try them
candidates() {
    local folder
    tr : '\n' <<<"${LD_LIBRARY_PATH:-}" | while read -r folder; do
        [[ ! -d $folder ]] || find "$folder/" -maxdepth 1 -name "$1" | sort -V
    done
    /sbin/ldconfig -p 2>/dev/null | sed -n 's/.* => //p' | grep -E "/${1//\*/[^/]*}$" || true
    # the newest release first; some folders may be closed
    { find -L /opt -maxdepth 7 -name "$1" 2>/dev/null || true; } | sort -rV
}

# needs LIBRARY: print "NAME PATH" for each library that it loads, with PATH "not" if it is not found
needs() {
    { ldd "$1" 2>/dev/null || true; } | awk '$2 == "=>" { print $1, $3 }'
}

folder=${1:-}
[[ -n $folder && $folder != -* ]] || die '--collect: give a new folder after it, where all nodes see it'
[[ $folder != *[,:]* ]] || die "$folder: a list of folders has no comma or colon in a name: give another one"
[[ ! -e $folder || -z $(ls -A "$folder") ]] || die "$folder is not empty: give a new folder"
plugin='' fabric=''
for path in "${@:2}"; do
    [[ -r $path ]] || die "$path: no such library"
    case ${path##*/} in
    libfabric.so*) fabric=$path ;;
    *.so*) plugin=$path ;;
    *) die "$path: give a plugin (libnccl-net*.so) or libfabric.so.1" ;;
    esac
done
# sed -n 1p and not head, because of pipefail
[[ -n $plugin || -n $fabric ]] || plugin=$(candidates 'libnccl-net*.so' | sed -n 1p)
[[ -z $plugin || -n $fabric ]] ||
    fabric=$(needs "$plugin" | awk '$1 == "libfabric.so.1" && $2 != "not" { print $2 }')
[[ -n $fabric ]] || fabric=$(candidates libfabric.so.1 | sed -n 1p)
[[ -n $plugin$fabric ]] ||
    die "$(uname -n) has no libnccl-net.so and no libfabric.so.1 in LD_LIBRARY_PATH, the loader's cache or" \
        "/opt: load the site's module, or name the files after the folder"

# Providers that libfabric loads by itself are in a folder beside it.
providers=()
[[ -z $fabric ]] || mapfile -t providers < <(
    real=$(readlink -f "$fabric")
    tr : '\n' <<<"${fabric%/*}/libfabric:${real%/*}/libfabric:${FI_PROVIDER_PATH:-}" | while read -r path; do
        [[ ! -d $path ]] || find "$path/" -maxdepth 1 -name '*-fi.so'
    done | sort -u
)

mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
missing=0
queue=(${plugin:+"$plugin"} ${fabric:+"$fabric"} "${providers[@]}")
declare -A seen=()
# What they load is found as they find it now: each other's folders may be needed.
export LD_LIBRARY_PATH=${fabric:+${fabric%/*}:}${LD_LIBRARY_PATH:-}
while ((${#queue[@]})); do
    path=${queue[0]} queue=("${queue[@]:1}")
    name=${path##*/}
    [[ ! -v seen[$name] ]] || continue
    seen[$name]=1
    cp -L "$path" "$folder/$name"
    while read -r needed found; do
        [[ ! $needed =~ $OWN && ! -v seen[$needed] ]] || continue
        if [[ $found == /* ]]; then
            queue+=("${found%/*}/$needed")
        else
            seen[$needed]=1
            say "error: $path needs $needed, which is not found: load the module that has it" >&2
            missing=1
        fi
    done < <(needs "$path")
done
((missing == 0)) || { rm -rf "$folder" && exit 1; } # it was new or empty

newest=$(grep -aohE 'GLIBC_2[.][0-9]+' "$folder"/* | sort -uV | tail -n 1) || true
newest=${newest#GLIBC_}
[[ -z $newest || $(printf '%s\n' "$newest" "$IMAGE_GLIBC" | sort -V | tail -n 1) == "$IMAGE_GLIBC" ]] ||
    say "warning: they need the C library $newest, and the image has $IMAGE_GLIBC, where they do not load" >&2

say "${#seen[@]} libraries of $(uname -n) are in $folder:${plugin:+ $plugin}${fabric:+ $fabric}" \
    "${providers[@]}"
say 'Set these before sbatch, or put the NCCL_ and FI_ ones into the file of your site:'
printf '    export APPTAINERENV_LD_LIBRARY_PATH=%q\n' "$folder"
((${#providers[@]} == 0)) || printf '    export FI_PROVIDER_PATH=%q\n' "$folder"
if [[ -n $plugin ]]; then
    name=${plugin##*/} && name=${name%%.so*}
    [[ $name == libnccl-net ]] || printf '    export NCCL_NET_PLUGIN=%q\n' "${name#libnccl-net-}"
    # The name by which the plugin calls itself: up to 1.11, and later.
    if grep -aq 'AWS Libfabric' "$plugin"; then
        echo '    export NCCL_NET="AWS Libfabric"'
    elif grep -aq 'Libfabric' "$plugin"; then
        echo '    export NCCL_NET=Libfabric'
    fi
fi
say 'Then see that the image loads them: sbatch launch/apptainer_ddp.sh check'
