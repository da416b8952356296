"""What a node offers NCCL: plugins that the loader finds or not, cards in a fake /sys; and NCCL's own log."""

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
from hpctrain.commands.check.nccl import Fabric
from hpctrain.distributed.world import World
from hpctrain.errors import HpctrainError
from tests.commands.check.helpers import errors, in_the_image, rank, run
from tests.helpers import run_command

SELECTED = {
    "": ["lo", "eth0", "ib0", "ib1"],
    "eth": ["eth0"],
    "=eth": [],
    "=ib1,eth0": ["eth0", "ib1"],
    "^ib": ["lo", "eth0"],
    "^=ib0": ["lo", "eth0", "ib1"],
    "hsn": [],
}


@pytest.mark.parametrize("wanted", SELECTED)
def test_lists_of_names_in_the_syntax_of_nccl(wanted):
    assert [name for name in SELECTED[""] if nccl.matches(wanted, name)] == SELECTED[wanted]


def test_running_interfaces():
    """Interfaces that are up and have an address, IPv4 or IPv6."""
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
    done = run_command(["unshare", "--net", "bash", "-ec", script, "-", sys.executable])
    assert sorted(done.stdout.split()) == ["four", "lo", "six"], done.stdout + done.stderr


# --- a fake node: a root folder with the files that NCCL reads, and libraries for the loader ---

AWS = "AWS Libfabric"


def library(folder: Path, file: str, source: str, *needs: str) -> None:
    """Compile a shared library that the loader can load."""
    folder.mkdir(exist_ok=True)
    command = ["tcc", "-shared", "-nostdlib", "-soname", file, "-o", file, "-", *needs]
    subprocess.run(command, cwd=folder, input=source, text=True, check=True)


class Node:
    """The files of a node, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.root, self.lib = folder / "root", folder / "lib"
        self.root.mkdir()
        self.lib.mkdir()

    def plugin(self, file: str = "libnccl-net.so") -> "Node":
        library(self.lib, "libfabric.so.1", "int fi_version(void) { return 1; }")
        needs = "int fi_version(void); int (*needs)(void) = fi_version;"
        library(self.lib, file, needs, "libfabric.so.1")
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

    def fabric(self, **env: str) -> Fabric:
        """What read_fabric() finds in a process whose loader finds the libraries of this node."""
        script = (
            "import json, sys; from dataclasses import asdict; from hpctrain.commands.check import nccl\n"
            "nccl.running_interfaces = lambda: ['lo', 'hsn0']\n"
            "print(json.dumps(asdict(nccl.read_fabric(root=nccl.Path(sys.argv[1])))))"
        )
        clean = {name: value for name, value in os.environ.items() if not name.startswith("NCCL_")}
        clean |= {"LD_LIBRARY_PATH": str(self.lib), "NCCL_CONF_FILE": "/nonexistent", **env}
        done = run_command([sys.executable, "-c", script, self.root], env=clean)
        assert done.returncode == 0, done.stderr
        return Fabric(**json.loads(done.stdout))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    if not shutil.which("tcc"):
        pytest.skip("no tcc to make plugins with: apt-get install tcc")
    return Node(tmp_path)


def hidden(node: Node) -> Node:
    shutil.rmtree(node.card().verbs().root / "dev")
    return node


def broken_plugin(node: Node) -> Node:
    return node.plugin().without("libfabric.so.1")


def site_without_ib(node: Node) -> Node:
    return node.card().verbs().file("etc/nccl.conf", "# ours\nNCCL_IB_DISABLE=1\n")


def without_verbs(node: Node) -> Node:
    (node.lib / "libibverbs.so.1").write_text("no library")
    return node.card()


PLUGIN, OFI, IB = "libnccl-net.so", "libnccl-net-ofi.so", "InfiniBand"
OFFERED = {
    # the node, its variables, and its networks beside TCP
    "nothing": (lambda n: n, {}, []),
    "a plugin": (Node.plugin, {}, [PLUGIN]),
    "a plugin by the name of its network": (Node.plugin, {"NCCL_NET": "aws libfabric"}, [PLUGIN]),
    "a plugin by its suffix": (lambda n: n.plugin(OFI), {"NCCL_NET_PLUGIN": "ofi"}, [OFI]),
    "a plugin by its file": (lambda n: n.plugin(OFI), {"NCCL_NET_PLUGIN": OFI}, [OFI]),
    "no plugin by choice": (lambda n: n.plugin().card().verbs(), {"NCCL_NET_PLUGIN": "none"}, [IB]),
    "Slingshot, and TCP by choice": (Node.slingshot, {"NCCL_NET": "Socket"}, []),
    "two cards": (lambda n: n.card().card("mlx5_1", layer="Ethernet").verbs(), {}, [IB, "RoCE"]),
    "a port": (lambda n: n.card().card("mlx5_1").verbs(), {"NCCL_IB_HCA": "mlx5_0:2,mlx5_1:1"}, [IB]),
    "a card without a link": (lambda n: n.card(state="1: DOWN").verbs(), {}, []),
    "a card of EFA, which is not for verbs": (lambda n: n.card("efa_0", layer="None").verbs(), {}, []),
    "a card, and IB off": (lambda n: n.card().verbs(), {"NCCL_IB_DISABLE": "1"}, []),
    "a plugin, and a card that the container hides": (lambda n: hidden(n).plugin(), {}, [PLUGIN]),
    "a file of the site": (site_without_ib, {}, []),
    "a file of the site, and the user's own choice": (site_without_ib, {"NCCL_IB_DISABLE": "0"}, [IB]),
}
WRONG = {
    # the node, its variables, and words of the message: that NCCL fails, or what it cannot use
    "a broken plugin": (broken_plugin, {}, "unusable", [PLUGIN, "libfabric.so.1", "LD_LIBRARY_PATH"]),
    "a broken plugin by NCCL_NET": (broken_plugin, {"NCCL_NET": AWS}, "failures", [AWS, "libfabric.so.1"]),
    "no plugin of that name": (lambda n: n, {"NCCL_NET_PLUGIN": "ofi"}, "unusable", [OFI, "NCCL_NET_PLUGIN"]),
    "Slingshot without the plugin": (Node.slingshot, {}, "unusable", [PLUGIN, "cxi0, cxi1", "--nccl"]),
    "the plugin required by the site": (Node.slingshot, {"NCCL_NET": AWS}, "failures", [AWS, PLUGIN]),
    "no such card": (lambda n: n.card().verbs(), {"NCCL_IB_HCA": "mlx4"}, "unusable", ["mlx4", "mlx5_0:1"]),
    "IB without a link": (lambda n: n.card(state="1: DOWN"), {"NCCL_NET": "IB"}, "failures", ["NCCL_NET"]),
    "libibverbs broken": (without_verbs, {}, "unusable", ["mlx5_0:1", "libibverbs.so.1"]),
    "a card that the container hides": (hidden, {}, "unusable", ["mlx5_0:1", "/dev/infiniband"]),
    "NCCL_NET without a name": (Node.plugin, {"NCCL_NET": ""}, "failures", ["NCCL_NET"]),
    "no such interface": (Node.plugin, {"NCCL_SOCKET_IFNAME": "ib"}, "failures", ["'ib'", "lo, hsn0"]),
}


@pytest.mark.parametrize("case", OFFERED)
def test_networks_that_a_node_offers(node, case):
    make, env, networks = OFFERED[case]
    found = make(node).fabric(**env)
    assert (found.networks, found.failures, found.unusable) == (networks, [], []), found


@pytest.mark.parametrize("case", WRONG)
def test_a_contradiction(node, case):
    make, env, kind, words = WRONG[case]
    found = make(node).fabric(**env)
    (message,) = found.failures + found.unusable
    assert getattr(found, kind) == [message] and all(word in message for word in words), found


def test_the_facts_of_a_node(node):
    found = node.plugin().slingshot().card().fabric(NCCL_DEBUG="WARN").description
    facts = [
        "TCP over lo, hsn0",
        "cxi0, cxi1",
        "mlx5_0:1 InfiniBand",
        "NCCL_DEBUG=WARN",
        "/lib/libfabric.so.1",
    ]
    assert all(fact in found for fact in [*facts, "no libcxi.so.1"]), found


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
    fabric = Fabric(["InfiniBand"], "", [], [])
    (problem,) = nccl.compare_with_log(fabric, "Socket")
    assert "Using network Socket" in problem and "InfiniBand" in problem
    for logged in ("IB", "Libfabric", ""):
        assert not list(nccl.compare_with_log(fabric, logged))
    assert not list(nccl.compare_with_log(Fabric([], "", [], []), "Socket"))


def test_slingshot_variables_of_slurm_reach_containers_and_not_other_nodes():
    """The numbers of the card's services are those of one node."""
    env = {**os.environ, "SLINGSHOT_SVC_IDS": "5,5", "FI_PROVIDER": "cxi"}
    script = "source launch/lib/main.sh; echo $(image_variables); forwarded_names"
    done = run_command(["bash", "-c", script], cwd=REPOSITORY, env=env, check=True)
    inside, *forwarded = done.stdout.splitlines()
    assert "SLINGSHOT_SVC_IDS" in inside.split()
    assert "FI_PROVIDER" in forwarded and "SLINGSHOT_SVC_IDS" not in forwarded


# --- in hpctrain check ---


@pytest.mark.slow
def test_nodes_that_differ(tmp_path, node):
    """Only n2 has a plugin. That is printed, but is no error: on CPUs Gloo uses TCP anyway."""
    env = {"LD_LIBRARY_PATH": str(node.plugin().lib), "NCCL_SOCKET_IFNAME": "ib"}
    status, output = run(tmp_path, rank(0, NCCL_SOCKET_IFNAME="ib"), rank(1, **env))
    assert status == 0 and errors(output) == [], output
    first, second = (line for line in output.splitlines() if line.startswith("NCCL between nodes"))
    assert "rank 0 on n1: TCP over lo" in first and "libnccl-net.so" not in first, output
    assert "rank 1 on n2: TCP over lo" in second and "libnccl-net.so, loaded " in second, output
    assert "NCCL was not asked" in output
    (warning,) = (line for line in output.splitlines() if line.startswith("warning: "))
    assert "ranks 0-1 on n1, n2" in warning and "NCCL_SOCKET_IFNAME" in warning, output


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
    "settings": {},
}


def test_gpus_on_nodes_that_differ():
    lines = [
        {**GPU, "rank": number, "host": f"n{number}", "networks": networks}
        for number, networks in enumerate([["InfiniBand"], [], ["InfiniBand"]])
    ]
    (problem,) = check.consistency_problems(lines)
    assert "InfiniBand for ranks 0,2 on n0, n2, TCP for rank 1 on n1" in problem
    assert not list(check.consistency_problems(lines[::2]))


@pytest.mark.parametrize(
    ("fabric", "nodes", "refused"),
    [
        (Fabric([], "TCP", [], ["a broken plugin"]), 2, True),
        (Fabric([], "TCP", [], ["a broken plugin"]), 1, False),  # NCCL uses no network there
        (Fabric([], "TCP", ["no such interface"], []), 1, True),
        (Fabric([], "TCP", [], []), 2, False),
    ],
)
def test_gpus_with_a_network_that_nccl_cannot_use(monkeypatch, capsys, fabric, nodes, refused):
    line = {**GPU, "nodes": nodes, "networks": [], "fabric": "TCP", "start": 1.0, "mount": "", "cpus": [0, 1]}
    monkeypatch.setattr(check, "read_fabric", lambda: fabric)
    monkeypatch.setattr(check, "rank_report", lambda *words: line | {"fabric_warnings": words[-1]})
    monkeypatch.setattr(check, "placement_problems", lambda _: [])
    monkeypatch.setattr(check, "gather", lambda _, value: [value])
    with pytest.raises(HpctrainError) if refused else nullcontext() as said:
        check.check_collectively(World(0, 1, 0, 1, 0, nodes, "none"), torch.device("cuda"), [])
    printed = capsys.readouterr().out
    assert "NCCL between nodes: TCP" in printed and "NCCL was not asked" not in printed
    for text in (*fabric.failures, *fabric.unusable):
        assert text in (str(said.value) if refused else printed)


def test_the_image_has_what_nccl_needs_for_infiniband(sif):
    """libibverbs and its drivers, of the cards' maker too."""
    script = "import ctypes; [ctypes.CDLL(f'lib{name}.so.1') for name in ('ibverbs', 'mlx5')]; print('both')"
    status, output = in_the_image("python", "-c", script)
    assert (status, output.strip()) == (0, "both"), output
    status, output = in_the_image("ls", "/etc/libibverbs.d")
    assert "mlx5.driver" in output.split(), output
