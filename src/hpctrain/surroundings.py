"""What surrounds a rank on its node: the way to the others, its Python packages, the folders that it writes to.

Each function yields its findings, a line each, that say what is wrong and what to do. Nothing here needs torch, so that a
broken one does not hide why it is broken.
"""

import errno
import os
import site
import socket
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpctrain.world import World

# Long enough for a name server or a switch that wakes up, short enough to have said so before srun's --wait is over.
CONNECT_SECONDS = 5
# What libraries keep on disk; they make the folder themselves when they first need it.
CACHES = ("HF_HOME", "TORCH_HOME", "MPLCONFIGDIR", "XDG_CACHE_HOME", "TMPDIR")


def rendezvous_problems(world: "World", env: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Why this node would not meet the others at MASTER_ADDR, or they would not find it."""
    if world.size == 1:
        return
    own = os.uname().nodename
    if (world.nodes > 1 or world.launcher == "horovodrun") and "GLOO_SOCKET_IFNAME" not in env:
        # Gloo tells the other ranks the address of the own name; Horovod's crashes where there is none.
        addresses = [address for _, address in resolve(own)]
        mend = "mend /etc/hosts, or set GLOO_SOCKET_IFNAME (HOROVOD_GLOO_IFACE) to the interface that joins the nodes"
        if not addresses:
            yield f"this node's own name, {own}, has no address: {mend}"
        elif world.nodes > 1 and all(map(is_loopback, addresses)):
            yield f"this node's own name, {own}, is {addresses[0]}, where no other node finds it: {mend}"
    name, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    if not name or not port.isdecimal():
        return  # process_group() says so
    found = resolve(name)
    listed = ", ".join(address for _, address in found)
    if not found:
        yield (
            f"MASTER_ADDR {name} does not resolve: it must be the first node's name or address as this node knows it; "
            "in a container look whether the host's /etc/hosts and /etc/resolv.conf are there"
        )
    elif world.node_rank > 0 and all(is_loopback(address) for _, address in found):
        yield f"MASTER_ADDR {name} is {listed}, which is this node itself and not that of rank 0: export its address instead"
    elif world.rank == 0 and not any(is_mine(family, address) for family, address in found):
        yield f"MASTER_ADDR {name} ({listed}) is no address of this node, where rank 0 runs: export the name of this one"
    elif world.node_rank > 0 and (errors := connect(found, int(port))):
        if all(family == socket.AF_INET6 for family, _ in found):
            yield (
                f"MASTER_ADDR {name} has IPv6 addresses only, and this node cannot reach them ({errors}): "
                "export the IPv4 address of the first node instead"
            )
        else:
            yield (
                f"MASTER_ADDR {name} cannot be reached ({errors}): a firewall or the wrong network is between; "
                "export the address of the first node in the network that joins the nodes"
            )


def resolve(name: str) -> list[tuple[int, str]]:
    """The addresses of a name, each with its family; none if it does not resolve."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        return []
    return [(family, str(address[0])) for family, _, _, _, address in found]


def is_loopback(address: str) -> bool:
    """Whether only this node itself is reached there; Debian gives 127.0.1.1 to a machine's own name."""
    return address.startswith("127.") or address == "::1"


def is_mine(family: int, address: str) -> bool:
    """Whether an interface of this node has that address."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def connect(addresses: list[tuple[int, str]], port: int) -> str:
    """Why no node is reached at any of these addresses; "" if one is, be it that rank 0 has not opened the port yet."""
    errors = []
    for family, address in addresses:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.settimeout(CONNECT_SECONDS)
            try:
                probe.connect((address, port))
                return ""
            except ConnectionRefusedError:
                return ""
            except OSError as error:
                errors.append(f"{address}: {error.strerror or error}")
    return ", ".join(errors)


def shadowed_packages() -> Iterator[str]:
    """Which folders hide a package of this Python by coming before its own on sys.path; additions to it are welcome."""
    own = [Path(entry).resolve() for entry in site.getsitepackages()]
    standard = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")]
    # Of hpctrain itself the user chose the one to run, often a checkout.
    theirs = set().union(sys.stdlib_module_names, *map(importable, own)) - {"hpctrain"}
    for entry in sys.path:
        folder = Path(entry).resolve()
        if folder in own:
            return
        if folder in standard or folder.parent in standard:
            continue
        if hidden := sorted(importable(folder) & theirs):
            if folder == Path(site.getusersitepackages()).resolve():
                mend = "export PYTHONNOUSERSITE=1"
            elif entry in os.environ.get("PYTHONPATH", "").split(":"):
                mend = "take that folder out of PYTHONPATH, or the package out of the folder"
            else:
                mend = "start from another folder, or rename it"
            yield f"{folder} hides the {some(hidden, ', ')} of {sys.prefix}: {mend}"


def importable(folder: Path) -> set[str]:
    """The names of the modules and packages in a folder; one without __init__.py does not hide another."""
    try:
        entries = list(folder.iterdir())
    except OSError:
        return set()
    return {
        entry.name.partition(".")[0] for entry in entries if entry.suffix in (".py", ".so") or (entry / "__init__.py").exists()
    }


def file_system_problems(env: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Where 4 MiB cannot be written, of the folders that a training writes to."""
    home = Path(env.get("HOME", "/"))
    wanted = {"home": home, "the current folder": Path.cwd(), "shared memory": Path("/dev/shm")}
    wanted |= {name: Path(env[name]) for name in CACHES if env.get(name)}
    if env.get("HF_HUB_OFFLINE") == "1":  # then it is only read, and often everybody's
        wanted.pop("HF_HOME", None)
    names_of: dict[Path, list[str]] = {}
    for name, path in wanted.items():
        while not os.access(path, os.F_OK):  # a cache is made when it is first needed
            path = path.parent
        names_of.setdefault(path.resolve(), []).append(name)
    for folder, names in names_of.items():
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(os.urandom(4 << 20))
                file.flush()
                os.fsync(file.fileno())  # where a quota or a server says no
        except OSError as error:
            # A home that is read-only harms only what is kept in it, and that is named by its own variable.
            if names != ["home"] or error.errno in (errno.ENOSPC, errno.EDQUOT):
                yield f"{', '.join(names)} ({folder}): {cannot_write(error, folder)}"


def cannot_write(error: OSError, folder: Path) -> str:
    """Why nothing can be written there, and what to do."""
    state = os.statvfs(folder)
    free = f"{state.f_bavail * state.f_frsize >> 20} MiB and {state.f_favail} inodes free, 4 MiB wanted"
    elsewhere = "or name a folder on another file system (scratch)"
    reasons = {
        errno.ENOSPC: f"the file system is full ({free}): delete something, {elsewhere}",
        errno.EDQUOT: f"your quota is used up (the file system has {free}): delete something, {elsewhere}",
        errno.EROFS: f"the file system is read-only: bind it writable into the container, {elsewhere}",
        errno.EACCES: f"user {os.getuid()} may not write there: change its mode or owner, {elsewhere}",
    }
    return reasons.get(error.errno or 0, f"cannot be written ({error.strerror}): name another folder")


def some(words: list[str], separator: str) -> str:
    """All of the words, or the first six of many."""
    return separator.join(words if len(words) <= 8 else [*words[:6], f"... and {len(words) - 6} more"])
