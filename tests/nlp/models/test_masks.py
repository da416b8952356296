"""Batches with padding without an attention mask: for which models nothing changes but rounding."""

import pytest
import torch
import transformers
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, masking_utils

from hpctrain.nlp.batches.features import Features
from hpctrain.nlp.models.masks import SEARCH, needs_mask, skip_searches
from hpctrain.nlp.task import IGNORED
from hpctrain.nlp.tasks.instruct import TASK
from hpctrain.nlp.training import finetune
from hpctrain.nlp.training.steps import Steps
from tests.nlp.helpers import metrics, scores, train

# by the names that the architectures have for them
SIZES = {
    "vocab_size": 50,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "word_embed_proj_dim": 64,
    "moe_intermediate_size": 32,
    "max_position_embeddings": 64,
}
# attention with grouped keys, sliding windows, biases in the place of positions, experts, recurrent layers
CAUSAL = {
    "falcon": {"alibi": True},
    "gemma3_text": {"sliding_window": 4},
    "gpt2": {},
    "gpt_neox": {},
    "jamba": {},
    "llama": {},
    "mistral": {"sliding_window": 4},
    "mixtral": {"num_local_experts": 4},
    "opt": {},
    "phi": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen3_next": {"num_experts": 4, "num_experts_per_tok": 2},
}
OTHER = {
    "bert": {},
    "gemma3_text": {"use_bidirectional_attention": True},
    "llama": {"is_causal": False},
    "mixtral": {"num_local_experts": 4, "output_router_logits": True},
}


def make_model(kind, **more):
    """A model of this architecture, with weights for which attention matters."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **SIZES, **more, use_cache=False)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    for weight in model.parameters():
        mean = weight.detach().mean().item() if weight.ndim == 1 else 0.0
        torch.nn.init.normal_(weight, mean, std=0.1)
    return model


def make_batch(lengths=(13, 9, 5, 2)):
    """Texts of these lengths in tokens, each of which is to be predicted."""
    texts = [torch.randint(1, 50, (length,)).tolist() for length in lengths]
    labels = [[IGNORED, *text[1:]] for text in texts]
    features = Features.from_lists({"input_ids": texts, "labels": labels}, {"units": [9] * len(texts)})
    return features.batch(torch.arange(len(texts)), {"labels": IGNORED})


def compute(model, batch, without=()):
    """The logits of the real tokens, the loss, and the gradients, one after the other."""
    model.zero_grad()
    output = model(**batch.model_inputs(without))
    output.loss.backward()
    gradients = [weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]
    return output.logits[batch.attention_mask == 1].detach(), output.loss.detach(), torch.cat(gradients)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CAUSAL)
def test_a_causal_model_computes_the_same_without_a_mask(kind):
    model, batch = make_model(kind, **CAUSAL[kind]), make_batch()
    assert not needs_mask(model) and model.training
    model.eval()
    for found, expected in zip(compute(model, batch, {"attention_mask"}), compute(model, batch), strict=True):
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("kind", OTHER)
def test_a_model_for_which_padding_counts_keeps_its_mask(kind):
    model, batch = make_model(kind, **OTHER[kind]), make_batch()
    assert needs_mask(model)
    (_, loss, _), (_, expected, _) = compute(model.eval(), batch, {"attention_mask"}), compute(model, batch)
    assert loss != expected


def test_bidirectional_attention_counts_in_a_new_model_too():
    """Its weights are small, so the tokens hardly change one another."""
    torch.manual_seed(1)
    for causal in (False, True):
        config = AutoConfig.for_model("llama", **SIZES, is_causal=causal)
        assert needs_mask(AutoModelForCausalLM.from_config(config)) is not causal


@pytest.mark.parametrize("recording", [False, True])
@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_without_a_mask_transformers_reads_no_value_and_makes_none(kind, recording, monkeypatch):
    """Holds for transformers 5.23, also while --cuda-graphs records a step: see skip_searches()."""
    model = transformers.AutoModel.from_config(AutoConfig.for_model(kind, **SIZES, pad_token_id=0)).eval()
    batch = make_batch((4, 4) if kind == "bert" else (4, 3))
    inputs = batch.model_inputs({"attention_mask", "labels"})
    masks = []

    def attend(*inputs, attn_mask=None, **options):
        masks.append(attn_mask)
        return scaled_dot_product_attention(*inputs, attn_mask=attn_mask, **options)

    expected = model(**batch.model_inputs({"labels"})).last_hidden_state
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recording)
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda tensor: pytest.fail("reads a value"))
    monkeypatch.setattr(torch.Tensor, "__contains__", lambda tensor, value: pytest.fail("reads a value"))
    skip_searches(model, packed=False)
    found = model(**inputs).last_hidden_state
    monkeypatch.undo()
    assert SEARCH in vars(masking_utils) and hasattr(PreTrainedModel, "warn_if_padding_and_no_attention_mask")
    assert masks == [None, None]
    real = batch.attention_mask == 1
    assert torch.allclose(found[real], expected[real], atol=1e-6)


def test_texts_packed_in_rows_are_searched_for():
    """Also after the training of another model in this process."""
    model = make_model("llama")
    packed = {"input_ids": torch.tensor([[3, 1, 2, 5, 4]]), "position_ids": torch.tensor([[0, 1, 2, 0, 1]])}
    found = []
    for apart in (True, False, True):
        skip_searches(model, packed=apart)
        found.append(model(**packed).logits[:, 3:])
    alone = model(input_ids=packed["input_ids"][:, 3:]).logits
    assert [torch.allclose(each, alone, rtol=1e-5, atol=1e-6) for each in found] == [True, False, True]


@pytest.mark.slow
def test_a_training_without_masks_has_the_losses_and_scores_of_one_with_them(tmp_path, monkeypatch):
    seen = []
    forward = Steps.forward

    def watch(steps, model, batch):
        seen.append((batch.is_padded, "attention_mask" in batch.model_inputs(steps._without)))
        return forward(steps, model, batch)

    monkeypatch.setattr(Steps, "forward", watch)
    monkeypatch.setattr(type(TASK), "generate_samples", lambda *_: [])
    options = ("--limit", 40, "--epochs", 1, "--batch-size", 8, "--max-length", 64)
    runs = []
    for masked in (False, True):
        seen.clear()
        runs.append(train("instruct", tmp_path / f"{masked}", *options))
        assert (True, masked) in seen and (True, not masked) not in seen
        monkeypatch.setattr(finetune, "needs_mask", lambda model: True)
    losses = [[line["train_loss"] for line in metrics(run) if "train_loss" in line] for run in runs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[0]) > 1
    assert scores(runs[0]) == pytest.approx(scores(runs[1]), rel=1e-5)
