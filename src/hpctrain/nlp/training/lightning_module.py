"""How a task's model is trained and scored: the LightningModule that Lightning's Trainer drives."""

from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from hpctrain.distributed.lazy_imports import import_of_lightning
from hpctrain.distributed.rendezvous import broadcast, gather
from hpctrain.nlp.batches.features import Features
from hpctrain.nlp.batches.sampling import Selection, evaluation_batches_by_length, make_loader
from hpctrain.nlp.batches.text_batch import TextBatch
from hpctrain.nlp.models.masks import no_searches
from hpctrain.nlp.options import FineTuneOptions
from hpctrain.nlp.task import Task
from hpctrain.nlp.training.step_graphs import StepGraphs
from hpctrain.run.record import Record
from hpctrain.training.batches import seed_step

with import_of_lightning():
    from lightning.pytorch import LightningModule


# An evaluation has larger batches than training only if there are so many of them. The fewer, the more the
# texts of a batch differ in length: reviews of NSMC have 63 tokens of padding per 100 in 4 batches, 5 in 40.
FEWEST_BATCHES = 32


class FineTuneModule(LightningModule):
    """A model with its training and evaluation steps.

    `steps`: optimizer steps of all epochs. `class_weights`, [labels], weigh the training loss alone.
    `masked`: whether the model gets the attention mask of a batch with padding.
    """

    class_weights: Tensor | None

    def __init__(
        self,
        task: Task,
        model: PreTrainedModel,
        labels: list[str],
        args: FineTuneOptions,
        run: Record,
        steps: int,
        class_weights: Tensor | None = None,
        masked: bool = True,
    ) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("class_weights", class_weights, persistent=False)
        self._task, self._labels, self._args, self._run, self._steps = task, labels, args, run, steps
        self._without = {*task.extra} if masked else {*task.extra, "attention_mask"}
        # the ranks of a group compute the same examples
        self.group = run.world.in_groups_of(args.tensor_parallel)
        self._sets: dict[str, tuple[list[Any], Features]] = {}
        self._predictions: list[tuple[Tensor, Tensor]] = []  # index and predictions of each batch
        self._graphs: StepGraphs | None = None  # with --cuda-graphs, from the first step on
        # the longest batch whose length is rounded up: see make_loader()
        self.round_up_to = args.max_length if run.device.type == "cuda" else 0

    # --- training ---

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW without decay of biases and norms."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.01},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        return AdamW(groups, lr=self._args.lr, fused=True)

    def _set_learning_rate(self) -> None:
        """Set the rate of the step: it rises linearly to its peak, then falls to 0.

        It depends on the options and the number of the step alone. A scheduler would be restored with the
        rates of the checkpoint, also where --force changes them.
        """
        step, warmup = self._run.global_step, round(self._args.warmup * self._steps)
        # as transformers' get_linear_schedule_with_warmup()
        if step < warmup:
            factor = step / warmup
        else:
            factor = max(0.0, (self._steps - step) / max(1, self._steps - warmup))
        for optimizer in self.trainer.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self._args.lr * factor

    def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
        """Clip gradients to a norm of 1.

        Lightning refuses fused optimizers with bf16 and fp16, whose gradients its own plugin leaves scaled.
        """
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)

    def on_train_batch_start(self, batch: TextBatch, batch_idx: int) -> int | None:
        """Set the rate, and seed dropout by seed, epoch, batch and rank alone, as a resumed run does.

        Returns -1, with which Lightning leaves out the rest of an epoch, if the run has stalled within it.
        """
        if self._run.best.has_stalled:
            return -1
        self._set_learning_rate()
        seed_step(self._args.seed, self.current_epoch, batch_idx, self.group)
        if self._run.world.rank % self._args.tensor_parallel == 0:  # of each group of ranks one
            self._run.times.count_tokens(batch.real_tokens, batch.attention_mask.numel())
        return None

    def forward(self, batch: TextBatch) -> ModelOutput:
        inputs = batch.model_inputs(without=self._without)
        with no_searches(inputs):
            return self.model(**inputs)

    def training_step(self, batch: TextBatch, batch_idx: int) -> Tensor:
        """The loss of one part of a global batch; LengthGroupedSampler explains the weight."""
        if not self._args.cuda_graphs:
            return self._compute_loss(batch)
        if self._graphs is None:
            self._graphs = StepGraphs(self.parameters(), self._compute_loss)
        return self._graphs.run(batch)

    def _compute_loss(self, batch: TextBatch) -> Tensor:
        output = self(batch)
        if self.class_weights is None:
            loss = self._task.compute_loss(output, batch)
        else:
            loss = compute_weighted_loss(output.logits, batch, self.class_weights)
        return loss * batch.weight

    def backward(self, loss: Tensor, *_: Any, **__: Any) -> None:
        """Compute the gradients, unless the graph of the step has them already."""
        if self._graphs is None:
            loss.backward()
        else:
            self._graphs.give_gradients()

    def on_train_end(self) -> None:
        """Free graphs, gradients and optimizer, which Lightning would copy to the host (seconds per GB)."""
        self._graphs = None
        for optimizer in self.trainer.optimizers:
            optimizer.state.clear()
            optimizer.zero_grad()

    # --- evaluation ---

    def make_evaluation_loader(
        self, name: str, examples: list[Any], features: Features, padding: dict[str, int]
    ) -> DataLoader:
        """The batches of this rank of the "validation" or the "test" set."""
        self._sets[name] = (examples, features)
        world = self.group
        batch_size = max(1, self._args.batch_size // (world.size * self._args.accumulate))
        # With --gradient-checkpointing, training keeps few activations, too, and may fill the memory.
        if not self._args.gradient_checkpointing:
            factor = len(features.lengths) // (batch_size * world.size * FEWEST_BATCHES)
            batch_size *= max(1, min(self._task.evaluation_factor, factor))
        indices = evaluation_batches_by_length(features.lengths, batch_size, world.rank, world.size)
        batches: list[Selection] = [(index, 1.0) for index in indices]
        # All ranks need the same number of batches, and at least one: Lightning leaves a rank without a batch
        # out of the collectives, and ranks with a sharded model gather its weights in each forward pass. So
        # the first example is repeated, in a batch that does not count.
        most = -(-len(features.lengths) // (batch_size * world.size))
        batches += [(torch.tensor([0]), 0.0)] * (most - len(batches))
        return make_loader(features, padding, batches, round_up_to=self.round_up_to)

    def on_validation_epoch_start(self) -> None:
        """Reset the predictions and the sums: of the loss over all labels, and of the labels."""
        self._predictions, self._sums = [], torch.zeros(2, dtype=torch.float64, device=self.device)

    def validation_step(self, batch: TextBatch, batch_idx: int) -> None:
        """Keep the predictions and add up the loss, on the device: to read a value waits for a GPU."""
        output = self(batch)
        if not batch.weight:
            return
        units = batch.units.sum()
        loss = self._task.compute_loss(output, batch) * units
        # the mean over no labels is NaN
        self._sums += torch.stack([torch.where(units > 0, loss, 0), units])
        self._predictions.append((batch.index, self._task.predict(output, batch)))

    def on_validation_epoch_end(self, name: str = "validation") -> None:
        """Score the predictions of all ranks together, on rank 0; each example counts once."""
        world = self._run.world
        examples, features = self._sets[name]
        if world.rank % self._args.tensor_parallel:  # another rank of the group has the same
            self._predictions = []
            self._sums.zero_()
        if world.size > 1:
            dist.all_reduce(self._sums)
        own = list(self._task.fetch_predictions(self._predictions))
        predictions_by_rank = gather(world, pack_predictions(own))
        scores: dict[str, float] = {}
        if world.rank == 0:
            numbered = sorted(
                (pair for part in predictions_by_rank for pair in unpack_predictions(part)),
                key=lambda pair: pair[0],
            )
            predictions = [prediction for _, prediction in numbered]
            answers = self._task.make_answers(examples, features, predictions, self._labels)
            scores = {key: float(value) for key, value in self._task.score(examples, answers).items()}
        # A set that has only labels which are not in the training data has no loss, but scores.
        loss = {"loss": (self._sums[0] / self._sums[1]).item()} if self._sums[1] else {}
        scores = broadcast(world, scores)
        first = self.choose_metric(self._sets["validation"][0])  # readers of metrics take the first score
        scores = {**loss, first: scores[first], **scores}
        # As float64: Lightning would store float32, which is too imprecise to compare runs.
        self.log_dict(
            {f"{name}_{key}": torch.tensor(value, dtype=torch.float64) for key, value in scores.items()}
        )

    def choose_metric(self, examples: list[Any]) -> str:
        """The metric that selects the best epoch, for these validation examples.

        With class weights it is F1 (macro), for which all classes count the same. Accuracy would select an
        epoch that never predicts a rare class.
        """
        return self._task.choose_metric(examples) if self.class_weights is None else "f1"

    def score(self, metrics: dict[str, float]) -> tuple[float, ...]:
        """The score of an epoch; the loss, if any, breaks ties, frequent with few examples."""
        value = metrics[f"validation_{self.choose_metric(self._sets['validation'][0])}"]
        return value if self._task.higher_is_better else -value, -metrics.get("validation_loss", 0)

    on_test_epoch_start, test_step = on_validation_epoch_start, validation_step

    def on_test_epoch_end(self) -> None:
        self.on_validation_epoch_end("test")


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
