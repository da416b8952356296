"""The digest of a SIF: hashed by the first job, found by the later ones in a record that can be trusted."""

import hashlib
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.helpers import run_command
from tests.launch.helpers import BARE, BY_ROOT, QUOTED, library, put, wait_until


@pytest.fixture(params=["my image.sif", "a\\b.sif"])
def image(tmp_path, request):
    sif = tmp_path / "images" / request.param
    sif.parent.mkdir()
    sif.write_bytes(os.urandom(1 << 20))
    return sif


one_image = pytest.mark.parametrize("image", ["my image.sif"], indirect=True)


def digest_of(sif):
    return "sha256:" + hashlib.sha256(sif.read_bytes()).hexdigest()


def find(sif):
    """The digest from a record; "" if the job would hash the image."""
    script = f"find_digest '{sif}'; echo ${{DIGEST:-}} ${{DIGEST_PENDING:+pending}}"
    said = library(script, HPCTRAIN_CACHE=str(sif.parents[1] / "cache")).stdout.strip()
    return "" if said == "pending" else said


def hash_then(sif, script, before=""):
    """The script of a job that hashes the image."""
    main = f"set -euo pipefail; source {QUOTED}/lib/main.sh"
    return f"{main}; find_digest '{sif}'; {before} hash_in_background '{sif}'; {script}"


def hash_it(sif):
    """The output of a job that hashes the image, and the file that it names for the digest."""
    script = hash_then(sif, "echo ${HPCTRAIN_IMAGE_DIGEST_FILE:-}; exec sleep 300")
    env = BARE | {"HPCTRAIN_CACHE": str(sif.parents[1] / "cache")}
    with subprocess.Popen(["bash", "-c", script], env=env, stdout=subprocess.PIPE, text=True) as job:
        lines = [job.stdout.readline().strip() for _ in range(2)]
        said = [line for line in lines if line.startswith("hpctrain:")]
        (promised,) = set(lines) - set(said)
        # The record beside the image is written last, if it can be.
        beside = Path(f"{sif}.digest")
        record = Path(promised) if beside.is_dir() else beside
        wait_until(lambda: record.exists() and record.read_text().startswith(digest_of(sif)), 60)
        job.kill()
    return said, promised


@one_image
def test_a_record_is_valid_in_every_locale(image, tmp_path):
    """In German, stat prints a decimal comma, and each job hashed the image again."""
    put(tmp_path, stat='[[ $LC_ALL == C ]] || exec /usr/bin/stat "$@" | tr . ,; exec /usr/bin/stat "$@"')
    stamp = run_command(["stat", "-c", "%s %.9Y", image]).stdout.strip()
    Path(f"{image}.digest").write_text(f"{digest_of(image)} {stamp}\n")
    env = {"HPCTRAIN_CACHE": str(tmp_path / "cache"), "PATH": f"{tmp_path}:{BARE['PATH']}"}
    assert library(f"find_digest '{image}'; echo $DIGEST", **env).stdout == f"{digest_of(image)}\n"


def test_only_the_first_job_hashes(image):
    """Whatever the name of the image, and by a link."""
    assert find(image) == ""
    said, promised = hash_it(image)
    assert len(said) == 1 and f"{image} {digest_of(image)}" in said[0]
    assert Path(promised).read_text() == f"{digest_of(image)}\n"
    (link := image.parents[1] / "link.sif").symlink_to(image)
    assert find(image) == find(link) == digest_of(image)
    assert sorted(path.name for path in image.parent.iterdir()) == [image.name, f"{image.name}.digest"]


@one_image
def test_where_the_folder_of_the_image_cannot_be_written_the_cache_has_the_record(image):
    Path(f"{image}.digest").mkdir()  # which nothing can replace, not even for root
    hash_it(image)
    folder = image.parents[1] / "cache/digests"
    (record,) = folder.iterdir()
    # somebody else's, in /tmp perhaps, or one that others can replace or change
    for path in (record, folder):
        assert find(image) == digest_of(image)
        os.chown(path, 12345, -1)
        assert find(image) == ""
        os.chown(path, os.geteuid(), -1)
        mode = path.stat().st_mode
        path.chmod(mode | 0o020)
        assert find(image) == ""
        path.chmod(mode)


@one_image
@pytest.mark.parametrize("changed", ["cache", "cache/digests"])
def test_the_record_is_not_in_a_cache_that_others_can_change(image, changed):
    """A link that somebody made there led the record to a private file, which got its mode, too."""
    digests = image.parents[1] / "cache/digests"
    digests.mkdir(parents=True)
    (image.parents[1] / changed).chmod(0o777)
    _, promised = hash_it(image)
    assert promised.startswith(f"/tmp/hpctrain-{os.getuid()}/digests/") and not list(digests.iterdir())
    assert Path(promised).stat().st_mode & 0o777 == 0o644
    Path(promised).unlink()


@one_image
def test_a_record_counts_for_its_image_alone(image):
    hash_it(image)
    copy = image.parent / "copy.sif"
    shutil.copy(image, copy)  # another time
    shutil.copy(f"{image}.digest", f"{copy}.digest")
    assert find(copy) == ""
    time_of_change = image.stat().st_mtime_ns
    image.write_bytes(image.read_bytes() + b"x")
    os.utime(image, ns=(time_of_change, time_of_change))
    assert find(image) == ""
    said, _ = hash_it(image)
    assert digest_of(image) in said[0] and find(image) == digest_of(image)


@BY_ROOT
@one_image
def test_a_record_of_somebody_else_does_not_count(image):
    """In a folder such as /tmp anybody can put one beside the image.

    Who owns the image or runs the job can be trusted.
    """
    hash_it(image)
    record = Path(f"{image}.digest")
    shutil.rmtree(image.parents[1] / "cache")
    os.chown(image, 23456, -1)
    for owner, counts in ((os.getuid(), True), (23456, True), (12345, False)):
        os.chown(record, owner, -1)
        assert find(image) == (digest_of(image) if counts else "")
    record.unlink()
    os.mkfifo(record)  # nobody writes to it
    assert find(image) == ""


@pytest.mark.slow
@one_image
def test_an_image_that_is_replaced_before_it_is_hashed_is_not_taken_for_the_first(image):
    """--broadcast and a check of MPI come between, and may take minutes."""
    other, first = image.parent / "other", image.parent / "first"
    other.write_bytes(b"other")
    script = hash_then(image, "sleep 2", f"mv '{image}' '{first}'; mv '{other}' '{image}';")
    done = library(script, HPCTRAIN_CACHE=str(image.parents[1] / "cache"))
    assert (done.returncode, done.stdout) == (0, "")
    first.rename(image)
    assert find(image) == ""


@one_image
@pytest.mark.parametrize("text", ["", "sha256:abc {stamp}\n", "{digest}\n", "{digest} {stamp}x\n", "\0\xff"])
def test_a_record_that_is_broken_does_not_count(image, text):
    stamp = subprocess.check_output(["stat", "-c", "%s %.9Y", image], text=True).strip()
    for record, counts in ((text, False), ("{digest} {stamp}\n", True)):
        Path(f"{image}.digest").write_text(record.format(digest=digest_of(image), stamp=stamp))
        assert find(image) == (digest_of(image) if counts else "")


@one_image
def test_nothing_is_left_when_the_job_ends_before_the_hash(image):
    """The launcher replaces the script, which then cannot clean up; the image here takes minutes to read."""
    os.truncate(image, 1 << 40)
    cache = image.parents[1] / "cache"
    done = library(hash_then(image, "exec sleep 1"), HPCTRAIN_CACHE=str(cache))
    assert done.returncode == 0 and done.stdout == ""  # so the pipe is closed: no process has it open
    hashes = ["pgrep", "-f", f"sha256sum {image}"]
    wait_until(lambda: not subprocess.run(hashes, capture_output=True).stdout, 10)  # it has got a signal
    time.sleep(0.1)
    assert not list((cache / "digests").iterdir())


@pytest.mark.slow
@BY_ROOT
@one_image
def test_no_digest_is_written_into_a_folder_of_somebody_else(image, stranger):
    """A folder with the name of the user's in /tmp, in which everything is prepared."""
    digests = stranger.own / "cache/digests"
    digests.mkdir(parents=True)
    for path in (stranger.own, stranger.own / "cache", digests):
        path.chmod(0o777)
    sif = shutil.copy(image, stranger.folder / "x.sif")
    script = hash_then(sif, "sleep 3; echo file ${HPCTRAIN_IMAGE_DIGEST_FILE:-none}")
    script = script.replace(QUOTED, str(stranger.launch))
    done = stranger.run("bash", "-c", script, env=BARE | {"HPCTRAIN_CACHE": f"{stranger.own}/cache"})
    assert done.stdout.endswith(f"{digest_of(image)}\nfile none\n") and not list(digests.iterdir()), done
