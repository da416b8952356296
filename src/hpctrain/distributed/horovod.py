"""Horovod with the ranks of any launcher, with or without MPI."""

import os
import platform
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from hpctrain.distributed.rendezvous import all_or_none, gather, main_address
from hpctrain.distributed.world import World
from hpctrain.errors import EndEarly, HpctrainError
from hpctrain.text import reason


@contextmanager
def horovod(world: World) -> Iterator[ModuleType]:
    """horovod.torch with the ranks of `world`, for the block (collective). Raises HpctrainError."""
    hvd = init_horovod(world)
    ended_early = None
    try:
        yield hvd
    except EndEarly as end:
        ended_early = end
    hvd.shutdown()  # not after other exceptions: it would wait for ranks that may have ended
    gather(world, None)  # rank 0 keeps its server until all ranks have shut down
    if ended_early:
        raise ended_early


def init_horovod(world: World) -> ModuleType:
    """Initialize Horovod with the ranks of `world`; returns horovod.torch. A collective call.

    Horovod gets its ranks from horovodrun or, with HOROVOD_CONTROLLER=mpi, from MPI. Otherwise this function
    sets them, and rank 0 runs the rendezvous server, as horovodrun would: then neither MPI nor PMI is needed.
    The parts of horovodrun that this takes (horovod.runner) are those of Horovod 0.28.1, its last release.

    Raises HpctrainError if Horovod is not installed, or its world is not that of the launcher.
    """
    launched = world.launcher == "horovodrun" or "HOROVOD_CONTROLLER" in os.environ
    with all_or_none(world):
        try:
            import horovod.torch as hvd
            from horovod.runner.common.util.hosts import SlotInfo
            from horovod.runner.gloo_run import create_slot_env_vars
            from horovod.runner.http.http_server import RendezvousServer
        except ImportError as error:
            raise HpctrainError(
                f"Horovod cannot be imported ({error}): run this in the container, which has it"
            ) from error
        address = ipv4(main_address()[0]) if world.size > 1 and not launched else None
    if launched:
        hvd.init()
        with all_or_none(world):
            if hvd.size() != world.size:
                raise HpctrainError(
                    f"{world.launcher_command} started {world.size} ranks, "
                    f"but Horovod sees rank {hvd.rank()} of {hvd.size()}: "
                    "launcher and MPI library have no common PMI; "
                    "use launch/apptainer_mpi.sh, or unset HOROVOD_CONTROLLER"
                )
        return hvd

    places = gather(world, (platform.node(), world.local_rank, world.local_size))
    slots = []
    for rank, (host, local_rank, local_size) in enumerate(places):
        # the ranks with this local rank
        peers = [r for r, place in enumerate(places) if place[1] == local_rank]
        slots.append(SlotInfo(host, rank, local_rank, peers.index(rank), world.size, local_size, len(peers)))
    variables = {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        **create_slot_env_vars(slots[world.rank]),
    }
    if address:
        port = 0
        if world.rank == 0:
            server = RendezvousServer()
            port = server.start()
            server.init(slots)
        variables |= {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(gather(world, port)[0]),
        }
    # the network that PyTorch's Gloo uses
    if "GLOO_SOCKET_IFNAME" in os.environ and "HOROVOD_GLOO_IFACE" not in os.environ:
        variables["HOROVOD_GLOO_IFACE"] = os.environ["GLOO_SOCKET_IFNAME"]
    os.environ.update(variables)
    hvd.init()
    for name in variables:  # otherwise a child process would detect itself as a rank of horovodrun
        del os.environ[name]
    return hvd


def ipv4(name: str) -> str:
    """The IPv4 address of a host, for Horovod's client. Raises HpctrainError if it has none."""
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise HpctrainError(
            f"{name} has no IPv4 address ({reason(error)}), which Horovod needs: "
            "set MASTER_ADDR to one of rank 0's node"
        ) from error
