# torchrun: one on each node, which starts the ranks there, and starts all of them again when one dies.
# shellcheck shell=bash
# shellcheck disable=SC2034 # the variables in capitals are read by main.sh

launch_with_torchrun() {
    local rendezvous restarts=${OPTION[max-restarts]:-0}
    LAUNCHER_TEXT="torchrun on each node, at most $(counted "$restarts" restart)"
    if [[ ${HOSTS[0]} == localhost ]]; then
        has_address 127.0.0.1 || (($? > 1)) ||
            die "the network interface lo of $(hostname) is down, and the ranks meet there: ip link set lo up"
        rendezvous=(--standalone)
    else
        if [[ -n ${PBS_NODEFILE:-} ]]; then
            set_mpirun 1
        else
            set_srun 1
        fi
        set_mpi_hint
        rendezvous=(--rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" --rdzv-id="$JOB")
        # Otherwise workers share the rendezvous's store: no restart over two nodes recovered (torch 2.13).
        export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    fi
    LAUNCH+=("$TASK" none)
    PYTHON=(python "$ROOT/launch/lib/torchrun.py" --nnodes="$NODES" --nproc-per-node="$TASKS"
        --max-restarts="$restarts" "${rendezvous[@]}")
}
