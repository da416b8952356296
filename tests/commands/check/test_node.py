"""A node with a fault gets one line, which says where the fault is and what to do."""

import shutil

import pytest

from hpctrain.commands.check import node
from tests.commands.check.helpers import CHECK, HOSTS, full, rank, refused, run

NO_RENDEZVOUS = {
    "a name that does not resolve": (
        {"hosts": "10.9.9.2 n2\n"},
        ["MASTER_ADDR", "n1"],
    ),
    "no way to the address": (
        {"hosts": "10.9.9.2 n2\n203.0.113.1 n1\n"},
        ["MASTER_ADDR", "n1", "203.0.113.1", "unreachable"],
    ),
    "a firewall that drops everything": (
        {
            "hosts": "10.9.9.2 n2\n203.0.113.1 n1\n",
            "prepare": "ip link add hole type veth peer name end; ip addr add 203.0.113.2/24 dev hole\n"
            "ip link set hole up; ip link set end up\n"
            "ip neigh add 203.0.113.1 lladdr 02:00:00:00:00:01 dev hole",
        },
        ["MASTER_ADDR", "n1", "203.0.113.1", "timed out"],
    ),
    "IPv6 only": (
        {"hosts": "10.9.9.2 n2\nfd00:9::1 n1\n"},
        ["MASTER_ADDR", "n1", "IPv6", "fd00:9::1"],
    ),
    "a loopback address of another node": (
        {"hosts": "10.9.9.2 n2\n127.0.1.1 n1\n"},
        ["MASTER_ADDR", "n1", "127.0.1.1", "rank 0"],
    ),
    "its own name at a loopback address": (
        {"hosts": "127.0.1.1 n2\n10.9.9.1 n1\n"},
        ["own name, n2", "127.0.1.1"],
    ),
    "its own name with no address": (
        {"hosts": "10.9.9.1 n1\n"},
        ["own name, n2", "no address"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NO_RENDEZVOUS)
def test_a_node_without_a_rendezvous_reports_why_at_once(tmp_path, name):
    wrong, words = NO_RENDEZVOUS[name]
    (said,) = refused(tmp_path, rank(1, **wrong))
    assert said.startswith("rank 1 on n2: ") and all(word in said for word in words)


@pytest.mark.slow
def test_rank_0_on_another_node_than_the_address(tmp_path):
    (said,) = refused(tmp_path, rank(0, hosts=HOSTS + "203.0.113.1 n7\n", MASTER_ADDR="n7"))
    assert said.startswith("rank 0 on n1: ") and "MASTER_ADDR n7 (203.0.113.1)" in said


@pytest.mark.slow
def test_a_rank_without_a_rendezvous_reports_its_other_problems_too(tmp_path):
    said = refused(tmp_path, rank(1, hosts="10.9.9.2 n2\n", prepare=full("cache"), TORCH_HOME="cache"))
    assert len(said) == 2 and "TORCH_HOME" in said[0] and "MASTER_ADDR" in said[1]


NOBODY = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]


FOLDERS = {
    "a full cache": (
        {"prepare": full("cache"), "TORCH_HOME": "cache/torch"},
        ["TORCH_HOME ({cwd}/cache)", "full", "1 MiB"],
    ),
    "a full home": (
        {"prepare": full("home"), "HOME": "home"},
        ["home ({cwd}/home)", "full"],
    ),
    "a full home with a cache in it": (
        {"prepare": full("home"), "HOME": "home", "HF_HOME": "home/.cache/huggingface"},
        ["home, HF_HOME ({cwd}/home)", "full"],
    ),
    "no inode left": (
        {"prepare": full("cache", "nr_inodes=1"), "XDG_CACHE_HOME": "cache"},
        ["XDG_CACHE_HOME ({cwd}/cache)", "full"],
    ),
    "a cache beyond the quota": (
        {
            "prepare": "truncate -s 128M img; mkfs.btrfs -q img; mkdir cache; mount -o loop img cache; "
            "btrfs quota enable cache; btrfs qgroup limit 2M cache",
            "HF_HOME": "cache",
        },
        ["HF_HOME ({cwd}/cache)", "quota"],
    ),
    "a read-only cache": (
        {"prepare": full("cache", "ro"), "MPLCONFIGDIR": "cache"},
        ["MPLCONFIGDIR ({cwd}/cache)", "read-only"],
    ),
    "somebody else's cache": (
        {
            "prepare": full("/mnt", "mode=1777") + "; mkdir -m 755 /mnt/cache; cd /mnt",
            "program": [*NOBODY, *CHECK],
            "TMPDIR": "/mnt/cache",
            "HOME": "/mnt",
        },
        ["TMPDIR (/mnt/cache)", "65534"],
    ),
    "no room in shared memory": (
        {"prepare": full("/dev/shm")},
        ["/dev/shm", "full"],
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "a full cache" else pytest.mark.slow) for name in FOLDERS]
)
def test_a_folder_that_cannot_be_written(tmp_path, name):
    wrong, words = FOLDERS[name]
    if "mkfs.btrfs" in wrong["prepare"] and not shutil.which("mkfs.btrfs"):
        pytest.skip("no mkfs.btrfs for a file system with a quota: apt-get install btrfs-progs")
    (said,) = refused(tmp_path, rank(0, size=1, **wrong))
    words = ["rank 0 on n1: ", *words]
    assert all(word.format(cwd=tmp_path) in said for word in words), said


@pytest.mark.slow
def test_a_home_that_is_read_only_and_holds_no_cache_is_no_problem(tmp_path):
    status, output = run(tmp_path, rank(0, size=1, prepare=full("home", "ro"), HOME="home"))
    assert status == 0, output


def test_what_mounts_the_image(tmp_path):
    env = {"APPTAINER_CONTAINER": "/images/hpctrain-cpu.sif"}

    def mount(names, env=env):
        proc = tmp_path / "-".join(names)
        for number, name in enumerate(names, start=1):
            (proc / str(number)).mkdir(parents=True)
            (proc / str(number) / "comm").write_text(f"{name}\n")
        return node.image_mount(env, proc)

    assert mount(["init", "squashfuse_ll", "python"]) == "squashfuse_ll"
    assert mount(["systemd", "squashfuse"]) == "squashfuse"
    assert mount(["systemd", "python"]) == "kernel"
    assert mount(["appinit", "python"]) == "" and mount([]) == ""  # hidden
    assert (
        mount(["bash", "squashfuse_ll"], {}) == "" == mount(["bash"], {"APPTAINER_CONTAINER": str(tmp_path)})
    )


def test_the_time_since_the_process_started():
    assert 0 < node.seconds_since_start() < 3600
