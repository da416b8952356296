"""Floating-point operations of models as counted by hand, and the share of a GPU's peak in result.json."""

import json
from functools import partial

import numpy
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from hpctrain.cli import load_command
from hpctrain.distributed.world import ALONE
from hpctrain.nlp.training.finetune import run_empty
from hpctrain.run import flops, record
from hpctrain.run.record import Record
from hpctrain.vision.model import ResNet50
from tests.helpers import write_digits


def count_bert(tokens):
    """The forward pass of BERT-base: 12 layers of 768, feed-forward 3072; the pooler sees one token."""
    projections = 2 * tokens * (4 * 768 * 768 + 2 * 768 * 3072)
    attention = 2 * 2 * tokens * tokens * 768  # scores, and the sum of the values
    return 12 * (projections + attention) + 2 * 768 * 768 + 2 * 768 * 2


def count_llama(tokens):
    """The forward pass of 4 layers of 256: 8 heads, 2 with keys and values, feed-forward 512."""
    projections = 2 * tokens * (2 * 256 * 256 + 2 * 256 * 64 + 3 * 256 * 512)
    attention = 2 * 2 * tokens * tokens * 256
    return 4 * (projections + attention) + 2 * tokens * 256 * 1000


@pytest.fixture(scope="module")
def bert():
    with torch.device("meta"):
        return BertForSequenceClassification(BertConfig(attn_implementation="sdpa"))


@pytest.mark.slow
def test_bert_base(bert):
    """The backward pass takes twice as many. Of frozen weights it has only one product."""
    for tokens in (128, 384):
        assert flops.count_flops(bert, partial(run_empty, length=tokens)) == 3 * count_bert(tokens)
    adapted = get_peft_model(bert, LoraConfig(r=4, task_type="SEQ_CLS"))
    assert (
        2 * count_bert(128)
        < flops.count_flops(adapted, partial(run_empty, length=128))
        < 2.1 * count_bert(128)
    )


def test_llama():
    shape = {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 512, "num_attention_heads": 8}
    config = LlamaConfig(**shape, num_key_value_heads=2, vocab_size=1000, attn_implementation="sdpa")
    config.use_cache = False  # as in training
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.activation_checkpointing_enable()
    assert flops.count_flops(model.train(), partial(run_empty, length=96)) == 3 * count_llama(96)
    lengths = [10, 20, 90]
    mean = sum(map(count_llama, lengths)) / 3
    assert flops.count_text_flops(model, numpy.array(lengths, numpy.uint16), run_empty) == pytest.approx(
        3 * mean, rel=1e-9
    )


@pytest.mark.slow
def test_resnet50():
    """4.09 GMAC at 224 x 224 (torchvision's table). The first convolution has no gradient of its input."""
    first = 2 * 112 * 112 * 64 * 3 * 7 * 7
    with torch.device("meta"):
        model = ResNet50(3, 1000)
    counted = flops.count_flops(model, lambda empty: empty(torch.empty(1, 3, 224, 224, device="meta")))
    assert (counted + first) / 3 / 2e9 == pytest.approx(4.09, abs=0.005)


def test_a_model_that_needs_values_is_not_counted():
    class Chooses(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) if self.weight.sum() > 0 else x

    assert flops.count_flops(Chooses(2, 2), lambda empty: empty(torch.empty(1, 2, device="meta"))) is None


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("NVIDIA A100-SXM4-40GB", 0.1),
        ("NVIDIA H100 80GB HBM3", 31.2 / 989.4),
        ("NVIDIA H100 PCIe", 31.2 / 756),
        ("Tesla V100-SXM2-32GB", 31.2 / 125),
        ("Other", None),
    ],
)
def test_utilization(name, share):
    figures = flops.utilization(31.2e12, name, "bf16")
    assert figures == flops.utilization(31.2e12, name, "fp16")
    assert figures == {"tflops_per_gpu": 31.2} | ({"mfu": round(share, 4)} if share else {})
    assert flops.utilization(31.2e12, name, "fp32") == {"tflops_per_gpu": 31.2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "options"),
    [("train_lightning", []), ("nlp.classify", ["--limit", "64", "--batch-size", "16"])],
)
def test_result_has_the_share_of_the_peak(tmp_path, monkeypatch, command, options):
    """As on a GPU, where alone it is counted."""
    monkeypatch.setattr(Record, "count_flops", lambda self, count: setattr(self, "_flops", count()))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(record, "utilization", lambda flops_per_s, name, precision: {"counted": flops_per_s})
    data = ["--data", str(write_digits(tmp_path / "data"))] if command == "train_lightning" else []
    load_command(command).main(ALONE, [*options, *data, "--epochs", "1", "--out", str(tmp_path / "run")])
    figures = json.loads((tmp_path / "run/result.json").read_text())["speed"]
    per_example = figures["counted"] / figures["examples_per_s"]
    assert per_example == pytest.approx(71_565_312) if data else 1e5 < per_example < 1e9
