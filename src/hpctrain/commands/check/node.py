"""Checks of a rank's node: network address, folders, image. Each yields a line per problem, with a remedy."""

import errno
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from hpctrain.distributed.world import World
from hpctrain.files import atomic
from hpctrain.files.trust import is_own

# Long enough for a slow name server or switch. srun kills the ranks after --wait, which is longer.
CONNECT_SECONDS = 5
# Caches of libraries, which create these folders when they first need them.
CACHES = ("HF_HOME", "TORCH_HOME", "MPLCONFIGDIR", "XDG_CACHE_HOME", "TMPDIR")


def rendezvous_problems(world: World) -> Iterator[str]:
    """Why this node cannot reach rank 0 at MASTER_ADDR, or other nodes cannot reach this one."""
    if world.size == 1:
        return
    own = os.uname().nodename
    if (world.nodes > 1 or world.launcher == "horovodrun") and "GLOO_SOCKET_IFNAME" not in os.environ:
        # Gloo gives the other ranks the address of this node's own name. Without one, Horovod's Gloo crashes.
        addresses = [address for _, address in resolve(own)]
        advice = (
            "correct /etc/hosts, or set GLOO_SOCKET_IFNAME (HOROVOD_GLOO_IFACE) "
            "to the interface that connects the nodes"
        )
        if not addresses:
            yield f"this node's own name, {own}, has no address: {advice}"
        elif world.nodes > 1 and all(map(is_loopback, addresses)):
            yield f"this node's own name, {own}, is {addresses[0]}, where no other node reaches it: {advice}"
    name, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not name or not port.isdecimal():
        return  # process_group() reports that
    found = resolve(name)
    listed = ", ".join(address for _, address in found)
    if not found:
        yield (
            f"MASTER_ADDR {name} does not resolve: set it to a name or address of the first node "
            "that this node can resolve; in a container check that the host's /etc/hosts "
            "and /etc/resolv.conf are mounted"
        )
    elif world.node_rank > 0 and all(is_loopback(address) for _, address in found):
        yield (
            f"MASTER_ADDR {name} is {listed}, which is this node and not that of rank 0: "
            "export the address of rank 0's node"
        )
    elif world.rank == 0 and not any(is_local(family, address) for family, address in found):
        yield (
            f"MASTER_ADDR {name} ({listed}) is not an address of this node, where rank 0 runs: "
            "export the name of this node"
        )
    elif world.node_rank > 0 and (errors := connection_errors(found, int(port))):
        if all(family == socket.AF_INET6 for family, _ in found):
            yield (
                f"MASTER_ADDR {name} has IPv6 addresses only, and this node cannot reach them ({errors}): "
                "export the IPv4 address of the first node instead"
            )
        else:
            yield (
                f"MASTER_ADDR {name} cannot be reached ({errors}): "
                "a firewall blocks it, or it is in the wrong network; "
                "export the address of the first node in the network that connects the nodes"
            )


def resolve(name: str) -> list[tuple[int, str]]:
    """The addresses of a host name, each with its family; an empty list if it does not resolve."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        return []
    return [(family, str(address[0])) for family, _, _, _, address in found]


def is_loopback(address: str) -> bool:
    """Debian's /etc/hosts gives 127.0.1.1 to the machine's own name."""
    return address.startswith("127.") or address == "::1"


def is_local(family: int, address: str) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def connection_errors(addresses: list[tuple[int, str]], port: int) -> str:
    """Why none of these addresses can be reached; "" if one can.

    An address that refuses the connection can be reached: rank 0 may open the port later.
    """
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


def file_system_problems() -> Iterator[str]:
    """Why 4 MiB cannot be written to the home, the current folder, a cache, or shared memory."""
    home = Path(os.environ.get("HOME", "/"))
    wanted = {"home": home, "the current folder": Path.cwd(), "shared memory": Path("/dev/shm")}
    wanted |= {name: Path(os.environ[name]) for name in CACHES if os.environ.get(name)}
    if os.environ.get("HF_HUB_OFFLINE") == "1":  # then it is only read, and often shared by many users
        wanted.pop("HF_HOME", None)
    names_of: dict[Path, list[str]] = {}
    for name, path in wanted.items():
        # a cache is created when it is first needed
        names_of.setdefault(atomic.existing_part(path).resolve(), []).append(name)
    for folder, names in names_of.items():
        try:
            atomic.probe(folder)
        except OSError as error:
            # A read-only home alone is not a problem; a cache in it is checked under its own variable.
            if names != ["home"] or error.errno in (errno.ENOSPC, errno.EDQUOT):
                yield f"{', '.join(names)} ({folder}): {explain_write_error(error, folder)}"


def seconds_since_start() -> float:
    """How long ago this process was started, at a resolution of 10 ms (proc_pid_stat(5))."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def image_mount(env: Mapping[str, str] = os.environ, proc: Path = Path("/proc")) -> str:
    """What mounts the SIF of this container: "squashfuse_ll", "squashfuse" or "kernel"; "" if that is hidden.

    The container covers the mount itself. squashfuse is a process of this user outside of the container.
    """
    image = env.get("APPTAINER_CONTAINER", env.get("SINGULARITY_CONTAINER", ""))
    if not image or Path(image).is_dir():
        return ""
    names = {}
    for process in proc.glob("[0-9]*"):
        try:
            names[process.name] = (process / "comm").read_text().strip() if is_own(process) else ""
        except OSError:  # it has ended
            continue
    for name in ("squashfuse_ll", "squashfuse"):
        if name in names.values():
            return name
    # A container with process ids of its own, or with hidepid, does not show squashfuse.
    return "kernel" if "1" in names and names["1"] not in ("appinit", "sinit") else ""


def explain_write_error(error: OSError, folder: Path) -> str:
    """Why nothing can be written to the folder, and what to do."""
    state = os.statvfs(folder)
    free = f"{state.f_bavail * state.f_frsize >> 20} MiB and {state.f_favail} inodes free, 4 MiB needed"
    elsewhere = "or use a folder on another file system (scratch)"
    reasons = {
        errno.ENOSPC: f"the file system is full ({free}): delete files, {elsewhere}",
        errno.EDQUOT: f"your quota is used up (the file system has {free}): delete files, {elsewhere}",
        errno.EROFS: f"the file system is read-only: bind mount it writable into the container, {elsewhere}",
        errno.EACCES: f"user {os.getuid()} may not write there: change its mode or owner, {elsewhere}",
    }
    return reasons.get(error.errno or 0, f"cannot be written ({error.strerror}): use another folder")
