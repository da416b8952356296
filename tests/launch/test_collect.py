"""launch/check.sh --collect: the host's NCCL plugin and libfabric, with what they load, for an image."""

import re
import shutil

import pytest

from tests.commands.check.test_nccl import library
from tests.launch.helpers import BARE, HOME, assert_refused, start

PLUGIN = 'int fi_version(void); int (*needs)(void) = fi_version; char name[] = "AWS Libfabric";'


@pytest.fixture
def host(tmp_path):
    """Libraries in two folders, as the modules of a site have them: plugin -> libfabric -> libcxi."""
    if not shutil.which("tcc"):
        pytest.skip("there is no tcc")
    library(tmp_path / "cray", "libcxi.so.1", "int cxi(void) { return 1; }")
    fabric = "int cxi(void); int (*needs)(void) = cxi; int fi_version(void) { return 1; }"
    library(tmp_path / "cray", "libfabric.so.1", fabric, "libcxi.so.1")
    library(tmp_path / "cray", "libnccl-net.so", PLUGIN, "-L.", "libfabric.so.1")
    (tmp_path / "plugin").mkdir()
    (tmp_path / "cray/libnccl-net.so").rename(tmp_path / "plugin/libnccl-net.so")
    return tmp_path


def collect(host, *words, path=("plugin", "cray")):
    env = BARE | {"LD_LIBRARY_PATH": ":".join(str(host / name) for name in path)}
    return start("check.sh", "--collect", *words, env=env)


def test_what_the_plugin_loads_is_followed(host):
    done = collect(host, host / "new")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (host / "new").iterdir()) == [
        "libcxi.so.1", "libfabric.so.1", "libnccl-net.so",
    ]  # fmt: skip
    exports = re.findall(r"^    export (\S+)$|^    export (NCCL_NET=.*)$", done.stdout, re.M)
    assert [a or b for a, b in exports] == [
        f"APPTAINERENV_LD_LIBRARY_PATH={host}/new", 'NCCL_NET="AWS Libfabric"',
    ]  # fmt: skip


def test_a_plugin_of_another_name_and_a_provider_beside_libfabric(host):
    (host / "plugin/libnccl-net.so").rename(host / "plugin/libnccl-net-ofi.so")
    (host / "cray/libfabric").mkdir()
    library(host / "cray/libfabric", "libshm-fi.so", "int fi_prov_ini(void) { return 0; }")
    done = collect(host, host / "new", host / "plugin/libnccl-net-ofi.so")
    assert done.returncode == 0, done.stderr
    assert (host / "new/libshm-fi.so").exists() and (host / "new/libcxi.so.1").exists()
    assert "export NCCL_NET_PLUGIN=ofi\n" in done.stdout
    assert f"export FI_PROVIDER_PATH={host}/new\n" in done.stdout


def test_what_cannot_be_collected_is_one_line(host):
    (host / "cray/libcxi.so.1").unlink()
    done = collect(host, host / "new")
    assert_refused(done, " needs libcxi.so.1", status=1)
    assert not (host / "new").exists()
    assert_refused(collect(host, host / "cray"), f"{host}/cray is not empty")
    assert_refused(collect(host, host / "other", host / "none.so"), f"{host}/none.so")
    assert_refused(collect(host), "--collect")


def test_what_was_collected_from_a_node_is_loaded_in_the_image(site):
    """Debian's libfabric1 of the node, with all that it loads; a plugin that stands in for aws-ofi-nccl.

    The nodes have a newer Debian than the image, so its loader finds each library, and refuses them.
    """
    host = site.host_path("/project/alice/host")
    site.exec("login", "mkdir", "-p", "/project/alice/host", user="alice")
    library(host, "libfabric.so.1", "int fi_version(void) { return 1; }")
    library(host, "libnccl-net.so", PLUGIN, "libfabric.so.1")
    (host / "libfabric.so.1").unlink()  # it loads the node's
    collect = ["launch/check.sh", "--collect", "/project/alice/new", "/project/alice/host/libnccl-net.so"]
    said = site.exec("n1", *collect, user="alice", cwd=HOME)
    names = {path.name for path in site.host_path("/project/alice/new").iterdir()}
    assert {"libnccl-net.so", "libfabric.so.1", "librdmacm.so.1", "libibverbs.so.1"} <= names
    assert not names & {"libc.so.6", "libm.so.6", "libpthread.so.0"}
    variable = re.search(r"export (APPTAINERENV_LD_LIBRARY_PATH)=(\S+)", said.stdout)
    assert re.search(r"need the C library 2\.\d+, and the image has 2.36", said.stderr)
    load = "import ctypes; ctypes.CDLL('libnccl-net.so')"
    command = ["apptainer", "exec", "--bind", "/project", "/project/hpctrain-cpu.sif", "python", "-c", load]
    done = site.exec("n1", *command, user="alice", env={variable[1]: variable[2]}, check=False)
    assert re.search(r"GLIBC_2\.\d+' not found \(required by /project/alice/new/", done.stderr)
