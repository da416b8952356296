"""--cuda-graphs, on a CPU: what surrounds the graphs.

benchmarks/gpu.py has the test on a GPU: the same weights, bit for bit.
"""

import argparse
import sys
from contextlib import nullcontext
from dataclasses import replace
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
from hpctrain.nlp.training.step_graphs import StepGraphs

sys.path.insert(0, str(REPOSITORY / "benchmarks"))
import nlp


@pytest.fixture
def captured(monkeypatch):
    """Let a function that computes the batch in the same memory be the graph.

    The value is the shapes that were captured, and whether with padding.
    """
    shapes = []

    def capture(steps, batch):
        shapes.append((tuple(batch.attention_mask.shape), batch.is_padded))
        loss = steps._pass(batch)

        def replay():
            steps.give_gradients()  # a graph writes where they were when it was captured
            loss.copy_(steps._pass(batch))

        return SimpleNamespace(replay=replay), loss

    monkeypatch.setattr(StepGraphs, "_capture", capture)
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    for name in ("get_rng_state", "set_rng_state"):
        monkeypatch.setattr(torch.cuda, name, getattr(torch, name))
    return shapes


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 100])
def test_a_graph_for_each_shape_gives_the_weights_of_steps_without_graphs(
    tmp_path, monkeypatch, captured, most
):
    """With dropout, in 20 steps; and where there are more shapes than graphs."""
    monkeypatch.setattr(step_graphs, "MAX_SHAPES", most)
    args = argparse.Namespace(data=None, size="tiny", examples=160, held_out=8, batch_size=8, max_length=64)
    args.lr, args.precision, args.seed, args.kernels = 1e-3, "fp32", 1, False
    setting = nlp.prepare(args, ALONE, torch.device("cpu"), tmp_path)
    weights, prepare_steps = [], nlp.prepare_steps

    def prepare_rounded(*words):
        steps = prepare_steps(*words)
        steps.round_up_to = 64
        steps.evaluate = lambda name: {f"{name}_{steps.metric}": 0.0}  # the benchmark has no examples
        return steps

    monkeypatch.setattr(nlp, "prepare_steps", prepare_rounded)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    for graphs in (False, True):
        options = replace(setting.args, out=tmp_path / f"{graphs}")
        model = nlp.load_model(classify.TASK, tmp_path / "model", setting.tokenizer, setting.labels, options)
        nlp.train_with_hpctrain(setting._replace(args=options), model, lambda *_: None, graphs=graphs)
        weights.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    assert len(set(captured)) == len(captured) <= most
    assert most == 1 or 1 < len({shape for shape, _ in captured}) < 10
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def test_steps_that_cannot_be_recorded_are_one_line(captured, monkeypatch):
    def refuse(*_):
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nCompile with")

    monkeypatch.setattr(StepGraphs, "_capture", refuse)
    weight = torch.nn.Parameter(torch.ones(1))
    steps = StepGraphs([weight], lambda batch: (weight * batch.units).sum())
    message = (
        r"--cuda-graphs: the steps of this model cannot be recorded \(CUDA error: .* capturing\): "
        "leave it out$"
    )
    with pytest.raises(HpctrainError, match=message):
        steps.run(make_batch(2))


def make_batch(texts):
    features = Features.from_lists({"input_ids": [[1, 2]] * texts}, {"units": [1] * texts})
    return features.batch(torch.arange(texts), {})


def test_weights_that_only_some_batches_train_are_refused(captured):
    first, second = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    steps = StepGraphs(
        [first, second], lambda batch: (first * batch.units).sum() + (second if len(batch.units) > 2 else 0)
    )
    steps.run(make_batch(2))
    with pytest.raises(
        HpctrainError, match="which weights this model trains depends on the batch: leave it out"
    ):
        steps.run(make_batch(3))


def test_layerdrop_is_refused():
    step_graphs.check_layers(transformers.BartConfig(encoder_layerdrop=0.0))
    with pytest.raises(HpctrainError, match=r"not for encoder_layerdrop 0\.1 in the config\.json"):
        step_graphs.check_layers(transformers.BartConfig(encoder_layerdrop=0.1))


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
