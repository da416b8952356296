"""The optimizer and the clipping of a fine-tuning, beside transformers and plain torch."""

import json

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import get_linear_schedule_with_warmup

from hpctrain.nlp.tasks import classify
from hpctrain.nlp.training.steps import Steps
from tests.nlp.helpers import NO_DROPOUT, SHAPE, train


def test_the_weights_are_those_of_a_loop_of_plain_torch(tmp_path, monkeypatch):
    """With gradients that are clipped, weight decay of matrices alone, and the schedule of transformers."""
    config = tmp_path / "config.json"  # of a model whose first gradients are large
    config.write_text(json.dumps({"model_type": "bert", "initializer_range": 0.15} | SHAPE | NO_DROPOUT))
    initial, batches, compute_loss = {}, [], Steps.compute_loss

    def record(self, model, batch):
        if not batches:
            initial.update({name: value.clone() for name, value in model.state_dict().items()})
        batches.append(batch)
        return compute_loss(self, model, batch)

    monkeypatch.setattr(Steps, "compute_loss", record)
    options = ("--epochs", 1, "--batch-size", 8, "--limit", 32, "--lr", 5e-3, "--from-scratch", config)
    run = train("classify", tmp_path / "run", *options)

    model = classify.TASK.model.from_pretrained(run / "model").train()
    model.load_state_dict(initial)
    named = dict(model.named_parameters())
    plain = [value for name, value in named.items() if name.endswith("bias") or "LayerNorm" in name]
    decayed = [value for value in named.values() if not any(value is other for other in plain)]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0}]
    optimizer = torch.optim.AdamW(groups, lr=5e-3, fused=True)
    schedule = get_linear_schedule_with_warmup(optimizer, round(0.1 * len(batches)), len(batches))
    norms = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch.model_inputs()).loss
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        schedule.step()
    assert len(batches) == 4 and max(norms) > 1
    for name, value in load_file(run / "model/model.safetensors").items():
        torch.testing.assert_close(value, named[name].detach(), rtol=1e-6, atol=1e-7)
