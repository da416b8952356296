# May this path be used, and whose is it? Others can make files, folders and links in /tmp, in /dev/shm and in
# shared folders. Everything in launch/ asks here, except site.sh, which runs in the user's shell. Sourced by
# launch/lib/main.sh, task.sh and launch/modulefiles/install.sh.
#
# Each launch script has to ask first whose its functions are, because it runs them. Slurm and PBS run a copy
# of the script, so that it looks in three places. HPCTRAIN_ROOT is the user's word. Functions beside the
# original count if they and their folder have its owner: others may put files beside a copy of yours. Those
# in the folder where the job was submitted count if they and their folder are the user's own.
# shellcheck shell=bash

# owner_of PATH: print the number of its owner; of a link itself
owner_of() {
    stat -c %u "$1"
}

# belongs_to_user PATH: whether the file or folder does, or the link: one of somebody else may lead to a
# folder of the user in which others can write
belongs_to_user() {
    [[ $(owner_of "$1" 2>/dev/null) == "$UID" ]]
}

# is_own FOLDER: whether it is one of this user, and no link. One look: between two, others could replace it.
is_own() {
    [[ $(stat -c %A:%u "$1" 2>/dev/null) == d*:"$UID" ]] # stat translates the name of a kind
}

# only_writable_by KIND PATH UID...: whether it is a folder (KIND d) or a file (-), so no link, and whether
# these users alone can change it
only_writable_by() {
    local found
    found=$(stat -c %A:%u "$2" 2>/dev/null) &&
        [[ -r $2 && $found == "$1"????-??-?:* && " ${*:3} " == *" ${found##*:} "* ]]
}

# is_open_to_all FOLDER: whether everybody can rename what is in it: without the sticky bit of /tmp
is_open_to_all() {
    [[ $(stat -Lc %A "$1") == *w[x-] ]]
}

# make_own FOLDER: create it for this user alone, unless it is there. Fails if it belongs to somebody else, or
# cannot be made.
make_own() {
    mkdir -m 700 "$1" 2>/dev/null || is_own "$1"
}

# make_own_or_other FOLDER: set REPLY to a folder of this user alone: this one, or, if somebody else has the
# name, another that the node's tasks have made, or one with an unknown name, also where it cannot be made
make_own_or_other() {
    local random
    REPLY=$1
    ! make_own "$1" || return 0
    random=$1.$(printf %s "$(uname -n) ${HPCTRAIN_JOB_SECRET:-}" | sha256sum | cut -c -16)
    for REPLY in "$random" "$1".* "$random"; do
        ! is_own "$REPLY" || break
    done
    make_own "$REPLY" || [[ ! -e $REPLY ]]
}

# write_private FOLDER FILE TEXT: make the folder, for this user alone, with this file. Where others can write
# the folder around it, they can replace it: so it is entered before the look at its owner. An ACL around it
# gives a new file to others, but not a folder of mode 700.
write_private() {
    (set -C && mkdir -m 700 "$1" && cd "$1" && [[ $(stat -c %u:%a .) == "$UID:"?(2)700 ]] &&
        printf %s "$3" >"$2")
}

# refuse_podman_settings_of_others: by default podman-hpc has its configuration in /tmp, and podman runs the
# programs that it names
refuse_podman_settings_of_others() {
    make_own "/tmp/${UID}_hpc" ||
        die "/tmp/${UID}_hpc on $(uname -n), which podman-hpc uses, belongs to somebody else" \
            "or cannot be made: leave the node out (--exclude=$(uname -n)), and tell the administrators"
}
