"""What a node offers NCCL for data between nodes, and the network that NCCL used, from its own log.

How NCCL chooses differs between its releases, so nothing here predicts the choice. There are problems only
where a setting contradicts what the node has, and where the node has hardware that no library can use.
"""

import ctypes
import fcntl
import os
import re
import socket
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpctrain.text import shorten

# From linux/sockios.h and linux/if.h.
SIOCGIFFLAGS, SIOCGIFADDR, IFF_RUNNING = 0x8913, 0x8915, 0x40


@dataclass(frozen=True)
class Fabric:
    """What a node offers NCCL between nodes.

    `networks`: what NCCL may use here instead of TCP. `failures`: settings that nothing here matches, so that
    NCCL fails. `unusable`: cards and plugins that are there, or named in a setting, and that NCCL cannot use.
    """

    networks: list[str]
    description: str
    failures: list[str]
    unusable: list[str]


def read_fabric(root: Path = Path("/")) -> Fabric:
    """Read interfaces, plugins, cards and NCCL's settings of this node."""
    env = read_settings(os.environ, root)
    running, slingshot = running_interfaces(), list_folder(root / "sys/class/cxi")
    plugins, problems = load_plugins(env.get("NCCL_NET_PLUGIN"), slingshot)
    ports = infiniband_ports(root)
    shown = shorten([f"{port} {kind}" for port, kind in ports.items()]) or "no InfiniBand or RoCE"
    facts = [
        f"TCP over {shorten(running) or 'no interface'}",
        *([f"Slingshot {shorten(slingshot)}"] if slingshot else []),
        shown,
        *([f"{file}, loaded {libraries}" for file, libraries in plugins.items()] or ["no plugin"]),
        *(f"{name}={env[name]}" for name in sorted(env) if name.startswith("NCCL_")),
    ]
    without = not ports or env.get("NCCL_IB_DISABLE", "0") not in ("", "0")
    obstacle = "" if without else infiniband_obstacle(env, root, ports, shown)
    verbs = [] if without or obstacle else sorted({*ports.values()})
    reasons = [*problems, obstacle] if obstacle else problems
    networks, unusable = [*plugins, *verbs], problems if plugins else reasons
    failures = []
    wanted = env.get("NCCL_SOCKET_IFNAME", "")
    if not any(matches(wanted, name) for name in running):
        found = shorten(running) or "no interface with an address"
        failures.append(
            f"NCCL_SOCKET_IFNAME is '{wanted}', but this node has {found}: name one of these, or unset it"
        )
    if (named := env.get("NCCL_NET")) is not None:  # NCCL uses no other
        networks = {"socket": [], "ib": verbs, "": []}.get(named.lower(), [*plugins])
        unusable = []
        if not networks and named.lower() != "socket":
            reason = "; ".join(reasons) or "this node has no such network"
            failures.append(
                f"NCCL_NET is '{named}', but {reason}: load that network (docs/reference/fabric.md), "
                "or unset it"
            )
    return Fabric(networks, "; ".join(facts), failures, unusable)


def read_settings(env: Mapping[str, str], root: Path) -> dict[str, str]:
    """The environment, and for variables that are not set there, the values in NCCL's configuration files."""
    merged = dict(env)
    for file in (env.get("NCCL_CONF_FILE") or Path.home() / ".nccl.conf", root / "etc/nccl.conf"):
        try:
            lines = Path(file).read_text(errors="replace").splitlines()
        except OSError:
            continue
        for name, equals, value in (line.partition("=") for line in lines if not line.startswith("#")):
            if equals:
                merged.setdefault(name, value)
    return merged


def matches(wanted: str, name: str, port: str | None = None) -> bool:
    """Whether a list in NCCL's syntax selects this interface, or this port of a card.

    The list holds prefixes of names, whole names after "=", or what is not selected after "^".
    """
    exclude, wanted = wanted.startswith("^"), wanted.removeprefix("^")
    exact, wanted = wanted.startswith("="), wanted.removeprefix("=")
    entries = [entry.split(":") for entry in wanted.split(",") if entry]
    found = not entries or any(
        (name == entry[0] if exact else name.startswith(entry[0]))
        and (port is None or entry[1:2] in ([], [port]))
        for entry in entries
    )
    return found != exclude


def load_plugins(wanted: str | None, cards: list[str]) -> tuple[dict[str, str], list[str]]:
    """Load NCCL's plugins from LD_LIBRARY_PATH or ldconfig's cache.

    `wanted` is NCCL_NET_PLUGIN, None if it is not set; `cards` are those of Slingshot. Returns the libraries
    that each file has loaded, and why others cannot be used.
    """
    plugins: dict[str, str] = {}
    problems: list[str] = []
    names = ["libnccl-net.so"] if wanted is None else [] if wanted.lower() == "none" else wanted.split(",")
    for name in filter(None, names):
        file = name if ".so" in name else f"libnccl-net-{name}.so"
        try:
            ctypes.CDLL(file)
        except OSError as error:
            if not str(error).startswith(f"{file}:") or "No such file" not in str(error):
                advice = "add the folder of the missing library to LD_LIBRARY_PATH"
                problems.append(f"{file} does not load: {error}: {advice}")
            elif wanted is not None:
                problems.append(f"no {file}, which NCCL_NET_PLUGIN names: add its folder to LD_LIBRARY_PATH")
            continue
        parts = ("libnccl-net", "libfabric.so", "libcxi.so")
        maps = {path for path in Path("/proc/self/maps").read_text().split() if "/" in path}
        plugins[file] = ", ".join(sorted(path for path in maps if Path(path).name.startswith(parts)))
        if cards and "/libcxi.so" not in plugins[file]:
            plugins[file] += " and no libcxi.so.1, which libfabric needs for Slingshot"
    if cards and not plugins and not problems:
        problems.append(
            f"no libnccl-net.so, without which NCCL cannot use this node's Slingshot ({', '.join(cards)}): "
            "give the runtime the site's module (podman-hpc --nccl, shifter --module=nccl-plugin), "
            "or add its folder to LD_LIBRARY_PATH"
        )
    return plugins, problems


def list_folder(folder: Path) -> list[str]:
    """The sorted names in a folder; an empty list if there is no such folder."""
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def infiniband_ports(root: Path) -> dict[str, str]:
    """The active ports, such as "mlx5_0:1", and their kind: "InfiniBand" or "RoCE"."""
    kinds = {"InfiniBand": "InfiniBand", "Ethernet": "RoCE"}  # others, such as EFA, have no verbs for NCCL
    return {
        f"{port.parents[1].name}:{port.name}": kinds[layer]
        for port in sorted((root / "sys/class/infiniband").glob("*/ports/*"))
        if (port / "state").read_text().startswith("4:")
        and (layer := (port / "link_layer").read_text().strip()) in kinds
    }


def infiniband_obstacle(env: Mapping[str, str], root: Path, ports: Iterable[str], found: str) -> str:
    """Why NCCL cannot use active ports, which `found` describes; "" if it can."""
    wanted = env.get("NCCL_IB_HCA", "")
    if not any(matches(wanted, *port.split(":")) for port in ports):
        return f"NCCL_IB_HCA={wanted} excludes {found}: name one of these, or unset it"
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError as error:
        return f"{found} is present, but {error}: install libibverbs1 and ibverbs-providers"
    if not any(os.access(device, os.R_OK | os.W_OK) for device in (root / "dev/infiniband").glob("uverbs*")):
        advice = "start the container with --device=/dev/infiniband (podman-hpc, docker)"
        return f"{found} is present, but no /dev/infiniband/uverbs* that this user may open: {advice}"
    return ""


def running_interfaces() -> list[str]:
    """The interfaces that are up and have an IPv4 or IPv6 address."""
    inet6 = Path("/proc/net/if_inet6")
    fields = [line.split() for line in inet6.read_text().splitlines()] if inet6.exists() else []
    with_ipv6 = {field[-1] for field in fields if int(field[0], 16) != 1}  # without ::1
    running = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("40s", name.encode())
            flags = struct.unpack_from("H", fcntl.ioctl(probe, SIOCGIFFLAGS, request), 16)[0]
            try:
                fcntl.ioctl(probe, SIOCGIFADDR, request)
                has_address = True
            except OSError:  # no IPv4 address
                has_address = name in with_ipv6
            if flags & IFF_RUNNING and has_address:
                running.append(name)
    return running


@contextmanager
def capture_nccl_log() -> Iterator[Callable[[], str]]:
    """Let NCCL, not initialized yet, log to a file. Yields a function that returns the network in the log.

    If the user has set NCCL_DEBUG, NCCL logs where the user wants, and the function returns "".
    """
    if "NCCL_DEBUG" in os.environ:
        yield lambda: ""
        return
    with tempfile.NamedTemporaryFile() as log:
        os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": log.name}
        yield lambda: network_in_log(Path(log.name).read_text(errors="replace"))


def network_in_log(log: str) -> str:
    """The name of the network in a log of NCCL (NCCL_DEBUG=INFO); "" if it has none."""
    names = re.findall(r"NCCL INFO Using network (.+)", log)
    return names[-1].strip() if names else ""


def compare_with_log(fabric: Fabric, logged: str) -> Iterator[str]:
    """Yield a problem if NCCL logs that it uses TCP on a node that has a faster network."""
    if logged == "Socket" and fabric.networks:
        advice = "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET shows why"
        yield (
            f"NCCL uses TCP (its log: Using network Socket), some 20 times slower than a fabric, "
            f"although this node has {', '.join(fabric.networks)}: {advice}"
        )
