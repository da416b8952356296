"""The loss and the scores of a task's model: what a step and an evaluation of a fine-tuning compute."""

from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from hpctrain.distributed.rendezvous import broadcast, gather
from hpctrain.nlp.batches.features import Features
from hpctrain.nlp.batches.sampling import Selection, evaluation_batches_by_length, make_loader
from hpctrain.nlp.batches.text_batch import TextBatch
from hpctrain.nlp.options import FineTuneOptions
from hpctrain.nlp.task import Task
from hpctrain.training.run import Run

# An evaluation has larger batches than training only if there are so many of them. The fewer, the more the
# texts of a batch differ in length: reviews of NSMC have 63 tokens of padding per 100 in 4 batches, 5 in 40.
MIN_BATCHES = 32


class Steps:
    """Computes the loss of training batches, and the scores of a validation or a test set.

    `class_weights`, [labels], weigh the training loss alone. `masked`: whether the model gets the attention
    mask of a batch with padding.
    """

    def __init__(
        self,
        task: Task,
        model: PreTrainedModel,
        labels: list[str],
        args: FineTuneOptions,
        run: Run,
        class_weights: Tensor | None = None,
        masked: bool = True,
    ) -> None:
        self.model = model
        self._task, self._labels, self._args, self._run = task, labels, args, run
        self._class_weights = None if class_weights is None else class_weights.to(run.device)
        self._without = {*task.extra} if masked else {*task.extra, "attention_mask"}
        # the ranks of a group compute the same examples
        self.group = run.world.in_groups_of(args.tensor_parallel)
        self._sets: dict[str, tuple[list[Any], Features, DataLoader]] = {}
        # the longest batch whose length is rounded up: see make_loader()
        self.round_up_to = args.max_length if run.device.type == "cuda" else 0

    @property
    def counts_tokens(self) -> bool:
        """Whether the tokens of this rank count: of each group of ranks, those of one do."""
        return self._run.world.rank % self._args.tensor_parallel == 0

    def forward(self, model: nn.Module, batch: TextBatch) -> Any:
        """The output of a model for a batch."""
        return model(**batch.model_inputs(without=self._without))

    def compute_loss(self, parallel: nn.Module, batch: TextBatch) -> Tensor:
        """The loss of one part of a global batch, times its weight: see TrainingTexts.

        `parallel` is the model as the training calls it, from run.prepare().
        """
        output = self.forward(parallel, batch)
        if self._class_weights is None:
            loss = self._task.compute_loss(output, batch)
        else:
            loss = compute_weighted_loss(output.logits, batch, self._class_weights)
        return loss * batch.weight

    # --- evaluation ---

    def add_set(self, name: str, examples: list[Any], features: Features, padding: dict[str, int]) -> None:
        """Divide the "validation" or the "test" set into the batches of this rank, for evaluate()."""
        world = self.group
        batch_size = max(1, self._args.batch_size // (world.size * self._args.accumulate))
        # With --gradient-checkpointing, training keeps few activations, too, and may fill the memory.
        if not self._args.gradient_checkpointing:
            factor = len(features.lengths) // (batch_size * world.size * MIN_BATCHES)
            batch_size *= max(1, min(self._task.evaluation_factor, factor))
        indices = evaluation_batches_by_length(features.lengths, batch_size, world.rank, world.size)
        batches = [Selection(index) for index in indices]
        # Ranks with a sharded model gather its weights in each forward pass, so all need the same number of
        # them. The first example is repeated, in a batch that does not count.
        most = -(-len(features.lengths) // (batch_size * world.size))
        batches += [Selection(torch.tensor([0]), 0.0)] * (most - len(batches))
        loader = make_loader(features, padding, batches, round_up_to=self.round_up_to)
        self._sets[name] = examples, features, loader

    @torch.inference_mode()
    def evaluate(self, name: str) -> dict[str, float]:
        """The scores of a set over all ranks, in which each example counts once. A collective call.

        A set that has only labels which are not in the training data has no loss, but scores.
        """
        examples, features, loader = self._sets[name]
        world, predictions = self._run.world, []
        # the sums over all labels: of their losses, and of their number
        sums = torch.zeros(2, dtype=torch.float64, device=self._run.device)
        with self._run.evaluation():
            self.model.eval()
            for batch in loader:
                batch = batch.to(self._run.device)
                with self._run.autocast():
                    output = self.forward(self.model, batch)
                    if not batch.weight:
                        continue
                    units = batch.units.sum()
                    loss = self._task.compute_loss(output, batch) * units
                    # The mean over no labels is NaN. On the device: to read a value waits for a GPU.
                    sums += torch.stack([torch.where(units > 0, loss, 0), units])
                    predictions.append((batch.index, self._task.predict(output, batch)))
            self.model.train()
            if not self.counts_tokens:  # another rank of the group has the same
                predictions = []
                sums.zero_()
            if world.size > 1:
                dist.all_reduce(sums)
            by_rank = gather(world, pack_predictions([*self._task.fetch_predictions(predictions)]))
            scores: dict[str, float] = {}
            if world.rank == 0:
                numbered = dict(pair for part in by_rank for pair in unpack_predictions(part))
                ordered = [numbered[number] for number in sorted(numbered)]
                answers = self._task.make_answers(examples, features, ordered, self._labels)
                scores = {key: float(value) for key, value in self._task.score(examples, answers).items()}
            scores = broadcast(world, scores)
        loss_of_set = {"loss": (sums[0] / sums[1]).item()} if sums[1] else {}
        first = self.metric  # readers of metrics take the first score
        scores = {**loss_of_set, first: scores[first], **scores}
        return {f"{name}_{key}": value for key, value in scores.items()}

    @property
    def metric(self) -> str:
        """The metric that selects the best epoch, for the examples of the validation set.

        With class weights it is F1 (macro), for which all classes count the same. Accuracy would select an
        epoch that never predicts a rare class.
        """
        if self._class_weights is not None:
            return "f1"
        return self._task.choose_metric(self._sets["validation"][0])


# --- training ---


def make_optimizer(model: PreTrainedModel, lr: float) -> Optimizer:
    """AdamW without decay of biases and norms."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.01},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=lr, fused=True)


def compute_weighted_loss(logits: Tensor, batch: TextBatch, class_weights: Tensor) -> Tensor:
    """The mean over the labels of a batch of their cross entropy, each times the weight of its class.

    Torch divides by the sum of the weights: without the rare class, that would undo the others' low weight.
    """
    losses = cross_entropy(logits, batch.values["labels"], class_weights, reduction="sum")
    return losses / batch.units.sum()


# --- exchanging predictions ---


def pack_predictions(numbered: list[tuple[int, numpy.ndarray]]) -> dict[str, list[Any]]:
    """Predictions and the numbers of their features as lists, for JSON, which keeps each bit of a value."""
    return {
        "features": [feature for feature, _ in numbered],
        "shapes": [prediction.shape for _, prediction in numbered],
        "types": [prediction.dtype.name for _, prediction in numbered],
        "values": [prediction.ravel().tolist() for _, prediction in numbered],
    }


def unpack_predictions(packed: dict[str, list[Any]]) -> list[tuple[int, numpy.ndarray]]:
    columns = (packed[name] for name in ("features", "shapes", "types", "values"))
    return [
        (feature, numpy.array(values, type_).reshape(shape))
        for feature, shape, type_, values in zip(*columns, strict=True)
    ]
