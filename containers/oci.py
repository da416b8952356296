"""OCI archives: tar files with one image as an OCI image layout (github.com/opencontainers/image-spec)."""

from __future__ import annotations

import gzip
import json
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO

import sif

LABEL = "org.opencontainers.image."


class RecordError(Exception):
    """An error that the user can fix; its message is one line."""


class Archive:
    """An OCI archive of one image. Raises RecordError if the file is none, or incomplete."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.tar = tarfile.open(path, "r:")  # noqa: SIM115  (closed when the program ends)
            self.tar.getmembers()  # reads to the end, and fails if the file is cut short
            self.digest = json.loads(self._member("index.json").read())["manifests"][0]["digest"]
            self.manifest = json.loads(self.blob(self.digest).read())
            self.config = json.loads(self.blob(self.manifest["config"]["digest"]).read())
        except (OSError, tarfile.TarError, KeyError, ValueError, IndexError) as error:
            raise RecordError(
                f"{path} is not an OCI archive, or it is cut short or damaged ({error})"
            ) from None
        self.labels: dict[str, str] = self.config.get("config", {}).get("Labels") or {}

    def _member(self, name: str) -> IO[bytes]:
        file = self.tar.extractfile(name)
        if file is None:
            raise KeyError(f"{name} is not a file")
        return file

    def blob(self, digest: str) -> IO[bytes]:
        """The blob with this digest; its content is not checked. Raises KeyError."""
        return self._member(f"blobs/{digest.replace(':', '/')}")

    def check(self) -> None:
        """Raise RecordError unless the content of each blob has its digest."""
        for digest in (
            self.digest,
            self.manifest["config"]["digest"],
            *(layer["digest"] for layer in self.manifest["layers"]),
        ):
            try:
                found = "sha256:" + sif.sha256(self.blob(digest)).hexdigest()
            except (OSError, tarfile.TarError, KeyError) as error:
                raise RecordError(f"{self.path} is cut short or damaged ({error})") from None
            if found != digest:
                raise RecordError(
                    f"{self.path} is damaged or was changed: the content of blob {digest} is {found}"
                )

    def files(self, wanted: Callable[[str], bool]) -> dict[str, bytes]:
        """The content of the files whose path (opt/hpctrain/...) is wanted, after all layers.

        Raises RecordError.
        """
        found: dict[str, bytes] = {}
        try:
            for layer in self.manifest["layers"]:
                removed, added = [], {}
                blob = self.blob(layer["digest"])  # `docker save` does not compress layers
                raw = gzip.open(blob) if layer["mediaType"].endswith("gzip") else blob  # noqa: SIM115
                with raw, tarfile.open(fileobj=raw, mode="r|") as tar:
                    for member in tar:
                        path = member.name[2:] if member.name.startswith("./") else member.name
                        folder, _, name = path.rpartition("/")
                        if name == ".wh..wh..opq":
                            removed.append(f"{folder}/")
                        elif name.startswith(".wh."):
                            removed += [f"{folder}/{name[4:]}", f"{folder}/{name[4:]}/"]
                        elif member.isfile() and wanted(path):
                            added[path] = tar.extractfile(member).read()
                found = {
                    path: data
                    for path, data in found.items()
                    if not any(
                        path.startswith(gone) if gone.endswith("/") else path == gone for gone in removed
                    )
                }
                found.update(added)
        except (OSError, EOFError, zlib.error, tarfile.TarError, KeyError) as error:
            raise RecordError(f"{self.path}: a layer cannot be read ({error})") from None
        return found


def write_docker_manifest(layout: Path, name: str) -> None:
    """Add manifest.json, where `docker load` looks for NAME:TAG, to an OCI layout of one image."""
    blobs = layout / "blobs"
    index = json.loads((layout / "index.json").read_text())
    manifest = json.loads((blobs / index["manifests"][0]["digest"].replace(":", "/")).read_text())
    paths = [
        f"blobs/{part['digest'].replace(':', '/')}" for part in (manifest["config"], *manifest["layers"])
    ]
    text = json.dumps([{"Config": paths[0], "RepoTags": [name], "Layers": paths[1:]}])
    (layout / "manifest.json").write_text(text)
