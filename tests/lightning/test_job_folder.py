"""A Trainer of a script that does not know hpctrain goes on after a requeue, or trains as without it."""

import json
import os
import re
import signal
import sys
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, IterableDataset

from hpctrain.lightning import ATTEMPT, JobFolder, RunFolder, _attempt
from hpctrain.run.config import write_json
from hpctrain.run.owner import launch_id
from tests.helpers import REPOSITORY
from tests.lightning.test_run_folder import run_script, stop_after
from tests.tools import warm_start

QUIET = dict.fromkeys(["logger", "enable_progress_bar", "enable_model_summary"], False)


class Sum(LightningModule):
    """It learns the sum of its inputs, with dropout; some batches have no finite loss."""

    def __init__(self, *, manual=False, lost=(), plateau=False):
        super().__init__()
        self.automatic_optimization, self.lost, self.plateau = not manual, lost, plateau

    def setup(self, stage):
        if not hasattr(self, "net"):  # as many modules make their layers
            self.net = torch.nn.Sequential(
                torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
            )

    def training_step(self, points, number):
        loss = (self.net(points)[:, 0] - points.sum(1)).square().mean()
        self.log("loss", loss)
        return loss.detach() * float("nan") if number in self.lost else loss

    def configure_optimizers(self):
        sgd = torch.optim.SGD(self.parameters(), lr=0.05)
        scheduler = {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(sgd), "monitor": "loss"}
        return {"optimizer": sgd, "lr_scheduler": scheduler} if self.plateau else sgd

    def backward(self, loss):
        if loss.requires_grad:
            loss.backward()


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.ones(4, 4))


class StopAfter(Callback):
    """Asks for the end of the job after so many steps, as the launch script does."""

    def __init__(self, steps):
        self.steps = steps

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.steps:
            Path(os.environ["HPCTRAIN_CONTROL"], "stop").touch()


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Begin a start of job 7, the first one being 0, in tmp_path."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr("hpctrain.checkpoints.saver.MAX_STEPS", 1)
    monkeypatch.chdir(tmp_path)

    def start(restart=0, launch="one", command=("train.py",), **env):
        monkeypatch.setattr(JobFolder, "_fits", 0)
        monkeypatch.setattr(sys, "argv", [*command])
        # not HPCTRAIN_WORLD_SIZE, or Lightning would give each Trainer another one
        env |= {"HPCTRAIN_CONTROL": str(tmp_path / "control"), "HPCTRAIN_JOB_SECRET": launch}
        for name, value in ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restart)} | env).items():
            monkeypatch.setenv(name, value)
        (tmp_path / "control").mkdir(exist_ok=True)
        for path in (tmp_path / "control").iterdir():
            path.unlink()

    start()
    yield start
    for number, handler in handlers.items():
        signal.signal(number, handler)


def make_trainer(*callbacks, **options):
    options = QUIET | {"max_epochs": 2, "enable_checkpointing": False} | options
    trainer = Trainer(accelerator="cpu", devices=1, callbacks=[*callbacks], **options)
    trainer.callbacks.append(JobFolder())  # as Lightning does with those of entry points
    return trainer


def fit(trainer, module=None, points=32, **options):
    """Train on so many points, in an order that the seed decides; the sum of the weights."""
    module = module or Sum()
    data = torch.arange(points * 4.0).view(-1, 4) / points / 4
    trainer.fit(module, DataLoader(data, batch_size=4, shuffle=True), **options)
    return sum(weight.double().sum().item() for weight in module.parameters())


def result(number=1):
    kind = "trainer" if number == 1 else f"trainer-{number}"
    return json.loads(Path("runs", kind, "7/result.json").read_text())


@pytest.mark.parametrize("unseeded", [False, True])
def test_a_trainer_goes_on_within_an_epoch(start, tmp_path, monkeypatch, capsys, unseeded):
    """A script without a seed has other random numbers in each job, and the same ones in each start of it."""
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    if not unseeded:
        monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    torch.manual_seed(5)
    with pytest.raises(SystemExit) as ended:
        fit(make_trainer(StopAfter(11)))
    assert ended.value.code == 0 and (tmp_path / "control/stopped").exists()
    assert (tmp_path / "control/saved").read_text() == ""  # the same command goes on
    start(1)
    torch.manual_seed(6)
    weights = fit(trainer := make_trainer())
    assert re.search(r"resuming after epoch 1 and \d steps of runs/trainer/7/", capsys.readouterr().out)
    start(2)
    assert fit(again := make_trainer()) == weights  # finished
    assert again.callback_metrics.keys() == trainer.callback_metrics.keys() == {"loss"}
    Path("runs").rename("before")
    start(0)
    torch.manual_seed(5)
    assert fit(make_trainer()) == weights


def test_each_fit_has_a_folder_of_its_own(start, tmp_path):
    """Also those of one Trainer, and one that begins with a checkpoint of the script's."""
    keep = ModelCheckpoint(dirpath=tmp_path / "own", filename="{epoch}", save_top_k=-1)
    fit(trainer := make_trainer(keep, enable_checkpointing=True), module := Sum())
    trainer.fit_loop.max_epochs = 3
    fit(trainer, module)
    fit(make_trainer(max_epochs=4), ckpt_path=tmp_path / "own/epoch=1.ckpt")
    assert [result(number)["epochs"] for number in (1, 2, 3)] == [2, 3, 4]
    assert {path.name for path in Path("runs/trainer-3/7/checkpoints").iterdir()} == {
        "epoch-0003.pt",
        "epoch-0004.pt",
    }
    state = torch.load(tmp_path / "own/epoch=1.ckpt", weights_only=True)
    assert "JobFolder" not in state["callbacks"]


def test_a_loss_that_is_not_finite_is_the_matter_of_the_script(start):
    fit(make_trainer(), Sum(lost=range(2, 5)))
    assert result()["epochs"] == 2


def own_handler():
    signal.signal(signal.SIGUSR1, lambda *_: None)


def foreign_file():
    Path("runs").touch()


class KillAfter:
    """In a rank: kills rank 1 after so many optimizer steps."""

    def __init__(self, steps):
        self.steps = steps

    def __call__(self):
        numbers = count(1)

        def kill(*_):
            if next(numbers) == self.steps and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)

        register_optimizer_step_post_hook(kill)


@pytest.mark.slow
def test_a_script_goes_on_that_does_not_know_hpctrain(tmp_path):
    """On two ranks: asked to stop, then one is killed. The installed hpctrain has the entry points."""
    script = REPOSITORY / "tests/scripts/plain_lightning.py"

    def run(name, *prepares):
        (folder := tmp_path / name).mkdir()
        (control := tmp_path / f"control-{name}").mkdir()
        env = {"HPCTRAIN_CONTROL": str(control), "HPCTRAIN_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
        for restart, prepare in enumerate(prepares):
            for path in control.iterdir():
                path.unlink()
            own = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restart)}
            setup = partial(run_script, script, prepare)
            ended = warm_start.run(warm_start.torchrun_ranks(2, [], os.environ | env | own, setup), folder)
            yield ended, {path.name for path in control.iterdir()}
        assert "rank 0 of 2 loss" in ended.stdout and "rank 1 of 2 loss" in ended.stdout, ended
        yield json.loads((folder / "runs/trainer/7/result.json").read_text())["weights_sha256"]

    *_, whole = run("whole", None)
    (stopped, told), (killed, _), (done, _), weights = run("cut", partial(stop_after, 2), KillAfter(2), None)
    assert stopped.returncode == 0 and "stopped" in told and "goes on from runs/trainer/7" in stopped.stdout
    assert killed.returncode != 0 and "resuming after epoch" in done.stdout, killed.stdout + done.stdout
    assert weights == whole


CASES = {
    "steps": ("max_steps", {"max_epochs": -1, "max_steps": 5}, {}, None),
    "manual": ("automatic optimization", {}, {"manual": True}, None),
    "plateau": ("ReduceLROnPlateau", {}, {"plateau": True}, None),
    "handler": ("a handler for SIGUSR1", {}, {}, own_handler),
    "folder": ("runs/trainer/7 cannot be written on ", {}, {}, foreign_file),
    "stream": ("not from this DataLoader", {}, {}, None),
    "ranks": ("1 of the job's 2 ranks", {}, {}, None),
    "child": ("a process that a rank has started", {}, {}, None),
    "RunFolder": ("", {"enable_checkpointing": True}, {}, None),
}


@pytest.mark.parametrize("name", CASES)
def test_a_trainer_that_cannot_go_on_trains_as_without_it(start, tmp_path, monkeypatch, capsys, name):
    text, options, of_module, prepare = CASES[name]
    if prepare:
        prepare()
    trainer = make_trainer(*([RunFolder("mine")] if name == "RunFolder" else []), **options)
    if name == "ranks":
        monkeypatch.setattr("hpctrain.lightning.count_ranks", lambda: 2)
    if name == "child":
        monkeypatch.setattr("hpctrain.lightning.is_child_of_rank", lambda: True)
    data = Stream() if name == "stream" else torch.ones(32, 4)
    trainer.fit(Sum(**of_module), DataLoader(data, batch_size=4))
    assert trainer.current_epoch > 0 and not any(isinstance(each, JobFolder) for each in trainer.callbacks)
    printed = re.findall("^hpctrain: this Trainer does not go on .*", capsys.readouterr().out, re.M)
    assert len(printed) == bool(text) and re.search(text, "".join(printed)), printed
    assert not Path("runs").is_dir()
    # so that a handler of Lightning or of the script gets the signal
    assert (tmp_path / "control/polled").exists() == (name == "RunFolder")


# The starts of a job, each with its restart, its launch, its command and its number of calls of fit(); and
# the number of the folder of each call.
ONCE = {number: [(number, each, "x", 1) for each in launches] for number, launches in enumerate(("ab", "cd"))}
STARTS = {
    "requeued": ([(0, "a", "x", 2), (1, "b", "x", 3)], [1, 2, 1, 2, 3]),
    # in one batch script of the user's, and again after a requeue
    "a loop": (
        [(0, "a", "x", 1), (0, "b", "y", 2), (1, "c", "x", 1), (1, "d", "y", 2)],
        [1, 2, 3, 1, 2, 3],
    ),
    "a loop of one command": (ONCE[0] + ONCE[1], [1, 2, 1, 2]),
    "torchrun starts the ranks again": ([(0, "a", "x", 2), (0, "a", "x", 2)], [1, 2, 1, 2]),
    "two scripts of one launch": ([(0, "a", "x", 1), (0, "a", "y", 1)], [1, 2]),
    "a job of the same number": (ONCE[0], [1, 2]),
}


@pytest.mark.parametrize("name", STARTS)
def test_a_call_of_fit_finds_its_folder_again(start, name):
    starts, numbers = STARTS[name]
    chosen = []
    for restart, launch, command, fits in starts:
        start(restart, launch, ("train.py", command), TORCHELASTIC_MAX_RESTARTS="1")
        for _ in range(fits):
            JobFolder._fits += 1
            folder = Path(JobFolder()._choose()[0])
            chosen.append(int(folder.parent.name.partition("-")[2] or 1))
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / "config.json", {"command": sys.argv})
            write_json(folder / ATTEMPT, {"attempt": _attempt(), "launch": launch_id()})
    assert chosen == numbers


def test_another_job_continues_one(start):
    """As one that PBS runs, or that the user submits by the last line of the log."""
    start(SLURM_JOB_ID="6")
    with pytest.raises(SystemExit):
        fit(make_trainer(StopAfter(3)))
    start(launch="two", HPCTRAIN_CONTINUES="6")
    fit(make_trainer())
    lines = Path("runs/trainer/6/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2, 4, 6, 8, 10, 12, 14, 16]
    assert Path("runs/trainer/6/config.2.json").exists()
