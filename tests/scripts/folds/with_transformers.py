"""Cross validation with a Trainer of transformers: three runs, and work after them."""

import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hpctrain.transformers import RunFolder

TOKENS = torch.randint(50, (24, 6), generator=torch.Generator().manual_seed(0))
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


class Sentences(TensorDataset):
    """Sentences; the label says whether the first token is from the upper half of the vocabulary."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        (tokens,) = super().__getitem__(index)
        return {"input_ids": tokens, "labels": (tokens[0] >= 25).long()}


class EndAfter(TrainerCallback):
    """Ends the training after so many epochs that it has seen itself."""

    def __init__(self, epochs: int) -> None:
        self.left = epochs

    def on_epoch_end(self, args, state, control, **objects) -> None:
        """Count an epoch."""
        self.left -= 1
        control.should_training_stop = self.left == 0


def train(fold: int) -> nn.Module:
    """Train on what is not in the fold; callbacks end the first two folds, and the last one its steps."""
    model = BertForSequenceClassification(BertConfig(vocab_size=50, **SIZES))
    more = {"max_steps": 10} if fold == 2 else {"num_train_epochs": 4}
    if fold == 1:  # nothing is learned, so no evaluation is better than the first one
        more |= {"learning_rate": 0.0, "metric_for_best_model": "loss", "load_best_model_at_end": True}
    arguments = TrainingArguments(
        output_dir=f"runs/{fold}", per_device_train_batch_size=4, logging_steps=1, report_to="none",
        use_cpu=True, disable_tqdm=True, eval_strategy="steps", eval_steps=2, save_strategy="steps",
        save_steps=2, **more,
    )  # fmt: skip
    folder = RunFolder(arguments)
    os.chdir("local")  # as to the data on the node's disk
    callbacks = [folder, *([EndAfter(2)], [EarlyStoppingCallback(2)], [])[fold]]
    data = Sentences(TOKENS)
    numbers = [number for number in range(24) if number % 3 != fold]
    held_out = Subset(data, [number for number in range(24) if number % 3 == fold])
    data_sets = {"train_dataset": Subset(data, numbers), "eval_dataset": held_out}
    trainer = Trainer(model, arguments, callbacks=callbacks, **data_sets)
    trainer.train(resume_from_checkpoint=folder.checkpoint)
    os.chdir("..")
    return model


Path("local").mkdir(exist_ok=True)
torch.manual_seed(0)
models = [train(fold).eval() for fold in range(3)]
answer = sum(model(TOKENS).logits.double().sum().item() for model in models) + torch.rand(1).item()
with Path("after.txt").open("a") as file:
    file.write(f"{answer!r}\n")
