# The SHA-256 of a SIF, without reading its gigabytes at the start of each job. Sourced by launch/lib/main.sh.
#
# IMAGE.sif.digest, beside the SIF, is one line: "sha256:HEX SIZE MTIME". It is valid while the SIF has that
# size and time of modification, if the owner of the SIF or the user alone can change it.
# apptainer/build_sif.sh, modulefiles/install.sh or the first job writes it, if it may. That job also writes
# the digest to a file in HPCTRAIN_CACHE, named by path, size and time of the SIF; a trainer reads it when it
# saves.
# shellcheck shell=bash
# shellcheck disable=SC2034 # DIGEST and DIGEST_PENDING are read by main.sh

# stamp_of SIF: print its size and time of modification. A locale may have a decimal comma.
stamp_of() {
    LC_ALL=C stat -c '%s %.9Y' "$1"
}

# digest_record SIF: print the line of SIF.digest, after hashing it
digest_record() {
    local sha256
    sha256=$(sha256sum <"$1" | cut -d ' ' -f 1)
    echo "sha256:$sha256 $(stamp_of "$1")"
}

# find_digest SIF: set DIGEST from a record, or else DIGEST_PENDING
find_digest() {
    local sif digest='' of=''
    sif=$(realpath "$1")
    DIGEST_STAMP=$(stamp_of "$sif")
    DIGEST_FILE=$HPCTRAIN_CACHE/digests/${sif##*/}
    DIGEST_FILE+=.$(printf '%s %s' "$sif" "$DIGEST_STAMP" | sha256sum | cut -c -16)
    # Both may be in a folder such as /tmp, where anybody can add a file, but nobody can replace another's.
    if only_writable_by - "$sif.digest" "$EUID" "$(owner_of "$sif")"; then
        read -r digest of <"$sif.digest" || true
    fi
    if [[ $of != "$DIGEST_STAMP" ]] && only_writable_by d "${DIGEST_FILE%/*}" "$EUID" &&
        only_writable_by - "$DIGEST_FILE" "$EUID"; then
        { read -r digest <"$DIGEST_FILE" && of=$DIGEST_STAMP; } || true
    fi
    if [[ $of == "$DIGEST_STAMP" && $digest =~ ^sha256:[0-9a-f]{64}$ ]]; then
        DIGEST=$digest
    else
        DIGEST_PENDING=1
    fi
}

# hash_in_background SIF: hash it, print and record the digest; HPCTRAIN_IMAGE_DIGEST_FILE names its file
hash_in_background() {
    # A cache for its user alone, if it is made here. In a folder that others can change, a link of theirs
    # would lead the record to any file of this user. In one above it, they could put such a folder there.
    for DIGEST_FILE in "$DIGEST_FILE" "/tmp/hpctrain-$UID/digests/${DIGEST_FILE##*/}"; do
        [[ $DIGEST_FILE != "/tmp/hpctrain-$UID"/* ]] || make_own "/tmp/hpctrain-$UID" || break
        (umask 077 && mkdir -p "${DIGEST_FILE%/*}") 2>/dev/null || continue
        if only_writable_by d "${DIGEST_FILE%/*}" "$EUID" &&
            only_writable_by d "${DIGEST_FILE%/*/*}" "$EUID"; then
            export HPCTRAIN_IMAGE_DIGEST_FILE=$DIGEST_FILE
            break
        fi
    done
    # The inner & detaches it: the launcher, which replaces this script by exec, does not get it as a child.
    (hash_and_record "$(realpath "$1")" $$ </dev/null &)
}

# hash_and_record SIF PID: ends when it is done, or half a second after process PID has ended
hash_and_record() {
    local sif=$1 owner=$2 digest='' reader
    exec 9< <(exec nice -n 19 sha256sum "$sif" 2>/dev/null)
    reader=$!
    while read -r -t 0.5 -u 9 digest _ || (($? > 128)); do # above 128: nothing yet
        [[ -z $digest ]] || break
        is_alive "$owner" || { kill "$reader" && return 0; }
    done
    digest=sha256:${digest#\\} # which sha256sum prints where the name of the file has one
    # Not if the SIF could not be read, or was replaced since find_digest.
    [[ $digest =~ ^sha256:[0-9a-f]{64}$ && $(stamp_of "$sif") == "$DIGEST_STAMP" ]] || return 0
    say "image $sif $digest"
    [[ -z ${HPCTRAIN_IMAGE_DIGEST_FILE:-} ]] || write_record "$DIGEST_FILE" "$digest"
    write_record "$sif.digest" "$digest $DIGEST_STAMP"
}

# write_record FILE LINE: write FILE atomically; a folder that cannot be written is no error
write_record() {
    local temporary=$1.$BASHPID$RANDOM
    # noclobber: a file is made, and nothing is written through the link of somebody else
    { (umask 022 && set -C && echo "$2" >"$temporary") && mv -T "$temporary" "$1"; } 2>/dev/null ||
        rm -f "$temporary"
}
