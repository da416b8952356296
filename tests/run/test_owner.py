"""Who writes in a run folder: one job at a time."""

import json
import multiprocessing
import os
import resource
import time
from types import SimpleNamespace

import pytest

from hpctrain.errors import HpctrainError
from hpctrain.files import atomic
from hpctrain.run import owner
from hpctrain.run.owner import Owner

# What tells this machine's processes from those of another; a job on another node has another one.
ELSEWHERE = {"space": "another node"}


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(owner, "BEAT", 0.4)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)


def content(folder):
    return json.loads((folder / "owner.json").read_text())


def acquired(folder):
    new = Owner(folder)
    new.acquire()
    return new


def test_a_second_job_is_refused_by_the_name_of_the_first(tmp_path, monkeypatch):
    first = acquired(tmp_path)
    (tmp_path / "owner.json").write_text(json.dumps(content(tmp_path) | ELSEWHERE))
    monkeypatch.setenv("SLURM_JOB_ID", "18")
    with pytest.raises(
        HpctrainError, match=rf"{tmp_path}: job 17 on \S+ \(process {os.getpid()}\) writes in this run folder"
    ):
        acquired(tmp_path)
    first.check()
    other_rank = Owner(tmp_path, first.id)  # writes in the folder as well
    other_rank.check()
    first.release()
    with pytest.raises(HpctrainError, match=r"so this one ends and writes nothing more"):
        other_rank.check()


def test_a_folder_that_was_released_is_free_at_once(tmp_path, capsys):
    acquired(tmp_path).release()
    assert not (tmp_path / "owner.json").exists()
    acquired(tmp_path).release()
    assert capsys.readouterr().out == ""


def test_an_owner_that_cannot_be_written_leaves_no_file(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            acquired(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_owner_that_shows_no_sign_of_life_is_dead(tmp_path, monkeypatch, capsys):
    """Clocks of nodes differ: only a change of the time stamp is a sign of life."""
    for stamp in (0, 4_000_000_000):
        (tmp_path / "owner.json").write_text(
            json.dumps({"job": "3", "host": "node7", "pid": 5, "id": "x"} | ELSEWHERE)
        )
        os.utime(tmp_path / "owner.json", (stamp, stamp))
        started = time.monotonic()
        new = acquired(tmp_path)
        assert time.monotonic() - started > 4.5 * owner.BEAT
        assert (
            "job 3 on node7 (process 5) wrote in" in capsys.readouterr().out
            and content(tmp_path)["job"] == "17"
        )
        new.release()


def test_a_process_of_this_machine_that_has_ended_needs_no_watching(tmp_path, capsys):
    process = multiprocessing.get_context("fork").Process(target=lambda: (acquired(tmp_path), os._exit(1)))
    process.start()
    process.join()
    assert content(tmp_path)["pid"] == process.pid
    acquired(tmp_path).release()
    assert capsys.readouterr().out == ""


def test_a_restart_of_the_job_takes_the_folder_and_the_old_ranks_end(tmp_path, monkeypatch):
    old = acquired(tmp_path)
    old.check()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    new = acquired(tmp_path)
    with pytest.raises(
        HpctrainError, match=r"job 17 on .* continues this run, so this one ends and writes nothing more"
    ):
        old.check()
    old.release()  # of what is not its own any more
    new.check()
    new.release()


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', '{"pid": "../..", "job": []}', "\0\udcff"])
def test_a_file_without_sense_is_an_owner_that_is_dead(tmp_path, text):
    (tmp_path / "owner.json").write_bytes(text.encode(errors="surrogateescape"))
    acquired(tmp_path).release()


def test_of_many_that_begin_at_the_same_time_one_owns_the_folder(tmp_path):
    def begin(over):
        try:
            acquired(tmp_path)
        except HpctrainError:
            os._exit(1)
        over.wait()
        os._exit(0)

    fork = multiprocessing.get_context("fork")
    over = fork.Event()
    started = [fork.Process(target=begin, args=(over,)) for _ in range(8)]
    for process in started:
        process.start()
    while sum(process.is_alive() for process in started) > 1:
        time.sleep(0.05)
    over.set()
    for process in started:
        process.join()
    assert sorted(process.exitcode for process in started) == [0] + [1] * 7


def test_the_same_process_begins_again(tmp_path, capsys):
    """As in a notebook, after an error."""
    first = acquired(tmp_path)
    acquired(tmp_path).check()
    assert capsys.readouterr().out == ""
    with pytest.raises(HpctrainError, match="continues this run"):
        first.check()


def test_a_file_system_that_does_not_answer_is_no_reason_to_end(tmp_path):
    new = acquired(tmp_path)
    (tmp_path / "owner.json").rename(tmp_path / "away")
    (tmp_path / "owner.json").mkdir()  # reading it raises OSError
    new.check()
    (tmp_path / "owner.json").rmdir()
    with pytest.raises(HpctrainError, match="somebody has removed"):
        new.check()


@pytest.mark.parametrize("content_now", [None, b"\xff", b"", b"[1]"])
def test_owner_json_that_was_removed_or_damaged_is_made_again(tmp_path, capsys, content_now):
    first = acquired(tmp_path)
    (tmp_path / "config.json").touch()
    other_rank = Owner(tmp_path, first.id)
    for each in (first, other_rank):
        each.check()
    (tmp_path / "owner.json").unlink()
    if content_now is not None:
        (tmp_path / "owner.json").write_bytes(content_now)
    other_rank.check()
    first.check()
    assert content(tmp_path)["id"] == first.id
    assert capsys.readouterr().out == f"hpctrain: {tmp_path}/owner.json was removed or damaged: made again\n"
    (tmp_path / "owner.json").unlink()
    (tmp_path / "config.2.json").touch()  # another start has come and gone
    for each in (first, other_rank):
        with pytest.raises(HpctrainError, match="somebody has removed"):
            each.check()


@pytest.mark.parametrize("is_link", [False, True])
def test_a_folder_that_somebody_has_exchanged_is_not_written(tmp_path, is_link):
    """Whoever can write beside the folder made the job write its weights into a folder of theirs, or over
    another run of the same user.
    """
    folder, other = tmp_path / "run", tmp_path / "other"
    for path, text in ((folder, "ours"), (other, "another")):
        path.mkdir()
        (path / "config.json").write_text(text)
    owners = [acquired(folder)]
    owners.append(Owner(folder, owners[0].id))
    for each in owners:
        each.check()
    folder.rename(tmp_path / "away")
    folder.symlink_to(other) if is_link else other.rename(folder)
    for each in owners:
        with pytest.raises(HpctrainError, match=r"run: another folder is in the place of this run's, so "):
            each.check()
    assert [path.name for path in folder.iterdir()] == ["config.json"]


@pytest.mark.parametrize("during_a_check", [False, True])
def test_a_file_system_that_is_gone_is_waited_for(tmp_path, monkeypatch, capsys, during_a_check):
    """Gone just after owner.json was read, the run ended as one whose folder another job has taken."""
    folder, away = tmp_path / "run", tmp_path / "away"
    folder.mkdir()
    first = acquired(folder)
    (folder / "config.json").touch()
    first.check()
    read = first._read

    def read_and_lose():
        monkeypatch.setattr(first, "_read", read)
        content = read()
        folder.rename(away)
        folder.mkdir()
        return content

    if during_a_check:
        monkeypatch.setattr(first, "_read", read_and_lose)
        first.check()
    else:
        read_and_lose()

    def come_back(_):
        folder.rmdir()
        away.rename(folder)

    monkeypatch.setattr(atomic, "time", SimpleNamespace(sleep=come_back, monotonic=time.monotonic))
    first.check()
    assert (
        "the files of this run are gone: is its file system mounted?; trying again" in capsys.readouterr().out
    )
    folder.rename(away)
    monkeypatch.setattr(atomic, "RETRY_FOR", -1.0)
    with pytest.raises(HpctrainError, match=r"mounted\? Start again with --resume"):
        first.check()
