"""Trainers of Lightning and transformers in users' scripts resume with the same weights."""

import json
import os
import runpy
import signal
import sys
from collections import Counter
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from slurm_cluster import REPOSITORY
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset

from hpctrain.checkpoints import saver
from hpctrain.distributed.world import ALONE
from hpctrain.errors import UsageError
from hpctrain.lightning import RunFolder, WorldEnvironment
from hpctrain.run.options import RunOptions
from hpctrain.training.batches import ResumableBatches, seed_loader
from tests.helpers import run_command
from tests.tools import warm_start

NAN = float("nan")
EXAMPLES = {name: REPOSITORY / f"examples/{name}/train.py" for name in ("lightning", "transformers")}


def run_script(path, prepare=None):
    """In a rank: run a script in the place of hpctrain."""
    if prepare:
        prepare()
    sys.argv = [str(path)]
    runpy.run_path(str(path), run_name="__main__")
    os._exit(0)


def stop_after(steps):
    """In a rank: ask for the end of the job after so many optimizer steps, as the launch script does."""
    saver.MAX_STEPS = 1
    done = Counter()

    def count(*_):
        done["steps"] += 1
        if done["steps"] == steps:
            Path(os.environ["HPCTRAIN_CONTROL"], "stop").touch()

    register_optimizer_step_post_hook(count)


def kill_at_sync(number):
    """In a rank: kill the process when this file or folder of checkpoints, from 1, is synced to disk."""
    synced, fsync = Counter(), os.fsync

    def count(descriptor):
        if "/checkpoint" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            synced["files"] += 1
            if synced["files"] == number:
                os.kill(os.getpid(), signal.SIGKILL)
        fsync(descriptor)

    os.fsync = count


def train(name, ranks, folder, prepare=None):
    """Run an example in this folder; returns its output and what the launch script gets to know."""
    control = folder / "control"
    control.mkdir(parents=True, exist_ok=True)
    for path in control.iterdir():
        path.unlink()
    env = dict(os.environ, HPCTRAIN_JOB="7", HPCTRAIN_CONTROL=str(control), OMP_NUM_THREADS="1")
    started = warm_start.torchrun_ranks(ranks, [], env, setup=partial(run_script, EXAMPLES[name], prepare))
    # A rank that was killed may leave a file under a name with a dot.
    return warm_start.run(started, folder), {path.name for path in control.iterdir() if path.name[0] != "."}


def result(name, folder):
    return json.loads((folder / f"runs/{name}-7/result.json").read_text())["weights_sha256"]


def steps_of(name, folder):
    return [
        json.loads(line)["step"]
        for line in (folder / f"runs/{name}-7/metrics.jsonl").read_text().splitlines()
    ]


def test_the_examples_are_short():
    for path in EXAMPLES.values():
        lines = path.read_text().splitlines()
        assert len(lines) < 60 and 5 < sum("# hpctrain" in line for line in lines) < 20, path


@pytest.mark.slow
def test_there_is_no_checkpoint_before_the_trainer_has_begun(tmp_path):
    code = f"from hpctrain.lightning import RunFolder; print(RunFolder({str(tmp_path)!r}).resume_from)"
    done = run_command([sys.executable, "-c", code])
    assert done.stdout == "None\n", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_goes_on_within_an_epoch_with_the_same_weights(tmp_path, name, ranks):
    """The one rank is also killed while it saves for the second time."""
    whole, told = train(name, ranks, tmp_path / "whole")
    assert whole.returncode == 0 and "stopped" not in told, whole.stderr
    cut = tmp_path / "cut"
    if ranks == 1:  # epoch 1 remains
        killed, told = train(name, 1, cut, partial(kill_at_sync, {"lightning": 3, "transformers": 12}[name]))
        assert killed.returncode == -signal.SIGKILL and told <= {"polled", "trains", "saved"}, (
            killed.stdout + killed.stderr
        )
    for steps in [5] if ranks == 1 else [5, 18]:
        stopped, told = train(name, ranks, cut, partial(stop_after, steps))
        assert (stopped.returncode, told) == (0, {"stop", "polled", "trains", "saved", "stopped"}), (
            stopped.stdout + stopped.stderr
        )
    again, told = train(name, ranks, cut)
    assert (again.returncode, "stopped" in told) == (0, False), again.stdout + again.stderr
    assert (
        "resuming from runs/transformers-7/checkpoint-" in again.stdout
        or "resuming after epoch 1 and" in again.stdout
    )
    assert result(name, cut) == result(name, tmp_path / "whole")
    steps = steps_of(name, cut)
    assert steps == sorted(set(steps)) and set(steps) >= set(steps_of(name, tmp_path / "whole"))
    if ranks == 1:
        once_more, _ = train(name, 1, cut)
        assert once_more.returncode == 0 and "nothing to do" in once_more.stdout, (
            once_more.stdout + once_more.stderr
        )


def compute_in_fp16(then=None):
    """In a rank: give the Trainer of the script fp16 with a scaler, whose first steps overflow."""
    import lightning.pytorch
    from lightning.pytorch.plugins import MixedPrecision

    make = lightning.pytorch.Trainer

    def make_trainer(*, plugins, **options):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
        return make(plugins=[*plugins, MixedPrecision("16-mixed", "cpu", scaler)], **options)

    lightning.pytorch.Trainer = make_trainer
    if then:
        then()


@pytest.mark.slow
def test_a_trainer_in_fp16_goes_on_with_its_scale(tmp_path):
    """For "16-mixed" Lightning would compute in bf16 on a CPU; a plugin it takes."""
    done, _ = train("lightning", 2, tmp_path / "whole", compute_in_fp16)
    assert done.returncode == 0, done.stderr
    cut = tmp_path / "cut"
    for then in (partial(stop_after, 2), None):
        done, _ = train("lightning", 2, cut, partial(compute_in_fp16, then))
        assert done.returncode == 0, done.stderr
    assert "resuming after epoch 0 and" in done.stdout
    assert result("lightning", cut) == result("lightning", tmp_path / "whole")
    results = [
        json.loads((folder / "runs/lightning-7/result.json").read_text())["overflow_steps"]
        for folder in (cut, tmp_path / "whole")
    ]
    assert results[0] == results[1] > 0


REFUSALS = """
import torch, sys
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, IterableDataset
from hpctrain.errors import HpctrainError
from hpctrain.lightning import RunFolder, WorldEnvironment
from hpctrain.distributed.world import ALONE

class Module(LightningModule):
    def __init__(self, manual=False, plateau=False, **options):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization, self.plateau = not manual, plateau
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, _):
        return self.layer(batch).mean()
    def configure_optimizers(self):
        sgd = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(sgd), "monitor": "loss"}
        return {"optimizer": sgd, "lr_scheduler": scheduler} if self.plateau else sgd

class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.ones(4, 2))

def fit(name, module=None, data=None, again=False, **options):
    folder = RunFolder(name)
    quiet = dict.fromkeys(["logger", "enable_progress_bar", "enable_model_summary"], False)
    options = {"max_epochs": 1} | options
    options |= {"callbacks": [folder], "plugins": [WorldEnvironment(ALONE)]}
    trainer = Trainer(accelerator="cpu", devices=1, **quiet, **options)
    loader = DataLoader(torch.ones(4, 2) if data is None else data)
    trainer.fit(module or Module(), loader, ckpt_path=None if again else folder.ckpt_path)
    return folder

def refuse(*arguments, **options):
    try:
        fit(*arguments, **options)
    except HpctrainError as error:
        print("refused:", error)

print("trained", fit("run").ckpt_path)
refuse("run", again=True, max_epochs=2)
refuse("steps", max_steps=3)
refuse("reload", reload_dataloaders_every_n_epochs=1)
refuse("manual", Module(manual=True))
refuse("stream", data=Stream())
refuse("plateau", Module(plateau=True))
refuse("code", Module(anything=print))
try:
    RunFolder("x", checkpoint_every="often")
except HpctrainError as error:
    print("refused:", error)
"""


@pytest.mark.slow
def test_lightning_refuses_what_could_not_be_resumed(tmp_path):
    (tmp_path / "script.py").write_text(REFUSALS)
    rank = warm_start.Rank([], dict(os.environ), setup=partial(run_script, tmp_path / "script.py"))
    done = warm_start.run([rank], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"trained {tmp_path}/run/checkpoints/epoch-0001.pt\n" in done.stdout
    refused = [line for line in done.stdout.splitlines() if line.startswith("refused: ")]
    advice = [
        "ckpt_path=folder.ckpt_path",
        "max_epochs, and without max_steps",
        "reload_dataloaders_every_n_epochs",
        "automatic",
    ]
    advice += [
        "not from this DataLoader",
        "ReduceLROnPlateau",
        "save_hyperparameters()",
        "checkpoint_every='often'",
    ]
    assert len(refused) == len(advice), done.stdout
    for line, text in zip(refused, advice, strict=True):
        assert text in line


class Losses(LightningModule):
    """A module that learns nothing: the losses are the batches, and a batch that is NaN is skipped."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch, _):
        return None if batch.isnan().any() else self.weight * 0 + batch.mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def fit(tmp_path, monkeypatch):
    """Train Losses on a loader for one epoch, in a new run folder; the lines of its metrics."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    before = signal.getsignal(signal.SIGTERM)
    quiet = dict.fromkeys(["logger", "enable_progress_bar", "enable_model_summary"], False)
    number = count()

    def fit(loader, callbacks=(), folder=None, **options):
        folder = folder or RunFolder(tmp_path / str(next(number)))
        trainer = Trainer(
            accelerator="cpu", devices=1, **quiet, **{"max_epochs": 1} | options,
            callbacks=[folder, *callbacks], plugins=[WorldEnvironment(ALONE)],
        )  # fmt: skip
        trainer.fit(Losses(), loader, ckpt_path=folder.ckpt_path)
        lines = (folder._run.folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    yield fit
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("batches", "means"),
    [
        ([1, 2, 3, 6, 5], [3, 5]),  # the last step of an epoch has fewer batches
        ([1, NAN, NAN, 6, 5], [3.5, 5]),
        ([NAN, NAN, NAN, NAN, 5], [None, 5]),
    ],
)
def test_the_loss_of_a_step_is_the_mean_over_its_batches_that_had_one(fit, batches, means):
    lines = fit(DataLoader(torch.tensor(batches, dtype=torch.float32)), accumulate_grad_batches=4)
    assert [line.get("train_loss") for line in lines] == means
    assert all(line["examples_per_s"] > 0 for line in lines)


def test_a_batch_that_is_none_is_left_out(fit):
    """As from a collate_fn that drops what is corrupt. At the start of an epoch it ended the run."""
    examples = torch.tensor([NAN, 2, 3, 7, 5])
    loader = DataLoader(examples, collate_fn=lambda batch: None if batch[0].isnan() else torch.stack(batch))
    assert [line["train_loss"] for line in fit(loader, accumulate_grad_batches=4)] == [4, 5]


@pytest.mark.parametrize("examples", [4, 6])
def test_a_script_changes_its_folder_and_its_data(fit, tmp_path, monkeypatch, capsys, examples):
    (tmp_path / "local").mkdir()
    for epochs, number in ((1, 4), (2, examples)):
        monkeypatch.chdir(tmp_path)
        folder = RunFolder("run")
        monkeypatch.chdir(tmp_path / "local")
        fit(DataLoader(torch.ones(number)), folder=folder, max_epochs=epochs)
    assert not [*(tmp_path / "local").iterdir()] and (tmp_path / "run/result.json").exists()
    told = f"the loader has {examples} examples, and had 4 before the resume"
    printed = capsys.readouterr().out
    assert (told in printed) == (examples != 4) and "resuming after epoch 1 of run/checkpoints/" in printed


class Endless:
    """A batch sampler without an end."""

    def __iter__(self):
        while True:
            yield [0]


@pytest.mark.slow
def test_a_batch_sampler_without_an_end(fit):
    def loader():
        return DataLoader(torch.ones(1), batch_sampler=Endless())

    assert len(fit(loader(), limit_train_batches=3)) == 3
    with pytest.raises(UsageError, match="make the Trainer with limit_train_batches"):
        fit(loader())


class Scored(Losses):
    """Its accuracy falls by an epoch, and within each."""

    def validation_step(self, batch, _):
        self.log_dict({"accuracy": -float(self.trainer.global_step), "val_loss": 1.0})


def score(folder, monitor="accuracy", **options):
    """Train Scored for two epochs of four steps, with RunOptions."""
    options = RunOptions(out=folder, resume="auto", others={"lr": 0.1}, **options)
    callback = RunFolder(options, name="scored", monitor=monitor)
    quiet = dict.fromkeys(["logger", "enable_progress_bar", "enable_model_summary"], False)
    trainer = Trainer(
        max_epochs=2, accelerator="cpu", devices=1, **quiet, val_check_interval=2, callbacks=[callback],
        num_sanity_val_steps=0, plugins=[WorldEnvironment(ALONE)],
    )  # fmt: skip
    trainer.fit(Scored(), DataLoader(torch.ones(4)), DataLoader(torch.ones(1)), ckpt_path=callback.ckpt_path)
    return json.loads((folder / "result.json").read_text())


def test_the_best_evaluation_within_an_epoch_is_kept_and_the_result_is_written_again(fit, tmp_path):
    """A run that died before its result has no epoch left: it gets the last scores from its checkpoint."""
    folder = tmp_path / "run"
    first = score(folder, keep_checkpoints=1)
    assert {path.name for path in (folder / "checkpoints").glob("epoch*")} == {
        "epoch-0001-step-000002.pt",
        "epoch-0002.pt",
    }
    assert json.loads((folder / "config.json").read_text())["trainer"] == "scored"
    (folder / "result.json").unlink()
    again = score(folder)
    assert first["accuracy"] == again["accuracy"] == -8 and first["weights_sha256"] == again["weights_sha256"]


def test_a_monitor_that_the_module_does_not_log_is_named(fit, tmp_path):
    with pytest.raises(UsageError, match=r"'recall'.*accuracy, val_loss"):
        score(tmp_path / "run", monitor="recall")


def test_a_loader_whose_dataset_makes_the_batches(fit):
    """With batch_size=None, the sampler's items are whole batches."""
    loader = DataLoader(torch.arange(6.0), sampler=[[0, 1], [2, 3], [4, 5]], batch_size=None)
    assert [line["train_loss"] for line in fit(loader)] == [0.5, 2.5, 4.5]


def test_epochs_with_different_numbers_of_steps_are_refused(fit):
    with pytest.raises(UsageError, match="GradientAccumulationScheduler, as"):
        fit(DataLoader(torch.ones(4)), callbacks=[GradientAccumulationScheduler({0: 1, 1: 4})])


class Noisy(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return index, torch.rand(1).item()


def add_noise(batch):
    return batch, torch.rand(1).item()


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 1, "persistent_workers": True}, {"generator": torch.Generator()}]
)
def test_the_batches_of_any_loader_depend_on_the_epoch_alone(options):
    """Also where the loader, its workers or its generator have a history."""

    def batches(loader, epoch, skip=0):
        place[0] = epoch
        inner = getattr(loader.batch_sampler, "inner", loader.batch_sampler)
        object.__setattr__(loader, "batch_sampler", ResumableBatches(inner, 3, lambda: place[0], 1, skip))
        return list(loader)

    def loader():
        made = DataLoader(Noisy(), batch_size=4, shuffle=True, collate_fn=add_noise, **options)
        seed_loader(made, 1)
        return made

    place, used = [0], loader()
    first, second = batches(used, 0), batches(used, 1)
    assert sorted(index for batch, _ in second for index, _ in batch) == list(range(12))
    assert len({noise for _, noise in first + second}) == 6
    assert batches(loader(), 1, skip=1) == second[1:] and first != second
    assert len(used.dataset) == 12 and used.batch_sampler.batch_size == 4


@pytest.mark.parametrize(
    ("index", "numbers"),
    [(int, (0.686070, 0.501282)), (torch.tensor, (0.686070, 0.501282)), (str, (0.327241, 0.532455))],
    ids=["number", "tensor", "name"],
)
def test_random_numbers_do_not_depend_on_the_process(index, numbers):
    """hash() of a tensor is its address, and that of a text is another one in each process."""

    class Named(Noisy):
        def __getitem__(self, index):
            return torch.rand(1).item()

    keys = [index(number) for number in range(2)]
    loader = DataLoader(Named(), batch_size=2, sampler=keys, collate_fn=list)
    batches = ResumableBatches(loader.batch_sampler, 1, lambda: 0, 1, 0)
    object.__setattr__(loader, "batch_sampler", batches)
    seed_loader(loader, 1)
    assert next(iter(loader)) == pytest.approx(numbers, abs=1e-6)


def test_a_callback_finds_the_users_dataset_and_collate_fn_in_the_loader():
    """A callback could not index the dataset, and what it set there was lost."""

    class Collate:
        tokenizer = "mine"

        def __call__(self, batch):
            return [self.tokenizer, *batch]

    class Opened(Noisy):
        def __getstate__(self):
            return {}

    noisy = Opened()
    loader = DataLoader(noisy, batch_size=2, collate_fn=Collate())
    seed_loader(loader, 1)
    loader.dataset.size = 7
    assert noisy.size == loader.dataset.size == 7 and loader.dataset[3][0] == 3
    assert loader.collate_fn.tokenizer == "mine" and loader.collate_fn([1, 2]) == ["mine", 1, 2]
    with pytest.raises(AttributeError):  # with it, Python 3.10 would pickle the state of the dataset alone
        loader.dataset.__getattr__("__getstate__")
