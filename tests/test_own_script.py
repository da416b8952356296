"""`import hpctrain` in a user's own script: examples/own-script, and each name of hpctrain."""

import json
import os
import random
import re
import sys
import time
from collections import Counter

import numpy
import pytest
import torch
from slurm_cluster import REPOSITORY
from torch import nn
from torch.nn.parallel import DataParallel
from torch.utils.data import Dataset

import hpctrain
from hpctrain.distributed.world import ALONE, World
from hpctrain.files import plain
from hpctrain.run.record import Record
from tests.helpers import run_command, run_ranks, start_ranks

SINGLE_GPU, NOTHING_LOST = (
    REPOSITORY / "examples/own-script" / name for name in ("1_single_gpu.py", "2_nothing_lost.py")
)


def python(code, **env):
    return run_command([sys.executable, "-c", code], env=os.environ | env)


def result(folder):
    return json.loads((folder / "result.json").read_text())


# ---- the examples ----


def code_of(script):
    """The lines after the module's docstring, without their indentation."""
    return Counter(line.strip() for line in script.read_text().partition('"""\n\n')[2].splitlines() if line)


def test_the_guide_shows_each_line_that_differs():
    before, after = code_of(SINGLE_GPU), code_of(NOTHING_LOST)
    page = (REPOSITORY / "docs/guides/own-script.md").read_text()
    blocks = re.findall(r"^```diff\n(.*?)^```", page, re.M | re.S)
    shown = Counter(f"{line[0]}{line[1:].strip()}" for block in blocks for line in block.splitlines())
    assert shown == Counter([f"-{line}" for line in before - after] + [f"+{line}" for line in after - before])


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """The folder of digits that the examples train on."""
    folder = tmp_path_factory.mktemp("photos")
    assert run_command([sys.executable, SINGLE_GPU.with_name("make_photos.py"), folder]).returncode == 0
    return folder


@pytest.mark.slow
def test_both_examples_train(tmp_path, photos):
    done = run_command([sys.executable, SINGLE_GPU, "--data", photos], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    accuracies = [float(accuracy) for accuracy in re.findall(r"accuracy ([\d.]+)\n", done.stdout)]
    assert len(accuracies) == 5 and max(accuracies) > 0.95
    assert "0.weight" in torch.load(tmp_path / "best.pt") and (tmp_path / "accuracy.png").exists()
    for ranks in (1, 2):
        out = run_ranks(ranks, NOTHING_LOST, "--data", photos, "--out", str(ranks), cwd=tmp_path)
        assert "terminate called" not in out
        assert result(tmp_path / str(ranks))["accuracy"] > 0.95


@pytest.mark.slow
@pytest.mark.main_road("With `import hpctrain` your own loop")
def test_the_last_example_resumes_bit_for_bit_after_sigkill(tmp_path, photos):
    """Four ranks, with dropout, random augmentation and workers, all killed in the middle of an epoch."""
    options = ["--data", photos, "--epochs", "2", "--checkpoint-every", "1", "--resume", "auto"]
    command = [NOTHING_LOST, *options, "--out"]
    run_ranks(4, *command, "whole", cwd=tmp_path)
    for attempt in range(3):
        cut = tmp_path / f"cut-{attempt}"
        with start_ranks(4, *command, cut, cwd=tmp_path) as ranks:
            while not [*cut.glob("checkpoints/epoch-0002-step-*.pt")]:
                assert all(rank.poll() is None for rank in ranks)
                time.sleep(0.01)
            for rank in ranks:
                rank.kill()
        if not (cut / "checkpoints/epoch-0002.pt").exists():
            break  # otherwise the ranks were faster than this process
    out = run_ranks(4, *command, cut, cwd=tmp_path)
    assert re.search(r"resuming after epoch 1 and \d steps", out), out
    assert result(cut)["weights_sha256"] == result(tmp_path / "whole")["weights_sha256"]
    saved = [torch.load(folder / "checkpoints/epoch-0002.pt") for folder in (cut, tmp_path / "whole")]
    for name in ("model", "tracked", "best", "means"):
        torch.testing.assert_close(saved[0][name], saved[1][name], rtol=0, atol=0)


# ---- import hpctrain ----


def test_the_import_does_nothing():
    code = "import sys; hook = sys.excepthook; import hpctrain; assert sys.excepthook is hook; "
    code += "print([name for name in sys.modules if name.startswith(('torch', 'numpy', 'hpctrain.'))])"
    assert python(code).stdout == "[]\n"


def test_every_name_is_there_and_described():
    pages = [
        REPOSITORY / "docs" / name for name in ("guides/own-script.md", "guides/loops.md", "reference/api.md")
    ]
    text = "".join(page.read_text() for page in pages)
    for name in hpctrain.__all__:
        assert getattr(hpctrain, name).__doc__, name
        assert re.search(rf"`(hpctrain\.)?{name}\b", text), f"no page describes {name}"
    assert set(hpctrain.__all__) <= set(dir(hpctrain))
    with pytest.raises(AttributeError, match="nonsense"):
        _ = hpctrain.nonsense


# ---- data ----


class Numbers(Dataset):
    """Twelve examples, each with random numbers of three generators."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return index, torch.rand(1).item(), random.random(), numpy.random.rand()


class AtOnce(Numbers):
    def __getitems__(self, indices):
        return [(*self[index][:2], len(indices)) for index in indices]


def examples(dataset=None, **options):
    options = {"batch_size": 4, "seed": 1, "epoch": 1, "world": ALONE} | options
    batches = hpctrain.data_loader(dataset or Numbers(), collate_fn=list, **options)
    return [example for batch in batches for example in batch]


@pytest.mark.slow
@pytest.mark.main_road
def test_a_loader_gives_the_same_examples_with_any_number_of_workers_and_after_a_resume():
    whole = examples()
    assert (
        sorted(example[0] for example in whole) == list(range(12))
        and len({example[1] for example in whole}) == 12
    )
    assert examples(num_workers=2) == whole
    assert examples(num_workers=1, skip=1) == whole[4:]
    both = [examples(world=World(rank, 2, rank, 2, 0, 1, "slurm"), num_workers=1) for rank in (0, 1)]
    assert sorted(both[0] + both[1]) == sorted(whole) and both[0][:2] == whole[:2]
    for other in (examples(epoch=2), examples(seed=2)):
        assert not {*other} & {*whole}  # no example has the random numbers that it had


def add_random(batch):
    """Collate with random numbers of three generators, as MixUp and masking do."""
    return [batch, torch.rand(1).item(), random.random(), numpy.random.rand()]


@pytest.mark.slow
@pytest.mark.parametrize("dataset", [Numbers, AtOnce])
@pytest.mark.main_road
def test_random_numbers_of_collating_depend_on_the_batch_alone(dataset):
    def collated(**options):
        options = {"batch_size": 4, "seed": 1, "epoch": 1, "world": ALONE} | options
        return [
            tuple(numbers)
            for _, *numbers in hpctrain.data_loader(dataset(), collate_fn=add_random, **options)
        ]

    whole = collated()
    assert collated(num_workers=2) == whole and collated(num_workers=1, skip=1) == whole[1:]
    ranks = [collated(world=World(rank, 2, rank, 2, 0, 1, "slurm"), num_workers=1) for rank in (0, 1)]
    others = [collated(epoch=2, num_workers=1), collated(seed=2, num_workers=1), *ranks]
    for drawn in zip(*sum(others, whole), strict=True):
        assert len({*drawn}) == 15


def test_a_loader_leaves_the_random_numbers_of_the_script_alone():
    torch.manual_seed(0), random.seed(0), numpy.random.seed(0)
    expected = torch.rand(3).tolist(), random.random(), numpy.random.rand()
    torch.manual_seed(0), random.seed(0), numpy.random.seed(0)
    examples()
    assert (torch.rand(3).tolist(), random.random(), numpy.random.rand()) == expected


def test_a_dataset_that_gives_a_batch_at_once():
    whole = examples(AtOnce())
    assert {example[2] for example in whole} == {4}
    assert examples(AtOnce(), num_workers=2, skip=2) == whole[8:]


def test_an_arrow_file_of_hugging_face_is_resumed_with_workers(tmp_path):
    """Mapped into memory, with a random transform."""
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"number": list(range(12))}).save_to_disk(tmp_path)
    mapped = datasets.Dataset.from_file(str(next(tmp_path.glob("*.arrow"))))

    def augment(rows):
        return rows | {"random": [torch.rand(1).item() for _ in rows["number"]]}

    def read(**options):
        return [
            (example["number"], example["random"])
            for example in examples(mapped.with_transform(augment), **options)
        ]

    whole = read()
    assert (
        sorted(number for number, _ in whole) == list(range(12)) and len({value for _, value in whole}) == 12
    )
    assert read(num_workers=2) == whole and read(num_workers=1, skip=1) == whole[4:]
    assert not {*read(epoch=2)} & {*whole}


def test_a_batch_that_the_ranks_cannot_share():
    with pytest.raises(hpctrain.UsageError, match="--batch-size 5 "):
        examples(batch_size=5, world=World(0, 2, 0, 2, 0, 1, "slurm"))


def test_dropout_depends_on_the_step_and_the_rank():
    def drawn(*key):
        hpctrain.seed_step(*key)
        return torch.rand(1).item()

    second = World(1, 2, 1, 2, 0, 1, "slurm")
    assert drawn(1, 1, 5, ALONE) == drawn(1, 1, 5, ALONE)
    assert (
        len({drawn(1, 1, 5, ALONE), drawn(1, 1, 6, ALONE), drawn(1, 2, 5, ALONE), drawn(1, 1, 5, second)})
        == 4
    )


# ---- weights ----


class Wrapped(nn.Module):
    """A model of somebody who has named its only part as DistributedDataParallel names the model."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(2, 2)


@pytest.mark.parametrize("make", [lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), Wrapped])
@pytest.mark.parametrize(
    "prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "net."]
)
@pytest.mark.parametrize("entry", [None, "model", "state_dict", "model_state_dict"])
def test_weights_of_anybody_load(tmp_path, make, prefix, entry):
    saved, loaded = make(), make()
    weights = {prefix + name: value for name, value in saved.state_dict().items()}
    torch.save({entry: weights, "epoch": 3} if entry else weights, tmp_path / "file.pt")
    hpctrain.load_weights(DataParallel(loaded), tmp_path / "file.pt")
    for name, value in saved.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)


def test_a_part_of_a_larger_model_is_found_if_it_is_the_only_one(tmp_path):
    """A LightningModule has its model beside a loss with weights, or beside a second model."""
    part = nn.Linear(2, 2)
    weights = {f"net.{name}": value for name, value in part.state_dict().items()}
    torch.save({"state_dict": weights | {"loss.weight": torch.ones(3)}}, tmp_path / "one.ckpt")
    loaded = nn.Linear(2, 2)
    hpctrain.load_weights(loaded, tmp_path / "one.ckpt")
    assert torch.equal(loaded.weight, part.weight)
    both = weights | {name.replace("net.", "teacher."): value for name, value in weights.items()}
    torch.save({"state_dict": both}, tmp_path / "two.ckpt")
    with pytest.raises(hpctrain.HpctrainError, match=r"two\.ckpt: .*teacher"):
        hpctrain.load_weights(loaded, tmp_path / "two.ckpt")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.pt", plain.LFS_POINTER, r"a\.pt: .*git lfs pull"),
        ("model.safetensors.index.json", b"{}", r"index\.json: .*files"),
        ("a.pt", b"\x80\x02cos\nsystem\n.", r"a\.pt: .*values"),
        ("b.pt", None, r"b\.pt: no such file"),
    ],
)
def test_a_file_without_weights_says_what_it_is(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(hpctrain.HpctrainError, match=message):
        hpctrain.load_weights(nn.Linear(2, 2), tmp_path / name)


def test_weights_of_another_model_are_refused(tmp_path):
    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "file.pt")
    with pytest.raises(hpctrain.HpctrainError, match=r"file\.pt: .*\(.*weight.*\)"):
        hpctrain.load_weights(nn.Linear(2, 2), tmp_path / "file.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(hpctrain.HpctrainError, match=r"list\.pt: "):
        hpctrain.load_weights(nn.Linear(2, 2), tmp_path / "list.pt")


def test_a_checkpoint_of_a_wrapped_model_has_plain_names(tmp_path):
    parser = hpctrain.trainer_parser("mine", "")
    parser.add_argument("--epochs", type=int, default=1)
    args = parser.parse_args(["--out", str(tmp_path / "run")])
    own = Record(ALONE, "mine", args, torch.device("cpu"))
    model = DataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    assert own.resume(torch.device("cpu"), 1, model) is None
    own.start_epoch(1, 1, 4)
    own.step(torch.tensor(1.0))
    own.end_epoch()
    own.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    own.finish(model)
    plain = nn.Linear(2, 2)
    hpctrain.load_weights(plain, tmp_path / "run/checkpoints/epoch-0001.pt")
    saved = torch.load(tmp_path / "run/checkpoints/epoch-0001.pt")["model"]
    assert set(saved) == {"weight", "bias"} and torch.equal(plain.weight, model.module.weight)
