# Shifter (NERSC).
# shellcheck shell=bash
# shellcheck disable=SC2034 # the variables in capitals are read by main.sh and its other parts

shifter_command() {
    local name
    separate_host_variables
    command -v shifter >/dev/null ||
        die "there is no shifter on the PATH of $(hostname): use a launch script for a runtime of this site"
    : "${HPCTRAIN_IMAGE:=hpctrain:$HPCTRAIN_FLAVOR}"
    # It says nothing of a missing image, and on stdout that its gateway is down ("ERROR: ...", "err 28").
    DIGEST=$(shifterimg lookup "$HPCTRAIN_IMAGE" 2>/dev/null) || [[ -z $DIGEST ]] ||
        die "shifterimg lookup: ${DIGEST%.}: the gateway of the images does not answer, so try again later"
    [[ $DIGEST || $HPCTRAIN_IMAGE != "hpctrain:${HPCTRAIN_FLAVOR:-}" ]] || check_flavor
    [[ $DIGEST =~ ^(sha256:)?[0-9a-f]+$ ]] ||
        die "$HPCTRAIN_IMAGE: shifter has no such image: shifterimg pull it, or set HPCTRAIN_IMAGE" \
            "(shifterimg images lists yours)"
    DIGEST=sha256:${DIGEST#sha256:}
    RUNTIME_VERSION=shifter
    # The home and the file systems of the site are there without --volume. By its id, no rank asks the
    # gateway for the image, and all have the one that the name means now.
    CONTAINER=(shifter "--image=id:${DIGEST#sha256:}")
    [[ -z ${HPCTRAIN_SHIFTER_MODULES:-} ]] || CONTAINER+=("--module=$HPCTRAIN_SHIFTER_MODULES")
    # shifter is setuid, and the loader takes these away from such a program.
    for name in TMPDIR MALLOC_MMAP_THRESHOLD_ MALLOC_TRIM_THRESHOLD_; do
        [[ ! -v $name ]] || CONTAINER+=("--env=$name=${!name}")
    done
    export HPCTRAIN_GPU_OPTION='--module=gpu (shifter; HPCTRAIN_SHIFTER_MODULES)'
}
