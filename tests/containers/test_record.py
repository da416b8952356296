"""record.py, sbom.py and sif.py: reproducible builds, the SBOM, the provenance, and the output of verify.

build_image.sh and build_sif.sh run unchanged, but with a Dockerfile of a few files instead of the image's.
The last test is about the image itself.
"""

import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile

import pytest
import slurm_cluster
from slurm_cluster import REPOSITORY, project_files
from spdx_tools.spdx.parser.parse_anything import parse_file
from spdx_tools.spdx.validation.document_validator import validate_full_spdx_document

from tests.helpers import IMAGE_TAR, run_command

pytestmark = pytest.mark.slow

DOCKERFILE = """FROM scratch
COPY pyproject.toml LICENSE /src/
COPY src /src/src
COPY containers/install/tree /
ARG FLAVOR
ARG MPI
ARG REVISION
ARG CREATED
LABEL org.opencontainers.image.title="hpctrain ${FLAVOR} with ${MPI}" \\
      org.opencontainers.image.revision="${REVISION}"
LABEL org.opencontainers.image.created="${CREATED}" org.opencontainers.image.version=1.0
"""
SITE = "opt/hpctrain/lib/python3.11/site-packages"
TREE = {
    "usr/share/hpctrain/debian.tsv": f"libc6\t2.36-9\tamd64\t{'a' * 64}\nlibstdc++6\t1:12.2\tamd64\t\n",
    "opt/hpctrain/wheels.tsv": f"torch\t2.13.0+cpu\t{'b' * 64}\ttorch-2.13.0+cpu.whl\n"
    f"PyYAML\t6.0\t{'c' * 64}\tpyyaml.whl\n",
    f"{SITE}/torch-2.13.0+cpu.dist-info/METADATA": "Name: torch\nVersion: 2.13.0+cpu\n",
    f"{SITE}/pyyaml-6.0.dist-info/METADATA": "Name: PyYAML\nVersion: 6.0\nLicense-Expression: MIT\n",
    f"{SITE}/horovod-0.28.1.dist-info/METADATA": "Name: horovod\nVersion: 0.28.1\n"
    "License: Apache 2.0\nClassifier: License :: OSI Approved :: Apache Software License\n\n"
    "Version: of something else\n",
    "usr/share/doc/libc6/copyright": "Files: *\nLicense: LGPL-2.1+\n\nLicense: GPL-2\n text\n",
    f"{SITE}/horovod-0.28.1.dist-info/RECORD": "horovod/__init__.py,sha256=abc,1\n",
}


def run(*command, cwd=REPOSITORY, check=True, **options):
    done = run_command(command, cwd=cwd, stdin=subprocess.DEVNULL, **options)
    assert not check or done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def git(folder, *arguments, date="2026-02-03T04:05:06Z"):
    env = {f"GIT_{who}_{what}": date if what == "DATE" else "somebody@example.org"
           for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL", "DATE")}  # fmt: skip
    run("git", *arguments, cwd=folder, env=os.environ | env)


def build(folder, store, *arguments, **options):
    """Run containers/build_image.sh in a copy of the project, with a separate image store."""
    store.mkdir(exist_ok=True)
    text = f'[storage]\ndriver = "overlay"\ngraphroot = "{store}/graph"\nrunroot = "{store}/run"\n'
    (store / "storage.conf").write_text(text)
    env = os.environ | {
        "CONTAINERS_STORAGE_CONF": f"{store}/storage.conf",
        "BASE_IMAGE": "none",
        "WHEELS": "",
        "COMPILED_WHEELS": "",
    }
    return run("containers/build_image.sh", "--tool", "buildah", *arguments, cwd=folder, env=env, **options)


def written(folder):
    """The files that a build wrote, by name."""
    return {path.name: path.read_bytes() for path in (folder / "build").glob("hpctrain-*")}


def verify(*arguments, **options):
    return run(
        sys.executable, REPOSITORY / "containers/record.py", "verify", *arguments, check=False, **options
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A copy of the project with a tiny image, built at a commit, then at the next one with its cache."""
    if reason := slurm_cluster.missing():
        pytest.skip(reason)
    base = tmp_path_factory.mktemp("record")
    folder = base / "one"
    folder.mkdir()
    for name in project_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, folder / name)
    (folder / "containers/Dockerfile").write_text(DOCKERFILE)
    for name, text in TREE.items():
        path = folder / "containers/install/tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git(folder, "init", "--quiet")
    git(folder, "add", "--all", "--force", ".")
    git(folder, "commit", "--quiet", "--message=older", date="2025-01-01T00:00:00Z")
    (folder / "build").mkdir()
    (folder / "build/cluster").symlink_to(REPOSITORY / "build/cluster")
    build(folder, base / "store")
    (folder / "containers/install/tree/opt/hpctrain/versions.json").write_text("those of this commit")
    git(folder, "add", "--all", ".")
    git(folder, "commit", "--quiet", "--message=newer")
    build(folder, base / "store")
    yield folder
    run(
        "buildah",
        "rmi",
        "--all",
        "--force",
        env=os.environ | {"CONTAINERS_STORAGE_CONF": f"{base}/store/storage.conf"},
    )


@pytest.fixture(scope="module")
def tiny_sif(tiny):
    run("apptainer/build_sif.sh", cwd=tiny)
    return tiny / "hpctrain-cpu.sif"


def test_another_clone_with_another_umask_and_store_gives_the_same_image(tiny, tmp_path):
    """The first build had the layers of an older commit in its store; the store of the second was empty."""
    git(tmp_path, "clone", "--quiet", str(tiny), "two")
    clone = tmp_path / "two"
    run("chmod", "-R", "go=", clone)
    run("find", clone / "src", "-exec", "touch", "--date=2001-02-03", "{}", "+")
    build(clone, tmp_path / "store", umask=0o077)
    run(
        "buildah",
        "rmi",
        "--all",
        "--force",
        env=os.environ | {"CONTAINERS_STORAGE_CONF": f"{tmp_path}/store/storage.conf"},
    )
    first, second = written(tiny), written(clone)
    assert sorted(second) == [
        f"hpctrain-cpu.{kind}" for kind in ("digest", "provenance.json", "spdx.json", "tar")
    ]
    assert all(first[name] == second[name] for name in second if name != "hpctrain-cpu.provenance.json")
    statements = [json.loads(files["hpctrain-cpu.provenance.json"]) for files in (first, second)]
    for statement in statements:  # the first one may contain a SIF by now
        statement["subject"] = statement["subject"][:3]
        statement["predicate"]["runDetails"]["builder"]["version"].pop("sif", None)
    assert statements[0] == statements[1]


def test_a_sif_does_not_depend_on_the_user_who_builds_it(tiny, tiny_sif, tmp_path):
    """apptainer/build_sif.sh as root, and as alice on a node of the test cluster."""
    theirs = tmp_path / "alice"
    theirs.mkdir()
    os.chown(theirs, 1000, 1000)
    command = ["run", "-u", "alice", "-b", theirs, "--", "apptainer/build_sif.sh"]
    command += ["--output", theirs / "image.sif"]
    run("cluster/cluster.sh", *command, cwd=tiny)
    assert (theirs / "image.sif").stat().st_uid == 1000
    assert (theirs / "image.sif").read_bytes() == tiny_sif.read_bytes()


def test_the_sbom_is_valid_spdx_and_lists_the_installed_packages(tiny):
    path = tiny / "build/hpctrain-cpu.spdx.json"
    assert validate_full_spdx_document(parse_file(str(path))) == []
    document = json.loads(path.read_text())
    listed = {
        element["externalRefs"][0]["referenceLocator"]: [
            checksum["checksumValue"] for checksum in element.get("checksums", [])
        ]
        for element in document["packages"]
    }
    assert {element["name"]: element["licenseDeclared"] for element in document["packages"]} == {
        "hpctrain": "Apache-2.0",
        "horovod": "Apache-2.0",
        "pyyaml": "MIT",
        "torch": "NOASSERTION",
        "libc6": "LicenseRef-deb-libc6-amd64",
        "libstdc++6": "LicenseRef-deb-libstdc-x2b-x2b6-amd64",
    }
    advisories = {
        (element["name"], reference["referenceLocator"].rpartition("/")[2], reference["comment"])
        for element in document["packages"]
        for reference in element["externalRefs"]
        if reference["referenceType"] == "advisory"
    }
    patch = "containers/patches/horovod-0.28.1-pickle.patch"
    holes = re.findall(r"CVE-\d+-\d+", (REPOSITORY / patch).read_text())
    assert len(holes) == 2 and advisories == {("horovod", hole, f"closed by {patch}") for hole in holes}
    digest = (tiny / "build/hpctrain-cpu.digest").read_text().strip()
    record = TREE[f"{SITE}/horovod-0.28.1.dist-info/RECORD"]
    assert listed == {
        f"pkg:oci/hpctrain@{digest.replace(':', '%3A')}": [digest[7:]],
        "pkg:deb/debian/libc6@2.36-9?arch=amd64&distro=debian-12": ["a" * 64],
        "pkg:deb/debian/libstdc%2B%2B6@1%3A12.2?arch=amd64&distro=debian-12": [],
        "pkg:pypi/torch@2.13.0%2Bcpu": ["b" * 64],
        "pkg:pypi/pyyaml@6.0": ["c" * 64],
        "pkg:pypi/horovod@0.28.1": [hashlib.sha256(record.encode()).hexdigest()],
    }
    assert (
        run(sys.executable, "containers/record.py", "sbom", tiny / "build/hpctrain-cpu.tar").stdout
        == path.read_text()
    )


def test_the_provenance_names_source_recipe_and_tools(tiny, tiny_sif):
    statement = json.loads((tiny / "build/hpctrain-cpu.provenance.json").read_text())
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    subjects = {subject["name"]: subject["digest"]["sha256"] for subject in statement["subject"]}
    assert subjects == {
        "hpctrain-cpu": (tiny / "build/hpctrain-cpu.digest").read_text().strip()[7:],
        **{
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in (tiny / "build/hpctrain-cpu.tar", tiny / "build/hpctrain-cpu.spdx.json", tiny_sif)
        },
    }
    definition = statement["predicate"]["buildDefinition"]
    revision = run("git", "rev-parse", "HEAD", cwd=tiny).stdout.strip()
    assert (
        definition["externalParameters"]["revision"] == revision
        and not definition["externalParameters"]["dirty"]
    )
    used = {part["name"]: part["digest"] for part in definition["resolvedDependencies"]}
    assert used["source"] == {"gitCommit": revision}
    for name in ("containers/Dockerfile", "containers/locks/cpu.lock", "pyproject.toml"):
        assert used[name] == {"sha256": hashlib.sha256((tiny / name).read_bytes()).hexdigest()}
    tools = statement["predicate"]["runDetails"]["builder"]["version"]
    assert tools["image"].startswith("buildah version") and tools["sif"].startswith("apptainer version")


def test_an_image_as_recorded_is_verified_in_one_line(tiny, tiny_sif):
    for image in (tiny / "build/hpctrain-cpu.tar", tiny_sif, "localhost/hpctrain:cpu"):
        store = {"CONTAINERS_STORAGE_CONF": f"{tiny.parent}/store/storage.conf"}
        record = [tiny / "build/hpctrain-cpu.provenance.json"] * (image != tiny / "build/hpctrain-cpu.tar")
        done = verify(image, *record, env=os.environ | store)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"verify: {image} ") and done.stdout.count("\n") == 1
        assert "hpctrain cpu with openmpi" in done.stdout  # its title


def flipped(source, target, at):
    """A copy with one bit flipped."""
    data = bytearray(source.read_bytes())
    data[at] ^= 1
    target.write_bytes(data)
    return target


def test_an_image_that_differs_from_its_record_is_named(tiny, tiny_sif, tmp_path):
    tar, record = tiny / "build/hpctrain-cpu.tar", tiny / "build/hpctrain-cpu.provenance.json"
    (tmp_path / "cut.tar").write_bytes(tar.read_bytes()[: tar.stat().st_size // 2])
    (tmp_path / "cut.sif").write_bytes(tiny_sif.read_bytes()[: tiny_sif.stat().st_size // 2])
    (tmp_path / "stub.sif").write_bytes(tiny_sif.read_bytes()[:100])
    (tmp_path / "empty.sif").touch()
    layer = tar.read_bytes().index(b"\x1f\x8b\x08")
    other = json.loads(record.read_text())
    other["predicate"]["buildDefinition"]["externalParameters"]["title"] = "hpctrain cu130 with openmpi"
    for subject in other["subject"]:
        subject["digest"]["sha256"] = "d" * 64
    (tmp_path / "other.json").write_text(json.dumps(other))
    (tmp_path / "list.json").write_text((tiny / "build/hpctrain-cpu.spdx.json").read_text())
    for image, its_record, said in [
        (tmp_path / "cut.tar", record, "cut.tar"),
        (tmp_path / "cut.sif", record, "cut.sif"),
        (tmp_path / "stub.sif", record, "stub.sif"),
        (tmp_path / "empty.sif", record, "empty.sif"),
        (flipped(tar, tmp_path / "load.tar", tar.read_bytes().index(b"RepoTags")), record, "all packages"),
        (flipped(tar, tmp_path / "flipped.tar", layer + 20), record, "damaged"),
        (flipped(tiny_sif, tmp_path / "flipped.sif", -1000), record, "flipped.sif"),
        (flipped(tiny_sif, tmp_path / "time.sif", 72), record, "time.sif"),
        (flipped(tiny_sif, tmp_path / "offset.sif", 4096 + 17 + 7), record, "offset.sif"),
        (tar, tmp_path / "other.json", "hpctrain cu130 with openmpi"),
        (tiny_sif, tmp_path / "other.json", "hpctrain cu130 with openmpi"),
        (tar, tmp_path / "list.json", "list.json"),
        (tar, tmp_path / "none.json", "none.json"),
        (tmp_path / "cut.tar", None, "cut.provenance.json"),
        (tmp_path / "none.tar", record, "none.tar"),
    ]:
        done = verify(image, *([its_record] if its_record else []))
        assert done.returncode == 1 and done.stdout == "" and said in done.stderr, (image, done)
        assert done.stderr.startswith("record.py: ") and "Traceback" not in done.stderr


def test_differing_packages_are_named_for_archive_and_sif(tiny, tiny_sif, tmp_path):
    """A build with one more, one less and one changed package.

    The SIF is compared on a node, which has unsquashfs.
    """
    for kind in ("spdx.json", "provenance.json"):
        shutil.copy(tiny / f"build/hpctrain-cpu.{kind}", tmp_path)
    shutil.copytree(tiny, tmp_path / "other", symlinks=True, ignore=shutil.ignore_patterns("hpctrain-cpu*"))
    tree = tmp_path / "other/containers/install/tree"
    (tree / SITE / "pyyaml-6.0.dist-info/METADATA").write_text("Name: PyYAML\nVersion: 6.1\n")
    (tree / SITE / "horovod-0.28.1.dist-info/METADATA").unlink()
    with (tree / "usr/share/hpctrain/debian.tsv").open("a") as file:
        file.write("zsh\t5.9\tamd64\t\n")
    build(tmp_path / "other", tiny.parent / "store")
    run("apptainer/build_sif.sh", cwd=tmp_path / "other")
    record, listed = tmp_path / "hpctrain-cpu.provenance.json", tmp_path / "hpctrain-cpu.spdx.json"
    parameters = json.loads((tmp_path / "other/build/hpctrain-cpu.provenance.json").read_text())
    assert parameters["predicate"]["buildDefinition"]["externalParameters"]["dirty"]
    by_archive = verify(tmp_path / "other/build/hpctrain-cpu.tar", record)
    command = ["python3", "containers/record.py", "verify", "hpctrain-cpu.sif", record]
    by_sif = run(
        "cluster/cluster.sh", "run", "-b", tmp_path, "--", *command, cwd=tmp_path / "other", check=False
    )
    for done in (by_archive, by_sif):
        assert done.returncode == 1
        lines = [line.strip() for line in done.stderr.splitlines()[1:]]
        assert lines[0] == "deb zsh: 5.9; recorded: missing"
        assert lines[1].startswith("pypi horovod: missing; recorded: 0.28.1 ")
        assert lines[2].startswith("pypi pyyaml: 6.1 ") and "recorded: 6.0 ccc" in lines[2]
        assert len(lines) == 3
    listed.write_text(listed.read_text().replace("libc6", "musl"))
    done = verify(tmp_path / "other/build/hpctrain-cpu.tar", record)
    assert done.returncode == 1 and f" {listed} " in done.stderr


def test_an_image_without_its_list_of_packages_is_refused_and_the_old_one_stays(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "other", symlinks=True)
    (tmp_path / "other/containers/install/tree/usr/share/hpctrain/debian.tsv").unlink()
    done = build(tmp_path / "other", tiny.parent / "store", check=False)
    assert done.returncode == 1 and " /usr/share/hpctrain/debian.tsv" in done.stderr
    assert written(tmp_path / "other") == written(tiny)
    assert not list((tmp_path / "other/build").glob("image.*"))


def test_layers_as_docker_saves_them_are_read(tiny, tmp_path):
    """`docker save` writes them without compression (seen with docker 26.1.5)."""
    with tarfile.open(tiny / "build/hpctrain-cpu.tar") as tar:
        tar.extractall(tmp_path / "oci")
    blobs = tmp_path / "oci/blobs/sha256"

    def replace(blob, content):
        entry = {"digest": f"sha256:{hashlib.sha256(content).hexdigest()}", "size": len(content)}
        (blobs / entry["digest"][7:]).write_bytes(content)
        return blob | entry

    index = json.loads((tmp_path / "oci/index.json").read_text())
    manifest = json.loads((blobs / index["manifests"][0]["digest"][7:]).read_text())
    for i, layer in enumerate(manifest["layers"]):
        content = gzip.decompress((blobs / layer["digest"][7:]).read_bytes())
        manifest["layers"][i] = replace(layer, content) | {
            "mediaType": "application/vnd.oci.image.layer.v1.tar"
        }
    index["manifests"] = [replace(index["manifests"][0], json.dumps(manifest).encode())]
    (tmp_path / "oci/index.json").write_text(json.dumps(index))
    run("tar", "-cf", tmp_path / "saved.tar", "-C", tmp_path / "oci", "oci-layout", "index.json", "blobs")
    done = verify(tmp_path / "saved.tar", tiny / "build/hpctrain-cpu.provenance.json")
    assert done.returncode == 1 and "all packages" in done.stderr, done.stdout + done.stderr


def test_a_signed_sif_is_verified_and_a_changed_one_is_refused(tiny, tiny_sif, tmp_path):
    """apptainer checks the signature, and our verify the hash that the file had before it was signed."""
    signed = shutil.copy(tiny_sif, tmp_path / "hpctrain-cpu.sif")
    shutil.copy(tiny / "build/hpctrain-cpu.provenance.json", tmp_path)

    def apptainer(*arguments, **options):
        command = ["run", "-b", tmp_path, "-e", f"APPTAINER_CONFIGDIR={tmp_path}/keys", "--", "apptainer"]
        command += arguments
        return run("cluster/cluster.sh", *command, **options)

    apptainer(
        "key",
        "newpair",
        "--name=A User",
        "--email=user@example.org",
        "--comment=",
        "--password=secret",
        "--push=false",
    )
    command = f"export APPTAINER_CONFIGDIR={tmp_path}/keys; echo secret | apptainer sign {signed}"
    run("cluster/cluster.sh", "run", "-b", tmp_path, "--", "sh", "-c", command)
    assert signed.read_bytes() != tiny_sif.read_bytes()
    assert "Verified signature(s)" in apptainer("verify", signed).stderr
    done = verify(signed)
    assert done.returncode == 0 and " 1 signature " in done.stdout, done.stderr
    flipped(signed, tmp_path / "hpctrain-cpu.sif", 45000)
    assert apptainer("verify", signed, check=False).returncode != 0
    assert verify(signed).returncode == 1


@pytest.mark.main_road("SBOM, provenance, `make verify`")
def test_the_image_is_as_its_record_says(sif):
    """The CPU image itself: every wheel is in a lock, and the SIF is the recorded one."""
    if not IMAGE_TAR.exists():
        pytest.skip(f"no {IMAGE_TAR.name}: make image")
    path = IMAGE_TAR.with_suffix(".spdx.json")
    assert validate_full_spdx_document(parse_file(str(path))) == []
    lock = "".join((REPOSITORY / f"containers/locks/{name}.lock").read_text() for name in ("cpu", "openmpi"))
    elements = json.loads(path.read_text())["packages"][1:]
    wheels = [
        element for element in elements if element.get("packageFileName", "").endswith((".whl", ".tar.gz"))
    ]
    assert len(wheels) > 70 and all(element["checksums"][0]["checksumValue"] in lock for element in wheels)
    debian = [element for element in elements if element["SPDXID"].startswith("SPDXRef-deb-")]
    assert len(debian) > 100 and sum("checksums" in element for element in debian) > 100
    assert [element["name"] for element in elements if element["licenseDeclared"] == "NOASSERTION"] == []
    names = {element["name"] for element in elements}
    assert {"torch", "horovod", "hpctrain", "libc6", "openmpi", "python3.11", "seqeval"} <= names
    for image in (IMAGE_TAR, sif):
        done = verify(image)
        assert done.returncode == 0, done.stderr
