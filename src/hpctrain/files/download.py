"""Download files into a folder that appears when all of them are there, and continue what was interrupted.

Over HTTP by Python's own library, which reads http_proxy and https_proxy as curl and wget do.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPMessage
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from tqdm import tqdm

from hpctrain.errors import HpctrainError
from hpctrain.files import atomic
from hpctrain.files.digests import write_digests
from hpctrain.files.plain import read_text
from hpctrain.files.redaction import hide_secrets
from hpctrain.files.trust import open_without_link, refuse_foreign
from hpctrain.text import reason

TIMEOUT = 60  # seconds without a byte
BLOCK = 2**20  # bytes


def partial_folder(folder: Path, version: str) -> Path:
    """Where a version of the folder is while it is not complete: hidden, beside it."""
    return folder.with_name(f".{folder.name}.{version}.partial")


@contextmanager
def complete_folder(unfinished: Path, folder: Path) -> Iterator[None]:
    """Let a block write into `unfinished`, a new folder or one of an earlier call, which becomes `folder`.

    It gets SHA256SUMS, and after an exception it stays. Raises OSError, and HpctrainError if another user
    made it: what is in it would not be downloaded again.
    """
    refuse_foreign(unfinished, advice="fetch into a folder of your own")
    unfinished.mkdir(parents=True, exist_ok=True)
    yield
    write_digests(unfinished)
    atomic.rename_folder(unfinished, folder, replace=False)


def download(url: str, path: Path, *, is_verified: bool) -> None:
    """Download a file, and continue the part of it that is there.

    Unless the caller verifies the file, only a part of the version that the server has today is continued.
    Raises HpctrainError if the server does not give the whole file, and OSError if it cannot be written.
    """
    version = path.with_name(f".{path.name}.version")
    headers = {"User-Agent": "hpctrain", "Accept-Encoding": "identity"}
    done = path.stat().st_size if path.exists() else 0
    if done and version.exists():
        headers |= {"Range": f"bytes={done}-", "If-Range": read_text(version)}
    elif done and is_verified:
        headers |= {"Range": f"bytes={done}-"}
    shown = hide_secrets(url)
    try:
        with _network_errors():
            opened = urlopen(Request(url, headers=headers), timeout=TIMEOUT)
        with opened as answer:
            continues = answer.headers.get("Content-Range", "").startswith(f"bytes {done}-")
            if answer.status == 206 and not continues:
                raise HTTPException("the server sent another part than was asked for")
            if mark := _version_of(answer.headers):
                atomic.write_text(version, mark)
            else:
                version.unlink(missing_ok=True)
            length = int(answer.headers.get("Content-Length", -1))
            start = done if continues else 0
            with (
                open(path, "ab" if continues else "wb", opener=open_without_link) as file,
                tqdm(
                    desc=path.name,
                    initial=start,
                    total=start + length if length >= 0 else None,
                    unit="B",
                    unit_scale=True,
                    disable=None,  # where nobody watches
                ) as bar,
            ):
                while True:
                    with _network_errors():
                        block = answer.read(BLOCK)
                    if not block:
                        break
                    file.write(block)
                    bar.update(len(block))
                size = file.tell()
            if size < start + length:
                raise HTTPException(f"the connection ended after {size:,} of {start + length:,} bytes")
    except HTTPError as error:
        if error.code == 416:  # there is nothing behind that part: it is of another version
            path.unlink()
        raise HpctrainError(f"{shown}: {error.code} {error.reason}") from error
    except URLError as error:
        raise HpctrainError(f"{shown}: cannot be reached ({error.reason})") from error
    except (HTTPException, ValueError) as error:
        raise HpctrainError(f"{shown}: {reason(error)}") from error
    version.unlink(missing_ok=True)


@contextmanager
def _network_errors() -> Iterator[None]:
    """Raise an OSError of a connection, such as a time-out, as HTTPException: it is none of the disk."""
    try:
        yield
    except URLError:
        raise
    except OSError as error:
        raise HTTPException(reason(error)) from error


def _version_of(headers: HTTPMessage) -> str:
    """What tells a version of the file from others; "" if the server does not say. A weak ETag does not."""
    tag = headers.get("ETag", "")
    return headers.get("Last-Modified", "") if tag.startswith("W/") or not tag else tag
