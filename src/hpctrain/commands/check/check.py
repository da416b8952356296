"""hpctrain check: test the placement, the software and the communication of all ranks.

Run it with the script of the long job that comes after it:

    sbatch launch/apptainer_ddp.sh check

First each rank checks its own node, then the ranks compare their versions, settings and devices, then they
exchange numbers. Each problem is one line, which names all ranks that have it.
"""

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from importlib import metadata
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from hpctrain.commands import add
from hpctrain.commands.check.gpu_faults import gpu_faults, watch_xids
from hpctrain.commands.check.mpi import mpi_problems
from hpctrain.commands.check.nccl import Fabric, capture_nccl_log, compare_with_log, read_fabric
from hpctrain.commands.check.node import (
    file_system_problems,
    image_mount,
    rendezvous_problems,
    seconds_since_start,
)
from hpctrain.distributed.device import choose_device
from hpctrain.distributed.gpu import allocated_gpus, gpu_devices, gpu_problems
from hpctrain.distributed.mpi import mpi_library, mpi_name
from hpctrain.distributed.python import shadowed_packages
from hpctrain.distributed.rendezvous import JOIN_TIMEOUT, format_ranks, gather, process_group
from hpctrain.distributed.world import World
from hpctrain.errors import HpctrainError, print_error
from hpctrain.parser import Parser, add_device
from hpctrain.run.config import versions
from hpctrain.text import counted, first_line, shorten

# variables by which OpenMP binds threads to CPUs
BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
START_SECONDS = seconds_since_start()  # with torch imported


def parser() -> Parser:
    parser = Parser(
        prog="hpctrain check",
        description="Check every rank's node, software and folders, and the network between them.",
    )
    add_device(parser)
    return parser


def main(world: World, arguments: list[str]) -> None:
    """Print a line for each rank and the result of the checks. Raises HpctrainError if there is a problem."""
    args = parser().parse_args(arguments)
    here = f"rank {world.rank} on {os.uname().nodename}"
    problems = [*gpu_problems(world, args.device), *shadowed_packages(), *add.problems()]
    if world.local_rank == 0:  # once per node, which spares a shared file system
        problems += [*file_system_problems(), *add.import_problems()]
        # Without a rendezvous there is no rank 0 that gathers the problems: each node prints its own.
        if unreachable := list(rendezvous_problems(world)):
            fail(f"{here}: {text}" for text in problems + unreachable)
    # --device cuda without a GPU is in `problems`, and must not prevent the other checks.
    device = choose_device(world, "cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")
    with ExitStack() as joined:
        try:
            # Over Gloo on every device: a rank without a GPU could not report over NCCL that it has none.
            joined.enter_context(process_group(world, torch.device("cpu")))
        except SystemExit:  # rank 0 names the missing ranks; the problems of this rank may be the reason
            print_errors(f"{here}: {text}" for text in problems)
            raise
        except HpctrainError as error:
            fail([*(f"{here}: {text}" for text in problems), str(error)])
        except RuntimeError as error:
            reason = (
                f"{here}: Gloo could not connect the ranks ({first_line(error)}): "
                "set GLOO_SOCKET_IFNAME to the network interface that connects the nodes"
            )
            fail([*(f"{here}: {text}" for text in problems), reason])
        try:
            check_collectively(world, device, problems)
        except RuntimeError as error:
            raise HpctrainError(
                f"{here}: lost the connection to the other ranks ({first_line(error)}): "
                "look for the first error of another rank"
            ) from error


def check_collectively(world: World, device: torch.device, problems: list[str]) -> None:
    """Compare the ranks, then test communication (collective). Raises HpctrainError on rank 0."""
    fabric = read_fabric()
    warnings = [*fabric.failures, *fabric.unusable]
    if device.type == "cuda":  # Gloo always uses TCP
        # NCCL within a node uses no network, but fails to start if it finds none.
        refused = warnings if world.nodes > 1 else fabric.failures
        warnings = [text for text in warnings if text not in refused]
        problems += [f"NCCL between nodes: {text}" for text in refused]
    faults, gpu_warning = gpu_faults(device)
    problems += faults
    reports = gather(world, rank_report(world, device, fabric, warnings) | {"gpu_warning": gpu_warning})
    hosts = [report["host"] for report in reports]
    if world.rank == 0:
        for report in reports:
            print(describe_rank(report))
        warnings = [*gpu_warnings(reports), *cpu_warnings(reports)]
        for line in [*describe_start(reports), *describe_networks(reports), *warnings]:
            print(line)
    end_on_problems(world, hosts, problems, [*consistency_problems(reports), *placement_problems(reports)])
    ranks, nodes = counted(world.size, "rank"), counted(len(set(hosts)), "host")
    passed = [f"check passed: {ranks} on {nodes} ({world.launcher})"]
    if world.size > 1:
        with capture_nccl_log() as logged_network, watch_xids(device) as xids:
            group = dist.new_group(backend="nccl") if device.type == "cuda" else None
            problems = [
                *ring_problems(world, device, group, hosts),
                *all_reduce_problems(world, device, group),
            ]
            logged = logged_network()  # "" if NCCL is not used
            if world.nodes > 1:
                problems += compare_with_log(fabric, logged)
            problems += xids()
            end_on_problems(world, hosts, problems)
            seconds = time_all_reduce(device, group)
        passed.append(
            f"ring and all-reduce correct on {device.type}" + (f" (NCCL: {logged})" if logged else "")
        )
        passed.append(f"64 MB in {seconds * 1e3:.0f} ms ({0.064 / seconds:.2f} GB/s)")
    if mpi := mpi_library(world):
        end_on_problems(world, hosts, list(mpi_problems(world, mpi)))
        passed.append(f"correct over MPI, too ({mpi_name(mpi)})")
    if world.rank == 0:
        print(", ".join(passed))


def print_errors(lines: Iterable[str]) -> None:
    """Print each line to stderr in the form of an error."""
    for line in lines:
        print_error(f"hpctrain: error: {line}")


def fail(lines: Iterable[str]) -> NoReturn:
    """Print all lines but the last, which becomes the HpctrainError that ends this rank."""
    *others, last = lines
    print_errors(others)
    raise HpctrainError(last)


def end_on_problems(world: World, hosts: list[str], problems: list[str], common: Iterable[str] = ()) -> None:
    """End all ranks if one of them has a problem. A collective call.

    `problems` are those of this rank, `common` those that all ranks find. Rank 0 prints each problem once and
    raises HpctrainError. The other ranks exit with status 0, because srun kills all ranks at the first
    failure, perhaps before rank 0 has printed its errors.
    """
    ranks: dict[str, list[int]] = {}
    for rank, texts in enumerate(gather(world, problems)):
        for text in texts:
            ranks.setdefault(text, []).append(rank)
    lines = [*common, *(f"{format_place(affected, hosts)}: {text}" for text, affected in ranks.items())]
    if lines and world.rank != 0:
        raise SystemExit(0)
    if lines:
        fail(lines)


def format_place(ranks: list[int], hosts: list[str]) -> str:
    """Ranks and their nodes in short form, such as "ranks 0-3,7 on n1, n2"."""
    return f"{format_ranks(ranks)} on {shorten(list(dict.fromkeys(hosts[rank] for rank in ranks)))}"


# --- comparing the ranks ---


def rank_report(world: World, device: torch.device, fabric: Fabric, warnings: list[str]) -> dict[str, Any]:
    """What the ranks compare: place, device, versions and network settings of this rank."""
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    software = versions()
    for name in ("lightning", "transformers", "horovod", "mpi4py"):
        try:
            software[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    software["image"] = os.environ.get("HPCTRAIN_IMAGE_DIGEST", "")
    return {
        **asdict(world),
        "host": os.uname().nodename,
        "device": f"cuda:{device.index} {gpu.name}" if gpu else f"cpu x{torch.get_num_threads()}",
        "gpu": str(gpu.uuid) if gpu else "",
        "visible_gpus": torch.cuda.device_count() if gpu else 0,
        "others_gpus": [] if gpu or allocated_gpus() else gpu_devices(),
        "cpus": sorted(os.sched_getaffinity(0)),
        "binding": [name for name in BINDING if os.environ.get(name)],
        "software": software,
        "start": START_SECONDS,
        "mount": image_mount(),
        "networks": fabric.networks,
        "fabric": fabric.description,
        "fabric_warnings": warnings,
        "settings": {
            name: value for name, value in os.environ.items() if name.startswith(("NCCL_", "FI_", "UCX_"))
        },
    }


def describe_rank(report: dict[str, Any]) -> str:
    """The line of a rank, with its place, its device and its versions."""
    software = (f"{name} {version}" for name, version in report["software"].items() if name != "image")
    return "  ".join(
        [
            f"rank {report['rank']} of {report['size']}",
            f"node {report['node_rank']} of {report['nodes']}",
            f"local {report['local_rank']} of {report['local_size']}",
            report["host"],
            report["device"],
            *software,
        ]
    )


def consistency_problems(reports: list[dict[str, Any]]) -> Iterator[str]:
    """Versions, settings, networks and devices that differ between ranks."""
    hosts = [report["host"] for report in reports]
    kinds = {
        "software": "run the same image or environment on every node",
        # Ranks of one node may differ: some sites assign each its own network card.
        "settings": "set it before the launcher starts the ranks, and not in a file of one node",
    }
    for kind, advice in kinds.items():
        compared = [report for report in reports if kind == "software" or report["local_rank"] == 0]
        for name in sorted({name for report in compared for name in report[kind]}):
            ranks: dict[str, list[int]] = {}
            for report in compared:
                ranks.setdefault(report[kind].get(name, "missing"), []).append(report["rank"])
            if len(ranks) > 1:
                found = ", ".join(
                    f"{value or 'missing'} for {format_place(having, hosts)}"
                    for value, having in ranks.items()
                )
                yield f"{name} differs: {found}: {advice}"
    networks: dict[str, list[int]] = {}
    for report in reports:
        if report["device"].startswith("cuda"):
            networks.setdefault(", ".join(report["networks"]) or "TCP", []).append(report["rank"])
    if len(networks) > 1:
        found = ", ".join(f"{name} for {format_place(having, hosts)}" for name, having in networks.items())
        yield f"NCCL has different networks: {found}: see above what these nodes lack, or exclude them"
    devices = {
        kind: [report["rank"] for report in reports if report["device"].startswith(kind)]
        for kind in ("cuda", "cpu")
    }
    if all(devices.values()):
        with_gpu, without = (format_place(devices[kind], hosts) for kind in ("cuda", "cpu"))
        yield f"{with_gpu} has a GPU, {without} has none: request the same GPUs on every node"


def describe_start(reports: list[dict[str, Any]]) -> Iterator[str]:
    """How long the processes took to start, and what mounts their image; warns of a mount that is slow."""
    fastest = min(report["start"] for report in reports)
    slowest = max(reports, key=lambda report: report["start"])
    mounts = sorted({report["mount"] for report in reports} - {""})
    yield (
        f"from the start of Python to the end of its imports: {fastest:.1f} to {slowest['start']:.1f} s "
        f"(rank {slowest['rank']} on {slowest['host']})"
        + (f"; the image is mounted by {', '.join(mounts)}" if mounts else "")
    )
    # github.com/apptainer/apptainer/issues/665: a job took 170 minutes instead of 24
    if "squashfuse" in mounts:
        hosts = list(dict.fromkeys(report["host"] for report in reports if report["mount"] == "squashfuse"))
        yield (
            f"warning: on {shorten(hosts)} the image is mounted by squashfuse, "
            "which has one thread for all ranks: "
            "ask the staff to install squashfuse_ll, which Apptainer then prefers"
        )


def describe_networks(reports: list[dict[str, Any]]) -> Iterator[str]:
    """What the nodes offer NCCL, one line for all ranks or for each kind of node, and what contradicts it."""
    hosts = [report["host"] for report in reports]
    offers: dict[str, list[int]] = {}
    warnings: dict[str, list[int]] = {}
    for report in reports:
        offers.setdefault(report["fabric"], []).append(report["rank"])
        for text in report["fabric_warnings"]:
            warnings.setdefault(text, []).append(report["rank"])
    for text, having in offers.items():
        place = f", {format_place(having, hosts)}" if len(offers) > 1 else ""
        yield f"NCCL between nodes{place}: {text}"
    for text, having in warnings.items():
        yield f"warning: {format_place(having, hosts)}: NCCL between nodes: {text}"
    if not any(report["device"].startswith("cuda") for report in reports):
        yield "NCCL was not asked which network it uses, because no rank has a GPU"


def gpu_warnings(reports: list[dict[str, Any]]) -> Iterator[str]:
    """GPUs with errors, GPUs that the job has not requested, and ranks of a node that see one GPU each."""
    hosts = [report["host"] for report in reports]
    for report in reports:
        if report.get("gpu_warning"):
            yield f"warning: {format_place([report['rank']], hosts)}: {report['gpu_warning']}"
    without = [report["rank"] for report in reports if report["others_gpus"]]
    if without:
        yield (
            f"warning: {format_place(without, hosts)}: GPUs are there that the job has not requested, and "
            "it computes on CPUs: request them by --gpus-per-node"
        )
    # NCCL then finds no NVLink (NVIDIA/nccl issue 1066).
    alone = [report["rank"] for report in reports if report["visible_gpus"] == 1 and report["local_size"] > 1]
    if alone:
        yield (
            f"warning: {format_place(alone, hosts)} see one GPU each (--gpus-per-task), "
            "so NCCL does not use NVLink between them: request GPUs by --gpus-per-node"
        )


def cpu_warnings(reports: list[dict[str, Any]]) -> Iterator[str]:
    """Ranks of one node that may use no CPU but the same one."""
    ranks: dict[tuple[str, int], list[int]] = {}
    for report in reports:
        if len(report["cpus"]) == 1:
            ranks.setdefault((report["host"], *report["cpus"]), []).append(report["rank"])
    if shared := [rank for having in ranks.values() if len(having) > 1 for rank in having]:
        names = sorted({name for report in reports for name in report["binding"]})
        advice = f"unset {', '.join(names)}" if names else "ask for more (--cpus-per-task)"
        place = format_place(shared, [report["host"] for report in reports])
        yield f"warning: {place} and their DataLoader workers share the same CPU: {advice}"


def placement_problems(reports: list[dict[str, Any]], env: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Ranks on other nodes or devices than the launcher or the user requested."""
    hosts = [report["host"] for report in reports]
    ranks: dict[tuple[str, str], list[int]] = {}
    for report in reports:
        for place in (f"local rank {report['local_rank']}", report["gpu"]):
            ranks.setdefault((report["host"], place), []).append(report["rank"])
    for (_, place), having in ranks.items():
        if place and len(having) > 1:
            yield f"{format_place(having, hosts)} share {place}: start one task per GPU (--ntasks-per-node)"
    counts = Counter(hosts)
    shown = shorten([f"{count} on {host}" for host, count in counts.items()])
    slurm, nodes = reports[0]["launcher"] == "slurm", reports[0]["nodes"]
    requested = env.get("SLURM_NTASKS_PER_NODE") if slurm else None
    if requested and set(counts.values()) != {int(requested)}:
        yield (
            f"wrong ranks per node: {shown}, but --ntasks-per-node={requested} was requested: "
            "pass that to srun, too"
        )
    elif len(set(counts.values())) > 1:
        yield f"wrong ranks per node: {shown}: use srun --ntasks-per-node, or mpirun --map-by ppr:N:node"
    if not slurm:  # srun counts the nodes of the step; other launchers may leave nodes of the job idle
        asked = int(env.get("SLURM_JOB_NUM_NODES", 0))
        if "HPCTRAIN_TASKS_PER_NODE" in env:  # of a launch script, perhaps with --hosts
            asked = int(env["HPCTRAIN_WORLD_SIZE"]) // int(env["HPCTRAIN_TASKS_PER_NODE"])
        nodes = max(nodes, asked)
    if nodes != len(counts):
        yield (
            f"wrong number of nodes: {len(counts)} instead of {nodes}, {shown}: "
            "pass the list of all nodes to the launcher"
        )
    elif len({(report["node_rank"], report["host"]) for report in reports}) != nodes:
        yield f"the ranks do not fill one node after the other ({shown}): use mpirun --map-by slot"


# --- communication between the ranks ---


def ring_problems(
    world: World, device: torch.device, group: dist.ProcessGroup | None, hosts: list[str]
) -> Iterator[str]:
    """Pass the rank's number to its right neighbor. Raises HpctrainError on a time-out."""
    left, right = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    sent, received = torch.tensor([world.rank], device=device), torch.tensor([-1], device=device)
    work = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, right, group), dist.P2POp(dist.irecv, received, left, group)]
    )
    try:
        for part in work:
            part.wait(JOIN_TIMEOUT)
    except RuntimeError as error:
        raise HpctrainError(
            f"rank {world.rank} on {hosts[world.rank]} could not exchange a number with rank {left} on "
            f"{hosts[left]} and rank {right} on {hosts[right]} ({first_line(error)}): "
            "check the network of these nodes, or exclude them"
        ) from error
    if received.item() != left:
        yield (
            f"in the ring, rank {left} on {hosts[left]} sent {left}, but {received.item()} arrived: "
            "do not train on these nodes"
        )


def all_reduce_problems(world: World, device: torch.device, group: dist.ProcessGroup | None) -> Iterator[str]:
    """Sum rank + 1 over all ranks, in a million floats."""
    values = torch.full((1_000_000,), world.rank + 1.0, device=device)
    dist.all_reduce(values, group=group)
    expected = world.size * (world.size + 1) / 2
    if not bool((values == expected).all()):
        yield f"the all-reduce gave {values[0].item()} instead of {expected}: do not train on these nodes"


def time_all_reduce(device: torch.device, group: dist.ProcessGroup | None) -> float:
    """The seconds that an all-reduce of 64 MB takes: the gradients of 16 million fp32 weights."""
    values = torch.zeros(16_000_000, device=device)
    for _ in range(2):  # the first one opens the connections
        dist.barrier(group)
        start = time.perf_counter()
        dist.all_reduce(values, group=group)
        values[0].item()  # on a GPU, all_reduce() returns before it is done
        seconds = time.perf_counter() - start
    return seconds
