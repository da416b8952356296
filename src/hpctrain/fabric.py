"""Which network NCCL takes between nodes, and why: by NCCL's own rules, without a GPU.

The rules are those of NCCL 2.29.7 (github.com/NVIDIA/nccl: src/plugin/net.cc and plugin_open.cc, src/transport/net_ib/init.cc,
src/misc/socket.cc and param.cc, src/os/linux.cc). NCCL goes through the plugins that it finds, then InfiniBand and RoCE, then
TCP, and takes the first that works; with NCCL_NET the first that works and has this name. Left out, because hardly anybody sets
them: NCCL_COMM_ID and NCCL_SOCKET_FAMILY.
"""

import ctypes
import fcntl
import os
import pwd
import re
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpctrain.surroundings import some

# The versions of a plugin's interface that NCCL 2.29 asks for, in its order; each begins with a pointer to the name.
PLUGIN_VERSIONS = range(11, 5, -1)
# What NCCL_SOCKET_IFNAME stands for where it is not set: the first of these that an interface matches.
INTERFACES = ("ib", "^docker,lo,virbr", "docker", "lo", "virbr")

# of linux/sockios.h and linux/if.h
SIOCGIFFLAGS, SIOCGIFADDR, IFF_RUNNING = 0x8913, 0x8915, 0x40


@dataclass(frozen=True)
class Network:
    """A network as NCCL sees it; `name` is the one that NCCL_NET wants: "AWS Libfabric", "IB", "Socket", "" for none.

    `words` say what it consists of, or why there is none. `amiss`: somebody meant another one to be used.
    """

    name: str
    words: str
    amiss: bool = False


def network(env: Mapping[str, str] = os.environ, root: Path = Path("/")) -> Network:
    """The network that NCCL takes on this node, and why; without a name if NCCL gives up."""
    env = settings(env, root)
    running = running_interfaces()
    interfaces = tcp_interfaces(env, running)
    if not interfaces:  # the ranks meet over TCP, whatever carries the data after that
        wanted = env.get("NCCL_SOCKET_IFNAME", "")
        found = some(running, ", ") or "no interface with an address"
        return Network("", f"none: NCCL_SOCKET_IFNAME is '{wanted}', and here is {found}: name what is here, or unset it", True)
    networks = [*plugins(env, root), infiniband(env, root), Network("Socket", f"TCP over {', '.join(interfaces)}")]
    named = env.get("NCCL_NET")
    taken = next((one for one in networks if one.name and (named is None or one.name.lower() == named.lower())), None)
    if taken is None:
        offers = "; ".join(f"here is {one.name} ({one.words})" if one.name else one.words for one in networks)
        return Network("", f"none: NCCL_NET is '{named}', and {offers}: load what it names (docs/fabric.md), or unset it", True)
    if named is not None:
        return Network(taken.name, f"{taken.name} ({taken.words}), by NCCL_NET")
    passed = networks[: networks.index(taken)]
    # of several plugins that NCCL_NET_PLUGIN lists any one will do
    amiss = taken.name in ("IB", "Socket") and any(one.amiss for one in passed)
    words = f"{taken.name} ({taken.words})"
    if taken.name == "Socket":
        words += ", some 20 times slower than a fabric"  # docs.cscs.ch/software/communication/nccl: 5.4 against 122.6 GB/s
    if amiss or taken.name == "Socket":
        words += f", because: {'; '.join(one.words for one in passed)}"
    return Network(taken.name, words, amiss)


def settings(env: Mapping[str, str], root: Path) -> dict[str, str]:
    """The environment and, for what is not set there, what NCCL reads from its files."""
    merged = dict(env)
    for file in (env.get("NCCL_CONF_FILE") or home() / ".nccl.conf", root / "etc/nccl.conf"):
        try:
            lines = Path(file).read_text(errors="replace").splitlines()
        except OSError:
            continue
        for name, equals, value in (line.partition("=") for line in lines if not line.startswith("#")):
            if equals:
                merged.setdefault(name, value)
    return merged


def home() -> Path:
    """The home that the list of users has, which NCCL takes, and not HOME."""
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return Path("/nonexistent")


def matches(wanted: str, name: str, port: int | None = None) -> bool:
    """Whether a list of NCCL's means this interface or port of a card: of prefixes, of whole names after =, of others after ^."""
    exclude, wanted = wanted.startswith("^"), wanted.removeprefix("^")
    exact, wanted = wanted.startswith("="), wanted.removeprefix("=")
    entries = [entry.split(":") for entry in wanted.split(",") if entry]
    found = not entries or any(
        (name == entry[0] if exact else name.startswith(entry[0])) and (port is None or entry[1:2] in ([], [str(port)]))
        for entry in entries
    )
    return found != exclude


def plugins(env: Mapping[str, str], root: Path) -> Iterator[Network]:
    """The plugins that NCCL would load, found as its loader finds them: in LD_LIBRARY_PATH, then by what ldconfig knows."""
    cards = listed(root / "sys/class/cxi")
    wanted = env.get("NCCL_NET_PLUGIN")
    names = "libnccl-net.so" if wanted is None else "" if wanted.lower() == "none" else wanted
    for name in filter(None, names.split(",")):
        whole = "/" in name or (name.startswith("lib") and name.endswith(".so"))
        files = [name] if whole else [name, f"libnccl-net-{name}.so"]
        errors = []
        for file in files:
            try:
                yield plugin(file, ctypes.CDLL(file), cards)
                break
            except OSError as error:
                errors.append(str(error))
        else:
            broken = [error for file, error in zip(files, errors, strict=True) if not is_absent(file, error)]
            if broken:
                words = f"{files[-1]} does not load: {broken[0]}: the folder of what it needs belongs into LD_LIBRARY_PATH"
            elif cards:
                words = (
                    f"no {files[-1]}, without which NCCL cannot use this node's Slingshot ({', '.join(cards)}): give the runtime "
                    "the site's module (podman-hpc --nccl, shifter --module=nccl-plugin), or put its folder into LD_LIBRARY_PATH"
                )
            else:
                words = f"no {files[-1]}"
            yield Network("", words, bool(broken or cards or wanted))


def is_absent(file: str, error: str) -> bool:
    """Whether the loader's error is that there is no such file, and not that something is wrong with it."""
    return error.startswith(f"{file}:") and "No such file" in error


def plugin(file: str, library: ctypes.CDLL, cards: list[str]) -> Network:
    """A plugin that was loaded, by the name that it gives itself."""
    for version in PLUGIN_VERSIONS:
        try:
            name = ctypes.c_char_p.in_dll(library, f"ncclNetPlugin_v{version}").value or b""
        except ValueError:
            continue
        maps = Path("/proc/self/maps").read_text().split()
        parts = sorted({path for path in maps if Path(path).name.startswith(("libnccl-net", "libfabric.so", "libcxi.so"))})
        words = f"{file}, loaded {', '.join(parts)}"
        if cards and not any("libcxi" in path for path in parts):
            words += f", but no libcxi.so.1, which libfabric wants for Slingshot ({', '.join(cards)})"
        return Network(name.decode(errors="replace"), words)
    versions = f"v{PLUGIN_VERSIONS[-1]} to v{PLUGIN_VERSIONS[0]}"
    return Network("", f"{file} has no ncclNetPlugin of {versions}: take a plugin built for this NCCL", True)


def listed(folder: Path) -> list[str]:
    """The names in a folder; none if there is no such folder."""
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def infiniband(env: Mapping[str, str], root: Path) -> Network:
    """NCCL's own way by verbs, over InfiniBand and RoCE."""
    if env.get("NCCL_IB_DISABLE", "0").strip() not in ("", "0"):
        return Network("", f"NCCL_IB_DISABLE is {env['NCCL_IB_DISABLE']}")
    folder = root / "sys/class/infiniband"
    cards = listed(folder)
    if not cards:
        return Network("", "no InfiniBand or RoCE card in /sys/class/infiniband")
    kinds = {"InfiniBand": "InfiniBand", "Ethernet": "RoCE"}  # NCCL takes no others, such as EFA's
    active = [
        (card, int(port.name), kinds[layer])
        for card in cards
        for port in sorted((folder / card / "ports").iterdir())
        if (port / "state").read_text().startswith("4:") and (layer := (port / "link_layer").read_text().strip()) in kinds
    ]
    if not active:
        return Network("", f"no active port on {', '.join(cards)}")
    wanted = env.get("NCCL_IB_HCA", "")
    ports = [f"{card}:{port} {kind}" for card, port, kind in active if matches(wanted, card, port)]
    if not ports:
        return Network("", f"NCCL_IB_HCA={wanted} leaves out {', '.join(f'{card}:{port}' for card, port, _ in active)}", True)
    found = ", ".join(ports)
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError as error:
        return Network("", f"{found} is here, but {error}: install libibverbs1 and ibverbs-providers", True)
    if not any(os.access(device, os.R_OK | os.W_OK) for device in (root / "dev/infiniband").glob("uverbs*")):
        mend = "start the container with --device=/dev/infiniband (podman-hpc, docker)"
        return Network("", f"{found} is here, but no /dev/infiniband/uverbs* that this user may open: {mend}", True)
    return Network("IB", found)


def running_interfaces() -> list[str]:
    """The interfaces that run and have an address, in NCCL's order: those with an IPv4 address first."""
    inet6 = Path("/proc/net/if_inet6")
    fields = [line.split() for line in inet6.read_text().splitlines()] if inet6.exists() else []
    with_ipv6 = {field[-1] for field in fields if int(field[0], 16) != 1}  # ::1 is not counted
    with_ipv4, others = [], []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("40s", name.encode())
            flags = struct.unpack_from("H", fcntl.ioctl(probe, SIOCGIFFLAGS, request), 16)[0]
            if not flags & IFF_RUNNING:
                continue
            try:
                fcntl.ioctl(probe, SIOCGIFADDR, request)
                with_ipv4.append(name)
            except OSError:
                others += [name] if name in with_ipv6 else []
    return with_ipv4 + others


def tcp_interfaces(env: Mapping[str, str], running: list[str]) -> list[str]:
    """Those over which NCCL's ranks meet, and their data go where nothing else carries them; none if NCCL finds none."""
    wanted = env.get("NCCL_SOCKET_IFNAME", "")
    for names in (wanted,) if len(wanted) > 1 else INTERFACES:  # NCCL ignores a single letter
        if found := [name for name in running if matches(names, name)]:
            return found
    return []


# What NCCL says itself, where there is a GPU


@contextmanager
def overheard() -> Iterator[Callable[[], str]]:
    """Have NCCL, which must not have begun, write what it does to a file; gives a function for the network that it names."""
    if "NCCL_DEBUG" in os.environ:  # then it tells the user
        yield lambda: ""
        return
    with tempfile.NamedTemporaryFile() as log:
        os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": log.name}
        yield lambda: spoken(Path(log.name).read_text(errors="replace"))


def spoken(log: str) -> str:
    """The network that NCCL names in its log (NCCL_DEBUG=INFO); "" if it names none."""
    named = re.findall(r"NCCL INFO Using network (.+)", log)
    return named[-1].strip() if named else ""


def contradicted(expected: Network, said: str) -> Iterator[str]:
    """That NCCL goes over TCP by its own words, where something faster was expected."""
    if said == "Socket" != expected.name:
        see = "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET shows why"
        yield f"NCCL goes over TCP (it says: Using network Socket), and not by {expected.words}: {see}"
