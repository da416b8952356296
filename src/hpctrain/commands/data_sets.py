"""hpctrain fetch data: download a data set by its name, or files by their URLs, for nodes without internet.

data_sets.json has what is known by name: license, page, mirrors, and of each file its size and its SHA-256.
Where this is not known, it has the id of the file in the git repository that publishes it, at the commit in
its URL.
"""

import errno
import io
import re
import shutil
import tarfile
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urldefrag, urlsplit

import numpy

from hpctrain.errors import HpctrainError, UsageError, explain_os_error
from hpctrain.files import atomic
from hpctrain.files.digests import NAME, file_sha256, git_blob
from hpctrain.files.download import complete_folder, download, partial_folder
from hpctrain.files.plain import read_object
from hpctrain.files.redaction import hide_secrets
from hpctrain.parser import Parser
from hpctrain.text import counted, say

SETS = read_object(Path(__file__).with_name("data_sets.json"))
CIFAR_SIDE, CIFAR_CHANNELS = 32, 3


class File(NamedTuple):
    """A file to download. Without `sha256` and `git_blob`, what comes is not verified."""

    name: str
    urls: list[str]
    bytes: int = 0  # 0: not known
    sha256: str = ""
    git_blob: str = ""

    def is_at(self, path: Path, digest: str = "") -> bool:
        """Whether this file is at `path`; `digest` is the SHA-256 of what is there, if it is known."""
        if self.sha256:
            return (digest or file_sha256(path)) == self.sha256
        return not self.git_blob or git_blob(path) == self.git_blob


def hint_fetch(path: Path) -> str:
    """What to add to an error about a missing folder that has the name of a data set; "" for another one."""
    if path.name not in SETS:
        return ""
    where = "" if str(path) == path.name else f" {path}"
    return f"; where there is internet, hpctrain fetch data {path.name}{where} downloads it"


def files_of(what: list[str]) -> list[File]:
    """The files of a data set, or of URLs that may end in #sha256=HEX. Raises UsageError."""
    if len(what) == 1 and (known := SETS.get(what[0])):
        return [
            File(name, [base + name for base in known["mirrors"]], **facts)
            for name, facts in known["files"].items()
        ]
    files: dict[str, File] = {}
    for each in what:
        url, fragment = urldefrag(each)
        shown = hide_secrets(url)
        name = Path(unquote(urlsplit(url).path)).name
        if urlsplit(url).scheme not in ("http", "https"):
            raise UsageError(
                f"hpctrain fetch data: {shown} is no URL: give the name of one data set, "
                f"of {', '.join(SETS)}, or URLs that begin with https://"
            )
        if fragment and not re.fullmatch(r"sha256=[0-9a-fA-F]{64}", fragment):
            raise UsageError(
                f"hpctrain fetch data: {shown}#{fragment}: write the SHA-256 as #sha256= and 64 "
                "hexadecimal digits"
            )
        if not name or name.startswith(".") or name in files:
            raise UsageError(
                f"hpctrain fetch data: {shown}: it ends in no file name of its own: download it with curl"
            )
        files[name] = File(name, [url], sha256=fragment.removeprefix("sha256=").lower())
    return list(files.values())


def fetch_data(what: list[str], folder: Path) -> None:
    """Download a data set or URLs into a new folder, which appears when all files are there and verified.

    Until then they are in a hidden folder beside it, where the next call continues. Raises HpctrainError.
    """
    files = files_of(what)
    if folder.exists():
        raise HpctrainError(f"{folder} already exists: use it with --data {folder}, or give another folder")
    if known := SETS.get(what[0]):
        say(f"{what[0]}: {known['title']}; license: {known['license']}; {known['page']}")
    unfinished = partial_folder(folder, sha256(repr(files).encode()).hexdigest()[:12])
    advice = "make room and run the same command again, or give a folder on another disk"
    with explain_os_error(f"{unfinished}: cannot be written", advice):
        free = shutil.disk_usage(atomic.existing_part(folder.absolute())).free
        if (needed := sum(file.bytes for file in files)) > free:
            raise OSError(errno.ENOSPC, f"{needed / 1e6:,.1f} MB are needed, {free / 1e6:,.1f} MB are free")
        with complete_folder(unfinished, folder):
            for file in files:
                fetch_file(file, unfinished)
            if convert := CONVERT.get(what[0]):
                convert(unfinished)


def fetch_file(file: File, folder: Path) -> None:
    """Download one file from the first mirror that has it as it should be. Raises HpctrainError, OSError."""
    path, problems = folder / file.name, []
    is_verified = bool(file.sha256 or file.git_blob)
    if is_verified and path.exists() and file.is_at(path):
        return
    for url in file.urls:
        try:
            download(url, path, is_verified=is_verified)
        except HpctrainError as error:
            problems.append(str(error))
            continue
        digest = file_sha256(path)
        if file.is_at(path, digest):
            remark = "" if is_verified else ", not verified: give the URL with #sha256=HEX to verify it"
            say(f"{file.name}: SHA-256 {digest}{remark}")
            return
        problems.append(f"{hide_secrets(url)}: another file than expected, with SHA-256 {digest}")
        path.unlink()
    raise HpctrainError(
        f"{'; '.join(problems)}: run the same command again where there is internet, and it continues from "
        f"{folder}"
    )


def write_cifar10(folder: Path) -> None:
    """Replace the binary version of CIFAR-10 by tar files of PNG, as --data of image trainers reads them.

    A record is the class and the red, green and blue pixels of an image, in bytes.
    """
    from PIL import Image  # other sets need none

    packed = folder / "cifar-10-binary.tar.gz"
    size = 1 + CIFAR_CHANNELS * CIFAR_SIDE**2
    with tarfile.open(packed) as archive:
        for part, batches in (("train", "data_batch"), ("test", "test_batch")):
            (folder / part).mkdir(exist_ok=True)
            members = sorted(
                (member for member in archive if Path(member.name).name.startswith(batches)),
                key=lambda member: member.name,
            )
            with tarfile.open(folder / part / "000000.tar", "w") as shard:
                for batch, member in enumerate(members):
                    content = archive.extractfile(member)
                    assert content
                    records = numpy.frombuffer(content.read(), numpy.uint8).reshape(-1, size)
                    for number, record in enumerate(records):
                        pixels = record[1:].reshape(CIFAR_CHANNELS, CIFAR_SIDE, CIFAR_SIDE)
                        png = io.BytesIO()
                        Image.fromarray(pixels.transpose(1, 2, 0)).save(png, "PNG")
                        add_file(shard, f"{batch}{number:05}.png", png.getvalue())
                        add_file(shard, f"{batch}{number:05}.cls", str(record[0]).encode())
    packed.unlink()


def add_file(shard: tarfile.TarFile, name: str, content: bytes) -> None:
    """Add a file to a tar file."""
    header = tarfile.TarInfo(name)
    header.size = len(content)
    shard.addfile(header, io.BytesIO(content))


# What is done with the files of a set before its folder is complete.
CONVERT: dict[str, Callable[[Path], None]] = {"cifar10": write_cifar10}


def parser() -> Parser:
    sets = "\n".join(f"  {name:9} {known['title']} ({known['license']})" for name, known in SETS.items())
    parser = Parser(
        prog="hpctrain fetch data",
        description="Download a data set, or files by their URLs, for nodes without internet.",
        epilog=f"data sets, and their licenses:\n{sets}",
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "what",
        nargs="+",
        metavar="NAME|URL|FOLDER",
        help="name of a data set, or URLs of its files, each with #sha256=HEX at its end if you know that; "
        "then the folder to create, for --data FOLDER of a trainer (default: NAME)",
    )
    return parser


def main(arguments: list[str]) -> None:
    """Run `hpctrain fetch data`."""
    what = parser().parse_args(arguments).what
    if len(what) == 1 and what[0] not in SETS:
        files_of(what)
        raise UsageError("hpctrain fetch data: name the folder to create after the URL")
    folder = Path(what[0] if len(what) == 1 else what.pop())
    fetch_data(what, folder)
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != NAME]
    size = sum(path.stat().st_size for path in files)
    say(f"{folder}: {counted(len(files), 'file')}, {size / 1e6:,.1f} MB; use it with --data {folder}")
