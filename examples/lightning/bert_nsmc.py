"""Sentiment of film reviews by BERT, as in the NLP tutorials: pandas reads NSMC, transformers has the model,
Lightning trains.

Usage: bert_nsmc.py MODEL, a folder with a model and its tokenizer.
"""

import os
import sys

import pandas as pd
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoTokenizer, BertForSequenceClassification


class Sentiment(pl.LightningModule):
    def __init__(self, model: str) -> None:
        super().__init__()
        self.bert = BertForSequenceClassification.from_pretrained(model, num_labels=2)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        ids, mask, labels = batch
        loss = self.bert(input_ids=ids, attention_mask=mask, labels=labels).loss
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=5e-5)


if __name__ == "__main__":
    pl.seed_everything(0)
    reviews = pd.read_csv("ratings_train.txt", sep="\t").dropna()
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    texts = tokenizer(
        list(reviews["document"]), padding=True, truncation=True, max_length=32, return_tensors="pt"
    )
    data = TensorDataset(texts["input_ids"], texts["attention_mask"], torch.tensor(list(reviews["label"])))
    ranks, here = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = pl.Trainer(accelerator="auto", strategy="ddp", devices=here, num_nodes=ranks // here,
                         max_epochs=1, logger=False, enable_checkpointing=False)  # fmt: skip
    trainer.fit(Sentiment(sys.argv[1]), DataLoader(data, batch_size=4, shuffle=True))
    print(
        f"rank {trainer.global_rank} of {trainer.world_size} "
        f"loss {trainer.callback_metrics['loss_epoch']:.6f}",
        flush=True,
    )
