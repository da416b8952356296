#!/usr/bin/env python3
"""record.py COMMAND: write the record of an image (SBOM and provenance), and verify an image against it.

The record of build/hpctrain-FLAVOR.tar, an OCI archive, is beside the archive (docs/reference/verify.md):
  hpctrain-FLAVOR.digest           the digest of the manifest
  hpctrain-FLAVOR.spdx.json        the SBOM, in SPDX 2.3
  hpctrain-FLAVOR.provenance.json  an in-toto statement with SLSA 1.0 provenance: the inputs of the build, and
                                   the digests of the image, of the SBOM and of the SIF
It needs only Python, and never runs anything from an image.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import sif
from oci import LABEL, Archive, RecordError, write_docker_manifest
from sbom import files_in_sif, lists_packages, read_packages, spdx_document


def provenance(archive: Archive, packages_sha256: str, context: Path, dirty: bool, builder: str) -> dict:
    """The provenance of an image: an in-toto statement v1 with a SLSA 1.0 predicate, without a build time.

    `context` is the build context. Its recipe is listed file by file, its src/ as one hash over the hashes of
    its files. `dirty` means that the context differs from the commit, `builder` names the build tool and its
    version.
    """
    files = {
        str(path.relative_to(context)): sif.digest_of(path.read_bytes())
        for path in context.rglob("*")
        if path.is_file()
    }
    source = "".join(f"{files[path]}  {path}\n" for path in sorted(files) if path.startswith("src/"))
    recipe = {path: digest for path, digest in files.items() if not path.startswith((".", "src/"))}
    name, base = archive.path.stem, archive.labels.get(LABEL + "base.name", "")
    base_digest = (
        base.partition("@sha256:")[2]
        or archive.manifest.get("annotations", {}).get(LABEL + "base.digest", "")[7:]
    )
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
                    {
                        "name": base.partition("@")[0],
                        **({"digest": {"sha256": base_digest}} if base_digest else {}),
                    },
                    *({"name": path, "digest": {"sha256": recipe[path]}} for path in sorted(recipe)),
                    {"name": "src", "digest": {"sha256": sif.digest_of(source.encode())}},
                ],
            },
            "runDetails": {
                "builder": {"id": "urn:hpctrain:containers/build_image.sh", "version": {"image": builder}}
            },
        },
    }


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal. Raises OSError."""
    with path.open("rb") as file:
        return sif.sha256(file).hexdigest()


def write_atomically(path: Path, text: str) -> None:
    """Write a file atomically: a temporary file beside it, then a rename."""
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
    """add manifest.json, which docker load reads, to the OCI layout of one image"""
    write_docker_manifest(options.layout, options.name)


def record_image(options: argparse.Namespace) -> None:
    """write the record of an archive (digest, SBOM, provenance) into its folder"""
    archive = Archive(options.archive)
    beside = str(options.archive.with_suffix(""))
    text = spdx_document(archive)
    write_atomically(Path(f"{beside}.spdx.json"), text)
    statement = provenance(
        archive, sif.digest_of(text.encode()), options.context, options.dirty, options.builder
    )
    write_atomically(Path(f"{beside}.provenance.json"), json.dumps(statement, indent=1) + "\n")
    write_atomically(Path(f"{beside}.digest"), archive.digest + "\n")


def print_sbom(options: argparse.Namespace) -> None:
    """print the SBOM of an archive"""
    sys.stdout.write(spdx_document(Archive(options.archive)))


def add_sif(options: argparse.Namespace) -> None:
    """add the SHA-256 of a SIF to the record of its image"""
    archive, statement = Archive(options.archive), read_record(options.record)
    if recorded_sha256(statement, "") != archive.digest[7:]:
        raise RecordError(
            f"{options.record} belongs to another image than {archive.path}; remove one of them"
        )
    subject = {"name": f"{parameters(statement)['name']}.sif", "digest": {"sha256": sha256_of(options.sif)}}
    statement["subject"] = [old for old in statement["subject"] if old["name"] != subject["name"]] + [subject]
    statement["predicate"]["runDetails"]["builder"]["version"]["sif"] = options.builder
    write_atomically(options.record, json.dumps(statement, indent=1) + "\n")


def read_record(path: Path) -> dict:
    """Read the statement that provenance() made. Raises RecordError."""
    try:
        statement = json.loads(path.read_text())
        known = statement["predicate"]["buildDefinition"]["buildType"] == "urn:hpctrain:image:1"
        if known and recorded_sha256(statement, "") and statement["subject"][0]["annotations"]["config"]:
            return statement
        raise ValueError("it is the provenance of another artifact")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path} is not the record of an hpctrain image ({error})") from None


def parameters(statement: dict) -> dict:
    """Name, title, revision, and `dirty`: whether the image's source had uncommitted changes."""
    return statement["predicate"]["buildDefinition"]["externalParameters"]


def recorded_sha256(statement: dict, ending: str) -> str:
    """The recorded SHA-256 of the manifest (ending "") or of a file (".tar", ".sif"); "" if there is none."""
    name = parameters(statement)["name"] + ending
    return next(
        (subject["digest"]["sha256"] for subject in statement["subject"] if subject["name"] == name), ""
    )


def verify(options: argparse.Namespace) -> None:
    """check that an image is the recorded one, or print what differs"""
    path, name = Path(options.image), options.image
    identity = "" if path.is_file() else local_image_id(name)
    record = options.record or find_record(
        path if path.is_file() else Path(name.rpartition("/")[2].replace(":", "-") + ".tar")
    )
    statement = read_record(record)
    note, labels, read = "", {}, None
    if identity:
        # A store identifies an image by its configuration, or (docker with the containerd store) by its
        # manifest.
        sha256, expected = identity, recorded_sha256(statement, "")
        if sha256 == statement["subject"][0]["annotations"]["config"][7:]:
            sha256 = expected
    elif sif.is_sif(path):
        try:
            sha256, number = sif.unsigned_sha256(path)
        except (OSError, ValueError, struct.error) as error:
            raise RecordError(f"{name} is damaged or cannot be read: {error}") from None
        expected, labels, read = (
            recorded_sha256(statement, ".sif"),
            sif.labels(path),
            lambda: files_in_sif(path),
        )
        if number:
            note = f", and {number} signature{'s' * (number > 1)} that apptainer verify can check"
    else:
        sha256, expected = sha256_of(path), recorded_sha256(statement, ".tar")
        if sha256 != expected:
            archive = Archive(path)
            archive.check()
            labels, read = archive.labels, lambda: archive.files(lists_packages)

    about = parameters(statement)
    title = labels.get(LABEL + "title", about["title"])
    if title != about["title"]:
        raise RecordError(f"{name} is {title}, but {record} is the record of {about['title']}")
    if not expected:
        raise RecordError(f"{record} has no SIF; run make sif, which adds it")
    if sha256 != expected:
        listed = record.with_name(about["name"] + ".spdx.json")
        why = (
            package_differences(read, listed, recorded_sha256(statement, ".spdx.json"), name) if read else []
        )
        raise RecordError(
            "\n  ".join(
                [f"{name} differs from {record}: it is sha256:{sha256}, recorded is sha256:{expected}", *why]
            )
        )
    revision = f"revision {about['revision'] or 'unknown'}{' with changes' * about['dirty']}"
    print(f"verify: {name} is {about['title']} of {record}, {revision}: sha256:{sha256}{note}")


def find_record(image: Path) -> Path:
    """The record for an image file of this name: beside it, or in build/.

    Raises RecordError if there is none.
    """
    places = [
        folder / f"{image.stem}.provenance.json"
        for folder in (image.parent, Path(__file__).parent.parent / "build")
    ]
    for place in places:
        if place.is_file():
            return place
    raise RecordError(
        f"there is no {places[0].name} beside {image} or in build/; name the record with RECORD=FILE"
    )


def package_differences(
    read: Callable[[], dict[str, bytes]], listed: Path, listed_sha256: str, image: str
) -> list[str]:
    """A line for each package in which an image differs from its SBOM, or one with the reason."""
    try:
        text = listed.read_bytes()
        if sif.digest_of(text) != listed_sha256:
            raise RecordError(f"{listed} is not the SBOM of the record")
        before = {
            (element["SPDXID"].split("-")[1], element["name"]): (
                element["versionInfo"],
                *(checksum["checksumValue"] for checksum in element.get("checksums", [])),
            )
            for element in json.loads(text)["packages"][1:]
        }
        here = {
            (package.kind, package.name): (package.version, *([package.sha256] if package.sha256 else []))
            for package in read_packages(read(), image)
        }
    except (OSError, ValueError, KeyError, struct.error, RecordError) as error:
        return [f"cannot compare the packages: {error}"]
    lines = []
    for key in sorted(before.keys() | here.keys()):
        old, new = before.get(key), here.get(key)
        if old != new:
            what = [" ".join(side) if side else "missing" for side in (new, old)]
            lines.append(f"{key[0]} {key[1]}: {what[0]}; recorded: {what[1]}")
    return lines or [
        "all packages are as recorded, so other files differ or are damaged; "
        "make reproduce compares two builds"
    ]


def local_image_id(name: str) -> str:
    """The id of an image in the store of docker, podman or buildah. Raises RecordError if none has it."""
    for tool in ("docker", "podman", "buildah"):
        if shutil.which(tool):
            done = subprocess.run(
                [tool, "images", "--quiet", "--no-trunc", name], capture_output=True, text=True
            )
            if done.returncode == 0 and done.stdout.strip():
                return done.stdout.split()[0].rpartition(":")[2]
    raise RecordError(f"{name} is neither a file nor an image in the store of docker, podman or buildah")


def main() -> NoReturn:
    """Run a command. An error that the user can fix is one message and exit status 1."""
    parser = argparse.ArgumentParser(
        prog="record.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(function: Callable[[argparse.Namespace], None], name: str) -> argparse.ArgumentParser:
        new = commands.add_parser(name, help=function.__doc__, description=function.__doc__)
        new.set_defaults(function=function)
        return new

    new = command(docker_manifest, "docker-manifest")
    new.add_argument("layout", type=Path, help="folder of the layout")
    new.add_argument("name", help="NAME:TAG of the image")
    new = command(record_image, "image")
    new.add_argument("archive", type=Path)
    new.add_argument("--context", type=Path, required=True, help="folder of the build context")
    new.add_argument("--builder", required=True, help="the build tool and its version")
    new.add_argument("--dirty", action="store_true", help="the context differs from the commit")
    new = command(add_sif, "sif")
    new.add_argument("sif", type=Path)
    new.add_argument("archive", type=Path)
    new.add_argument("record", type=Path)
    new.add_argument("--builder", required=True, help="the build tool and its version")
    new = command(print_sbom, "sbom")
    new.add_argument("archive", type=Path)
    new = command(verify, "verify")
    new.add_argument(
        "image", help="an archive, a SIF, or the name of an image in the store of docker, podman or buildah"
    )
    new.add_argument(
        "record",
        type=Path,
        nargs="?",
        help="NAME.provenance.json; by default the one beside the file or in build/",
    )
    options = parser.parse_args()
    try:
        options.function(options)
    except (RecordError, OSError) as error:
        sys.exit(f"record.py: {error}")
    sys.exit(0)


if __name__ == "__main__":
    main()
