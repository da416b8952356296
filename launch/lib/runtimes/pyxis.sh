# Pyxis with enroot: options of srun, which enters the image, so that task.sh runs inside.
# shellcheck shell=bash
# shellcheck disable=SC2034 # the variables in capitals are read by main.sh and its other parts

pyxis_command() {
    local bind name mounts=/tmp:/tmp names=''
    [[ -n ${SLURM_JOB_ID:-}${OPTION[dry-run]:-} ]] ||
        die "HPCTRAIN_RUNTIME is pyxis, which is a part of Slurm's srun, and this is no Slurm job:" \
            "set another one"
    [[ $(srun --help 2>/dev/null) == *--container-image* ]] ||
        die "srun on $(hostname) has no --container-image, so this site has no Pyxis:" \
            "set HPCTRAIN_RUNTIME to another runtime"
    # Settings of enroot, and what makes Pyxis number the ranks itself
    drop 'ENROOT_*' PYTORCH_VERSION
    separate_host_variables
    find_folders_to_bind
    leave_out_folders_of_one_node
    find_pyxis_image
    RUNTIME_VERSION="enroot $(enroot version 2>/dev/null)" || true
    for bind in "${BINDS[@]}"; do
        [[ $bind == *:* ]] || bind=$bind:$bind
        mounts+=,$bind
    done
    if ((GPUS)); then
        export NVIDIA_VISIBLE_DEVICES=${NVIDIA_VISIBLE_DEVICES:-all}
        export NVIDIA_DRIVER_CAPABILITIES=${NVIDIA_DRIVER_CAPABILITIES:-compute,utility}
    fi
    # Otherwise a variable of the image beats that of the user, and those of the language are not there.
    while read -r name; do
        is_one_of "$name" "${HOST_VARIABLES[@]}" "${OF_ONE_TASK[@]}" 'HPCTRAIN_*' || names+=,$name
    done < <(compgen -e)
    SRUN_ENTERS=1
    STEP_OPTIONS+=(--container-image="$HPCTRAIN_IMAGE" --container-mounts="$mounts"
        --container-workdir="$PWD" --container-env="${names#,}"
        --no-container-entrypoint --no-container-remap-root --no-container-mount-home)
    export HPCTRAIN_GPU_OPTION='NVIDIA_VISIBLE_DEVICES=all (enroot)'
    # By a name, the steps of a job share what the first one unpacks: a minute on a busy node.
    if [[ -z ${OPTION[dry-run]:-} ]] && ! site_mounts_images; then
        STEP_OPTIONS+=(--container-name="hpctrain-$JOB")
        CLEAN_UP+=(remove_pyxis_containers)
    fi
}

# find_pyxis_image: set HPCTRAIN_IMAGE to the path of a squashfs file, or leave the name of a registry's image
find_pyxis_image() {
    [[ ${HPCTRAIN_IMAGE:-} != *.sif ]] ||
        die "$HPCTRAIN_IMAGE is a SIF, which enroot cannot read: run make sqsh, and set HPCTRAIN_IMAGE to" \
            "the .sqsh file, or to the name of an image in a registry"
    [[ -z ${HPCTRAIN_IMAGE:-} || $HPCTRAIN_IMAGE == *.sqsh || $HPCTRAIN_IMAGE == @(/|./)* ]] || return 0
    find_image sqsh
    # Without a / it would be a name at Docker Hub.
    [[ $HPCTRAIN_IMAGE == /* ]] || HPCTRAIN_IMAGE=$PWD/$HPCTRAIN_IMAGE
    find_digest "$HPCTRAIN_IMAGE"
}

# leave_out_folders_of_one_node: where a node lacks the source of a mount, Pyxis ends the step.
leave_out_folders_of_one_node() {
    local bind kept=() missing
    ((NODES > 1)) && [[ -z ${OPTION[dry-run]:-} ]] || return 0
    # shellcheck disable=SC2016 # the shells on the nodes expand it
    missing=$(on_every_node bash -c 'for path; do [[ -e $path ]] || echo "$(uname -n):$path"; done' \
        check "${BINDS[@]%:*}") || true
    for bind in "${BINDS[@]}"; do
        if [[ $'\n'$missing$'\n' =~ $'\n'([^:]*):"${bind%:*}"$'\n' ]]; then
            say "warning: the image has no $bind, because ${BASH_REMATCH[1]} has none" >&2
        else
            kept+=("$bind")
        fi
    done
    BINDS=("${kept[@]}")
}

# site_mounts_images: whether this site's Pyxis mounts squashfs files instead of unpacking them
site_mounts_images() {
    local file
    file=$(scontrol show config 2>/dev/null | awk '$1 == "PlugStackConfig" { print $3 }') || true
    [[ $HPCTRAIN_IMAGE == *.sqsh && -n $file ]] && grep -rqs 'use_squashfuse=1' "$file" "$file.d"
}

# remove_pyxis_containers: that of this job, and those of the user's jobs whose batch script was killed
remove_pyxis_containers() {
    local running
    running=$(jobs_of_user) || return 0
    # shellcheck disable=SC2016,SC2086 # the shells on the nodes expand it; numbers
    on_every_node bash -c '
        for name in $(enroot list); do
            job=${name#pyxis_hpctrain-}
            [[ $job == "$name" || ($job != "$1" && " ${*:2} " == *" $job "*) ]] || enroot remove -f "$name"
        done' remove "$JOB" $running
}
