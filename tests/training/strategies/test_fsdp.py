"""--strategy fsdp: the weights of ddp, of which each rank holds a part."""

import json
import math
import os
import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
)

from hpctrain.checkpoints import checkpoint
from hpctrain.checkpoints.parts import Pieces
from hpctrain.distributed.world import ALONE, World
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.nlp.models import memory
from hpctrain.nlp.parser import parse_options
from hpctrain.nlp.tasks import classify
from hpctrain.nlp.training import finetune
from hpctrain.nlp.training.steps import Steps
from hpctrain.training.strategies import fsdp
from hpctrain.training.strategies.fsdp import copy_without_weights, find_blocks, split_state
from tests.helpers import write_digits
from tests.nlp.conftest import feature_cache as feature_cache  # a fixture, for each test
from tests.nlp.helpers import NO_DROPOUT, SHAPE, metrics, result, scores, train
from tests.tools import warm_start

CPU = torch.device("cpu")


def train_ranks(folder: Path, count, *words, setup=None, out="run"):
    """Train on this number of ranks, in folder/run or another one; the run folder."""
    folder.mkdir(exist_ok=True)
    ranks = warm_start.torchrun_ranks(count, [*map(str, words), "--out", out], dict(os.environ), setup)
    done = warm_start.run(ranks, folder)
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr[-3000:]
    return folder / out


def compile_quickly():
    """Without the kernels of C++, which take a minute. Each graph is a line in the file `graphs`."""
    real = torch.compile

    def backend(graph, inputs):
        from torch._dynamo.backends.debugging import aot_eager

        with Path("graphs").open("a") as file:
            file.write(f"rank {os.environ['RANK']}\n")
        return aot_eager(graph, inputs)

    torch.compile = lambda function, **options: real(function, backend=backend, **options)


def spoil_a_step():
    """Rank 1 has a loss that is not a number in the third part of the batches."""
    real = Steps.compute_loss

    def compute_loss(self, parallel, batch):
        spoiled = batch.number == 2 and os.environ["RANK"] == "1"
        return real(self, parallel, batch) * (math.nan if spoiled else 1)

    Steps.compute_loss = compute_loss


def let_rank_0_load():
    """Other ranks may not load the model."""
    if os.environ["RANK"] != "0":
        AutoModelForSequenceClassification.from_pretrained = None


def require_offload():
    """Every block is sharded with its parts on the CPU."""
    real = fsdp.fully_shard

    def fully_shard(*arguments, offload_policy, **options):
        assert isinstance(offload_policy, CPUOffloadPolicy)
        return real(*arguments, offload_policy=offload_policy, **options)

    fsdp.fully_shard = fully_shard


def fail_on_rank_1():
    """Rank 1 cannot write its part of the second checkpoint."""
    real = checkpoint.save

    def save(path, *arguments):
        if os.environ["RANK"] == "1" and path.parent.name == "epoch-0001-step-000004.pt":
            raise HpctrainError(f"{path}: the disk is full")
        real(path, *arguments)

    checkpoint.save = save


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def weights(run):
    return result(run)["weights_sha256"]


def losses(run):
    return [
        line[name]
        for line in metrics(run)
        for name in ("train_loss", "validation_loss", "test_loss")
        if name in line
    ]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps({"model_type": "bert"} | SHAPE | NO_DROPOUT))
    return path


@pytest.fixture(scope="module")
def words(config):
    """Each epoch has five steps.

    There are 50 test texts, so that ranks have different numbers of batches to evaluate.
    """
    words = ["nlp.classify", "--from-scratch", config, "--epochs=2", "--limit=63", "--batch-size=12"]
    words += ["--max-length=64"]
    return [*words, "--checkpoint-every", 2, "--keep-checkpoints", 99]


@pytest.fixture(scope="module")
def whole(words, tmp_path_factory):
    """A run on four ranks."""
    return train_ranks(
        tmp_path_factory.mktemp("whole"), 4, *words, "--strategy", "fsdp", setup=let_rank_0_load
    )


@pytest.mark.slow
def test_the_weights_are_those_of_ddp(words, whole, tmp_path):
    ddp = train_ranks(tmp_path, 4, *words)
    assert losses(whole) == pytest.approx(losses(ddp), rel=1e-5)
    for name in ("epoch-0001-step-000002.pt", "epoch-0002.pt"):
        ours, theirs = (checkpoint.load(run / "checkpoints" / name, CPU) for run in (whole, ddp))
        assert ours.keys() == theirs.keys()
        for part in ("model", "tracked"):
            torch.testing.assert_close(ours[part], theirs[part], rtol=1e-4, atol=1e-5)
    logs = [path.read_text() for path in sorted((whole / "logs").iterdir())]
    peaks = [float(re.search(r"peak memory of this rank: (.*) MB", log)[1]) for log in logs]
    assert len(peaks) == 4 and max(peaks) == result(whole)["speed"]["peak_memory_mb"]
    # Each rank writes its quarter, and each tensor once.
    sizes = [path.stat().st_size for path in (whole / "checkpoints/epoch-0002.pt").iterdir()]
    assert len(sizes) == 4 and max(sizes) < 0.35 * (ddp / "checkpoints/epoch-0002.pt").stat().st_size
    model = AutoModelForSequenceClassification.from_pretrained(whole / "model")
    first = checkpoint.load(whole / "checkpoints/epoch-0001.pt", CPU)["model"]
    checkpoint.load_weights(model, whole / "checkpoints/epoch-0001.pt")  # as scripts of users do
    assert all(
        torch.equal(weight, parts)
        for weight, parts in zip(model.state_dict().values(), first.values(), strict=True)
    )
    saved = AutoModelForSequenceClassification.from_pretrained(whole / "model").state_dict()
    best = checkpoint.load(
        checkpoint.path_of(whole, json.loads((whole / "result.json").read_text())["epochs"]), CPU
    )["model"]
    assert saved.keys() == best.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "options"),
    [
        (4, ["--strategy", "fsdp"]),
        (4, ["--cpu-offload"]),
        (3, ["--strategy", "fsdp"]),
        (2, ["--strategy", "ddp"]),
        (2, ["--strategy", "fsdp"]),
    ],
    ids=lambda value: str(value).strip("[]"),
)
def test_a_run_cut_within_an_epoch_goes_on_with_any_number_of_ranks(words, whole, tmp_path, count, options):
    cut = tmp_path / "run"
    shutil.copytree(whole, cut)
    (cut / "result.json").unlink()
    # As if rank 1 had not written its part when the job died, and a bit of another checkpoint was flipped on
    # the disk.
    (cut / "checkpoints/epoch-0002.pt/rank-0001-of-0004.pt").unlink()
    flip_a_bit(cut / "checkpoints/epoch-0002-step-000003.pt/rank-0003-of-0004.pt")
    assert checkpoint.find_newest(cut).name == "epoch-0002-step-000001.pt"
    setup = require_offload if "--cpu-offload" in options else None
    out = "run" if count > 2 else "other"
    cut = train_ranks(tmp_path, count, *words, *options, "--resume", "run", setup=setup, out=out)
    first, second = (checkpoint.load(run / "checkpoints/epoch-0002.pt", CPU) for run in (cut, whole))
    tolerance = {"rtol": 0, "atol": 0} if count == 4 else {"rtol": 1e-3, "atol": 1e-4}
    for part in ("model", "tracked"):
        torch.testing.assert_close(first[part], second[part], **tolerance)
    assert weights(cut) == weights(whole) or count != 4
    assert scores(cut)["test_loss"] == pytest.approx(scores(whole)["test_loss"], rel=1e-4)


@pytest.mark.slow
def test_a_run_that_died_after_its_last_checkpoint_is_finished_on_two_ranks(words, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run/result.json").unlink()
    train_ranks(tmp_path, 2, *words, "--strategy", "fsdp", "--resume", "run", setup=let_rank_0_load)
    assert weights(tmp_path / "run") == weights(whole)
    assert scores(tmp_path / "run") == pytest.approx(scores(whole), rel=1e-5)


@pytest.mark.slow
def test_a_part_that_cannot_be_written_ends_the_run_and_keeps_the_last_complete_checkpoint(tmp_path):
    write_digits(tmp_path / "digits", 64, 8)
    words = ["train_fsdp", "--data=digits", "--batch-size=8", "--checkpoint-every=2", "--keep-checkpoints=1"]
    done = warm_start.run(
        warm_start.torchrun_ranks(2, [*words, "--out", "run"], dict(os.environ), fail_on_rank_1), tmp_path
    )
    error = "run/checkpoints/epoch-0001-step-000004.pt/rank-0001-of-0002.pt: the disk is full"
    assert done.returncode == 1 and done.stderr == f"hpctrain: error: on rank 1: {error}\n"
    assert checkpoint.find_newest(tmp_path / "run").name == "epoch-0001-step-000002.pt"


@pytest.mark.slow
def test_the_optimizer_of_another_model_is_one_line(tmp_path):
    write_digits(tmp_path / "digits", 64, 8)
    words = ["train_fsdp", "--data", "digits", "--batch-size", "32"]
    path = train_ranks(tmp_path, 1, *words, "--epochs", 1) / "checkpoints/epoch-0001.pt"
    state = checkpoint.load(path, CPU)
    for values in state["tracked"]["optimizer"]["state"].values():
        values["momentum_buffer"] = values["momentum_buffer"][:1]
    checkpoint.save(path, state)
    (tmp_path / "run/result.json").unlink()
    for count in (1, 2):
        again = [*words, "--epochs", "2", "--resume", "run"]
        done = warm_start.run(warm_start.torchrun_ranks(count, again, dict(os.environ)), tmp_path)
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert "epoch-0001.pt: not the optimizer of this model (a tensor of another shape)" in done.stderr


@pytest.mark.slow
def test_tied_weights_dropout_accumulation_and_skipped_steps(tmp_path):
    """A language model, whose output layer is its embedding."""
    words = ["nlp.generate", "--epochs=1", "--limit=40", "--batch-size=8", "--max-length=32"]
    words += ["--accumulate=2"]
    words += ["--on-nan", "skip", "--gradient-checkpointing"]
    runs = [
        train_ranks(tmp_path / name, 2, *words, "--strategy", name, setup=spoil_a_step)
        for name in ("ddp", "fsdp")
    ]
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), rel=1e-5)
    assert [result(run)["skipped_steps"] for run in runs] == [1, 1]
    model = AutoModelForCausalLM.from_pretrained(runs[1] / "model")
    assert model.lm_head.weight is model.get_input_embeddings().weight
    logs = [(run / "logs/rank-0000.log").read_text() for run in runs]
    samples = [[line.split("sample: ")[1] for line in log.splitlines() if "sample: " in line] for log in logs]
    assert samples[0] == samples[1] and len(samples[0]) == 4


@pytest.mark.slow
def test_an_adapter_is_whole_and_bf16_trains(whole, words, tmp_path):
    data = [word for word in words if word != "--from-scratch" and not isinstance(word, Path)]
    lora = [*data, "--model", whole / "model", "--data", classify.TASK.samples, "--lora-rank=4"]
    lora += ["--gradient-checkpointing"]
    runs = [train_ranks(tmp_path / name, 2, *lora, "--strategy", name) for name in ("ddp", "fsdp")]
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), rel=1e-5)
    adapters = []
    for run in runs:
        base = AutoModelForSequenceClassification.from_pretrained(
            whole / "model", config=AutoConfig.from_pretrained(run / "model")
        )
        adapters.append(PeftModel.from_pretrained(base, run / "model").state_dict())
    torch.testing.assert_close(*adapters, rtol=1e-4, atol=1e-5)
    rough = train_ranks(tmp_path / "bf16", 2, *words, "--strategy", "fsdp", "--precision", "bf16")
    assert losses(rough) == pytest.approx(losses(whole), rel=0.02) and losses(rough) != losses(whole)


@pytest.mark.slow
def test_compiled_layers_have_the_losses_of_those_that_are_not(whole, words, tmp_path):
    """Three graphs: one for both layers, one for another batch size, and that of check_compiler()."""
    compiled = train_ranks(tmp_path, 2, *words, "--strategy", "fsdp", "--compile", setup=compile_quickly)
    assert losses(compiled) == pytest.approx(losses(whole), rel=1e-4)
    graphs = (tmp_path / "graphs").read_text().splitlines()
    assert graphs.count("rank 0") == graphs.count("rank 1") == 3  # hooks of FSDP would cut it into more


@pytest.mark.slow
def test_gradient_checkpointing_keeps_the_weights_and_less_for_the_backward_pass(
    config, tmp_path, monkeypatch
):
    kept = []
    real = Steps.compute_loss

    def compute_loss(self, parallel, batch):
        def keep(tensor):
            kept[-1] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            return real(self, parallel, batch)

    monkeypatch.setattr(Steps, "compute_loss", compute_loss)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "bert"} | SHAPE))  # with dropout
    runs = []
    for name, more in (("without", []), ("with", ["--gradient-checkpointing"])):
        kept.append(0)
        options = ["--epochs", 1, "--limit", 40, "--from-scratch", config]
        runs.append(train("classify", tmp_path / name, *options, *more))
    assert weights(runs[0]) == weights(runs[1])
    assert kept[1] < 0.6 * kept[0]
    monkeypatch.setattr(BertForSequenceClassification, "supports_gradient_checkpointing", False)
    with pytest.raises(
        HpctrainError,
        match="its architecture has no gradient checkpointing: leave out --gradient-checkpointing",
    ):
        train("classify", tmp_path / "no", *options, "--gradient-checkpointing")


def test_what_cannot_fit_is_refused_before_it_is_loaded(config, tmp_path, monkeypatch):
    """With the arithmetic, by hand: the memory is one byte less than what is needed."""
    folder = (
        train("classify", tmp_path / "run", "--epochs", 1, "--limit", 20, "--from-scratch", config) / "model"
    )
    count = sum(
        weight.numel() for weight in AutoModelForSequenceClassification.from_pretrained(folder).parameters()
    )
    assert sum(memory.read_sizes(folder).values()) == count
    for words, world, each, advice in (
        ([], ALONE, 16, "take --strategy fsdp on 2 ranks or more, or --lora-rank 16, which"),
        (["--lora-rank", "4"], ALONE, 4, "take --strategy fsdp on 2 ranks or more (docs"),
        (["--epochs", "0"], ALONE, 4, "take --strategy fsdp on 2 ranks or more (docs"),
        (
            ["--strategy", "fsdp"],
            World(0, 4, 0, 4, 0, 1, "torchrun"),
            4,
            "take --strategy fsdp on 5 ranks or more, or",
        ),
        (
            ["--cpu-offload"],
            World(0, 4, 0, 4, 0, 1, "torchrun"),
            4,
            "take --strategy fsdp on 5 ranks or more, or",
        ),
    ):
        args = parse_options(classify.TASK, ["--model", str(folder), *words])
        monkeypatch.setattr(memory, "free_memory", lambda *_, limit=each * count: limit)
        memory.check_memory(folder, args, world, CPU)
        monkeypatch.setattr(memory, "free_memory", lambda *_, limit=each * count - 1: limit)
        with pytest.raises(HpctrainError) as caught:
            memory.check_memory(folder, args, world, CPU)
        assert f"{count:,} weights of " in str(caught.value) and advice in str(caught.value)
    args = parse_options(classify.TASK, ["--model", str(folder), "--strategy", "fsdp"])
    with pytest.raises(HpctrainError, match="which freezes them, or --cpu-offload "):
        memory.check_memory(folder, args, World(0, 4, 0, 4, 0, 1, "torchrun"), torch.device("cuda"))
    # The adapter of --lora-from is loaded into a whole model, on each rank of a node.
    args = parse_options(
        classify.TASK, ["--model", str(folder), "--strategy", "fsdp", "--lora-from", "adapter"]
    )
    world = World(5, 8, 1, 4, 1, 2, "slurm")
    monkeypatch.setattr(memory, "free_memory", lambda *_: 4 * count)
    memory.check_memory(folder, args, world, CPU)
    monkeypatch.setattr(memory, "free_memory", lambda *_: 4 * count - 1)
    with pytest.raises(
        HpctrainError, match=r"each of the 4 ranks on a node loads them all .*: take fewer ranks on a node "
    ):
        memory.check_memory(folder, args, world, CPU)
    monkeypatch.setattr(finetune, "load_model", None)
    with pytest.raises(HpctrainError, match=r"rank 0 can have 0\.00 GB"):
        train("classify", tmp_path / "no", "--model", folder)


def test_parts_in_the_memory_of_the_node_need_two_ranks(tmp_path):
    with pytest.raises(
        UsageError, match="--cpu-offload is for the parts of --strategy fsdp, and one rank has all of them"
    ):
        train("classify", tmp_path / "run", "--cpu-offload")


def test_a_tensor_in_pieces_is_read_in_any_other_pieces():
    whole = torch.arange(35.0).reshape(5, 7)
    places = [
        (slice(0, 2), slice(0, 7)),
        (slice(2, 5), slice(0, 3)),
        (slice(2, 5), slice(3, 7)),
        (slice(5, 5), slice(0, 7)),
    ]
    parts = [
        {"part": whole[place], "offset": [part.start for part in place], "shape": [5, 7]} for place in places
    ]
    pieces = Pieces([*parts, parts[0]])  # two ranks may have the same one
    assert torch.equal(pieces.whole(), whole) and torch.equal(pieces.region([1, 2], [3, 4]), whole[1:4, 2:6])
    assert pieces.region([5, 0], [0, 7]).shape == (0, 7)
    with pytest.raises(ValueError, match=r"pieces of a tensor of shape \(5, 7\) are missing"):
        Pieces(parts[:2])
    for harm in (
        {"offset": [4, 0]},
        {"offset": [-1, 0]},
        {"offset": [0]},
        {"part": torch.empty(2, 7, device="meta")},
    ):
        # the rest would be what was in memory
        with pytest.raises(ValueError, match=r"tensor of shape|argument"):
            Pieces([parts[0] | harm, *parts[1:]])
    with pytest.raises(ValueError, match="is not in it"):
        Pieces([parts[0] | {"part": torch.ones(1).expand(2, 7)}, *parts[1:]])


def test_a_tensor_of_a_checkpoint_that_would_fill_the_memory_is_not_copied():
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters())
    with pytest.raises(ValueError, match="a tensor without values of its own"):
        split_state(
            optimizer, {"state": {0: {"momentum_buffer": torch.ones(1).expand(10**15)}}, "param_groups": []}
        )


def test_a_model_without_values_reads_none(monkeypatch):
    """It gets those of rank 0 when it is sharded.

    A rank would otherwise have the whole model in memory, and torch would warn.
    """
    whole = torch.ones(2, 2)
    weights = {"weight": Pieces([{"part": whole, "offset": [0, 0], "shape": [2, 2]}]), "bias": torch.ones(2)}
    model = torch.nn.Linear(2, 2)
    fsdp.load_parts(model, weights)
    assert torch.equal(model.weight, whole)
    monkeypatch.setattr(Pieces, "whole", None)
    with warnings.catch_warnings(action="error"):
        fsdp.load_parts(model.to("meta"), weights)


def test_blocks_are_the_layers_of_a_model():
    bert = BertForTokenClassification(BertConfig(**SHAPE))
    assert find_blocks(bert) == list(bert.bert.encoder.layer)
    gpt = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=100))
    assert find_blocks(gpt) == list(gpt.transformer.h)
    copied = copy_without_weights(gpt)
    assert copied.lm_head.weight is copied.transformer.wte.weight and not copied.lm_head.weight.numel()
    assert gpt.lm_head.weight.numel() == 3200
