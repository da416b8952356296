"""hpctrain bench: how fast the ranks exchange data, by size, as a table, JSON and a picture.

Run it with the script of the long job, on the nodes of the long job:

    sbatch launch/apptainer_ddp.sh bench

The sizes and the two bandwidths are those of nccl-tests (doc/PERFORMANCE.md of github.com/NVIDIA/nccl-tests).
The bandwidth of the algorithm is the size divided by the time. The bandwidth of the bus is what one link
carried at least: it does not depend on the number of ranks, and compares with the hardware's.
"""

import argparse
import itertools
import json
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.commands import bench_layernorm, rounds
from hpctrain.distributed.device import choose_device, free_memory
from hpctrain.distributed.horovod import horovod
from hpctrain.distributed.mpi import mpi_library, mpi_name
from hpctrain.distributed.rendezvous import all_or_none, gather, process_group
from hpctrain.distributed.world import World, job_id
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.files import atomic
from hpctrain.parser import Parser, add_device
from hpctrain.run.charts import COLORS, folder_for_matplotlib, save_picture
from hpctrain.run.config import versions
from hpctrain.text import first_line, say

# Bandwidth of the bus over that of the algorithm, for n ranks.
BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "point-to-point": lambda n: 1.0,
}
POINT_TO_POINT = "point-to-point"
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
STEP = 4  # from a size to the next one
BETWEEN_NODES = 2**24  # bytes: large enough for the bandwidth, and small enough to ask every node

# Makes an exchange of so many floats, which returns what arrived, [groups, floats of each]: see expected().
Maker = Callable[..., Callable[[], Tensor]]


def main(world: World, arguments: list[str]) -> None:
    """Print a line for each operation and size, on rank 0. Raises HpctrainError if a value arrives wrong."""
    args = parser().parse_args(arguments)
    if args.what == "layernorm":
        bench_layernorm.run(world, args)
        return
    if world.size == 1:
        raise UsageError(
            "hpctrain bench: one rank has nobody to exchange data with: start it with a launch script"
        )
    device = choose_device(world, args.device if args.backend == "torch" else "cpu")
    # Over Gloo on every device: it exchanges times and errors, beside what is measured.
    with ExitStack() as stack:
        stack.enter_context(process_group(world, torch.device("cpu")))
        folder = args.out or Path("runs/bench") / job_id()
        with all_or_none(world):
            if world.rank == 0:
                rounds.prepare(folder, foreseen=not args.out)
        name, makers = stack.enter_context(BACKENDS[args.backend](world, device))
        try:
            measure(world, device, args, name, makers, folder)
        except RuntimeError as error:
            raise HpctrainError(
                f"rank {world.rank} on {os.uname().nodename}: the exchange failed ({first_line(error)}): "
                "look for the first error of another rank, and run hpctrain check"
            ) from error


def measure(
    world: World,
    device: torch.device,
    args: argparse.Namespace,
    name: str,
    makers: dict[str, Maker],
    folder: Path,
) -> None:
    """Measure all operations, print a line for each, and write bench.json and bench.png."""
    chosen = args.operations or list(makers)
    if unknown := [operation for operation in chosen if operation not in makers]:
        raise UsageError(
            f"hpctrain bench: --backend {args.backend} has no {unknown[0]}: choose from {', '.join(makers)}"
        )
    largest = args.max_size or (2**30 if device.type == "cuda" else 2**26)
    memory = min(gather(world, free_memory(world, device)))
    hosts = gather(world, os.uname().nodename)
    results: list[dict[str, Any]] = []
    between: list[dict[str, Any]] = []
    title = f"{name}, {world.extent}"
    show(world, f"{title}; time of the slowest rank, median of {rounds.ROUNDS} rounds")
    show(world, f"{'operation':15} {'bytes':>12} {'time (us)':>12} {'algbw (GB/s)':>13} {'busbw (GB/s)':>13}")
    for operation in chosen:
        for size in sizes(args.min_size, largest):
            count = max(1, size // 4 // world.size) * world.size
            if 3 * count * 4 > memory:
                needed = f"it needs {3 * count * 4:,} bytes, {memory:,} are free"
                show(world, f"{operation:15} {count * 4:12} left out: {needed}")
                break
            call = makers[operation](count)
            check_values(world, operation, count, call())
            seconds = time_calls(world, device, call)
            algorithm = count * 4 / seconds / 1e9
            bus = algorithm * BUS_FACTORS[operation](world.size)
            figures = {"seconds": seconds, "algbw_gb_per_s": algorithm, "busbw_gb_per_s": bus}
            results.append({"operation": operation, "bytes": count * 4, **figures})
            show(world, f"{operation:15} {count * 4:12} {seconds * 1e6:12.1f} {algorithm:13.3f} {bus:13.3f}")
    if POINT_TO_POINT in chosen and world.nodes > 1:
        count = min(BETWEEN_NODES, memory // 3) // 4
        between = measure_nodes(world, device, makers[POINT_TO_POINT], count, hosts)
    if world.rank == 0:
        record = {
            "backend": name,
            "world": asdict(world) | {"rank": 0},
            "job": job_id(),
            "hosts": hosts,
            "software": versions(),
            "results": results,
            "between_nodes": between,
        }
        atomic.write_text(folder / "bench.json", json.dumps(record, indent=1) + "\n")
        with folder_for_matplotlib():
            draw(folder / "bench.png", title, results)
        say(f"the table as JSON and a picture are in {folder}")


def measure_nodes(
    world: World, device: torch.device, make: Maker, count: int, hosts: list[str]
) -> list[dict[str, Any]]:
    """Measure between rank 0 and the first rank of each other node in turn; prints median and extremes."""
    places = gather(world, (world.node_rank, world.local_rank))
    firsts = [rank for rank, (node, local) in enumerate(places) if local == 0 and node != 0]
    between: list[dict[str, Any]] = []
    speeds: list[tuple[float, str]] = []
    for peer in firsts:
        seconds = time_calls(world, device, make(count, peer=peer))
        speed = count * 4 / seconds / 1e9
        speeds.append((speed, hosts[peer]))
        between.append({"node": hosts[peer], "bytes": count * 4, "seconds": seconds, "gb_per_s": speed})
    slowest, fastest = min(speeds), max(speeds)
    middle = statistics.median(speed for speed, _ in speeds)
    show(
        world,
        f"{count * 4:,} bytes between {hosts[0]} and each other node: median {middle:.3f} GB/s, "
        f"slowest {slowest[0]:.3f} ({slowest[1]}), fastest {fastest[0]:.3f} ({fastest[1]})",
    )
    return between


def show(world: World, line: str) -> None:
    """Print a line on rank 0, at once."""
    if world.rank == 0:
        print(line, flush=True)


def sizes(smallest: int, largest: int) -> Iterator[int]:
    """The sizes to measure, in bytes."""
    while smallest <= largest:
        yield smallest
        smallest *= STEP


def expected(operation: str, ranks: int) -> Tensor:
    """What arrives, [groups, 1], if rank r sends r + 1 in every float."""
    if operation == "all-gather":
        return torch.arange(1.0, ranks + 1).unsqueeze(1)
    if operation in ("broadcast", POINT_TO_POINT):
        return torch.tensor([[1.0]])  # from rank 0
    return torch.tensor([[ranks * (ranks + 1) / 2]])


def check_values(world: World, operation: str, count: int, arrived: Tensor) -> None:
    """Raise HpctrainError, naming the ranks, if wrong values arrived. A collective call."""
    with all_or_none(world):
        wrong = int((arrived != expected(operation, world.size).to(arrived.device)).sum())
        if wrong:
            raise HpctrainError(
                f"{operation} of {count * 4} bytes: {wrong} of {arrived.numel()} values arrived wrong "
                f"on {os.uname().nodename}: do not train on these nodes"
            )
    arrived.zero_()  # a sum in place would grow with each exchange


def time_calls(world: World, device: torch.device, call: Callable[[], object]) -> float:
    """The seconds of a call: the median of the rounds, on the slowest rank. A collective call."""

    def seconds(calls: int) -> float:
        rounds.synchronize(device)
        dist.barrier()
        return rounds.mean_seconds(device, call, calls)

    calls = rounds.calls_of_round(max(gather(world, seconds(1))))
    return max(gather(world, statistics.median(seconds(calls) for _ in range(rounds.ROUNDS))))


# --- the backends: each yields its name, and a Maker for each operation ---


@contextmanager
def torch_backend(world: World, device: torch.device) -> Iterator[tuple[str, dict[str, Maker]]]:
    """The process groups of PyTorch: NCCL on GPUs, else Gloo."""
    name = "nccl" if device.type == "cuda" else "gloo"
    group = dist.new_group(backend=name)
    # The second names are those before torch 2.13.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    yield (
        name,
        makers(
            world,
            device,
            all_reduce=lambda values: dist.all_reduce(values, group=group),
            all_gather=lambda arrived, own: all_gather(arrived, own, group=group),
            reduce_scatter=lambda arrived, values: reduce_scatter(arrived, values, group=group),
            broadcast=lambda values: dist.broadcast(values, 0, group),
            send=lambda values, peer: dist.send(values, peer, group),
            receive=lambda values, peer: dist.recv(values, peer, group),
        ),
    )


@contextmanager
def mpi_backend(world: World, device: torch.device) -> Iterator[tuple[str, dict[str, Maker]]]:
    """The MPI library that mpi4py loads, on the memory of the host. Raises HpctrainError."""
    mpi = mpi_library(world)
    with all_or_none(world):
        if mpi is None:
            raise HpctrainError(
                "--backend mpi: these ranks were not started as an MPI program: use launch/apptainer_mpi.sh"
            )
    mpi.Init()
    comm = mpi.COMM_WORLD
    with all_or_none(world):
        if comm.size != world.size:
            raise HpctrainError(
                f"MPI sees {comm.size} of {world.size} ranks: run hpctrain check with the same script"
            )
    yield (
        mpi_name(mpi),
        makers(
            world,
            device,
            all_reduce=lambda values: comm.Allreduce(mpi.IN_PLACE, values.numpy()),
            all_gather=lambda arrived, own: comm.Allgather(own.numpy(), arrived.numpy()),
            reduce_scatter=lambda arrived, values: comm.Reduce_scatter_block(values.numpy(), arrived.numpy()),
            broadcast=lambda values: comm.Bcast(values.numpy()),
            send=lambda values, peer: comm.Send(values.numpy(), peer),
            receive=lambda values, peer: comm.Recv(values.numpy(), peer),
        ),
    )
    mpi.Finalize()  # otherwise mpirun reports the end of this process as a crash


@contextmanager
def horovod_backend(world: World, device: torch.device) -> Iterator[tuple[str, dict[str, Maker]]]:
    """Horovod, over MPI or Gloo as train_horovod uses it. It has no exchange between two ranks."""

    def make(exchange: Callable[[Tensor], Tensor], share: int = 1, groups: int = 1) -> Maker:
        def of_size(count: int) -> Callable[[], Tensor]:
            values = torch.full((count // share,), world.rank + 1.0)
            return lambda: exchange(values).view(groups, -1)

        return of_size

    with horovod(world) as hvd:

        def all_reduce(values: Tensor) -> Tensor:
            return hvd.allreduce_(values, op=hvd.Sum, name="all-reduce")

        def all_gather(values: Tensor) -> Tensor:
            return hvd.allgather(values, name="all-gather")

        def reduce_scatter(values: Tensor) -> Tensor:
            return hvd.reducescatter(values, op=hvd.Sum, name="reduce-scatter")

        def broadcast(values: Tensor) -> Tensor:
            return hvd.broadcast_(values, 0, name="broadcast")

        library = "MPI" if os.environ.get("HOROVOD_CONTROLLER") == "mpi" else "Gloo"
        yield (
            f"Horovod {metadata.version('horovod')} over {library}",
            {
                "all-reduce": make(all_reduce),
                "all-gather": make(all_gather, world.size, world.size),
                "reduce-scatter": make(reduce_scatter),
                "broadcast": make(broadcast),
            },
        )


BACKENDS = {"torch": torch_backend, "mpi": mpi_backend, "horovod": horovod_backend}


def makers(
    world: World,
    device: torch.device,
    all_reduce: Callable[[Tensor], object],
    all_gather: Callable[[Tensor, Tensor], object],
    reduce_scatter: Callable[[Tensor, Tensor], object],
    broadcast: Callable[[Tensor], object],
    send: Callable[[Tensor, int], object],
    receive: Callable[[Tensor, int], object],
) -> dict[str, Maker]:
    """A Maker of exchanges of tensors [floats] for each operation; of two, values arrive in the first."""

    def full(count: int) -> Tensor:
        return torch.full((count,), world.rank + 1.0, device=device)

    def make_all_gather(count: int) -> Callable[[], Tensor]:
        own, arrived = full(count // world.size), torch.empty(count, device=device)
        return lambda: exchange(arrived.view(world.size, -1), all_gather, arrived, own)

    def make_reduce_scatter(count: int) -> Callable[[], Tensor]:
        values, arrived = full(count), torch.empty(count // world.size, device=device)
        return lambda: exchange(arrived.view(1, -1), reduce_scatter, arrived, values)

    def in_place(function: Callable[[Tensor], object]) -> Maker:
        def make(count: int) -> Callable[[], Tensor]:
            values = full(count)
            return lambda: exchange(values.view(1, -1), function, values)

        return make

    def make_point_to_point(
        count: int, peer: int = world.local_size if world.nodes > 1 else 1
    ) -> Callable[[], Tensor]:
        """Exchange with `peer`, in turns; by default the second node's first rank, or rank 1."""
        values = torch.full((count,), 0.0 if world.rank == peer else 1.0, device=device)
        senders = itertools.cycle((0, peer))

        def call() -> Tensor:
            sender = next(senders)
            if world.rank in (0, peer):
                transfer = send if world.rank == sender else receive
                transfer(values, peer - world.rank)
            return values.view(1, -1)

        return call

    return {
        "all-reduce": in_place(all_reduce),
        "all-gather": make_all_gather,
        "reduce-scatter": make_reduce_scatter,
        "broadcast": in_place(broadcast),
        POINT_TO_POINT: make_point_to_point,
    }


def exchange(arrived: Tensor, function: Callable[..., object], *tensors: Tensor) -> Tensor:
    """Call the function, and return the tensor in which values arrive."""
    function(*tensors)
    return arrived


def draw(path: Path, title: str, results: list[dict[str, Any]]) -> None:
    """Draw the bandwidth of the bus over the size, a line for each operation."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axis = figure.subplots()
    last: dict[Line2D, float] = {}  # the value at the right end of each line
    for color, operation in zip(COLORS, BUS_FACTORS, strict=False):
        own = [one for one in results if one["operation"] == operation]
        if own:
            sizes, values = [one["bytes"] for one in own], [one["busbw_gb_per_s"] for one in own]
            (line,) = axis.plot(sizes, values, color=color, marker="o", markersize=3, label=operation)
            last[line] = values[-1]
    # The legend has the order of the right ends, from top to bottom.
    lines = sorted(last, key=lambda line: -last[line])
    figure.legend(handles=lines, loc="outside right center", frameon=False)
    axis.set(xscale="log", yscale="log", xlabel="bytes", ylabel="bus bandwidth in GB/s", title=title)
    axis.grid(alpha=0.3)
    save_picture(figure, path)


def size_in_bytes(text: str) -> int:
    """An argparse type: 1024, 64K, 16M or 1G, powers of two as nccl-tests takes them."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    if not number.isdecimal() or unit not in UNITS or not 4 <= int(number) * UNITS[unit] <= 2**36:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size between 4 bytes and 64G, such as 64K, 16M or 1G"
        )
    return int(number) * UNITS[unit]


def parser() -> Parser:
    parser = Parser(
        prog="hpctrain bench",
        description="Measure how fast the ranks exchange data, by operation and size, or LayerNorm on one "
        "device.",
    )
    add = parser.add_argument
    add(
        "what",
        nargs="?",
        choices=["network", "layernorm"],
        default="network",
        help="layernorm: as one fused kernel and as several, in one process (default: %(default)s)",
    )
    add_device(parser)
    add(
        "--backend",
        choices=[*BACKENDS],
        default="torch",
        help="torch (NCCL on GPUs, else Gloo), mpi or horovod (default: %(default)s)",
    )
    add(
        "--operations",
        nargs="+",
        choices=[*BUS_FACTORS],
        metavar="NAME",
        help=f"only these of {', '.join(BUS_FACTORS)}",
    )
    add(
        "--min-size",
        type=size_in_bytes,
        default=1024,
        metavar="SIZE",
        help="smallest size of a message (default: 1K)",
    )
    add(
        "--max-size",
        type=size_in_bytes,
        metavar="SIZE",
        help="largest size of a message (default: 1G on GPUs, 64M on CPUs)",
    )
    add(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="folder for bench.json and bench.png (default: runs/bench/<job id>)",
    )
    add(
        "--shapes",
        nargs="+",
        type=bench_layernorm.shape_of,
        default=bench_layernorm.SHAPES,
        metavar="SIZE",
        help="of layernorm: sizes to measure, as ROWSxFEATURES (default: "
        f"{' '.join(f'{rows}x{features}' for rows, features in bench_layernorm.SHAPES)})",
    )
    add(
        "--dtypes",
        nargs="+",
        choices=[*bench_layernorm.DTYPES],
        default=[*bench_layernorm.DTYPES],
        help="of layernorm: types to measure (default: all)",
    )
    return parser
