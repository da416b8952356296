"""hpctrain check: does every rank run where it should, with the same software, and do they reach each other?

Run it by the same script as the long job that comes after it:

    sbatch launch/apptainer_ddp.sh check

First each rank looks around alone, then the ranks compare what they have, then they send each other numbers. Every
finding is one line, said once however many ranks have it. The variables of schedulers that are read here are only
compared with what is there; the place of a rank in the world comes from world.py alone.
"""

import argparse
import ctypes
import os
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from hpctrain import packages
from hpctrain.fabric import Network, contradicted, network, overheard
from hpctrain.run import Parser, versions
from hpctrain.surroundings import file_system_problems, rendezvous_problems, shadowed_packages, some
from hpctrain.world import JOIN_TIMEOUT, HpctrainError, World, choose_device, gather, in_words, process_group


def main(world: World, arguments: list[str]) -> None:
    """Print a line for each rank and the result of the tests; raises HpctrainError if anything is off."""
    args = parse(arguments)
    here = f"rank {world.rank} on {os.uname().nodename}"
    problems = [*gpu_problems(world, args.device), *shadowed_packages(), *packages.problems()]
    if world.local_rank == 0:  # the same for all ranks of a node, and a shared file system should not serve them all
        problems += file_system_problems()
        # Without a meeting point nobody can gather what the ranks have found: each says it for itself.
        if cannot_meet := list(rendezvous_problems(world)):
            fail(f"{here}: {text}" for text in problems + cannot_meet)
    # "cuda" without a GPU is among the problems by now, and not the end of the search for others.
    device = choose_device(world, "cpu" if args.device == "cpu" else "auto")
    with ExitStack() as meeting:
        try:
            # Over Gloo, whatever the device: ranks with and without a GPU could not meet over NCCL to find that out.
            meeting.enter_context(process_group(world, torch.device("cpu")))
        except SystemExit:  # rank 0 says who is missing; what this one knows may be why
            say(f"{here}: {text}" for text in problems)
            raise
        except HpctrainError as error:
            fail([*(f"{here}: {text}" for text in problems), str(error)])
        except RuntimeError as error:
            reason = f"{here}: Gloo could not connect the ranks ({first_line(error)}): set GLOO_SOCKET_IFNAME to the network "
            fail([*(f"{here}: {text}" for text in problems), reason + "interface that joins the nodes"])
        try:
            together(world, device, problems)
        except RuntimeError as error:
            raise HpctrainError(
                f"{here}: lost the other ranks ({first_line(error)}): look for the first error of another rank"
            ) from error


def together(world: World, device: torch.device, problems: list[str]) -> None:
    """All that needs the process group: compare the ranks, then let them talk. Raises HpctrainError on rank 0."""
    nccl = network()
    # Gloo goes over TCP anyway, and NCCL within a node over none of them, but it has to find one.
    if device.type == "cuda" and nccl.amiss and (world.nodes > 1 or not nccl.name):
        problems.append(f"NCCL between nodes: {nccl.words}")
    reports = gather(world, report(world, device, nccl))
    hosts = [line["host"] for line in reports]
    if world.rank == 0:
        for line in reports:
            print(
                f"rank {line['rank']} of {line['size']}  node {line['node_rank']} of {line['nodes']}  "
                f"local {line['local_rank']} of {line['local_size']}  {line['host']}  {line['device']}  "
                + "  ".join(f"{name} {version}" for name, version in line["software"].items() if name != "image")
            )
        for line in between_nodes(reports):
            print(line)
    end_on_problems(world, hosts, problems, [*differences(reports), *misplaced(reports)])
    passed = [f"check passed: {world.size} ranks on {len(set(hosts))} hosts ({world.launcher})"]
    if world.size > 1:
        with overheard() as spoken:
            group = dist.new_group(backend="nccl") if device.type == "cuda" else None
            mine = [*ring(world, device, group, hosts), *all_reduce(world, device, group)]
            said = spoken()  # "" where NCCL is not used
            if world.nodes > 1:
                mine += contradicted(nccl, said)
            end_on_problems(world, hosts, mine)
            seconds = time_all_reduce(device, group)
        passed.append(f"ring and all-reduce right on {device.type}" + (f" (NCCL: {said})" if said else ""))
        passed.append(f"64 MB in {seconds * 1e3:.0f} ms ({0.064 / seconds:.2f} GB/s)")
    if mpi := mpi_library(world):
        end_on_problems(world, hosts, list(mpi_problems(world, mpi)))
        passed.append(f"right over MPI too ({mpi_name(mpi)})")
    if world.rank == 0:
        print(", ".join(passed))


def say(lines: Iterable[str]) -> None:
    """Print lines in the form of an error."""
    for line in lines:
        print(f"hpctrain: error: {line}", file=sys.stderr)


def fail(lines: Iterable[str]) -> NoReturn:
    """Say every line; the last one is the HpctrainError that ends this rank."""
    *others, last = lines
    say(others)
    raise HpctrainError(last)


def end_on_problems(world: World, hosts: list[str], mine: list[str], of_all: Iterable[str] = ()) -> None:
    """End every rank if one has a problem; a collective call.

    `mine` are the problems of this rank, `of_all` those that every rank sees alike. Rank 0 says each of them once and
    raises HpctrainError; the others leave as if all were well, or srun would kill rank 0 in the middle of its sentence.
    """
    ranks: dict[str, list[int]] = {}
    for rank, texts in enumerate(gather(world, mine)):
        for text in texts:
            ranks.setdefault(text, []).append(rank)
    lines = [*of_all, *(f"{where(having, hosts)}: {text}" for text, having in ranks.items())]
    if lines and world.rank != 0:
        raise SystemExit(0)
    if lines:
        fail(lines)


def where(ranks: list[int], hosts: list[str]) -> str:
    """Ranks and their nodes in short, such as "ranks 0-3,7 on n1, n2"."""
    return f"{in_words(ranks)} on {some(list(dict.fromkeys(hosts[rank] for rank in ranks)), ', ')}"


def first_line(error: Exception) -> str:
    """The first line of an error, without the stack that torch adds to it."""
    return str(error).partition("\n")[0]


# What a rank finds alone, beside its surroundings


def gpu_problems(world: World, wanted: str, env: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Why this rank has no GPU although it was given one or wants one, or has to share it."""
    if wanted == "cpu":
        return
    if torch.cuda.is_available():
        # A rank with --gpus-per-task=1 sees one GPU; how many the node has for the job only Slurm knows.
        gpus = int(env.get("SLURM_GPUS_ON_NODE") or torch.cuda.device_count())
        if world.local_size > gpus:
            yield f"{world.local_size} ranks on a node with {gpus} GPUs for this job: start one rank per GPU (--ntasks-per-node)"
        return
    names = ("SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES")
    given = [f"{name}={env[name]}" for name in names if env.get(name, "") not in ("", "-1", "NoDevFiles")]
    devices = gpu_devices()
    if not given and not devices:
        if wanted == "cuda":
            yield "--device cuda, but there is no /dev/nvidia* here: ask the scheduler for a GPU (--gpus-per-node)"
        return
    if not devices:
        yield (
            f"a GPU was given ({given[0]}), but there is no /dev/nvidia* here that this user may open: start the container "
            "with --gpu (podman-hpc), --nv (apptainer), --module=gpu (shifter) or --gpus all (docker)"
        )
    elif not has_driver():
        yield (
            f"{devices[0]} is here, but libcuda.so.1 is not: start the container with --nv before the image (apptainer), "
            "--gpu (podman-hpc) or --module=gpu (shifter)"
        )
    if torch.version.cuda is None:
        yield f"torch {torch.__version__} is a CPU build, on a node with a GPU: use the CUDA image, or --device cpu"
    elif devices and has_driver():
        try:
            torch.cuda.init()
        except RuntimeError as error:  # torch knows what is wrong with the driver, such as its age
            yield f"torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use {devices[0]}: {first_line(error)}"


def gpu_devices() -> list[str]:
    """The GPUs that this job may open: Slurm hides those of others by a cgroup, which shows at no earlier moment."""
    mine = []
    for path in sorted(Path("/dev").glob("nvidia[0-9]*")):
        try:
            os.close(os.open(path, os.O_RDWR))
        except OSError:
            continue
        mine.append(str(path))
    return mine


def has_driver() -> bool:
    """Whether the driver's library is here, which belongs to the host and not to an image."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


# What the ranks find by comparing


def report(world: World, device: torch.device, nccl: Network) -> dict[str, Any]:
    """What this rank has to say of itself."""
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
        "software": software,
        "network": nccl.name,
        "nccl": nccl.words,
        "fabric": {name: value for name, value in os.environ.items() if name.startswith(("NCCL_", "FI_", "UCX_"))},
    }


def differences(reports: list[dict[str, Any]]) -> Iterator[str]:
    """What should be the same everywhere and is not."""
    hosts = [line["host"] for line in reports]
    mends = {
        "software": "every node must run the same image or environment",
        # Ranks of one node may differ: some sites give each its own network card.
        "fabric": "set it before the launcher starts the ranks, and not in a file of one node",
    }
    for kind, mend in mends.items():
        lines = [line for line in reports if kind == "software" or line["local_rank"] == 0]
        for name in sorted({name for line in lines for name in line[kind]}):
            ranks: dict[str, list[int]] = {}
            for line in lines:
                ranks.setdefault(line[kind].get(name, "missing"), []).append(line["rank"])
            if len(ranks) > 1:
                found = ", ".join(f"{value or 'missing'} for {where(having, hosts)}" for value, having in ranks.items())
                yield f"{name} differs: {found}: {mend}"
    networks: dict[str, list[int]] = {}
    for line in reports:
        if line["device"].startswith("cuda"):
            networks.setdefault(line["network"] or "none", []).append(line["rank"])
    if len(networks) > 1:
        found = ", ".join(f"{name} for {where(having, hosts)}" for name, having in networks.items())
        yield f"NCCL takes different networks: {found}: see above what they lack, or leave those nodes out"
    kinds = {kind: [line["rank"] for line in reports if line["device"].startswith(kind)] for kind in ("cuda", "cpu")}
    if all(kinds.values()):
        yield f"{where(kinds['cuda'], hosts)} has a GPU, {where(kinds['cpu'], hosts)} has none: ask for the same on every node"


def between_nodes(reports: list[dict[str, Any]]) -> Iterator[str]:
    """Which network NCCL takes between nodes; a line for all ranks, or for each that some of them take."""
    hosts = [line["host"] for line in reports]
    ranks: dict[str, list[int]] = {}
    for line in reports:
        ranks.setdefault(line["nccl"], []).append(line["rank"])
    for words, having in ranks.items():
        yield f"NCCL between nodes{f', {where(having, hosts)}' if len(ranks) > 1 else ''}: {words}"


def misplaced(reports: list[dict[str, Any]], env: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Which ranks are not where the launcher or the user wanted them."""
    hosts = [line["host"] for line in reports]
    ranks: dict[tuple[str, str], list[int]] = {}
    for line in reports:
        for place in (f"local rank {line['local_rank']}", line["gpu"]):
            ranks.setdefault((line["host"], place), []).append(line["rank"])
    for (_, place), having in ranks.items():
        if place and len(having) > 1:
            yield f"{where(having, hosts)} share {place}: start one task per GPU (--ntasks-per-node)"
    counts = Counter(hosts)
    shown = some([f"{count} on {host}" for host, count in counts.items()], ", ")
    slurm, nodes = reports[0]["launcher"] == "slurm", reports[0]["nodes"]
    asked = env.get("SLURM_NTASKS_PER_NODE") if slurm else None
    if asked and set(counts.values()) != {int(asked)}:
        yield f"wrong ranks per node: {shown}, and --ntasks-per-node={asked} was asked for: give that to srun too"
    elif len(set(counts.values())) > 1:
        yield f"wrong ranks per node: {shown}: give srun --ntasks-per-node, or mpirun --map-by ppr:N:node"
    if not slurm:  # which knows where its tasks are; the others may leave nodes of the job idle
        nodes = max(nodes, int(env.get("SLURM_JOB_NUM_NODES", 0)))
    if nodes != len(counts):
        yield f"wrong number of nodes: {len(counts)} instead of {nodes}, {shown}: give the launcher the list of all nodes"
    elif len({(line["node_rank"], line["host"]) for line in reports}) != nodes:
        yield f"the ranks do not fill one node after the other ({shown}): give mpirun --map-by slot"


# What the ranks find by talking


def ring(world: World, device: torch.device, group: dist.ProcessGroup | None, hosts: list[str]) -> Iterator[str]:
    """Every rank sends its number to the right and hears that of its left neighbour."""
    left, right = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    mine, heard = torch.tensor([world.rank], device=device), torch.tensor([-1], device=device)
    work = dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, right, group), dist.P2POp(dist.irecv, heard, left, group)])
    try:
        for part in work:
            part.wait(JOIN_TIMEOUT)
    except RuntimeError as error:
        raise HpctrainError(
            f"rank {world.rank} on {hosts[world.rank]} could not exchange a number with rank {left} on {hosts[left]} and rank "
            f"{right} on {hosts[right]} ({first_line(error)}): look at the network of these nodes, or leave them out"
        ) from error
    if heard.item() != left:
        yield f"in the ring, rank {left} on {hosts[left]} sent {left} and {heard.item()} came: do not train on these nodes"


def all_reduce(world: World, device: torch.device, group: dist.ProcessGroup | None) -> Iterator[str]:
    """Sum rank + 1 over a million floats on every rank."""
    values = torch.full((1_000_000,), world.rank + 1.0, device=device)
    dist.all_reduce(values, group=group)
    expected = world.size * (world.size + 1) / 2
    if not bool((values == expected).all()):
        yield f"the all-reduce gave {values[0].item()} where {expected} is right: do not train on these nodes"


def time_all_reduce(device: torch.device, group: dist.ProcessGroup | None) -> float:
    """The seconds that an all-reduce of 64 MB takes, as many bytes as the gradients of 16 million weights."""
    values = torch.zeros(16_000_000, device=device)
    for _ in range(2):  # the first one makes the connections
        dist.barrier(group)
        start = time.perf_counter()
        dist.all_reduce(values, group=group)
        values[0].item()  # on a GPU the call returns before the work is done
        seconds = time.perf_counter() - start
    return seconds


def mpi_library(world: World, env: Mapping[str, str] = os.environ) -> ModuleType | None:
    """mpi4py's MPI, not yet initialised, where a launcher offers to start MPI programs; else None."""
    by_srun = world.launcher == "slurm" and ("PMIX_RANK" in env or "PMI_RANK" in env)
    if "HPCTRAIN_WORLD_SIZE" in env and "HPCTRAIN_MPI_LIBRARY" not in env:
        return None  # from a launch script that wants no MPI; where Slurm has a default PMI every srun offers one
    if world.launcher not in ("openmpi", "mpich") and not by_srun:
        return None
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError):  # it is not installed, or there is no MPI for it to load
        return None
    return MPI


def mpi_name(mpi: ModuleType) -> str:
    """Such as "Open MPI v4.1.4"."""
    return mpi.Get_library_version().partition(",")[0].partition("\n")[0].strip()


def mpi_problems(world: World, mpi: ModuleType, env: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Whether MPI sees the same world as its launcher, and the ring and the sum over it; a collective call."""
    if world.launcher == "slurm":
        launcher = f"srun --mpi={env.get('SLURM_MPI_TYPE') or ('pmix' if 'PMIX_RANK' in env else 'pmi2')}"
        mend = "use a --mpi= that both speak (srun --mpi=list; Open MPI wants pmix, MPICH pmi2), or mpirun"
    else:
        launcher, mend = "mpirun", "use an mpirun of the same MPI and version as the image's, or srun --mpi=pmix"
    mismatch = f"PMI mismatch: {launcher} started {world.size} ranks, but {mpi_name(mpi)} "
    with outlived(f"rank {world.rank} on {os.uname().nodename}: {mismatch}did not get through MPI_Init: {mend}", world):
        mpi.Init()
    comm = mpi.COMM_WORLD
    if (comm.rank, comm.size) != (world.rank, world.size):
        yield f"{mismatch}makes each of them a world of {comm.size}: {mend}"
    else:
        left = (world.rank - 1) % world.size
        heard = comm.sendrecv(world.rank, dest=(world.rank + 1) % world.size, source=left)
        if heard != left:
            yield f"in MPI's ring rank {left} sent {left} and {heard} came: do not train on these nodes"
        if (total := comm.allreduce(world.rank + 1)) != (expected := world.size * (world.size + 1) // 2):
            yield f"MPI's all-reduce gave {total} where {expected} is right: do not train on these nodes"
    mpi.Finalize()  # or mpirun calls the end of this process a crash


@contextmanager
def outlived(message: str, world: World) -> Iterator[None]:
    """Have a child process say `message` where the block does not return: MPI ends or stops a process that it cannot start."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.close(writer)  # the parent's end alone counts: it closes when the parent dies
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # srun sends it to all when the first rank fails
        ready, _, _ = select.select([reader], [], [], JOIN_TIMEOUT.seconds)
        if not ready or not os.read(reader, 1):
            if world.local_rank == 0:  # one a node is enough
                os.write(2, f"hpctrain: error: {message}\n".encode())
            if not ready:
                os.kill(os.getppid(), signal.SIGKILL)
        os._exit(0)
    os.close(reader)
    yield
    os.write(writer, b"1")
    os.close(writer)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The flags of this command."""
    parser = Parser(prog="hpctrain check", description="Check places, software, folders and the network of all ranks.")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="(default: a GPU where there is one)")
    return parser.parse_args(arguments)
