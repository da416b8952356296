"""--cuda-graphs, on a CPU: what surrounds the graphs. benchmarks/gpu.py has the test on a GPU: the same weights, bit for bit."""

import argparse
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import transformers
from slurm_cluster import REPOSITORY

from hpctrain.distributed.world import ALONE, World
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.nlp.batches.features import Features
from hpctrain.nlp.tasks import classify
from hpctrain.nlp.training import finetune, step_graphs
from hpctrain.nlp.training.lightning_module import FineTuneModule
from hpctrain.nlp.training.options import parse_options
from hpctrain.nlp.training.step_graphs import StepGraphs

sys.path.insert(0, str(REPOSITORY / "benchmarks"))
import nlp


@pytest.fixture
def captured(monkeypatch):
    """The shapes that were captured, and whether with padding.

    In place of a graph there is a function that computes the batch in the same memory.
    """
    shapes = []

    def capture(steps, batch):
        shapes.append((tuple(batch.get("input_ids", torch.ones(0)).shape), batch.get("is_padded")))
        loss = steps._pass(batch)
        return SimpleNamespace(replay=lambda: loss.copy_(steps._pass(batch))), loss

    monkeypatch.setattr(StepGraphs, "_capture", capture)
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    for name in ("get_rng_state", "set_rng_state"):
        monkeypatch.setattr(torch.cuda, name, getattr(torch, name))
    return shapes


@pytest.mark.parametrize("most", [1, 100])
def test_a_graph_for_each_shape_gives_the_weights_of_steps_without_graphs(
    tmp_path, monkeypatch, captured, most
):
    """With dropout, in 20 steps; and where there are more shapes than graphs."""
    monkeypatch.setattr(step_graphs, "MOST", most)
    args = argparse.Namespace(data=None, size="tiny", examples=160, held_out=8, batch_size=8, max_length=64)
    args.lr, args.precision, args.seed, args.kernels = 1e-3, "fp32", 1, False
    setting = nlp.prepare(args, ALONE, torch.device("cpu"), tmp_path)
    trainers, weights = [], []
    make = nlp.make_trainer
    monkeypatch.setattr(nlp, "make_trainer", lambda *words: trainers.append(make(*words)) or trainers[-1])
    loader = nlp.make_loader
    monkeypatch.setattr(nlp, "make_loader", lambda *words, round_up_to: loader(*words, round_up_to=64))
    for graphs in (False, True):
        setting.args.out = tmp_path / f"{graphs}"
        model = nlp.load_model(
            classify.TASK, tmp_path / "model", setting.tokenizer, setting.labels, setting.args
        )
        nlp.train_with_hpctrain(setting, model, lambda batch: batch, graphs=graphs)
        weights.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    assert len(set(captured)) == len(captured) <= most
    assert most == 1 or 1 < len({shape for shape, _ in captured}) < 10
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    # Lightning would copy the optimizer's state to the host when the training is over.
    assert not any(optimizer.state for trainer in trainers for optimizer in trainer.optimizers)


def test_steps_that_cannot_be_recorded_are_one_line(captured, monkeypatch):
    def refuse(*_):
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nCompile with")

    monkeypatch.setattr(StepGraphs, "_capture", refuse)
    weight = torch.nn.Parameter(torch.ones(1))
    steps = StepGraphs([weight], lambda batch: (weight * batch["x"]).sum())
    message = r"--cuda-graphs: the steps of this model cannot be recorded \(CUDA error: .* capturing\): leave it out$"
    with pytest.raises(HpctrainError, match=message):
        steps.run({"x": torch.ones(2)})


def test_weights_that_only_some_batches_train_are_refused(captured):
    first, second = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    steps = StepGraphs(
        [first, second], lambda batch: (first * batch["x"]).sum() + (second if len(batch["x"]) > 2 else 0)
    )
    steps.run({"x": torch.ones(2)})
    with pytest.raises(
        HpctrainError, match="which weights this model trains depends on the batch: leave it out"
    ):
        steps.run({"x": torch.ones(3)})


def test_layerdrop_is_refused():
    step_graphs.check_layers(transformers.BartConfig(encoder_layerdrop=0.0))
    with pytest.raises(HpctrainError, match=r"not for encoder_layerdrop 0\.1 in the config\.json"):
        step_graphs.check_layers(transformers.BartConfig(encoder_layerdrop=0.1))


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_transformers_asks_no_gpu_for_the_mask(kind, monkeypatch):
    """What it asks would be read from the memory of the GPU, which cannot be recorded.

    The output is that without graphs.
    """
    config = {"bert": transformers.BertConfig, "gpt2": transformers.GPT2Config}[kind]
    sizes = {
        "bert": {"hidden_size": 8, "num_attention_heads": 1, "intermediate_size": 8},
        "gpt2": {"n_embd": 8, "n_head": 1},
    }[kind]
    model = transformers.AutoModel.from_config(
        config(num_hidden_layers=1, vocab_size=20, use_cache=False, **sizes)
    ).eval()
    tokens = torch.arange(1, 9).reshape(2, 4)
    for padded in (False, True):
        mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0 if padded else 1]])
        inputs = {"input_ids": tokens, **({"attention_mask": mask} if padded else {})}
        expected = model(input_ids=tokens, attention_mask=mask).last_hidden_state
        with (
            step_graphs._choose_mask({"attention_mask": mask, "is_padded": padded}),
            monkeypatch.context() as patched,
        ):
            patched.setattr(torch.Tensor, "__bool__", lambda tensor: pytest.fail("asks for a value"))
            found = model(**inputs).last_hidden_state
        assert torch.allclose(found[mask == 1], expected[mask == 1], atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--cuda-graphs needs a GPU, and this rank computes on the CPU: leave it out"),
        (["--accumulate", "2"], "--accumulate is not for --cuda-graphs: leave out one"),
        (["--gradient-checkpointing"], "--gradient-checkpointing is not for --cuda-graphs: leave out one"),
    ],
)
def test_what_is_not_for_graphs_is_refused(options, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        finetune.fine_tune(classify.TASK, ALONE, ["--cuda-graphs", *options, "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


def test_graphs_are_for_one_rank():
    with pytest.raises(UsageError, match="--cuda-graphs is for one rank, and there are 2: leave it out"):
        finetune.fine_tune(classify.TASK, World(0, 2, 0, 2, 0, 1, "torchrun"), ["--cuda-graphs"])


def test_batches_are_padded_to_a_multiple():
    features = Features.from_lists({"input_ids": [[1, 2, 3], [4]]}, {"units": [1, 1]})
    batch = features.batch(torch.tensor([0, 1]), {"input_ids": 9}, round_up_to=64)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 9, 9, 9, 9, 9], [4, 9, 9, 9, 9, 9, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0]]
    # --max-length, beyond which a model may have no positions
    assert [features.batch(torch.tensor([0, 1]), {}, most)["input_ids"].shape[1] for most in (0, 3, 5)] == [
        3,
        3,
        5,
    ]


def test_a_model_gets_a_mask_only_where_there_is_padding():
    """With a mask it asks the GPU whether there is any padding, and waits for the answer."""
    seen = []
    model = torch.nn.Linear(1, 1)
    model.forward = lambda **inputs: seen.append(set(inputs)) or SimpleNamespace(loss=torch.zeros(()))
    module = FineTuneModule(
        classify.TASK, model, [], parse_options(classify.TASK, []), SimpleNamespace(world=ALONE), 1
    )
    batch = {
        "input_ids": torch.ones(2, 3),
        "attention_mask": torch.ones(2, 3),
        "labels": torch.ones(2),
        "weight": 1.0,
    }
    for real in (6, 5):
        module.training_step({**batch, "real": real}, 0)
    assert seen == [{"input_ids", "labels"}, {"input_ids", "labels", "attention_mask"}]
