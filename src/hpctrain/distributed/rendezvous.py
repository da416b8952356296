"""The process group: joining the other ranks, exchanging values with them, and agreeing on errors.

Values are exchanged as JSON. torch.distributed's own functions for objects use pickle, and whoever sends a
pickle runs code in the process that reads it.
"""

import atexit
import functools
import hmac
import json
import os
import resource
import socket
import sys
import time
import uuid
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # documented names

from hpctrain.distributed.world import World, restart_count
from hpctrain.errors import HpctrainError, UsageError, print_error
from hpctrain.text import first_line, reason

# Every rank of a job has to join within this time. A job that Slurm starts again has started before, so a
# node or a name service that is slow now is waited for.
JOIN_TIMEOUT = timedelta(seconds=300 if restart_count() else 60)
# How long ranks wait in a collective: rank 0 may write a checkpoint or compute scores before it.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)

# The largest value that ranks exchange, in bytes; another rank's length decides how much is allocated.
MAX_VALUE = 2**30
# The longest text about a call that ranks exchange, in bytes.
MAX_CALL = 200
# Modules that call functions of this one for a script; others count as scripts: see describe_call().
PARTS = ("contextlib", *(f"hpctrain.{name}." for name in ("distributed", "checkpoints", "run", "training")))

# Groups kept until the process ends (see process_group()). Then their threads are joined while they can get
# the GIL to free their last tensor: a thread that asks for it later aborts the process.
_kept_groups: list[dist.ProcessGroup | None] = []
# The prefix of the keys in the store, from _connect_store().
_prefix: list[str] = []
atexit.register(_kept_groups.clear)


@contextmanager
def process_group(world: World, device: torch.device, cpu_tensors: bool = False) -> Iterator[None]:
    """Initialize the default process group for the block; a world of one rank needs none.

    The backend follows the device: nccl on CUDA, gloo on CPU. With `cpu_tensors`, collectives on CUDA take
    tensors of the CPU, too, by gloo. HpctrainError names the ranks that do not join within JOIN_TIMEOUT.
    """
    if world.size == 1:
        yield
        return
    backend = ("cpu:gloo,cuda:nccl" if cpu_tensors else "nccl") if device.type == "cuda" else "gloo"
    _raise_file_limit()
    store = _connect_store(world)
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=world.rank,
            world_size=world.size,
            timeout=COLLECTIVE_TIMEOUT,
            device_id=device if device.type == "cuda" else None,
        )
    except dist.DistBackendError as error:
        # Its last line is NCCL's, such as "Duplicate GPU detected : rank 0 and rank 1 both on CUDA ...".
        raise HpctrainError(
            f"{_describe(world)}, {device}: NCCL cannot start ({str(error).strip().splitlines()[-1]}): "
            "give each rank a GPU of its own (--gpus-per-node as large as --ntasks-per-node), "
            "and set NCCL_DEBUG=WARN to see more"
        ) from error
    ends_at_once = False
    try:
        yield
    except (HpctrainError, SystemExit):
        # see entry.py; to destroy a group of NCCL would wait for other ranks, which may not come
        ends_at_once = True
        raise
    finally:
        # The destructor of a Gloo group waits for its threads, and holds the GIL meanwhile where the last
        # reference is that of DDP's reducer (torch 2.13) or any (2.7). A thread that needs the GIL to free
        # its last tensor then deadlocks. A reference keeps the destructor from running.
        if "gloo" in backend:
            _kept_groups.append(dist.group.WORLD)
        if not ends_at_once:
            dist.destroy_process_group()


def _describe(world: World) -> str:
    return f"rank {world.rank} of {world.size} on {os.uname().nodename}"


def _raise_file_limit() -> None:
    """Let this process have as many connections as the administrator allows.

    Most sites allow 1,024 open files unless a program asks for more. Rank 0 has three connections to the
    store from each rank, and with Gloo every rank has one to each other rank.
    """
    with suppress(OSError, ValueError):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main_address() -> tuple[str, int]:
    """MASTER_ADDR and MASTER_PORT of rank 0. Raises HpctrainError if unset, or if the name is unknown."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not address or not port.isdecimal():
        raise HpctrainError(
            "MASTER_ADDR and MASTER_PORT are not set: use a script in launch/, or in the batch script "
            'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) '
            "MASTER_PORT=29500; "
            "on one machine, MASTER_ADDR=localhost"
        )
    deadline = time.monotonic() + (JOIN_TIMEOUT.total_seconds() if restart_count() else 0)
    while True:
        try:
            socket.getaddrinfo(address, int(port))
            return address, int(port)
        except (OSError, OverflowError) as error:
            if time.monotonic() >= deadline:
                raise HpctrainError(
                    f"MASTER_ADDR is {address} and MASTER_PORT {port}, "
                    f"which {os.uname().nodename} cannot resolve ({reason(error)}): "
                    "set MASTER_ADDR to a name or address of rank 0's node that every node can resolve"
                ) from error
        time.sleep(1)


def _connect_store(world: World) -> Store:
    """Connect to the store at MASTER_ADDR:MASTER_PORT and wait there for all ranks.

    Rank 0 serves the store, or torchrun's agent does. Raises HpctrainError.
    """
    address, port = main_address()
    agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = _open_store(address, port, world.rank == 0 and not agent_serves)
    except (dist.DistError, RuntimeError, ValueError) as error:
        text = first_line(error)
        if "EADDRINUSE" in text:
            raise HpctrainError(
                f"port {port} of {os.uname().nodename} (MASTER_PORT) is in use by another process: "
                "set MASTER_PORT to another number"
            ) from error
        raise HpctrainError(
            f"{_describe(world)} did not reach rank 0 at {address}:{port} "
            f"within {JOIN_TIMEOUT.seconds} s ({text}): "
            f"check that rank 0 started, that {address} is its node, and that this node can reach it"
        ) from error
    try:
        return _wait_for_all_ranks(world, store, f"{address}:{port}")
    except (dist.DistError, RuntimeError) as error:  # the store is gone, or does not answer
        raise HpctrainError(
            f"{_describe(world)} lost the connection to rank 0 at {address}:{port} ({first_line(error)}): "
            "read the log of rank 0"
        ) from error


@functools.cache  # a script may join the others again, while this process still serves the store
def _open_store(address: str, port: int, serve: bool) -> TCPStore:
    return TCPStore(address, port, is_master=serve, wait_for_workers=False, timeout=JOIN_TIMEOUT)


def _wait_for_all_ranks(world: World, store: Store, address: str) -> Store:
    """Wait until every rank has joined; returns a store whose prefix belongs only to this start of the ranks.

    torchrun keeps its store when it restarts the ranks, so a key such as "rank 3 has joined" may come from a
    rank 3 that has died since. Each start of a rank therefore gets a unique id. A rank publishes its id, rank
    0 answers under that id with its own, and a rank that has read this answer belongs to the same start as
    rank 0.

    Everyone who can reach the store can write to it. With a secret of the job (see _sign) each entry is
    signed, and entries with another signature are ignored; the prefix is then a signature as well, which
    nobody without the secret can compute. Raises HpctrainError on rank 0.
    """
    start_id = uuid.uuid4().hex
    if world.rank == 0:
        _admit_ranks(world, store, start_id, address)
    else:
        start_id = _join_rank_0(world, store, start_id, address)
    store.set_timeout(COLLECTIVE_TIMEOUT)
    _prefix[:] = [_sign("prefix", start_id) or start_id]
    return PrefixStore(_prefix[0], store)


def _admit_ranks(world: World, store: Store, start_id: str, address: str) -> None:
    """On rank 0: answer each rank, and wait until all have read the answer. Raises HpctrainError."""
    missing = set(range(1, world.size))
    warned_of: set[int] = set()
    deadline = time.monotonic() + JOIN_TIMEOUT.total_seconds()
    while missing and time.monotonic() < deadline:
        for rank in sorted(missing):
            for key in {_own_key("id of", rank), f"id of {rank}"}:
                if not store.check([key]):
                    continue
                its_id = verify(store.get(key), "id of", rank)
                if its_id:
                    store.set(f"answer to {its_id}", seal(start_id, "answer to", its_id))
                elif rank not in warned_of:
                    warned_of.add(rank)
                    _warn_of_unsigned(f"rank {rank}", address)
            key = f"{start_id} joined by {rank}"
            if store.check([key]) and verify(store.get(key), "joined by", rank) == start_id:
                missing.remove(rank)
        time.sleep(0.02)
    message = ""
    if missing:
        message = (
            f"{format_ranks(missing)} of {world.size} did not join at {address} "
            f"within {JOIN_TIMEOUT.seconds} s ({format_ranks(set(range(world.size)) - missing)} did): "
            "check that every rank started, and look at its node"
        )
    store.set(f"{start_id} error", seal(message, "error", start_id))
    if message:
        time.sleep(1)  # for the other ranks to read it before the store ends with this process
        raise HpctrainError(message)


def _join_rank_0(world: World, store: Store, own_id: str, address: str) -> str:
    """On the other ranks: publish the own id; returns that of rank 0, once all ranks have joined."""
    store.set(_own_key("id of", world.rank), seal(own_id, "id of", world.rank))
    start_id = _read_from_rank_0(store, f"answer to {own_id}", ("answer to", own_id), address)
    store.set(f"{start_id} joined by {world.rank}", seal(start_id, "joined by", world.rank))
    if _read_from_rank_0(store, f"{start_id} error", ("error", start_id), address):
        raise SystemExit(0)  # rank 0 prints it: see all_or_none()
    return start_id


def connect_again() -> Store:
    """Another connection to the store of the process group, for a thread.

    A request waits for earlier ones of the same connection. Raises DistError or RuntimeError.
    """
    store = TCPStore(*main_address(), is_master=False, timeout=JOIN_TIMEOUT)
    return PrefixStore(f"{_prefix[0]}/threads", store)


def _read_from_rank_0(store: Store, key: str, context: tuple[object, ...], address: str) -> str:
    """Wait for an entry that rank 0 has signed. Raises DistStoreError after a while."""
    timeout = JOIN_TIMEOUT + timedelta(seconds=10)  # rank 0 may have started to wait a little later
    deadline = time.monotonic() + timeout.total_seconds()
    warned = False
    store.wait([key], timeout)
    while (text := verify(store.get(key), *context)) is None:
        if not warned:
            warned = True
            _warn_of_unsigned("rank 0", address)
        if time.monotonic() > deadline:
            raise dist.DistStoreError("no answer that has the signature of this job")
        time.sleep(0.1)
    return text


def _warn_of_unsigned(name: str, address: str) -> None:
    """Warn of an entry without the signature of the job in the place of this rank's entry."""
    print_error(
        "hpctrain: warning: something that is not a rank of this job "
        f"answered as {name} at {address}, and was ignored"
    )


def _sign(*parts: object) -> str:
    """HMAC-SHA256 of the parts with the job's HPCTRAIN_JOB_SECRET; "" without it."""
    secret = os.environ.get("HPCTRAIN_JOB_SECRET", "")
    return hmac.new(secret.encode(), json.dumps(parts).encode(), "sha256").hexdigest() if secret else ""


def _own_key(*parts: object) -> str:
    """A key of the store that only ranks with the job's secret know; without a secret, the parts."""
    return _sign("key", *parts) or " ".join(map(str, parts))


def seal(text: str, *context: object) -> str:
    """The text after its signature, which is valid in this context only: copies elsewhere are ignored."""
    signature = _sign(text, *context)
    return f"{signature} {text}" if signature else text


def verify(entry: bytes, *context: object) -> str | None:
    """The text of seal(), or None if its signature is wrong."""
    content = entry.decode(errors="replace")
    signature, _, text = content.partition(" ")
    expected = _sign(text, *context)
    if not expected:
        return content
    return text if hmac.compare_digest(signature.encode(), expected.encode()) else None


def format_ranks(ranks: Iterable[int]) -> str:
    """Ranks in short form, such as "rank 3" or "ranks 0-2,5"; of more than eight ranges, the first six."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    pieces = [str(first) if first == last else f"{first}-{last}" for first, last in parts]
    text = ",".join(pieces if len(pieces) <= 8 else [*pieces[:6], f"... and {len(pieces) - 6} more"])
    return f"rank {text}" if text.isdecimal() else f"ranks {text}"


def gather(world: World, value: Any, *, of: str = "") -> list[Any]:
    """The JSON value of every rank, in rank order, on every rank. A collective call.

    Raises HpctrainError that names the rank if one of them sends something other than JSON, and UsageError as
    meet() does; `of` is what the ranks have to call in common beside the function.
    """
    if world.size == 1:
        return [value]
    content = _encode(value)
    sizes = _meet(world, len(content), of)
    # Every rank sends as many bytes as the one with the most.
    padded = torch.nn.functional.pad(content, (0, max(sizes) - len(content)))
    parts = [torch.empty_like(padded) for _ in range(world.size)]
    dist.all_gather(parts, padded)
    return [_decode(rank, part[:size]) for rank, (part, size) in enumerate(zip(parts, sizes, strict=True))]


def broadcast(world: World, value: Any, source: int = 0) -> Any:
    """The JSON value of rank `source`, on every rank; what the others pass is ignored. A collective call.

    Raises HpctrainError that names the rank if it sends something other than JSON.
    """
    if world.size == 1:
        return value
    content = _encode(value if world.rank == source else None)
    length = _meet(world, len(content))[source]
    if world.rank != source:
        content = content.new_empty(length)
    dist.broadcast(content, source)
    return _decode(source, content)


def _encode(value: Any) -> torch.Tensor:
    """JSON as bytes [length] uint8, on the device of the process group: NCCL takes tensors of a GPU only."""
    return _to_device(bytearray(json.dumps(value), "ascii"))


def _to_device(content: bytearray) -> torch.Tensor:
    return torch.frombuffer(content, dtype=torch.uint8).to(_device())


def _device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def meet(world: World) -> None:
    """Raise UsageError unless every rank calls the same function of hpctrain. A collective call.

    gather() and broadcast() do so. It comes before collective calls on tensors, where ranks that are in
    different ones would wait for each other, or take values for those of another call.
    """
    if world.size > 1:
        _meet(world, 1)


def _meet(world: World, length: int, of: str = "") -> list[int]:
    """The lengths of the values that the ranks send next. Raises UsageError as meet() does."""
    call, place = describe_call(sys._getframe(1), of)
    own = torch.tensor([zlib.crc32(call.encode()), length], device=_device())
    of_ranks = [torch.zeros_like(own) for _ in range(world.size)]
    dist.all_gather(of_ranks, own)
    calls, lengths = zip(*torch.stack(of_ranks).tolist(), strict=True)
    if len({*calls}) > 1:
        _refuse_calls(world, f"{call} ({place})")
    for rank, number in enumerate(lengths):
        if not 0 < number <= MAX_VALUE:
            raise HpctrainError(
                f"rank {rank} sent a value of {number} bytes: run the same version of hpctrain on every rank"
            )
    return [*lengths]


def _refuse_calls(world: World, call: str) -> NoReturn:
    own = _to_device(bytearray(call.encode()[:MAX_CALL].ljust(MAX_CALL)))
    of_ranks = [torch.empty_like(own) for _ in range(world.size)]
    dist.all_gather(of_ranks, own)
    texts = [bytes(text.tolist()).decode(errors="replace").strip() for text in of_ranks]
    ranks = {text: [rank for rank, other in enumerate(texts) if other == text] for text in texts}
    raise UsageError(
        " where ".join(f"{format_ranks(numbers)} called {text}" for text, numbers in ranks.items())
        + ": call every method of a run on all ranks, not only `if rank == 0:`"
    )


def describe_call(frame: FrameType, of: str = "") -> tuple[str, str]:
    """The function of hpctrain that a script has called to come to this frame, and the script's line."""
    name = ""
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(PARTS):
        if not frame.f_globals["__name__"].startswith("contextlib"):
            kind = type(frame.f_locals["self"]).__name__ + "." if "self" in frame.f_locals else ""
            name = f"{kind}{frame.f_code.co_name}"
        frame = frame.f_back
    name = name.removesuffix(".__init__")
    return f"{name}({of})", f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _decode(rank: int, content: torch.Tensor) -> Any:
    try:
        return json.loads(content.cpu().numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise HpctrainError(
            f"rank {rank} sent something other than JSON, which is not read: "
            "run the same version of hpctrain on every rank"
        ) from error


@contextmanager
def all_or_none(world: World) -> Iterator[None]:
    """Run the block on every rank; if it raises HpctrainError on any of them, all exit and rank 0 prints why.

    Without this, ranks without an error would wait for the others in the next collective, and an error that
    all ranks have would be printed by each of them. A collective call, which needs the process group.
    """
    message = None
    try:
        yield
    except HpctrainError as error:
        message = str(error)
    messages = gather(world, message)
    ranks = {text: [r for r, m in enumerate(messages) if m == text] for text in messages if text}
    if not ranks:
        return
    if world.rank != 0:
        # With status 0: srun kills all ranks at the first failure, perhaps before rank 0 prints the error.
        raise SystemExit(0)
    first, *others = ranks
    if not others and len(ranks[first]) == world.size:
        raise HpctrainError(first)
    raise HpctrainError("; ".join(f"on {format_ranks(r)}: {text}" for text, r in ranks.items()))
