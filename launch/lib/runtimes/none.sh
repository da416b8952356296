# No container: the python that modules, a venv or a conda environment put on the PATH.
# shellcheck shell=bash
# shellcheck disable=SC2034 # the variables in capitals are read by main.sh and its other parts

# is_venv ENVIRONMENT: whether it is a venv, and none of conda. Somebody else may have made a folder with the
# name of yours where you submit.
is_venv() {
    [[ $1 == */* ]] || belongs_to_user "$1" || return 1
    [[ -r $1/bin/activate && ! -d $1/conda-meta ]]
}

none_command() {
    local env=${HPCTRAIN_PYTHON_ENV:-}
    [[ $env != -* ]] || env=./$env
    [[ -z ${HPCTRAIN_PACKAGES:-} ]] ||
        die "HPCTRAIN_PACKAGES is for images: unset it, and pip install into the environment itself"
    if is_venv "$env"; then
        # shellcheck source=/dev/null
        source "$env/bin/activate"
    elif [[ -n $env ]]; then
        command -v conda >/dev/null ||
            die "HPCTRAIN_PYTHON_ENV=$env is not a venv (give that of somebody else by its path)," \
                "and there is no conda on the PATH: load conda's module (HPCTRAIN_MODULES)"
        set +u # conda's scripts read variables that are not set
        eval "$(conda shell.bash hook)"
        conda activate "$env" || die "conda activate $env failed: conda env list shows the environments"
        set -u
    fi
    # The current folder may have an importlib.py.
    python -c 'import sys; sys.path[:] = filter(None, sys.path)
import importlib.util as u; raise SystemExit(u.find_spec("torch") is None)' 2>/dev/null ||
        die "$(command -v python || echo python) on $(hostname) has no torch:" \
            "set HPCTRAIN_MODULES or HPCTRAIN_PYTHON_ENV to one that has it"
    RUNTIME_VERSION=$(python --version)
    HPCTRAIN_IMAGE=$(command -v python)
    # The PMIx of a wheel, or of conda, lacks the munge that srun's may offer: each rank would complain. The
    # image has the same setting.
    if [[ -e ${HPCTRAIN_IMAGE%/bin/*}/etc/pmix-mca-params.conf ]]; then
        export PMIX_MCA_psec=${PMIX_MCA_psec-^munge}
    fi
    # A site's PyTorch does not include hpctrain. This folder holds nothing else, so it hides nothing.
    export PYTHONPATH=$ROOT/src${PYTHONPATH:+:$PYTHONPATH}
}
