# Apptainer, or Singularity.
# shellcheck shell=bash

apptainer_command() {
    local program bind variable=SINGULARITYENV_PYTHONPATH
    drop_isolation_settings
    separate_host_variables
    find_folders_to_bind
    program=$(command -v apptainer || command -v singularity) ||
        die "neither apptainer nor singularity is on the PATH of $(hostname):" \
            "load your site's module (HPCTRAIN_MODULES)," \
            "or export HPCTRAIN_RUNTIME=none to run without a container"
    find_image sif
    RUNTIME_VERSION=$("$program" --version)
    CONTAINER=("${program##*/}" exec)
    # --nv goes before the image. Without a GPU it does nothing and says nothing.
    ((GPUS == 0)) || CONTAINER+=(--nv)
    for bind in "${BINDS[@]}"; do
        CONTAINER+=(--bind "$bind")
    done
    if [[ -f $HPCTRAIN_IMAGE ]]; then
        SIF=$HPCTRAIN_IMAGE
        find_digest "$SIF"
        # compose gives it its value. A dry run prints commands that may run twice.
        if [[ -z ${OPTION[dry-run]:-} && $RUNTIME_VERSION =~ ^apptainer\ version\ ([0-9]+)\.([0-9]+) ]] &&
            ((BASH_REMATCH[1] > 1 || BASH_REMATCH[2] > 2)); then
            export HPCTRAIN_NODE_CONTAINER=1
        fi
    else # a sandbox folder
        CONTAINER+=("$HPCTRAIN_IMAGE")
    fi
    export HPCTRAIN_GPU_OPTION='--nv before the image (apptainer)'
    export HPCTRAIN_CONTAINER_VARIABLES='APPTAINER_BIND SINGULARITY_BIND'
    # Our images unset PYTHONPATH, for those who enter them after loading a module.
    [[ $RUNTIME_VERSION != apptainer* ]] || variable=APPTAINERENV_PYTHONPATH # the other one with a warning
    [[ -z ${PYTHONPATH:-} ]] || export "$variable=${!variable:-$PYTHONPATH}"
    if [[ -n ${SLURM_JOB_ID:-} ]]; then
        variable=${variable%PYTHONPATH}APPEND_PATH
        export "$variable=${!variable:+${!variable}:}$ROOT/launch/lib/slurm" HPCTRAIN_HOSTS="${HOSTS[*]}"
        HPCTRAIN_SLURM_VERSION=$(scontrol --version 2>/dev/null) || true
        export HPCTRAIN_SLURM_VERSION
    fi
}
