"""Which network NCCL uses between nodes, and why: predicted by NCCL's own rules, without a GPU.

The rules are those of NCCL 2.26.2 to 2.30.7 (github.com/NVIDIA/nccl: src/plugin/net.cc and plugin_open.cc,
src/transport/net_ib, src/misc/socket.cc and param.cc, src/os/linux.cc); RULES has what differs between them.
NCCL tries the plugins that it finds, then InfiniBand and RoCE, then TCP, and uses the first that works. With
NCCL_NET it uses the first that works and has that name. Two rarely used settings are left out: NCCL_COMM_ID
and NCCL_SOCKET_FAMILY.
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
from importlib import metadata
from pathlib import Path

from hpctrain.text import shorten

# What NCCL tries for NCCL_SOCKET_IFNAME if it is not set, until one matches an interface.
INTERFACES = ("ib", "^docker,lo,virbr", "docker", "lo", "virbr")


@dataclass(frozen=True)
class Rules:
    """What differs between versions of NCCL.

    `plugins` are the versions of the plugin interface in NCCL's order. For a name in NCCL_NET_PLUGIN, NCCL
    tries `files`, or `files_of_library` if the name is that of a library.
    """

    plugins: range
    interfaces: tuple[str, ...] = INTERFACES
    lists: bool = True  # whether NCCL_NET_PLUGIN may have several names, with commas
    none: bool = True  # whether it may be "none"
    library: str = r"lib.*\.so|.*/.*"
    files: tuple[str, ...] = ("{}", "libnccl-net-{}.so")
    files_of_library: tuple[str, ...] = ("{}",)


# By the first version that has them.
RULES = {
    (2, 26): Rules(
        range(10, 5, -1),
        ("ib", "^docker,lo", "docker", "lo"),
        lists=False,
        none=False,
        files=("{}", "libnccl-net-{}.so", "libnccl-net.so"),
        files_of_library=("{}", "libnccl-net-{}.so", "libnccl-net.so"),
    ),
    (2, 27): Rules(
        range(10, 5, -1),
        ("ib", "^docker,lo", "docker", "lo"),
        none=False,
        library=r"lib.*\.so",
        files=("libnccl-net-{}.so",),
    ),
    (2, 28): Rules(range(11, 5, -1)),
    (2, 30): Rules(range(12, 5, -1)),
}
DEFAULT_VERSION = "2.29.7"  # of cu130


def nccl_rules() -> Rules:
    """The rules of the installed NCCL, or of DEFAULT_VERSION if there is none."""
    version = DEFAULT_VERSION
    for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    number = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    return RULES[max((first for first in RULES if first <= number), default=min(RULES))]


# From linux/sockios.h and linux/if.h.
SIOCGIFFLAGS, SIOCGIFADDR, IFF_RUNNING = 0x8913, 0x8915, 0x40


@dataclass(frozen=True)
class Network:
    """A network of NCCL; `name` is as in NCCL_NET: "AWS Libfabric", "IB", "Socket", or "" for none.

    `description`: its parts, or why it is unusable. `unintended`: the node or its settings imply another.
    """

    name: str
    description: str
    unintended: bool = False


def predict_network(root: Path = Path("/")) -> Network:
    """The network that NCCL uses on this node, and why; its name is "" if NCCL fails."""
    env = read_settings(os.environ, root)
    rules = nccl_rules()
    running = running_interfaces()
    interfaces = tcp_interfaces(env, running, rules)
    if not interfaces:  # NCCL's ranks connect over TCP first, whichever network the data use
        wanted = env.get("NCCL_SOCKET_IFNAME", "")
        found = shorten(running) or "no interface with an address"
        return Network(
            "",
            f"none: NCCL_SOCKET_IFNAME is '{wanted}', but this node has {found}: "
            "name one of these, or unset it",
            True,
        )
    tcp = Network("Socket", f"TCP over {', '.join(interfaces)}")
    networks = [*find_plugins(env, root, rules), find_infiniband(env, root), tcp]
    named = env.get("NCCL_NET")
    usable = [one for one in networks if one.name]
    if named is not None:
        usable = [one for one in usable if one.name.lower() == named.lower()]
    if not usable:
        offers = "; ".join(
            f"this node has {one.name} ({one.description})" if one.name else one.description
            for one in networks
        )
        return Network(
            "",
            f"none: NCCL_NET is '{named}', but {offers}: load that network (docs/reference/fabric.md), "
            "or unset it",
            True,
        )
    taken = usable[0]
    if named is not None:
        return Network(taken.name, f"{taken.name} ({taken.description}), by NCCL_NET")
    skipped = networks[: networks.index(taken)]
    # NCCL_NET_PLUGIN may list several plugins; any of them is intended.
    unintended = taken.name in ("IB", "Socket") and any(one.unintended for one in skipped)
    description = f"{taken.name} ({taken.description})"
    if taken.name == "Socket":
        # docs.cscs.ch/software/communication/nccl: 5.4 against 122.6 GB/s
        description += ", some 20 times slower than a fabric"
    if unintended or taken.name == "Socket":
        description += f", because: {'; '.join(one.description for one in skipped)}"
    return Network(taken.name, description, unintended)


def read_settings(env: Mapping[str, str], root: Path) -> dict[str, str]:
    """The environment, and for variables that are not set there, the values in NCCL's configuration files."""
    merged = dict(env)
    for file in (env.get("NCCL_CONF_FILE") or home_folder() / ".nccl.conf", root / "etc/nccl.conf"):
        try:
            lines = Path(file).read_text(errors="replace").splitlines()
        except OSError:
            continue
        for name, equals, value in (line.partition("=") for line in lines if not line.startswith("#")):
            if equals:
                merged.setdefault(name, value)
    return merged


def home_folder() -> Path:
    """The user's home in the password database, which NCCL uses instead of HOME."""
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return Path("/nonexistent")


def matches(wanted: str, name: str, port: int | None = None) -> bool:
    """Whether a list in NCCL's syntax selects this interface, or this port of a card.

    The list holds prefixes of names, whole names after "=", or what is not selected after "^".
    """
    exclude, wanted = wanted.startswith("^"), wanted.removeprefix("^")
    exact, wanted = wanted.startswith("="), wanted.removeprefix("=")
    entries = [entry.split(":") for entry in wanted.split(",") if entry]
    found = not entries or any(
        (name == entry[0] if exact else name.startswith(entry[0]))
        and (port is None or entry[1:2] in ([], [str(port)]))
        for entry in entries
    )
    return found != exclude


def find_plugins(env: Mapping[str, str], root: Path, rules: Rules) -> Iterator[Network]:
    """The plugins that NCCL loads, in its order, from LD_LIBRARY_PATH, then ldconfig's cache."""
    cards = list_folder(root / "sys/class/cxi")
    wanted = env.get("NCCL_NET_PLUGIN")
    for files in plugin_files(wanted, rules):
        errors = []
        for file in files:
            try:
                yield describe_plugin(file, ctypes.CDLL(file), cards, rules)
                break
            except OSError as error:
                errors.append(str(error))
        else:
            broken = [error for file, error in zip(files, errors, strict=True) if not is_absent(file, error)]
            if broken:
                description = (
                    f"{files[-1]} does not load: {broken[0]}: "
                    "add the folder of the missing library to LD_LIBRARY_PATH"
                )
            elif cards:
                description = (
                    f"no {files[-1]}, without which NCCL cannot use this node's Slingshot "
                    f"({', '.join(cards)}): give the runtime the site's module "
                    "(podman-hpc --nccl, shifter --module=nccl-plugin), "
                    "or add its folder to LD_LIBRARY_PATH"
                )
            else:
                description = f"no {files[-1]}"
            yield Network("", description, bool(broken or cards or wanted))


def plugin_files(wanted: str | None, rules: Rules) -> Iterator[list[str]]:
    """The files that NCCL tries for each plugin; `wanted` is NCCL_NET_PLUGIN, None if it is not set."""
    if wanted is None:
        yield ["libnccl-net.so"]
        return
    if rules.none and wanted.lower() == "none":
        return
    for name in filter(None, wanted.split(",") if rules.lists else [wanted]):
        templates = rules.files_of_library if re.fullmatch(rules.library, name) else rules.files
        yield list(dict.fromkeys(template.format(name) for template in templates))


def is_absent(file: str, error: str) -> bool:
    """Whether the loader's error is that there is no such file, rather than that the file does not load."""
    return error.startswith(f"{file}:") and "No such file" in error


def describe_plugin(file: str, library: ctypes.CDLL, cards: list[str], rules: Rules) -> Network:
    """The network of a plugin that has been loaded, under the name that the plugin exports."""
    for version in rules.plugins:
        try:
            name = ctypes.c_char_p.in_dll(library, f"ncclNetPlugin_v{version}").value or b""
        except ValueError:
            continue
        maps = Path("/proc/self/maps").read_text().split()
        parts = sorted(
            {
                path
                for path in maps
                if Path(path).name.startswith(("libnccl-net", "libfabric.so", "libcxi.so"))
            }
        )
        description = f"{file}, loaded {', '.join(parts)}"
        if cards and not any("libcxi" in path for path in parts):
            description += f", but no libcxi.so.1, which libfabric needs for Slingshot ({', '.join(cards)})"
        return Network(name.decode(errors="replace"), description)
    versions = f"v{rules.plugins[-1]} to v{rules.plugins[0]}"
    return Network("", f"{file} has no ncclNetPlugin of {versions}: use a plugin built for this NCCL", True)


def list_folder(folder: Path) -> list[str]:
    """The sorted names in a folder; an empty list if there is no such folder."""
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def find_infiniband(env: Mapping[str, str], root: Path) -> Network:
    """NCCL's built-in network "IB", which uses verbs over InfiniBand and RoCE."""
    if env.get("NCCL_IB_DISABLE", "0").strip() not in ("", "0"):
        return Network("", f"NCCL_IB_DISABLE is {env['NCCL_IB_DISABLE']}")
    folder = root / "sys/class/infiniband"
    cards = list_folder(folder)
    if not cards:
        return Network("", "no InfiniBand or RoCE card in /sys/class/infiniband")
    kinds = {"InfiniBand": "InfiniBand", "Ethernet": "RoCE"}  # NCCL ignores others, such as EFA
    active = [
        (card, int(port.name), kinds[layer])
        for card in cards
        for port in sorted((folder / card / "ports").iterdir())
        if (port / "state").read_text().startswith("4:")
        and (layer := (port / "link_layer").read_text().strip()) in kinds
    ]
    if not active:
        return Network("", f"no active port on {', '.join(cards)}")
    wanted = env.get("NCCL_IB_HCA", "")
    ports = [f"{card}:{port} {kind}" for card, port, kind in active if matches(wanted, card, port)]
    if not ports:
        return Network(
            "",
            f"NCCL_IB_HCA={wanted} excludes {', '.join(f'{card}:{port}' for card, port, _ in active)}",
            True,
        )
    found = ", ".join(ports)
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError as error:
        return Network(
            "", f"{found} is present, but {error}: install libibverbs1 and ibverbs-providers", True
        )
    if not any(os.access(device, os.R_OK | os.W_OK) for device in (root / "dev/infiniband").glob("uverbs*")):
        advice = "start the container with --device=/dev/infiniband (podman-hpc, docker)"
        return Network(
            "", f"{found} is present, but no /dev/infiniband/uverbs* that this user may open: {advice}", True
        )
    return Network("IB", found)


def running_interfaces() -> list[str]:
    """The interfaces that are up and have an address, in NCCL's order: first those with an IPv4 address."""
    inet6 = Path("/proc/net/if_inet6")
    fields = [line.split() for line in inet6.read_text().splitlines()] if inet6.exists() else []
    with_ipv6 = {field[-1] for field in fields if int(field[0], 16) != 1}  # without ::1
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
            except OSError:  # no IPv4 address
                if name in with_ipv6:
                    others.append(name)
    return with_ipv4 + others


def tcp_interfaces(env: Mapping[str, str], running: list[str], rules: Rules) -> list[str]:
    """The interfaces over which NCCL's ranks connect, and send data if there is no other network."""
    wanted = env.get("NCCL_SOCKET_IFNAME", "")
    for names in (wanted,) if len(wanted) > 1 else rules.interfaces:  # NCCL ignores a single letter
        if found := [name for name in running if matches(names, name)]:
            return found
    return []


# --- the network that NCCL itself logs, where there is a GPU ---


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


def compare_with_log(expected: Network, logged: str) -> Iterator[str]:
    """Yield a problem if NCCL logs that it uses TCP, although a faster network was expected."""
    if logged == "Socket" != expected.name:
        advice = "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET shows why"
        yield f"NCCL uses TCP (its log: Using network Socket) instead of {expected.description}: {advice}"
