"""Which network NCCL uses: plugins that the loader finds or not, cards in a fake /sys, and NCCL's own log."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from slurm_cluster import REPOSITORY

from hpctrain.commands.check import check, nccl
from hpctrain.commands.check.nccl import Network
from hpctrain.distributed.world import World
from hpctrain.errors import HpctrainError
from tests.commands.check.helpers import errors, in_the_image, rank, run

# As observed with NCCL 2.29.7 on such interfaces: ncclGetUniqueId, which needs no GPU, used the first one.
RUNNING = ["lo", "eth0", "docker0", "ib0", "ib1"]
CHOSEN = {
    None: ["ib0", "ib1"],
    "": ["ib0", "ib1"],
    "e": ["ib0", "ib1"],  # too short for NCCL
    "eth": ["eth0"],
    "=eth": [],
    "=eth0": ["eth0"],
    "=ib1,eth0": ["eth0", "ib1"],
    "^ib": ["lo", "eth0", "docker0"],
    "^=ib0": ["lo", "eth0", "docker0", "ib1"],
    "hsn": [],
}


@pytest.mark.parametrize("wanted", CHOSEN)
def test_interfaces(wanted):
    env = {} if wanted is None else {"NCCL_SOCKET_IFNAME": wanted}
    assert nccl.tcp_interfaces(env, RUNNING, nccl.nccl_rules()) == CHOSEN[wanted]


def test_interfaces_that_are_not_meant_come_last():
    rules = nccl.nccl_rules()
    assert nccl.tcp_interfaces({}, ["lo", "docker0", "virbr0", "eth0"], rules) == ["eth0"]
    assert nccl.tcp_interfaces({}, ["lo", "docker0", "virbr0"], rules) == ["docker0"]
    assert nccl.tcp_interfaces({}, ["lo", "virbr0"], rules) == ["lo"]


def test_running_interfaces():
    """Interfaces that are up and have an address, those with an IPv4 address first."""
    if os.geteuid() != 0:
        pytest.skip("a network of its own needs root")
    script = """
        ip link set lo up
        ip link add six type veth peer name four; ip link add idle type veth peer name bare
        ip address add fd00::1/64 dev six
        ip address add 10.0.0.1/24 dev four
        ip address add 10.0.1.1/24 dev idle
        for name in six four; do ip link set $name addrgenmode none; ip link set $name up; done
        exec "$@" -c 'from hpctrain.commands.check import nccl; print(*nccl.running_interfaces())'
    """
    done = subprocess.run(
        ["unshare", "--net", "bash", "-ec", script, "-", sys.executable], capture_output=True, text=True
    )
    assert done.stdout.split() == ["lo", "four", "six"], done.stdout + done.stderr


# --- a fake node: a root folder with the files that NCCL reads, and libraries for the loader ---

AWS = "AWS Libfabric"


def library(folder: Path, file: str, source: str, *needs: str) -> None:
    """Compile a shared library that the loader can load."""
    folder.mkdir(exist_ok=True)
    command = ["tcc", "-shared", "-nostdlib", "-soname", file, "-o", file, "-", *needs]
    subprocess.run(command, cwd=folder, input=source, text=True, check=True)


def plugin(name: str, version: int = 10) -> str:
    """The C source of a plugin with this name."""
    start = "int fi_version(void); struct { const char *name; int (*init)(void); }"
    return f'{start} ncclNetPlugin_v{version} = {{"{name}", fi_version}};'


class Node:
    """The files of a node, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.root, self.lib = folder / "root", folder / "lib"
        self.root.mkdir()
        self.lib.mkdir()

    def plugin(self, name: str = AWS, file: str = "libnccl-net.so", version: int = 10) -> "Node":
        library(self.lib, "libfabric.so.1", "int fi_version(void) { return 1; }")
        library(self.lib, file, plugin(name, version), "libfabric.so.1")
        return self

    def without(self, file: str) -> "Node":
        (self.lib / file).unlink()
        return self

    def file(self, file: str, content: str) -> "Node":
        path = self.root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        return self

    def slingshot(self) -> "Node":
        return self.file("sys/class/cxi/cxi0/device", "").file("sys/class/cxi/cxi1/device", "")

    def card(self, name: str = "mlx5_0", state: str = "4: ACTIVE", layer: str = "InfiniBand") -> "Node":
        port = f"sys/class/infiniband/{name}/ports/1"
        return self.file(f"{port}/state", state + "\n").file(f"{port}/link_layer", layer + "\n")

    def verbs(self) -> "Node":
        library(self.lib, "libibverbs.so.1", "int ibv_open_device(void) { return 0; }")
        return self.file("dev/infiniband/uverbs0", "")

    def network(self, nccl: str = nccl.DEFAULT_VERSION, **env: str) -> Network:
        """What predict_network() says in a process whose loader finds the libraries of this node."""
        script = (
            "import json, sys; from dataclasses import asdict; from hpctrain.commands.check import nccl\n"
            f"nccl.running_interfaces, nccl.DEFAULT_VERSION = lambda: ['lo', 'hsn0'], {nccl!r}\n"
            "print(json.dumps(asdict(nccl.predict_network(root=nccl.Path(sys.argv[1])))))"
        )
        clean = {name: value for name, value in os.environ.items() if not name.startswith("NCCL_")}
        clean |= {"LD_LIBRARY_PATH": str(self.lib), "NCCL_CONF_FILE": "/nonexistent", **env}
        done = subprocess.run(
            [sys.executable, "-c", script, self.root], env=clean, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return Network(**json.loads(done.stdout))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    if not shutil.which("tcc"):
        pytest.skip("no tcc to make plugins with: apt-get install tcc")
    return Node(tmp_path)


SLOW = ", some 20 times slower than a fabric, because: "
NO_CARD = "no InfiniBand or RoCE card in /sys/class/infiniband"
NO_PLUGIN = "no libnccl-net.so"
TCP = "Socket (TCP over hsn0)"
NO_SLINGSHOT = f"{NO_PLUGIN}, without which NCCL cannot use this node's Slingshot (cxi0, cxi1): "
BROKEN = "libnccl-net.so does not load: libfabric.so.1: cannot open shared object file: "
BROKEN += "No such file or directory: "
IB = "IB (mlx5_0:1 InfiniBand"
NETWORKS = {
    # the node, its variables, then the network: its name, whether it is unintended, and how the description
    # begins or what it has
    "nothing": (lambda n: n, {}, "Socket", False, [f"{TCP}{SLOW}{NO_PLUGIN}; {NO_CARD}"]),
    "a plugin": (
        lambda n: n.plugin(),
        {},
        AWS,
        False,
        [f"{AWS} (libnccl-net.so, loaded ", "/lib/libfabric.so.1, "],
    ),
    "a plugin by name": (Node.plugin, {"NCCL_NET": "aws libfabric"}, AWS, False, [AWS, "), by NCCL_NET"]),
    "a plugin on Slingshot with a libfabric that has no way there": (
        lambda n: n.plugin().slingshot(),
        {"NCCL_NET": AWS},
        AWS,
        False,
        [AWS, "but no libcxi.so.1, which libfabric needs for Slingshot (cxi0, cxi1)), by NCCL_NET"],
    ),
    "a plugin by its suffix": (
        lambda n: n.plugin(file="libnccl-net-ofi.so"),
        {"NCCL_NET_PLUGIN": "ofi"},
        AWS,
        False,
        [f"{AWS} (libnccl-net-ofi.so"],
    ),
    "the second of two plugins": (
        lambda n: n.plugin(file="libnccl-net-ofi.so"),
        {"NCCL_NET_PLUGIN": "mine,ofi"},
        AWS,
        False,
        [AWS],
    ),
    "a plugin that is not the one of NCCL_NET": (
        lambda n: n.plugin("Libfabric"),
        {"NCCL_NET": AWS},
        "",
        True,
        [f"none: NCCL_NET is '{AWS}', but this node has Libfabric (libnccl-net.so, "],
    ),
    "a plugin that needs what is not there": (
        lambda n: n.plugin().without("libfabric.so.1"),
        {},
        "Socket",
        True,
        [f"{TCP}{SLOW}{BROKEN}"],
    ),
    "a plugin that needs what is not there, and has to be": (
        lambda n: n.plugin().without("libfabric.so.1"),
        {"NCCL_NET": AWS},
        "",
        True,
        [f"none: NCCL_NET is '{AWS}', but {BROKEN}"],
    ),
    "a plugin for another NCCL": (
        lambda n: n.plugin(version=5),
        {},
        "Socket",
        True,
        [TCP, "libnccl-net.so has no ncclNetPlugin of v6 to v11: "],
    ),
    "a plugin that is named and not there": (
        lambda n: n.card().verbs(),
        {"NCCL_NET_PLUGIN": "ofi"},
        "IB",
        True,
        [f"{IB}), because: no libnccl-net-ofi.so"],
    ),
    "a plugin that is not wanted": (
        lambda n: n.plugin().card().verbs(),
        {"NCCL_NET_PLUGIN": "none"},
        "IB",
        False,
        [f"{IB})"],
    ),
    "Slingshot without the plugin": (
        Node.slingshot,
        {},
        "Socket",
        True,
        [f"{TCP}{SLOW}{NO_SLINGSHOT}", "podman-hpc --nccl"],
    ),
    "Slingshot without the plugin, which the site demands": (
        Node.slingshot,
        {"NCCL_NET": AWS},
        "",
        True,
        [f"none: NCCL_NET is '{AWS}', but {NO_SLINGSHOT}"],
    ),
    "Slingshot, and TCP by choice": (
        Node.slingshot,
        {"NCCL_NET": "Socket"},
        "Socket",
        False,
        [f"{TCP}, by NCCL_NET"],
    ),
    "two cards": (
        lambda n: n.card().card("mlx5_1", layer="Ethernet").verbs(),
        {},
        "IB",
        False,
        [f"{IB}, mlx5_1:1 RoCE)"],
    ),
    "one of two cards": (
        lambda n: n.card().card("mlx5_1").verbs(),
        {"NCCL_IB_HCA": "^=mlx5_1"},
        "IB",
        False,
        [f"{IB})"],
    ),
    "a card by its port": (
        lambda n: n.card().card("mlx5_1").verbs(),
        {"NCCL_IB_HCA": "mlx5_0:2,mlx5_1:1"},
        "IB",
        False,
        ["IB (mlx5_1:1 Infini"],
    ),
    "a card that is not there": (
        lambda n: n.card().verbs(),
        {"NCCL_IB_HCA": "mlx4"},
        "Socket",
        True,
        [TCP, "NCCL_IB_HCA=mlx4 excludes mlx5_0:1"],
    ),
    "a card without a link": (
        lambda n: n.card(state="1: DOWN").verbs(),
        {},
        "Socket",
        False,
        [f"{TCP}{SLOW}{NO_PLUGIN}; no active port on mlx5_0"],
    ),
    "a card of EFA, which is not for verbs": (
        lambda n: n.card("efa_0", layer="Unspecified").verbs(),
        {},
        "Socket",
        False,
        [TCP, "no active port on efa_0"],
    ),
    "a card, and IB off": (
        lambda n: n.card().verbs(),
        {"NCCL_IB_DISABLE": "1"},
        "Socket",
        False,
        [TCP, "NCCL_IB_DISABLE is 1"],
    ),
    "a card, and libibverbs broken": (
        lambda n: (n.lib / "libibverbs.so.1").write_text("no library") and n.card(),
        {},
        "Socket",
        True,
        [
            TCP,
            "mlx5_0:1 InfiniBand is present, but ",
            "libibverbs.so.1: ",
            "install libibverbs1 and ibverbs-providers",
        ],
    ),
    "a card that the container does not show": (
        lambda n: shutil.rmtree(n.card().verbs().root / "dev") or n,
        {},
        "Socket",
        True,
        [
            TCP,
            "mlx5_0:1 InfiniBand is present, but no /dev/infiniband/uverbs* that this user may open: "
            "start the container with ",
        ],
    ),
    "no name where one is wanted": (
        Node.plugin,
        {"NCCL_NET": ""},
        "",
        True,
        ["none: NCCL_NET is '', but this node has AWS Libfabric"],
    ),
    "no interface for the rendezvous": (
        Node.plugin,
        {"NCCL_SOCKET_IFNAME": "ib"},
        "",
        True,
        ["none: NCCL_SOCKET_IFNAME is 'ib', but this node has lo, hsn0: "],
    ),
    "a file of the site": (
        lambda n: n.card().verbs().file("etc/nccl.conf", "# ours\nNCCL_IB_DISABLE=1\n"),
        {},
        "Socket",
        False,
        ["Socket"],
    ),
    "a file of the site, and the user's own choice": (
        lambda n: n.card().verbs().file("etc/nccl.conf", "NCCL_IB_DISABLE=1\n"),
        {"NCCL_IB_DISABLE": "0"},
        "IB",
        False,
        ["IB"],
    ),
}


@pytest.mark.parametrize("case", NETWORKS)
def test_network(node, case):
    make, env, name, unintended, words = NETWORKS[case]
    found = make(node).network(**env)
    assert (found.name, found.unintended) == (name, unintended), found.description
    assert found.description.startswith(words[0]) and all(part in found.description for part in words), (
        found.description
    )


# What differs between versions of NCCL, read in the source of each: the node, its variables, how the
# description begins.
OF_VERSION = {
    "2.26.2": [
        (lambda n: n.plugin(), {"NCCL_NET_PLUGIN": "none"}, f"{AWS} (libnccl-net.so, "),
        (
            lambda n: n.plugin(file="libnccl-net-ofi.so"),
            {"NCCL_NET_PLUGIN": "mine,ofi"},
            f"{TCP}{SLOW}{NO_PLUGIN}",
        ),
        (lambda n: n.plugin(version=11), {}, f"{TCP}{SLOW}libnccl-net.so has no ncclNetPlugin of v6 to v10"),
    ],
    "2.27.7": [
        (lambda n: n.plugin(), {"NCCL_NET_PLUGIN": "none"}, f"{TCP}{SLOW}no libnccl-net-none.so"),
        (
            lambda n: n.plugin(file="libnccl-net-ofi.so"),
            {"NCCL_NET_PLUGIN": "mine,ofi"},
            f"{AWS} (libnccl-net-ofi.so, ",
        ),
    ],
    "2.29.7": [
        (lambda n: n.plugin(version=12), {}, f"{TCP}{SLOW}libnccl-net.so has no ncclNetPlugin of v6 to v11")
    ],
    "2.30.7": [(lambda n: n.plugin(version=12), {}, f"{AWS} (libnccl-net.so, ")],
}


@pytest.mark.parametrize("version", OF_VERSION)
def test_rules_of_a_version(tmp_path, node, version):
    for number, (make, env, begins) in enumerate(OF_VERSION[version]):
        (tmp_path / f"{number}").mkdir()
        found = make(Node(tmp_path / f"{number}")).network(version, **env)
        assert found.description.startswith(begins), found.description


def test_rules_are_those_of_the_nccl_that_is_installed(monkeypatch):
    """Those of the newest version that is not newer, and of the oldest one for an older NCCL."""
    firsts = {"2.19.3": (2, 26), "2.26.2": (2, 26), "2.27.3": (2, 27), "2.29.7": (2, 28), "2.31.0": (2, 30)}
    for version, first in firsts.items():
        monkeypatch.setattr(nccl.metadata, "version", lambda name, version=version: version)
        assert nccl.nccl_rules() is nccl.RULES[first]


# Lines of real logs: NVIDIA/nccl issues 1925 (2.28) and 1267 (2.19), aws/aws-ofi-nccl issue 801 on Slingshot.
LOGS = {
    "IB": "nccl-sleep-c7d759db6-2bp29:2620971:2620971 [3] NCCL INFO Assigned NET plugin IB to comm\n"
    "nccl-sleep-c7d759db6-2bp29:2620971:2620971 [3] NCCL INFO Using network IB\n",
    "Socket": "instance-8g-96c-3:2744870:2745046 [0] NCCL INFO NET/IB : No device found.\n"
    "instance-8g-96c-3:2744870:2745046 [0] NCCL INFO Using network Socket\n",
    "AWS Libfabric": "[0] NCCL INFO NET/OFI Selected Provider is cxi (found 8 nics)\n"
    "[0] NCCL INFO Using non-device net plugin version 0\n[0] NCCL INFO Using network AWS Libfabric\n",
    "": "vm:1301:1301 [0] NCCL INFO Bootstrap: Using eth0:192.0.2.2<0>\n",
}


@pytest.mark.parametrize("name", LOGS)
def test_the_network_in_a_log_of_nccl(monkeypatch, name):
    monkeypatch.setattr(os, "environ", {})
    with nccl.capture_nccl_log() as logged_network:
        assert os.environ["NCCL_DEBUG"] == "INFO"
        Path(os.environ["NCCL_DEBUG_FILE"]).write_text(LOGS[name])
        assert logged_network() == name
    assert not Path(os.environ["NCCL_DEBUG_FILE"]).exists()


def test_a_log_of_the_users_own_is_left_alone(monkeypatch):
    monkeypatch.setattr(os, "environ", {"NCCL_DEBUG": "WARN"})
    with nccl.capture_nccl_log() as logged_network:
        assert (os.environ, logged_network()) == ({"NCCL_DEBUG": "WARN"}, "")


def test_nccl_that_uses_tcp():
    (problem,) = nccl.compare_with_log(Network("IB", "IB (mlx5_0:1 InfiniBand)"), "Socket")
    assert problem.startswith(
        "NCCL uses TCP (its log: Using network Socket) instead of IB (mlx5_0:1 InfiniBand): "
    )
    for logged in ("IB", "Libfabric", ""):
        assert not list(nccl.compare_with_log(Network("IB", "IB (mlx5_0:1 InfiniBand)"), logged))
    assert not list(nccl.compare_with_log(Network("Socket", "Socket (TCP over eth0)"), "Socket"))


def test_slingshot_variables_of_slurm_reach_containers_and_not_other_nodes():
    """The numbers of the card's services are those of one node."""
    env = {**os.environ, "SLINGSHOT_SVC_IDS": "5,5", "FI_PROVIDER": "cxi"}
    script = "source launch/lib/main.sh; echo $(image_variables); forwarded_names"
    done = subprocess.run(
        ["bash", "-c", script], cwd=REPOSITORY, env=env, capture_output=True, text=True, check=True
    )
    inside, *forwarded = done.stdout.splitlines()
    assert "SLINGSHOT_SVC_IDS" in inside.split()
    assert "FI_PROVIDER" in forwarded and "SLINGSHOT_SVC_IDS" not in forwarded


# --- in hpctrain check ---


@pytest.mark.slow
def test_nodes_that_differ(tmp_path, node):
    """Only n2 has a plugin. That is printed, but is no error: on CPUs Gloo uses TCP anyway."""
    status, output = run(tmp_path, rank(0), rank(1, LD_LIBRARY_PATH=str(node.plugin().lib)))
    assert status == 0 and errors(output) == [], output
    said = [line for line in output.splitlines() if line.startswith("NCCL between nodes")]
    assert len(said) == 2 and said[0].startswith(
        "NCCL between nodes, rank 0 on n1: Socket (TCP over lo), some 20 times slower"
    )
    assert said[1].startswith("NCCL between nodes, rank 1 on n2: AWS Libfabric (libnccl-net.so, loaded "), (
        output
    )


# The report of a rank with a GPU.
GPU = {
    "rank": 0,
    "size": 1,
    "node_rank": 0,
    "local_rank": 0,
    "local_size": 1,
    "others_gpus": [],
    "host": "n1",
    "launcher": "none",
    "device": "cuda:0 H100",
    "gpu": "GPU-a",
    "visible_gpus": 1,
    "software": {},
    "fabric": {},
}


def test_gpus_on_nodes_that_differ():
    lines = [
        {**GPU, "rank": number, "host": f"n{number}", "network": name}
        for number, name in enumerate(["IB", "Socket", "IB", ""])
    ]
    assert list(check.consistency_problems(lines)) == [
        "NCCL uses different networks: IB for ranks 0,2 on n0, n2, Socket for rank 1 on n1, "
        "none for rank 3 on n3: see above what these nodes lack, or exclude them"
    ]
    assert not list(check.consistency_problems(lines[::2]))


@pytest.mark.parametrize(
    ("nccl", "nodes", "refused"),
    [
        (Network("Socket", "TCP, because the plugin is broken", unintended=True), 2, True),
        # no network in there
        (Network("Socket", "TCP, because the plugin is broken", unintended=True), 1, False),
        (Network("", "none: no such name", unintended=True), 1, True),
        (Network("Socket", "TCP, because there is nothing else"), 2, False),
    ],
)
def test_gpus_without_the_network_that_nccl_should_use(monkeypatch, capsys, nccl, nodes, refused):
    line = {**GPU, "nodes": nodes, "network": nccl.name, "nccl": nccl.description, "start": 1.0, "mount": ""}
    monkeypatch.setattr(check, "predict_network", lambda: nccl)
    monkeypatch.setattr(check, "rank_report", lambda *_: line)
    monkeypatch.setattr(check, "placement_problems", lambda _: [])
    monkeypatch.setattr(check, "gather", lambda _, value: [value])
    with pytest.raises(HpctrainError) if refused else nullcontext() as said:
        check.check_collectively(World(0, 1, 0, 1, 0, nodes, "none"), torch.device("cuda"), [])
    assert f"NCCL between nodes: {nccl.description}" in capsys.readouterr().out
    assert not refused or str(said.value) == f"rank 0 on n1: NCCL between nodes: {nccl.description}"


@pytest.mark.slow
def test_the_image_has_what_nccl_needs_for_infiniband(sif):
    """libibverbs and its drivers, of the cards' maker too."""
    script = "import ctypes; [ctypes.CDLL(f'lib{name}.so.1') for name in ('ibverbs', 'mlx5')]; print('both')"
    status, output = in_the_image("python", "-c", script)
    assert (status, output.strip()) == (0, "both"), output
    status, output = in_the_image("ls", "/etc/libibverbs.d")
    assert "mlx5.driver" in output.split(), output
