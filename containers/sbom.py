"""The packages in an image, and their list in SPDX 2.3."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import sif
from oci import LABEL, Archive, RecordError

DEBIAN, WHEELS = "usr/share/hpctrain/debian.tsv", "opt/hpctrain/wheels.tsv"
SITE = "opt/hpctrain/lib/python3.11/site-packages"


def lists_packages(path: str) -> bool:
    """Whether read_packages() needs this file of an image."""
    return (
        path in (DEBIAN, WHEELS)
        or re.fullmatch(rf"{SITE}/[^/]+\.dist-info/(METADATA|RECORD)", path) is not None
    )


class Package(NamedTuple):
    """A package in an image. `sha256` is the hash of `file`; a field that is unknown is empty."""

    kind: str  # deb or pypi
    name: str
    version: str
    architecture: str
    sha256: str
    file: str
    license: str  # what its METADATA declares, as an SPDX expression


def read_packages(files: dict[str, bytes], image: str) -> list[Package]:
    """All packages of an image, from the files that lists_packages() selects.

    Raises RecordError if a list is missing.

    A Python package has the hash of the wheel (or source) that pip installed. A package that the build itself
    makes (Horovod, hpctrain) has the hash of its RECORD, which contains the hash of each of its files.
    """
    for path in (DEBIAN, WHEELS):
        if path not in files:
            raise RecordError(f"{image} has no /{path}, its list of packages; rebuild it (make image)")
    found = []
    for line in files[DEBIAN].decode().splitlines():
        name, version, architecture, digest = line.split("\t")
        found.append(Package("deb", name, version, architecture, digest, "", ""))
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
            found.append(Package("pypi", name, version, "", digest, file, python_license(about)))
    return sorted(found)


def canonical(name: str) -> str:
    """The normalized name of a Python package (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


# The SPDX names of what METADATA declares without one.
LICENSES = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache License, Version 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD": "LicenseRef-BSD",  # two clauses or three
    "BSD License": "LicenseRef-BSD",
    "GNU General Public License v3 (GPLv3)": "GPL-3.0-only",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "NVIDIA Proprietary Software": "LicenseRef-NVIDIA",
    "Python Software Foundation License": "PSF-2.0",
}
SPDX = (
    "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "LicenseRef-OpenMPI", "MIT", "MPL-2.0", "MPL-2.0 AND MIT",
)  # fmt: skip
LICENSES |= {name: name for name in SPDX}


# Known holes of a release that a patch of this project closes, which scanners would report by the version.
CLOSED = {("horovod", "0.28.1", "horovod-0.28.1-pickle.patch"): ("CVE-2024-10190", "CVE-2026-31234")}


def python_license(about: Message) -> str:
    """What the METADATA of a Python package declares, as an SPDX expression."""
    title = (about["License"] or "").partition("\n")[0].strip()  # some give the whole text
    if found := about["License-Expression"] or LICENSES.get(title):
        return found
    names = {LICENSES.get(name.rpartition(" :: ")[2]) for name in about.get_all("Classifier", [])}
    return " OR ".join(sorted(names - {None})) or "NOASSERTION"


def spdx_document(archive: Archive) -> str:
    """The SBOM of an image as an SPDX 2.3 document (spdx.github.io/spdx-spec/v2.3).

    It depends on the image only.
    """
    name = archive.path.stem
    files = archive.files(lambda path: lists_packages(path) or path.startswith("usr/share/doc/"))
    licenses: dict[str, str] = {}
    version = archive.labels.get(LABEL + "version", "")
    elements = [
        spdx_element(
            "image",
            "hpctrain",
            version,
            f"pkg:oci/hpctrain@{quote(archive.digest, safe='')}",
            archive.digest[7:],
        )
    ]
    elements[0]["primaryPackagePurpose"] = "CONTAINER"
    elements[0]["licenseDeclared"] = "Apache-2.0"
    for package in read_packages(files, str(archive.path)):
        purl = f"pkg:pypi/{package.name}@{quote(package.version)}"
        if package.kind == "deb":
            arch = package.architecture
            purl = (
                f"pkg:deb/debian/{quote(package.name)}@{quote(package.version)}?arch={arch}&distro=debian-12"
            )
        identifier = f"{package.kind}-{package.name}{package.architecture and '-' + package.architecture}"
        elements.append(spdx_element(identifier, package.name, package.version, purl, package.sha256))
        if package.file:
            elements[-1]["packageFileName"] = package.file
        declared, place = package.license, f"the dist-info folder of each package in /{SITE}"
        if package.kind == "deb":
            declared = elements[-1]["SPDXID"].replace("SPDXRef", "LicenseRef")
            place = f"/usr/share/doc/{package.name}/copyright"
            text = files.get(place[1:], b"").decode(errors="replace")
            if names := sorted(set(re.findall(r"^License: *(\S.*)$", text, re.M))):
                elements[-1]["licenseComments"] = f"named in {place}: {', '.join(names)}"
        elements[-1]["licenseDeclared"] = declared
        found = re.findall(r"LicenseRef-[A-Za-z0-9.-]+", declared)
        licenses |= dict.fromkeys(found, f"The text is in the image: {place}")
        elements[-1]["externalRefs"] += [
            {
                "referenceCategory": "SECURITY",
                "referenceType": "advisory",
                "referenceLocator": f"https://nvd.nist.gov/vuln/detail/{hole}",
                "comment": f"closed by containers/patches/{patch}",
            }
            for (name, version, patch), holes in CLOSED.items()
            if (name, version) == (package.name, package.version)
            for hole in holes
        ]
    document = {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": name,
        "documentNamespace": f"https://spdx.org/spdxdocs/{name}-{archive.digest[7:]}",
        "creationInfo": {"created": archive.config["created"], "creators": ["Tool: hpctrain-record"]},
        "packages": elements,
        "hasExtractedLicensingInfos": [
            {"licenseId": name, "extractedText": text} for name, text in sorted(licenses.items())
        ],
        "relationships": [
            {"spdxElementId": start, "relationshipType": kind, "relatedSpdxElement": end["SPDXID"]}
            for start, kind, end in [
                ("SPDXRef-DOCUMENT", "DESCRIBES", elements[0]),
                *((elements[0]["SPDXID"], "CONTAINS", end) for end in elements[1:]),
            ]
        ],
    }
    return json.dumps(document, indent=1) + "\n"


def spdx_element(identifier: str, name: str, version: str, purl: str, digest: str) -> dict:
    """The SPDX element of a package; `purl` is its package URL, `digest` its SHA-256 or empty."""
    identifier = re.sub("[^A-Za-z0-9.-]", lambda match: f"-x{ord(match[0]):x}", identifier)
    return {
        "SPDXID": f"SPDXRef-{identifier}",
        "name": name,
        "versionInfo": version,
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": False,
        **({"checksums": [{"algorithm": "SHA256", "checksumValue": digest}]} if digest else {}),
        "externalRefs": [
            {"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": purl}
        ],
    }


def files_in_sif(path: Path) -> dict[str, bytes]:
    """Archive.files() for a SIF and lists_packages(), with unsquashfs of squashfs-tools.

    Raises RecordError if it fails.
    """
    if not shutil.which("unsquashfs"):
        raise RecordError("unsquashfs is not installed (Debian: squashfs-tools)")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        command = [
            "unsquashfs",
            "-no-xattrs",
            "-no-progress",
            "-offset",
            str(sif.squashfs(path)),
            "-dest",
            str(root),
            str(path),
        ]
        done = subprocess.run(
            [*command, DEBIAN, WHEELS, f"{SITE}/*.dist-info"], capture_output=True, text=True
        )
        if done.returncode:
            raise RecordError("its file system is damaged")
        return {str(file.relative_to(root)): file.read_bytes() for file in root.rglob("*") if file.is_file()}
