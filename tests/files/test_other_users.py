"""Links, folders and modules that another user made where hpctrain reads and writes.

docs/reference/security.md has the list.
"""

import os
import shutil
import subprocess
import sys
from argparse import Namespace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hpctrain.checkpoints import checkpoint
from hpctrain.commands import rounds
from hpctrain.commands.add import failed_import
from hpctrain.commands.sweep import sweep
from hpctrain.distributed.python import SAFE_PYTHON
from hpctrain.distributed.world import ALONE
from hpctrain.errors import HpctrainError
from hpctrain.files import atomic
from hpctrain.files.digests import check_digests
from hpctrain.files.plain import open_plain
from hpctrain.nlp.data.splits import find_split_files
from hpctrain.nlp.models import hub
from hpctrain.nlp.predict import read_rows
from hpctrain.run import reader
from hpctrain.run.options import RunOptions
from hpctrain.run.owner import Owner
from hpctrain.run.prepare import prepare_folder
from hpctrain.run.record import Record
from hpctrain.servers.tunnel import Tunnel
from tests.helpers import make_run, run_command

by_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make files for another user")
SWEEP = "command: train_single --epochs 1\nmetric: test_accuracy\ndirection: maximize\ntrials: 1\n"


# ---- what is written ----


@by_root
@pytest.mark.parametrize("name", ["checkpoints", "logs", "tensorboard"])
def test_no_folder_of_a_run_is_a_link_of_somebody_else(tmp_path, theirs, name):
    """With a link to another run's checkpoints, those would be overwritten, and the oldest removed."""
    for folder in ("run", "other"):
        (tmp_path / folder).mkdir()
    (link := tmp_path / "run" / name).symlink_to(tmp_path / "other")
    # a link of your own is kept
    prepare_folder("train_ddp", RunOptions(out=tmp_path / "run"))[2].release()
    theirs(link)
    with pytest.raises(HpctrainError, match=r"run: .*another user"):
        prepare_folder("train_ddp", RunOptions(out=tmp_path / "run"))
    # made later
    with pytest.raises(HpctrainError, match=r"epoch-0001\.pt.*another user"):
        checkpoint.save(link / "epoch-0001.pt", {})


@by_root
def test_a_sweep_and_a_download_that_another_user_foresaw_are_refused(tmp_path, monkeypatch, theirs):
    """The best trial was theirs, and theirs the weights, of which nothing was downloaded."""
    monkeypatch.chdir(tmp_path)
    Path("search.yaml").write_text(SWEEP + "parameters:\n  lr: {values: [0.1]}\n")
    Path("runs/search/trial-000").mkdir(parents=True)
    theirs(Path("runs/search"))
    with pytest.raises(HpctrainError, match=r"runs/search: .*another user.* --out"):
        sweep.main(ALONE, ["search.yaml"])
    # one of their own trials in a folder that is meant
    Path("runs/search/trial-000/parameters.json").write_text('{"lr": 0.1, "data": "theirs"}')
    with pytest.raises(HpctrainError, match=r"trial-000/parameters\.json.* --out"):
        sweep.main(ALONE, ["search.yaml", "--out", "runs/search", "--show"])
    monkeypatch.setattr(hub.HfApi, "model_info", lambda *_, **__: SimpleNamespace(sha="c0"))
    (unfinished := Path(".kcbert.c0.partial")).mkdir()
    theirs(unfinished)
    with pytest.raises(HpctrainError, match=r"\.partial: .*another user"):
        hub.fetch_model("beomi/kcbert-base", Path("kcbert"))
    assert not Path("kcbert").exists()


@by_root
@pytest.mark.parametrize("made", ["folder", "link", "parent"])
def test_a_run_folder_that_another_user_foresaw_is_refused(tmp_path, monkeypatch, made):
    """Job numbers can be foreseen: a link there led the files of a run over others of the user's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "48")
    (tmp_path / "precious").mkdir()
    theirs = Path("runs/train" if made == "parent" else "runs/train/48")
    theirs.parent.mkdir(parents=True)
    if made == "folder":
        theirs.mkdir()
    else:
        theirs.symlink_to(tmp_path / "precious")
    os.chown(theirs, 12345, -1, follow_symlinks=False)
    with pytest.raises(HpctrainError, match="another user"):
        prepare_folder("train", RunOptions())
    with pytest.raises(HpctrainError, match="another user"), Tunnel("train"):
        pass
    Path("runs/train").rename("runs/bench")
    with pytest.raises(HpctrainError, match="another user"):
        rounds.prepare(Path("runs/bench/48"), foreseen=True)
    assert not list((tmp_path / "precious").iterdir())


@by_root
@pytest.mark.parametrize(
    ("what", "resume"),
    [
        ("run", "auto"),
        ("run", "folder"),
        ("run", None),
        ("run/checkpoints", None),
        ("run/checkpoints/epoch-0001.pt", "auto"),
        ("everybody's", "auto"),
    ],
)
def test_no_run_begins_or_goes_on_in_what_another_user_made(tmp_path, theirs, monkeypatch, what, resume):
    """The weights of another user became the result, in their folder: made before, or exchanged since."""
    folder = tmp_path / ("everybody's/run" if what == "everybody's" else "run")
    (folder / "checkpoints").mkdir(parents=True)
    checkpoint.save(folder / "checkpoints/epoch-0001.pt", {})
    (folder / "config.json").write_text('{"job": "48", "trainer": "train"}')
    monkeypatch.setenv("SLURM_JOB_ID", "48")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    options = RunOptions(out=folder, resume=folder if resume == "folder" else resume)
    prepare_folder("train", options)[2].release()
    if what == "everybody's":
        os.chown(folder.parent, 1234, 1234)
        folder.parent.chmod(0o775)  # as in the folder of a project
        prepare_folder("train", options)[2].release()
        folder.parent.chmod(0o777)
    else:
        theirs(tmp_path / what)
    with pytest.raises(HpctrainError, match=r"run: .*another user.*--out"):
        prepare_folder("train", options)
    assert not (folder / "owner.json").exists()
    if what == "run":  # what is meant to be of somebody else
        own = prepare_folder("train", RunOptions(out=tmp_path / "own", resume=folder))
        assert own[1] == folder / "checkpoints/epoch-0001.pt"
        own[2].release()


@by_root
@pytest.mark.parametrize("first_file", [False, True])
def test_a_new_folder_that_another_user_exchanges_is_left(tmp_path, monkeypatch, theirs, first_file):
    """Between mkdir() and the first file, or after it, while no config.json identifies the run."""
    folder, mkdir, acquire = tmp_path / "run", Path.mkdir, Owner.acquire

    def exchange():
        folder.rename(tmp_path / "away")
        mkdir(folder)
        theirs(folder)

    def make(path, *args, **kwargs):
        mkdir(path, *args, **kwargs)
        if path == folder and not first_file:
            exchange()

    def become_owner(owner):
        acquire(owner)
        exchange()

    monkeypatch.setattr(Path, "mkdir", make)
    if first_file:
        monkeypatch.setattr(Owner, "acquire", become_owner)
    with pytest.raises(HpctrainError, match=r"run: .*another"):
        Record(ALONE, "mine", RunOptions(out=folder), torch.device("cpu"))
    if not first_file:
        for make_folder in (
            Tunnel("serve", folder).__enter__,
            lambda: rounds.prepare(folder, foreseen=False),
        ):
            shutil.rmtree(folder)
            shutil.rmtree(tmp_path / "away")
            with pytest.raises(HpctrainError, match=r"run: .*another"):
                make_folder()
        assert not list(folder.iterdir())


@by_root
@pytest.mark.parametrize("name", [".probe", "metrics.jsonl", "logs/rank-0.log", "token"])
def test_links_in_a_run_folder_that_others_can_write(tmp_path, theirs, name):
    """Their names can be predicted."""
    (tmp_path / "logs").mkdir()
    link = tmp_path / (f".probe.{os.getpid()}" if name == ".probe" else name)
    link.symlink_to(tmp_path / "mine")
    theirs(link)
    if name == "token":
        with Tunnel("serve", tmp_path) as opened:
            assert link.read_text() == opened.token + "\n" and not link.is_symlink()
    elif name == ".probe":
        with pytest.raises(HpctrainError, match="File exists"):
            prepare_folder("train_ddp", RunOptions(out=tmp_path))
    else:
        with pytest.raises(PermissionError, match="another user"):
            atomic.open_to_append(link)


# ---- what is read ----


@by_root
@pytest.mark.parametrize("read", [reader.read_configs, reader.load_metrics])
def test_a_run_folder_that_is_closed_to_this_user_is_one_line(tmp_path, read):
    make_run(tmp_path / "run")
    os.seteuid(65534)
    try:
        with pytest.raises(HpctrainError, match=r"run/.*: cannot be read \(Permission denied\)"):
            read(tmp_path / "run")
    finally:
        os.seteuid(0)


@by_root
@pytest.mark.parametrize(
    ("name", "trick"),
    [
        *product(
            ["search.yaml", "pruned.txt", "error.txt", "SHA256SUMS"], ["link", "pipe", "device", "large"]
        ),
        ("texts", "link"),
    ],
)
def test_small_files_of_others_are_read_with_care(tmp_path, monkeypatch, capsys, theirs, name, trick):
    """A link to a secret was quoted in the log, a pipe waited for, and /dev/zero filled the memory."""
    parameters = "parameters:\n  lr: {values: [0.1]}\n"
    (search := tmp_path / "search.yaml").write_text(SWEEP + parameters)
    (trial := tmp_path / "out/trial-000").mkdir(parents=True)
    (trial / "parameters.json").write_text('{"lr": 0.1}')
    path = trial / name if name.endswith(".txt") else tmp_path / name
    path.unlink(missing_ok=True)
    if trick == "pipe":
        os.mkfifo(path)
    elif trick == "large":
        with path.open("wb") as file:
            file.truncate(2**40)
    else:
        (tmp_path / "token").write_text("[hf_secret]")
        path.symlink_to("/dev/zero" if trick == "device" else tmp_path / "token")
        theirs(path)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: None)
    try:
        if name == "SHA256SUMS":
            check_digests(tmp_path)
        elif name == "texts":
            next(read_rows(Namespace(file=path), SimpleNamespace(inputs=["text"])))
        else:
            sweep.main(ALONE, [str(search), "--out", f"{tmp_path}/out", *["--show"] * (name == "pruned.txt")])
    except HpctrainError as error:
        assert "secret" not in str(error)
        assert str(path) in str(error) or name != "search.yaml"
    else:
        assert name == "pruned.txt" and "pruned" in capsys.readouterr().out


@by_root
def test_a_link_of_somebody_else_to_a_file_of_yours_is_not_read(tmp_path, theirs):
    """The error about its first line quoted a token in the log of the job, which others may read."""
    (tmp_path / "token").write_text("hf_secret")
    (link := tmp_path / "link").symlink_to("token")

    def read():
        with open_plain(link) as file:
            return file.read()

    assert read() == b"hf_secret"
    theirs(link)
    with pytest.raises(HpctrainError, match=r"link: .*another user.*token"):
        read()
    os.chown(tmp_path / "token", 1234, 1234)
    assert read() == b"hf_secret"


@by_root
def test_a_link_of_somebody_else_to_a_folder_of_yours_is_not_read(tmp_path, theirs):
    for name in ("private/train.txt", "data/test/a.txt"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("secret")
    (link := tmp_path / "data/train").symlink_to("../private")
    assert sorted(find_split_files(tmp_path / "data")) == ["test", "train"]
    os.chown(link, 1234, 1234, follow_symlinks=False)
    with pytest.raises(HpctrainError, match=r"train\.txt: .*another user"):
        find_split_files(tmp_path / "data")
    os.chown(tmp_path / "private/train.txt", 1234, 1234)
    assert sorted(find_split_files(tmp_path / "data")) == ["test", "train"]


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no option -P")
def test_modules_in_a_folder_of_others_are_not_imported(tmp_path, monkeypatch):
    for name in ("torch", "yaml", "optuna", "numpy", "uv"):
        (tmp_path / f"{name}.py").write_text("open('canary', 'w')")
    (tmp_path / "search.yaml").write_text(SWEEP + "parameters: {seed: {values: [1]}}\n")
    command = [*SAFE_PYTHON, "-m", "hpctrain", "sweep", "search.yaml", "--out", "sweep"]
    env = os.environ | {"MPLCONFIGDIR": str(tmp_path)}
    done = run_command(command, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    monkeypatch.chdir(tmp_path)
    (tmp_path / "added").mkdir()
    assert failed_import(tmp_path / "added") is None
    assert not (tmp_path / "canary").exists()


# ---- what others may read ----


@pytest.mark.slow
@pytest.mark.main_road
def test_a_run_holds_no_secret_and_is_for_its_user_alone(tmp_path):
    """With a umask that lets others read.

    The token is where a user would put it by mistake: in names of folders.
    """
    token, secret = "hf_abcdefghijklmnop", "0123456789abcdef" * 2
    (tmp_path / "there").mkdir(mode=0o755)
    env = {"HF_TOKEN": token, "HPCTRAIN_JOB_SECRET": secret, "MPLCONFIGDIR": str(tmp_path)}
    env |= {"HPCTRAIN_IMAGE": "docker://me:pass@host/image", "HPCTRAIN_CACHE": f"{tmp_path}/caches/cache"}
    for out in (f"new/{token}", "there"):
        command = [sys.executable, "-m", "hpctrain", "nlp.ner", "--epochs=1", "--limit=40", "--out", out]
        done = run_command(command, cwd=tmp_path, env=os.environ | env, umask=0o022)
        assert done.returncode == 0, done.stderr
        files = [path for path in (tmp_path / out).rglob("*") if path.is_file()]
        found = [done.stdout + done.stderr, *(path.read_bytes().decode("latin-1") for path in files)]
        assert not any(text in content for content in found for text in (token, secret, "me:pass"))
    modes = {f"new/{token}": 0o700, "there": 0o755, "caches/cache": 0o700}
    assert {name: (tmp_path / name).stat().st_mode & 0o777 for name in modes} == modes
