"""--tensor-parallel: the losses of ddp, with each layer split over ranks that compute the same examples."""

import os
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hpctrain.checkpoints import checkpoint
from hpctrain.distributed.world import World
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.nlp.models import memory
from hpctrain.nlp.models.model_folder import save_model
from hpctrain.nlp.models.scratch import create_model
from hpctrain.nlp.models.tensor_parallel import choose_styles
from hpctrain.nlp.models.tokenizer import load_tokenizer
from hpctrain.nlp.parser import parse_options
from hpctrain.nlp.tasks import instruct
from tests.nlp.helpers import result, train
from tests.training.strategies.test_fsdp import CPU, losses, train_ranks, weights

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SHAPE |= {"head_dim": 16}


def make_model(folder, kind):
    """A model with random weights, and the tokenizer of the sample data."""
    examples = instruct.TASK.read(instruct.TASK.samples / "train.jsonl")
    create_model(
        folder,
        "tiny",
        "gpt2",
        [text for example in examples for text in instruct.TASK.get_texts(example)],
        1,
        64,
    )
    tokenizer = load_tokenizer(folder)
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), max_position_embeddings=64, **SHAPE)
    save_model(folder, AutoModelForCausalLM.from_config(config), tokenizer)
    return folder


def overflow_in_a_split_layer():
    """In a rank: in the first step, the gradient of a part of a layer that rank 1 has is infinite."""
    from hpctrain.training.precision import Scaler

    unscale, done = Scaler.unscale_, []

    def spoil(self, optimizer):
        if not done and os.environ["RANK"] == "1":
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            split = next(weight for weight in weights if weight.placements[-1].is_shard())
            split.grad.to_local().fill_(torch.inf)
        done.append(0)
        unscale(self, optimizer)

    Scaler.unscale_ = spoil


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("llama") / "model", "llama")


@pytest.mark.slow
def test_the_losses_of_ddp_on_four_ranks_and_a_resume_on_two(llama, tmp_path):
    words = ["nlp.instruct", "--model", llama, "--data", instruct.TASK.samples, "--epochs=1", "--limit=40"]
    words += ["--batch-size=8"]
    words += ["--max-length", 64, "--checkpoint-every", 3, "--keep-checkpoints", 99]
    ddp = train_ranks(tmp_path / "ddp", 2, *words)
    whole = train_ranks(tmp_path / "whole", 4, *words, "--tensor-parallel", 2)
    assert losses(whole) == pytest.approx(losses(ddp), rel=1e-4) and len(losses(ddp)) > 4
    saved = [AutoModelForCausalLM.from_pretrained(run / "model").state_dict() for run in (whole, ddp)]
    torch.testing.assert_close(*saved, rtol=1e-3, atol=1e-4)
    for count, name in ((4, "cut"), (2, "two")):
        cut = tmp_path / name / "run"
        shutil.copytree(whole, cut)
        (cut / "result.json").unlink()
        for path in checkpoint.list_newest_first(cut):
            if path.name > "epoch-0001-step-000003.pt":
                checkpoint.remove(path)
        train_ranks(tmp_path / name, count, *words, "--tensor-parallel", 2, "--resume", "run")
        assert result(cut)["test_loss"] == pytest.approx(result(whole)["test_loss"], rel=1e-4)
        assert weights(cut) == weights(whole) or count != 4
    # Each rank has half of the split layers of its group.
    parts = [torch.load(path)["model"] for path in sorted((whole / "checkpoints/epoch-0001.pt").iterdir())]
    query = "model.layers.0.self_attn.q_proj.weight"
    assert [part[query]["part"].numel() for part in parts] == [64 * 64 // 4] * 4
    states = [checkpoint.load(run / "checkpoints/epoch-0001.pt", CPU) for run in (whole, ddp)]
    torch.testing.assert_close(states[0]["model"], states[1]["model"], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_an_overflow_on_one_rank_of_a_group_skips_the_step_on_all(llama, tmp_path):
    """The gradients of a layer that is not split are finite on the other rank: see Scaler."""
    words = ["nlp.instruct", "--model", llama, "--data", instruct.TASK.samples, "--epochs", 1, "--limit", 16]
    words += ["--batch-size", 8, "--max-length", 64, "--tensor-parallel", 2, "--precision", "fp16"]
    run = train_ranks(tmp_path, 2, *words, setup=overflow_in_a_split_layer)
    assert result(run)["overflow_steps"] == 1
    parts = [torch.load(path) for path in sorted((run / "checkpoints/epoch-0001.pt").iterdir())]
    assert [part["tracked"]["scaler"]["scale"] for part in parts] == [2**15] * 2


def test_what_cannot_be_split_is_refused_in_one_line(llama, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(llama)
    styles = choose_styles(model, 2)
    assert len(styles) == 2 * 7 and "model.layers.1.mlp.down_proj" in styles
    with pytest.raises(
        HpctrainError,
        match=r"--tensor-parallel 4 does not divide the num_key_value_heads of the model, 2: give",
    ):
        choose_styles(model, 4)
    for kind in ("gpt2", "mixtral"):  # none, and one with experts
        other = SimpleNamespace(config=AutoConfig.for_model(kind))
        with pytest.raises(
            HpctrainError, match=rf"--tensor-parallel 2: no plan to split a model of type {kind}"
        ):
            choose_styles(other, 2)
    with pytest.raises(
        UsageError, match="--tensor-parallel 2 does not divide the number of ranks, 3: give a divisor of it"
    ):
        World(0, 3, 0, 3, 0, 1, "torchrun").in_groups_of(2)
    words = ["--model", str(llama), "--tensor-parallel", "2"]
    with pytest.raises(UsageError, match="--tensor-parallel splits no LoRA matrices: leave it out"):
        parse_options(instruct.TASK, [*words, "--lora-rank", "4"])
    for option in ("--compile", "--cpu-offload"):
        with pytest.raises(UsageError, match=f"{option} is not for --tensor-parallel: leave out one"):
            parse_options(instruct.TASK, [*words, option])
    with pytest.raises(UsageError, match="--tensor-parallel 2 does not divide the number of ranks, 1"):
        train("instruct", tmp_path / "run", *words)


def test_the_memory_of_a_split_model(llama, monkeypatch):
    """By hand: on four ranks in two groups, a rank has a quarter of the split layers, half of the others."""
    split = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96)
    others = (
        sum(weight.numel() for weight in AutoModelForCausalLM.from_pretrained(llama).parameters()) - split
    )
    needed = 16 * (split // 4 + others // 2)
    args = parse_options(instruct.TASK, ["--model", str(llama), "--tensor-parallel", "2"])
    world = World(0, 4, 0, 2, 0, 2, "slurm")
    monkeypatch.setattr(memory, "free_memory", lambda *_: needed)
    memory.check_memory(llama, args, world, CPU)
    monkeypatch.setattr(memory, "free_memory", lambda *_: needed - 1)
    text = f"{split + others:,} weights of 16 bytes on 4 ranks, of which {others:,} only on 2 groups, are "
    with pytest.raises(HpctrainError, match=re.escape(text)):
        memory.check_memory(llama, args, world, CPU)
    # The node of rank 0 loads the whole model first.
    gpu = torch.device("cuda")
    monkeypatch.setattr(
        memory, "free_memory", lambda _, device: needed if device == gpu else 2 * (split + others) - 1
    )
    with pytest.raises(HpctrainError, match="Rank 0 loads them all before it gives each rank its part"):
        memory.check_memory(llama, args, world, gpu)
    memory.check_memory(llama, args, World(2, 4, 0, 2, 1, 2, "slurm"), gpu)
