# MPI: srun with a PMI, or the host's mpirun.
# shellcheck shell=bash
# shellcheck disable=SC2034 # PYTHON is read by main.sh

# launch_with_mpi HOW: mpirun, or srun with that PMI; "auto" or nothing: the PMI of the image's MPI library
launch_with_mpi() {
    local how=${1:-${HPCTRAIN_MPI:-auto}} library offered
    library=$(in_image python -c '
import sys
sys.path[:] = filter(None, sys.path) # not the current folder
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(*MPI.Get_library_version().split(",")[0].splitlines()[0].split())' 2>&1 | tail -n 1) || true
    [[ $how == @(auto|mpirun) ]] || command -v srun >/dev/null ||
        die "there is no srun on the PATH of $(hostname), which starts the ranks with --mpi=$how:" \
            "run this where Slurm is, or use --mpi=mpirun"
    offered=$(srun --mpi=list 2>&1 | sed 's/^specific .* available://' | tr -s '\n\t, ' ' ' || true)
    if [[ $how == auto ]]; then
        choose_pmi "$library" "$offered"
        how=$REPLY
    fi
    export HPCTRAIN_MPI_LIBRARY=$library
    if [[ $how == mpirun ]]; then
        use_launcher mpirun
    else
        [[ " $offered " == *" $how "* || " $offered " == *" ${how}_v"* ]] ||
            die "srun does not offer --mpi=$how here: choose one of these: ${offered##*are... }"
        LAUNCHER_TEXT="srun --mpi=$how for $library"
        set_srun "$TASKS" --mpi="$how"
        LAUNCH+=("$TASK" srun)
    fi
    # Any script, as a module of its own may import mpi4py; mpirun.sh says why.
    [[ $library == *Error:* || ${PROGRAM[*]:0:2} == '-m hpctrain' ]] ||
        PYTHON=(python "$ROOT/launch/lib/mpi4py_main.py")
    [[ -z ${OPTION[dry-run]:-} ]] || return 0
    # There mpirun 4 tells Open MPI 5 wrongly which ranks share a node: sums over nodes crash or hang.
    ! { [[ $how == mpirun && $library == "Open MPI v5"* && $LAUNCHER_TEXT =~ \ [1-4]\. ]] && is_outside; } ||
        die "${LAUNCHER_TEXT#*, } must start on a node of the job, as the image has $library," \
            "and this is ${SLURMD_NODENAME:-$(uname -n)}: use sbatch, or an Open MPI 5"
    # mpirun starts Horovod over Gloo without any MPI
    [[ $how == mpirun && $library == ModuleNotFoundError* ]] ||
        check_mpi_world "$library" "${LAUNCHER_TEXT%% for *}"
}

# is_outside: whether this machine is no node of the job, as in salloc. In a PBS job it is one.
is_outside() {
    local machine=${SLURMD_NODENAME:-$(uname -n)}
    [[ -z ${PBS_NODEFILE:-} && " ${HOSTS[*]%%.*} " != *" ${machine%%.*} "* ]]
}

# choose_pmi LIBRARY OFFERED: set REPLY to the PMI of the library that srun offers, or to mpirun
choose_pmi() {
    case "$1:$2" in
    "Open MPI"*\ pmix*) REPLY=pmix ;;
    *MPICH*\ cray_shasta\ *)
        REPLY=pmi2
        [[ ! -e /opt/cray ]] || REPLY=cray_shasta # srun lists it without a Cray, too
        ;;
    *MPICH*\ pmi2\ * | Intel*\ pmi2\ *) REPLY=pmi2 ;;
    "Open MPI"*) REPLY=mpirun ;;
    *)
        die "$HPCTRAIN_IMAGE has no MPI library that srun or mpirun can start here ($1):" \
            "use another image, or apptainer_ddp.sh"
        ;;
    esac
}

# check_mpi_world LIBRARY LAUNCHER: check that MPI gives one world of all ranks, before the long job. Without
# a common PMI, launcher and library give N worlds of one rank each, which run, and end with exit status 0.
# When a job starts again, another error may go away, and must not end it for good.
check_mpi_world() {
    local status=0 output seconds advice='try another --mpi= (srun --mpi=list shows them; or mpirun)'
    ! script_is apptainer_horovod.sh ||
        advice='try another HPCTRAIN_MPI (srun --mpi=list shows them), or --launcher=mpirun'
    seconds=$((HPCTRAIN_WORLD_SIZE < 540 ? 60 + HPCTRAIN_WORLD_SIZE : 600))
    compose python -c '
import sys
sys.path[:] = filter(None, sys.path)
import os
from mpi4py import MPI
size, wanted = MPI.COMM_WORLD.size, int(os.environ["HPCTRAIN_WORLD_SIZE"])
raise SystemExit(0 if size == wanted else f"MPI: {size} of {wanted}")'
    output=$(timeout --kill-after=10 "$seconds" "${COMMAND[@]}" 2>&1) || status=$?
    ((status != 0)) || return 0
    printf '%s\n' "$output" | tail -n 8 >&2
    if [[ $output == *"MPI: 1 of"* ]]; then
        die "each of $HPCTRAIN_WORLD_SIZE ranks is rank 0 of 1: $1 does not support the PMI of $2: $advice"
    fi
    ((${SLURM_RESTART_COUNT:-${HPCTRAIN_RESTARTS:-0}} == 0)) || return 0
    ((status != 124 && status != 137)) ||
        die "MPI has not started in $seconds s ($1 with $2; its last lines, if any, are above): $advice"
    die "MPI does not start ($1 with $2, exit status $status; its last lines are above): $advice"
}
