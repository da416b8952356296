#!/usr/bin/env python3
"""record.py COMMAND: what an image consists of, what it was made from, and whether a file is that image.

The record of build/hpctrain-FLAVOR.tar, an OCI archive, lies beside it; docs/verify.md explains it:
  hpctrain-FLAVOR.digest           the digest of its manifest
  hpctrain-FLAVOR.spdx.json        its packages, in SPDX 2.3
  hpctrain-FLAVOR.provenance.json  an in-toto statement in the form of SLSA 1.0: what it was made from, and the digests of
                                   the image, of that list, and of the SIF
Nothing of an image is ever run for this, and it needs no more than Python.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path
from typing import IO, NamedTuple, NoReturn
from urllib.parse import quote

import sif

DEBIAN, WHEELS = "usr/share/hpctrain/debian.tsv", "opt/hpctrain/wheels.tsv"
SITE = "opt/hpctrain/lib/python3.11/site-packages"
LABEL = "org.opencontainers.image."


class RecordError(Exception):
    """One line for the user."""


class Archive:
    """An OCI archive that holds one image. Raises RecordError where it is none, or not whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.tar = tarfile.open(path, "r:")  # noqa: SIM115  (closed when the program ends)
            self.tar.getmembers()  # to its end, which one that is cut short has not
            self.digest = json.loads(self._member("index.json").read())["manifests"][0]["digest"]
            self.manifest = json.loads(self.blob(self.digest).read())
            self.config = json.loads(self.blob(self.manifest["config"]["digest"]).read())
        except (OSError, tarfile.TarError, KeyError, ValueError, IndexError) as error:
            raise RecordError(f"{path} is no OCI archive, or it is cut short or damaged ({error})") from None
        self.labels: dict[str, str] = self.config.get("config", {}).get("Labels") or {}

    def _member(self, name: str) -> IO[bytes]:
        file = self.tar.extractfile(name)
        if file is None:
            raise KeyError(f"{name} is no file")
        return file

    def blob(self, digest: str) -> IO[bytes]:
        """The part of the image that has this digest, unchecked. Raises KeyError."""
        return self._member(f"blobs/{digest.replace(':', '/')}")

    def check(self) -> None:
        """Raises RecordError unless each part is what its digest says."""
        for digest in (self.digest, self.manifest["config"]["digest"], *(layer["digest"] for layer in self.manifest["layers"])):
            try:
                found = "sha256:" + sif.sha256(self.blob(digest)).hexdigest()
            except (OSError, tarfile.TarError, KeyError) as error:
                raise RecordError(f"{self.path} is cut short or damaged ({error})") from None
            if found != digest:
                raise RecordError(f"{self.path} is damaged or was changed: the part {digest} has the content of {found}")

    def files(self, wanted: Callable[[str], bool]) -> dict[str, bytes]:
        """The content of the files of the image whose path (opt/hpctrain/...) is wanted. Raises RecordError."""
        found: dict[str, bytes] = {}
        try:
            for layer in self.manifest["layers"]:
                removed, added = [], {}
                with gzip.open(self.blob(layer["digest"])) as raw, tarfile.open(fileobj=raw, mode="r|") as tar:
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
                    if not any(path.startswith(gone) if gone.endswith("/") else path == gone for gone in removed)
                }
                found.update(added)
        except (OSError, EOFError, zlib.error, tarfile.TarError, KeyError) as error:
            raise RecordError(f"{self.path}: a layer cannot be read ({error})") from None
        return found


def files_of_sif(path: Path) -> dict[str, bytes]:
    """As Archive.files() with what tells the packages, by unsquashfs of squashfs-tools. Raises RecordError where it fails."""
    if not shutil.which("unsquashfs"):
        raise RecordError("there is no unsquashfs (Debian: squashfs-tools)")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        command = ["unsquashfs", "-no-xattrs", "-no-progress", "-offset", str(sif.squashfs(path)), "-dest", str(root), str(path)]
        done = subprocess.run([*command, DEBIAN, WHEELS, f"{SITE}/*.dist-info"], capture_output=True, text=True)
        if done.returncode:
            raise RecordError("its file system is damaged")
        return {str(file.relative_to(root)): file.read_bytes() for file in root.rglob("*") if file.is_file()}


def tells_packages(path: str) -> bool:
    """Whether packages() reads this file of an image."""
    return path in (DEBIAN, WHEELS) or re.fullmatch(rf"{SITE}/[^/]+\.dist-info/(METADATA|RECORD)", path) is not None


class Package(NamedTuple):
    """A package in an image; `sha256` is that of `file`, and both are empty where they are not known."""

    kind: str  # deb or pypi
    name: str
    version: str
    architecture: str
    sha256: str
    file: str


def packages(files: dict[str, bytes], image: str) -> list[Package]:
    """All packages of an image, from the files that tell them. Raises RecordError where a list is missing.

    A Python package has the hash of the wheel (or source) that pip installed. What the build made itself (Horovod, hpctrain) has
    that of its RECORD, which holds the hash of each of its files.
    """
    for path in (DEBIAN, WHEELS):
        if path not in files:
            raise RecordError(f"{image} has no /{path}, its list of packages; build it anew (make image)")
    found = []
    for line in files[DEBIAN].decode().splitlines():
        name, version, architecture, digest = line.split("\t")
        found.append(Package("deb", name, version, architecture, digest, ""))
    wheels = {}
    for line in files[WHEELS].decode().splitlines():
        name, version, digest, file = line.split("\t")
        wheels[canonical(name), version] = digest, file
    for path in files:
        if path.endswith("/METADATA"):
            about = Parser().parsestr(files[path].decode(), headersonly=True)
            name, version = canonical(about["Name"]), about["Version"]
            record = path.replace("/METADATA", "/RECORD")
            digest, file = wheels.get((name, version)) or (sif.digest_of(files.get(record, b"")), record)
            found.append(Package("pypi", name, version, "", digest, file))
    return sorted(found)


def canonical(name: str) -> str:
    """The name of a Python package as PyPI writes it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def sbom(archive: Archive) -> str:
    """The packages of an image as an SPDX 2.3 document (spdx.github.io/spdx-spec/v2.3), a function of the image alone."""
    name = archive.path.stem
    version = archive.labels.get(LABEL + "version", "")
    elements = [element("image", "hpctrain", version, f"pkg:oci/hpctrain@{quote(archive.digest, safe='')}", archive.digest[7:])]
    elements[0]["primaryPackagePurpose"] = "CONTAINER"
    for package in packages(archive.files(tells_packages), str(archive.path)):
        purl = f"pkg:pypi/{package.name}@{quote(package.version)}"
        if package.kind == "deb":
            arch = package.architecture
            purl = f"pkg:deb/debian/{quote(package.name)}@{quote(package.version)}?arch={arch}&distro=debian-12"
        identifier = f"{package.kind}-{package.name}{package.architecture and '-' + package.architecture}"
        elements.append(element(identifier, package.name, package.version, purl, package.sha256))
        if package.file:
            elements[-1]["packageFileName"] = package.file
    document = {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": name,
        "documentNamespace": f"https://spdx.org/spdxdocs/{name}-{archive.digest[7:]}",
        "creationInfo": {"created": archive.config["created"], "creators": ["Tool: hpctrain-record"]},
        "packages": elements,
        "relationships": [
            {"spdxElementId": start, "relationshipType": kind, "relatedSpdxElement": end["SPDXID"]}
            for start, kind, end in [
                ("SPDXRef-DOCUMENT", "DESCRIBES", elements[0]),
                *((elements[0]["SPDXID"], "CONTAINS", end) for end in elements[1:]),
            ]
        ],
    }
    return json.dumps(document, indent=1) + "\n"


def element(identifier: str, name: str, version: str, purl: str, digest: str) -> dict:
    """A package as SPDX writes it."""
    identifier = re.sub("[^A-Za-z0-9.-]", lambda match: f"-x{ord(match[0]):x}", identifier)
    return {
        "SPDXID": f"SPDXRef-{identifier}",
        "name": name,
        "versionInfo": version,
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": False,
        **({"checksums": [{"algorithm": "SHA256", "checksumValue": digest}]} if digest else {}),
        "externalRefs": [{"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": purl}],
    }


def provenance(archive: Archive, packages_sha256: str, context: Path, dirty: bool, builder: str) -> dict:
    """What the image was made from and by what: an in-toto statement v1, with a predicate of SLSA 1.0 and no time of its own.

    `context` is the folder that the build saw: its recipe is listed by file, its src/ as one hash over the hashes of its files.
    """
    files = {str(path.relative_to(context)): sif.digest_of(path.read_bytes()) for path in context.rglob("*") if path.is_file()}
    source = "".join(f"{files[path]}  {path}\n" for path in sorted(files) if path.startswith("src/"))
    recipe = {path: digest for path, digest in files.items() if not path.startswith((".", "src/"))}
    name, base = archive.path.stem, archive.labels.get(LABEL + "base.name", "")
    base_digest = base.partition("@sha256:")[2] or archive.manifest.get("annotations", {}).get(LABEL + "base.digest", "")[7:]
    revision = archive.labels.get(LABEL + "revision", "")
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [
            {
                "name": name,
                "digest": {"sha256": archive.digest[7:]},
                "annotations": {"config": archive.manifest["config"]["digest"]},
            },
            {"name": f"{name}.tar", "digest": {"sha256": sha256_of(archive.path)}},
            {"name": f"{name}.spdx.json", "digest": {"sha256": packages_sha256}},
        ],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:hpctrain:image:1",
                "externalParameters": {
                    "name": name,
                    "title": archive.labels.get(LABEL + "title", ""),
                    "revision": revision,
                    "dirty": dirty,
                },
                "internalParameters": {"SOURCE_DATE_EPOCH": int(os.environ["SOURCE_DATE_EPOCH"])},
                "resolvedDependencies": [
                    {"name": "source", **({"digest": {"gitCommit": revision}} if revision else {})},
                    {"name": base.partition("@")[0], **({"digest": {"sha256": base_digest}} if base_digest else {})},
                    *({"name": path, "digest": {"sha256": recipe[path]}} for path in sorted(recipe)),
                    {"name": "src", "digest": {"sha256": sif.digest_of(source.encode())}},
                ],
            },
            "runDetails": {"builder": {"id": "urn:hpctrain:containers/build.sh", "version": {"image": builder}}},
        },
    }


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file. Raises OSError."""
    with path.open("rb") as file:
        return sif.sha256(file).hexdigest()


def write(path: Path, text: str) -> None:
    """Write a file that appears when it is whole."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(text)
            file.close()
            Path(file.name).chmod(0o644)
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink()
            raise


def docker_manifest(options: argparse.Namespace) -> None:
    """Add to an OCI layout, which holds one image, the manifest.json by which docker load finds it."""
    blobs = options.layout / "blobs"
    index = json.loads((options.layout / "index.json").read_text())
    manifest = json.loads((blobs / index["manifests"][0]["digest"].replace(":", "/")).read_text())
    paths = [f"blobs/{part['digest'].replace(':', '/')}" for part in (manifest["config"], *manifest["layers"])]
    text = json.dumps([{"Config": paths[0], "RepoTags": [options.name], "Layers": paths[1:]}])
    (options.layout / "manifest.json").write_text(text)


def image(options: argparse.Namespace) -> None:
    """Write the three files of the record of an archive into its folder."""
    archive = Archive(options.archive)
    beside = str(options.archive.with_suffix(""))
    text = sbom(archive)
    write(Path(f"{beside}.spdx.json"), text)
    statement = provenance(archive, sif.digest_of(text.encode()), options.context, options.dirty, options.builder)
    write(Path(f"{beside}.provenance.json"), json.dumps(statement, indent=1) + "\n")
    write(Path(f"{beside}.digest"), archive.digest + "\n")


def print_sbom(options: argparse.Namespace) -> None:
    """Print the list of the packages in an archive."""
    sys.stdout.write(sbom(Archive(options.archive)))


def add_sif(options: argparse.Namespace) -> None:
    """Add the SHA-256 of a SIF to the record of the image that it was made from."""
    archive, statement = Archive(options.archive), read_record(options.record)
    if recorded(statement, "") != archive.digest[7:]:
        raise RecordError(f"{options.record} is the record of another image than {archive.path}; remove one of them")
    subject = {"name": f"{parameters(statement)['name']}.sif", "digest": {"sha256": sha256_of(options.sif)}}
    statement["subject"] = [old for old in statement["subject"] if old["name"] != subject["name"]] + [subject]
    statement["predicate"]["runDetails"]["builder"]["version"]["sif"] = options.builder
    write(options.record, json.dumps(statement, indent=1) + "\n")


def read_record(path: Path) -> dict:
    """The statement that `image` wrote. Raises RecordError."""
    try:
        statement = json.loads(path.read_text())
        known = statement["predicate"]["buildDefinition"]["buildType"] == "urn:hpctrain:image:1"
        if known and recorded(statement, "") and statement["subject"][0]["annotations"]["config"]:
            return statement
        raise ValueError("it is the provenance of something else")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path} is no record of an hpctrain image ({error})") from None


def parameters(statement: dict) -> dict:
    """The name and the title of the image that a record is of, its revision, and whether the source had changes."""
    return statement["predicate"]["buildDefinition"]["externalParameters"]


def recorded(statement: dict, ending: str) -> str:
    """The SHA-256 that a record has for the image's manifest (ending: nothing) or a file (.tar, .sif); empty if it has none."""
    name = parameters(statement)["name"] + ending
    return next((subject["digest"]["sha256"] for subject in statement["subject"] if subject["name"] == name), "")


def verify(options: argparse.Namespace) -> None:
    """Say that an image is the one that its record names, or what differs."""
    path, name = Path(options.image), options.image
    identity = "" if path.is_file() else local_image(name)
    record = options.record or find_record(path if path.is_file() else Path(name.rpartition("/")[2].replace(":", "-") + ".tar"))
    statement = read_record(record)
    note, labels, read = "", {}, None
    if identity:
        # A store names an image by its configuration, or (docker with the store of containerd) by its manifest.
        sha256, expected = identity, recorded(statement, "")
        if sha256 == statement["subject"][0]["annotations"]["config"][7:]:
            sha256 = expected
    elif sif.is_sif(path):
        try:
            sha256, number = sif.unsigned_sha256(path)
        except (OSError, ValueError, struct.error) as error:
            raise RecordError(f"{name} is damaged or cannot be read: {error}") from None
        expected, labels, read = recorded(statement, ".sif"), sif.labels(path), lambda: files_of_sif(path)
        if number:
            note = f", and {number} signature{'s' * (number > 1)} that apptainer verify can check"
    else:
        sha256, expected = sha256_of(path), recorded(statement, ".tar")
        if sha256 != expected:
            archive = Archive(path)
            archive.check()
            labels, read = archive.labels, lambda: archive.files(tells_packages)

    about = parameters(statement)
    title = labels.get(LABEL + "title", about["title"])
    if title != about["title"]:
        raise RecordError(f"{name} is {title}, and {record} is the record of {about['title']}")
    if not expected:
        raise RecordError(f"{record} names no SIF: none was made from its image; make sif enters it")
    if sha256 != expected:
        listed = record.with_name(about["name"] + ".spdx.json")
        why = differences(read, listed, recorded(statement, ".spdx.json"), name) if read else []
        raise RecordError("\n  ".join([f"{name} is not what {record} names: it is sha256:{sha256}, not sha256:{expected}", *why]))
    revision = f"revision {about['revision'] or 'unknown'}{' with changes' * about['dirty']}"
    print(f"verify: {name} is {about['title']} of {record}, {revision}: sha256:{sha256}{note}")


def find_record(image: Path) -> Path:
    """The record of an image whose file has this name: beside it, or in build/. Raises RecordError where there is none."""
    places = [folder / f"{image.stem}.provenance.json" for folder in (image.parent, Path(__file__).parent.parent / "build")]
    for place in places:
        if place.is_file():
            return place
    raise RecordError(f"no {places[0].name} is beside {image} or in build/; give the record as RECORD=FILE")


def differences(read: Callable[[], dict[str, bytes]], listed: Path, listed_sha256: str, image: str) -> list[str]:
    """Lines that say in which packages an image differs from the list beside its record, as far as can be told."""
    try:
        text = listed.read_bytes()
        if sif.digest_of(text) != listed_sha256:
            raise RecordError(f"{listed} is not the list of the record")
        before = {
            (element["SPDXID"].split("-")[1], element["name"]): (
                element["versionInfo"],
                *(checksum["checksumValue"] for checksum in element.get("checksums", [])),
            )
            for element in json.loads(text)["packages"][1:]
        }
        here = {
            (package.kind, package.name): (package.version, *([package.sha256] if package.sha256 else []))
            for package in packages(read(), image)
        }
    except (OSError, ValueError, KeyError, struct.error, RecordError) as error:
        return [f"which packages differ cannot be told: {error}"]
    lines = []
    for key in sorted(before.keys() | here.keys()):
        old, new = before.get(key), here.get(key)
        if old != new:
            what = [" ".join(side) if side else "missing" for side in (new, old)]
            lines.append(f"{key[0]} {key[1]}: {what[0]}; in the record {what[1]}")
    return lines or ["all packages are those of the record: other files differ or are damaged; make reproduce compares builds"]


def local_image(name: str) -> str:
    """The id of an image in the store of docker, podman or buildah. Raises RecordError where there is none."""
    for tool in ("docker", "podman", "buildah"):
        if shutil.which(tool):
            done = subprocess.run([tool, "images", "--quiet", "--no-trunc", name], capture_output=True, text=True)
            if done.returncode == 0 and done.stdout.strip():
                return done.stdout.split()[0].rpartition(":")[2]
    raise RecordError(f"{name} is neither a file nor an image that docker, podman or buildah has here")


def main() -> NoReturn:
    """Run a command; what the user can mend is one sentence and exit status 1."""
    parser = argparse.ArgumentParser(prog="record.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(function: Callable[[argparse.Namespace], None], name: str) -> argparse.ArgumentParser:
        new = commands.add_parser(name, help=function.__doc__, description=function.__doc__)
        new.set_defaults(function=function)
        return new

    new = command(docker_manifest, "docker-manifest")
    new.add_argument("layout", type=Path, help="a folder")
    new.add_argument("name", help="NAME:TAG for the image")
    new = command(image, "image")
    new.add_argument("archive", type=Path)
    new.add_argument("--context", type=Path, required=True, help="the folder that the build saw")
    new.add_argument("--builder", required=True, help="what built it, and its version")
    new.add_argument("--dirty", action="store_true", help="the folder is not as the revision has it")
    new = command(add_sif, "sif")
    new.add_argument("sif", type=Path)
    new.add_argument("archive", type=Path)
    new.add_argument("record", type=Path)
    new.add_argument("--builder", required=True, help="what built it, and its version")
    new = command(print_sbom, "sbom")
    new.add_argument("archive", type=Path)
    new = command(verify, "verify")
    new.add_argument("image", help="an archive, a SIF, or the name of an image that docker, podman or buildah has")
    new.add_argument("record", type=Path, nargs="?", help="by default NAME.provenance.json beside the file, or in build/")
    options = parser.parse_args()
    try:
        options.function(options)
    except (RecordError, OSError) as error:
        sys.exit(f"record.py: {error}")
    sys.exit(0)


if __name__ == "__main__":
    main()
