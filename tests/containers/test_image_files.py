"""Files that must not be in the archive or the SIF; and a read-only image works for an ordinary user.

There was no docker daemon where these tests were written, so podman of an ordinary user stands for `docker
run --user`.
"""

import json
import os
import re
import shutil
import socket
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath

import pytest
from slurm_cluster import REPOSITORY

from tests.helpers import IMAGE_TAR, run_command

pytestmark = pytest.mark.slow

# the start of a secret, and the pattern of the whole
SECRETS = {
    b"PRIVATE KEY-----": rb"-----BEGIN [A-Z ]*PRIVATE KEY-----(\\n|\s)+[A-Za-z0-9+/]{40}",
    b"AKIA": rb"\bAKIA[0-9A-Z]{16}\b",
    b"AIza": rb"\bAIza[\w-]{35}\b",
    b"ghp_": rb"\bghp_[A-Za-z0-9]{36}\b",
    b"github_pat_": rb"\bgithub_pat_\w{60}",
    b"glpat-": rb"\bglpat-[\w-]{20}\b",
    b"hf_": rb"\bhf_[A-Za-z]{34}\b",
    b"pypi-AgE": rb"\bpypi-AgE[\w-]{50}",
    b"xoxb-": rb"\bxoxb-[\w-]{20}",
}


@dataclass(frozen=True)
class File:
    """A file, folder or link of the image: tar header, content if small, and the secrets found in it."""

    info: tarfile.TarInfo
    text: bytes | None  # for small files outside of site-packages
    found: tuple[bytes, ...]

    @property
    def mode(self) -> int:
        return self.info.mode & 0o7777


@dataclass(frozen=True)
class Image:
    """The configuration, and the files by absolute path, after all layers are applied."""

    config: dict
    files: dict[str, File]


def own_words() -> list[bytes]:
    """Names, folders and addresses of this machine, which must not be in the image."""
    words = {str(REPOSITORY), socket.gethostname()}
    words |= {
        value
        for name, value in os.environ.items()
        if re.search("(?i)proxy$|^PIP_(INDEX_URL|FIND_LINKS)|^WHEELS$", name)
    }
    if shutil.which("pip"):
        pip = run_command(["pip", "config", "list"]).stdout
        words |= {word for word in re.findall(r"[^\s'=]+", pip) if "/" in word and "ssl" not in word}
    return [word.encode() for word in words if len(word) > 5 and "pypi.org" not in word]


@pytest.fixture(scope="module")
def image() -> Image:
    if not IMAGE_TAR.exists():
        pytest.skip(f"no {IMAGE_TAR.name}: make image")
    own = own_words()
    files: dict[str, File] = {}
    with tarfile.open(IMAGE_TAR) as archive:
        manifest = json.load(archive.extractfile("manifest.json"))[0]
        config = json.load(archive.extractfile(manifest["Config"]))
        for name in manifest["Layers"]:
            with tarfile.open(fileobj=archive.extractfile(name)) as layer:
                new = {}
                for info in layer:
                    path = PurePosixPath("/", info.name)
                    if path.name.startswith(".wh."):  # a whiteout: the layer removes this file
                        gone = path.parent if path.name == ".wh..wh..opq" else path.parent / path.name[4:]
                        kept = path.name == ".wh..wh..opq"
                        below = f"{gone}/"
                        files = {
                            n: f
                            for n, f in files.items()
                            if not n.startswith(below) and (kept or n != str(gone))
                        }
                    else:
                        new[str(path)] = look(layer, info, own)
                files |= new
    return Image(config, files)


def look(layer: tarfile.TarFile, info: tarfile.TarInfo, own: list[bytes]) -> File:
    if (
        not info.isfile()
        or not info.size
        or info.size > 2_000_000
        or re.search(r"\.(pyc|so[.0-9]*|ttf|png|mo)$", info.name)
    ):
        return File(info, b"" if info.isfile() and not info.size else None, ())
    content = layer.extractfile(info).read()
    found = [word for word in own if word in content]
    for start, pattern in SECRETS.items():
        if start in content:  # much faster than the pattern
            found += [match[0] for match in re.finditer(pattern, content)]
    return File(
        info, content if "site-packages" not in info.name and info.size < 100_000 else None, tuple(found)
    )


def names(image: Image, condition: Callable[[str, File], object]) -> list[str]:
    return sorted(name for name, file in image.files.items() if condition(name, file))


@pytest.mark.main_road("make sif")
def test_nothing_is_privileged_or_writable_by_everyone(image):
    assert len(image.files) > 20_000
    assert names(image, lambda _, file: file.info.isfile() and file.mode & 0o6000) == []
    assert (
        names(image, lambda _, file: any("security.capability" in key for key in file.info.pax_headers)) == []
    )
    open_to_all = names(image, lambda _, file: file.mode & 0o002 and not file.info.issym())
    assert open_to_all == ["/run/lock", "/tmp", "/var/tmp"]
    assert all(image.files[name].mode == 0o1777 for name in open_to_all)
    assert names(image, lambda _, file: file.info.isblk() or file.info.ischr()) == []


def test_all_files_belong_to_root_and_are_readable(image):
    """The groups are Debian's own.

    Only files that Debian closes are closed, and a user needs none of them.
    """
    assert names(image, lambda _, file: file.info.uid != 0) == ["/var/cache/apt/archives/partial"]
    assert (
        names(image, lambda name, file: name.startswith("/opt/") and (file.info.uid or file.info.gid)) == []
    )
    closed = names(
        image, lambda _, file: not file.mode & 0o004 or (file.info.isdir() and not file.mode & 0o001)
    )
    debian = (
        r"/root|/etc/(g?shadow-?|passwd-|\.pwd\.lock|security/opasswd|ssl/private)"
        r"|/var/(log|cache|lib/(dpkg|apt))/.*"
    )
    assert [name for name in closed if not re.fullmatch(debian, name)] == []


@pytest.mark.main_road("make sif")
def test_no_secret_and_no_name_of_the_build_machine(image):
    assert [(name, file.found) for name, file in image.files.items() if file.found] == []
    assert [word for word in own_words() if word.decode() in json.dumps(image.config)] == []
    environment = {line.partition("=")[0] for line in image.config["config"]["Env"]}
    assert environment == set(
        re.findall(r"^ENV (\w+)=", (REPOSITORY / "containers/Dockerfile").read_text(), re.M)
    )
    for name in ("/etc/hostname", "/etc/resolv.conf", "/etc/hosts", "/etc/machine-id"):
        assert name not in image.files or image.files[name].text == b"", name
    empty = (
        r"/(src|wheels|compiled).*|/(home|tmp|mnt|media|srv|run/secrets|usr/local/share/ca-certificates)/.+"
        r"|/root/(?!\.bashrc|\.profile).+"
    )
    assert names(image, lambda name, _: re.fullmatch(empty, name)) == []
    private = (
        r".*/(\.netrc|\.pypirc|pip\.conf|\.git-credentials|auth\.json|ssh_host_\w+|id_(rsa|ecdsa|ed25519))"
    )
    assert names(image, lambda name, _: re.fullmatch(private, name)) == []
    # The build got certificates from the host; those in the image are Debian's.
    trusted = image.files["/etc/ssl/certs/ca-certificates.crt"].info.size
    debian = names(image, lambda name, _: re.fullmatch("/usr/share/ca-certificates/mozilla/.*", name))
    assert trusted == sum(image.files[name].info.size for name in debian) > 100_000


def test_nothing_is_left_of_the_build(image):
    """Nothing that only installers, compilers or manuals need, and no bytecode that Python would reject."""
    left = (
        r".*\.(a|o|la|cmake|pc|pxd|pyx)|/usr/include/.+"
        r"|.*/bin/(gcc|cc|c\+\+|g\+\+|ld|as|make|cmake)(-[0-9]+)?"
        r"|/var/lib/apt/lists/.+|/var/cache/apt/.*(\.deb|\.bin)|.*/\.cache/.*"
        r"|/var/log/(apt|dpkg).*|/var/lib/.*-old"
        r"|/usr/share/(man|locale)/.+|/opt/.*/site-packages/.*/tests?/.*"
    )
    assert names(image, lambda name, file: not file.info.isdir() and re.fullmatch(left, name)) == []
    sources = names(image, lambda name, _: re.fullmatch(r"/(usr/lib/python3.11|opt)/.*\.py", name))
    compiled = {re.sub(r"([^/]*)\.py$", r"__pycache__/\1.cpython-311.pyc", name) for name in sources}
    bytecode = set(names(image, lambda name, _: re.fullmatch(r"/(usr/lib/python3.11|opt)/.*\.pyc", name)))
    # torch's, for a newer Python
    assert len(compiled) > 5000 and bytecode <= compiled and len(compiled - bytecode) <= 1


def test_a_login_shell_finds_the_commands_of_the_image(image):
    """enroot starts one, in which Debian's /etc/profile sets PATH anew, and reads what is in this folder."""
    assert image.files["/etc/profile.d/hpctrain.sh"].text == b"PATH=/opt/hpctrain/bin:$PATH\n"


def test_python_trusts_the_bytecode_of_its_library(cluster):
    """It names no time, because all files of an image get another one."""
    code = (
        "import pathlib; found = [p for p in pathlib.Path('/usr/lib/python3.11').rglob('*.pyc')];"
        "print(len(found), sum(p.read_bytes()[4] != 1 for p in found))"
    )
    done = cluster.exec(
        "n1", "apptainer", "exec", "/project/hpctrain-cpu.sif", "python", "-c", code, user="alice"
    )
    total, dated = map(int, done.stdout.split())
    assert total > 600 and dated == 0


def test_the_sif_has_only_the_files_of_the_image(cluster, image):
    """No privileged and no writable files, and no additional files but Apptainer's own."""
    find = (
        "find / -xdev \\( -path /proc -o -path /sys -o -path /dev -o -path /project \\) -prune "
        "-o -printf '%m %y %p\\n'"
    )
    sif = ["apptainer", "exec", "--contain", "/project/hpctrain-cpu.sif"]
    said = cluster.exec("n1", *sif, "sh", "-c", find, user="alice", check=False).stdout
    found = {
        path: (int(mode, 8), kind) for mode, kind, path in (line.split(" ", 2) for line in said.splitlines())
    }
    assert len(found) > 20_000
    assert [path for path, (mode, kind) in found.items() if kind == "f" and mode & 0o6000] == []
    open_to_all = [path for path, (mode, kind) in found.items() if mode & 0o002 and kind != "l"]
    assert sorted(open_to_all) == ["/run/lock", "/tmp", "/var/tmp"]
    apptainer = (
        r"/|/(\.singularity\.d|\.exec|\.run|\.shell|\.test|environment|singularity"
        r"|proc|sys|dev|project|home|root|etc).*"
    )
    assert [path for path in found if path not in image.files and not re.fullmatch(apptainer, path)] == []


def test_a_user_without_a_name_in_a_read_only_container(cluster, podman_image):
    """podman run --user 1000 --read-only: no name, no home, no network; only podman's /tmp is writable."""
    options = ["--user=1000:1000", "--read-only", "--network=none", "--cap-drop=all"]
    options += ["--security-opt=no-new-privileges"]
    script = "id -u; touch /opt/hpctrain/x /x 2>&1; hpctrain train_ddp --epochs 1 --out /tmp/out; ls /tmp/out"
    done = cluster.exec(
        "n1", "podman-hpc", "run", "--rm", *options, "hpctrain:cpu", "sh", "-c", script,
        user="alice", env=podman_image, check=False,
    )  # fmt: skip
    assert done.stdout.startswith("1000\n"), done.stdout + done.stderr
    assert done.stdout.count("Read-only file system") == 2, done.stdout
    assert {"checkpoints", "curves.png"} <= {*done.stdout.splitlines()}


def test_training_writes_nothing_into_the_image(cluster, podman_image):
    """Not even as root of the container, the default of `docker run`."""
    script = (
        "touch /tmp/before; hpctrain train_ddp --epochs 1 --out /tmp/out && "
        "find / -xdev -newer /tmp/before ! -path '/tmp*'"
    )
    run = ["podman-hpc", "run", "--rm", "--network=none", "hpctrain:cpu", "sh", "-c", script]
    done = cluster.exec("n1", *run, user="alice", env=podman_image)
    assert "/tmp/out" in done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("/") and line != "/root"] == []
