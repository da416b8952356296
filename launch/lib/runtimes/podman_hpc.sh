# podman-hpc (NERSC): one container per node for all its tasks; in separate ones MPI ranks find no others.
# shellcheck shell=bash
# shellcheck disable=SC2034 # the variables in capitals are read by main.sh and its other parts

# The launchers, Slurm and task.sh set them in each task.
LATER_VARIABLES=('CUDA_*' 'GROUP_*' 'HOROVOD_*' 'HPCTRAIN_*' 'MASTER_*' 'OMPI_*' 'PBS_*' 'PMI_*' 'PMIX_*'
    'SLINGSHOT_*' 'SLURM_*' 'TORCH*')

podman_hpc_command() {
    local bind name module modules label=hpctrain.job=$JOB
    separate_host_variables
    find_folders_to_bind
    command -v podman-hpc >/dev/null ||
        die "there is no podman-hpc on the PATH of $(hostname):" \
            "use a launch script for a runtime of this site"
    refuse_podman_settings_of_others
    : "${HPCTRAIN_IMAGE:=hpctrain:$HPCTRAIN_FLAVOR}"
    DIGEST=$(podman-hpc images --format '{{.Digest}}' "$HPCTRAIN_IMAGE" 2>&1 | tail -n 1) || true
    [[ $DIGEST == sha256:* || $HPCTRAIN_IMAGE != "hpctrain:${HPCTRAIN_FLAVOR:-}" ]] || check_flavor
    [[ $DIGEST == sha256:* ]] ||
        die "$HPCTRAIN_IMAGE: podman-hpc has no such image on $(hostname): podman-hpc pull it" \
            "(after podman-hpc build or load: podman-hpc migrate), or set HPCTRAIN_IMAGE"
    # An image that was both loaded and pulled has two digests; the one that the user named was found.
    [[ $HPCTRAIN_IMAGE != *@* ]] || DIGEST=${HPCTRAIN_IMAGE#*@}
    RUNTIME_VERSION=$(podman --version)
    # keep-id: files in shared folders stay the user's own, and PMIx accepts the caller. /tmp: PMIx's sockets.
    CONTAINER=(podman-hpc shared-run --label "$label" --userns=keep-id --network=host --ipc=host
        --volume /tmp:/tmp --workdir "$PWD")
    split_list "${HPCTRAIN_PODMAN_MODULES:-}" modules
    for module in "${modules[@]}"; do
        CONTAINER+=("--$module")
    done
    for bind in "${BINDS[@]}"; do
        [[ $bind == *:* ]] || bind=$bind:$bind
        CONTAINER+=(--volume "$bind")
    done
    # Not --env-host, which would replace the PATH of the image. First those that the tasks get later.
    for name in RANK LOCAL_RANK NODE_RANK WORLD_SIZE LOCAL_WORLD_SIZE "${LATER_VARIABLES[@]}"; do
        CONTAINER+=(--env "$name")
    done
    while read -r name; do
        is_one_of "$name" "${LATER_VARIABLES[@]}" || CONTAINER+=(--env "$name")
    done < <(image_variables)
    CONTAINER+=("$HPCTRAIN_IMAGE")
    # The task of this launcher on the node that makes the container, and how many enter it (task.sh)
    export PODMANHPC_LOCALID_VAR=HPCTRAIN_NODE_TASK PODMANHPC_TASKS_PER_NODE_VAR=HPCTRAIN_NODE_TASKS
    # Its unmount of the image gives up after five seconds by default, and a busy node takes longer.
    export UMOUNT_WAIT_RETRIES=${UMOUNT_WAIT_RETRIES:-60}
    export HPCTRAIN_GPU_OPTION='--gpu (podman-hpc; HPCTRAIN_PODMAN_MODULES)'
    # Its containers outlive podman-hpc. The task ends them where Slurm ends the job and lets it start nothing
    # more; otherwise they end after srun has killed the tasks, where one of them failed. podman run ignores
    # SIGTERM: while one still makes a container (a second on a busy node), rm would not see it.
    HPCTRAIN_END_TASK="for i in {1..40}; do pgrep -u $UID -f '[p]odman run .*--label $label ' >/dev/null"
    HPCTRAIN_END_TASK+=" && sleep 0.1 || break; done; podman-hpc rm --force --time 0 --filter label=$label"
    export HPCTRAIN_END_TASK
    CLEAN_UP+=(remove_podman_containers)
}

remove_podman_containers() {
    (($1 == 0)) || on_every_node bash -c "$HPCTRAIN_END_TASK" >/dev/null
}
