"""A Trainer of transformers of your own, in a run folder; it goes on after its time limit.

Added lines are marked "hpctrain".

sbatch launch/apptainer_ddp.sh examples/transformers/train.py
"""

import os

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import hpctrain  # hpctrain
from hpctrain.transformers import RunFolder  # hpctrain


class Sentences(Dataset):
    """Random sentences of eight subword tokens.

    The label says whether the first token is from the upper half of the vocabulary.
    """

    tokens = torch.randint(100, (512, 8), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": (self.tokens[index, 0] >= 50).long()}


def main(world: hpctrain.World) -> None:  # hpctrain: world
    """Train."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = BertForSequenceClassification(BertConfig(vocab_size=100, **sizes))
    arguments = TrainingArguments(
        # hpctrain: the same after a requeue
        output_dir="runs/transformers-" + os.environ.get("HPCTRAIN_JOB", "mine"),
        num_train_epochs=3,
        per_device_train_batch_size=16,
        learning_rate=1e-3,
        logging_steps=8,
        save_strategy="epoch",
        save_total_limit=3,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),  # hpctrain: or each rank trains alone
    )
    folder = RunFolder(arguments)  # hpctrain
    trainer = Trainer(model, arguments, train_dataset=Sentences(), callbacks=[folder])  # hpctrain: callbacks
    trainer.train(resume_from_checkpoint=folder.checkpoint)  # hpctrain: resume_from_checkpoint


if __name__ == "__main__":
    hpctrain.main(main)  # hpctrain: errors in one line, and no abort at the end on CPUs
