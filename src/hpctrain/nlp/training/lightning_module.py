"""How a task's model is trained and scored: the LightningModule that Lightning's Trainer drives."""

import argparse
from typing import Any

import numpy
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from hpctrain.distributed.lazy_imports import import_of_lightning
from hpctrain.distributed.rendezvous import broadcast, gather
from hpctrain.nlp.batches.features import Features
from hpctrain.nlp.batches.sampling import evaluation_batches, make_loader
from hpctrain.nlp.task import Task
from hpctrain.nlp.training.step_graphs import StepGraphs
from hpctrain.run.run import Run
from hpctrain.training.batches import seed_step

with import_of_lightning():
    from lightning.pytorch import LightningModule


class FineTuneModule(LightningModule):
    """A model with its training and evaluation steps; `args` are the options, `steps` the optimizer steps of
    all epochs.

    `class_weights`, [labels], weigh the training loss; the loss of an evaluation stays as it is.
    """

    def __init__(
        self,
        task: Task,
        model: torch.nn.Module,
        labels: list[str],
        args: argparse.Namespace,
        run: Run,
        steps: int,
        class_weights: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("class_weights", class_weights, persistent=False)
        self._task, self._labels, self._args, self._run, self._steps = task, labels, args, run, steps
        # the ranks of a group compute the same examples
        self._group = run.world.in_groups_of(args.tensor_parallel)
        self._sets: dict[str, tuple[list[Any], Features]] = {}
        self._predictions: list[tuple[int, Any]] = []
        self._graphs: StepGraphs | None = None  # with --cuda-graphs, from the first step on

    # --- training ---

    def configure_optimizers(self) -> dict[str, Any]:
        """AdamW without decay of biases and norms; the learning rate rises linearly, then falls linearly to 0, every step."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.01},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        optimizer = AdamW(groups, lr=self._args.lr, fused=True)
        warmup = round(self._args.warmup * self._steps)

        # that of transformers' get_linear_schedule_with_warmup(), whose module imports peft
        def factor(step: int) -> float:
            return (
                step / warmup
                if step < warmup
                else max(0.0, (self._steps - step) / max(1, self._steps - warmup))
            )

        scheduler = LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
        """Clip gradients to a norm of 1.

        Lightning's own clipping refuses fused optimizers with bf16, because of a gradient scaler that bf16
        does not use.
        """
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)

    def on_train_batch_start(self, batch: dict[str, Any], batch_idx: int) -> int | None:
        """Seed dropout by seed, epoch, batch and rank alone, so that a resumed run draws the same masks.

        Returns -1, with which Lightning leaves out the rest of an epoch, if the run has stalled within it.
        """
        if self._run.best.has_stalled:
            return -1
        seed_step(self._args.seed, self.current_epoch, batch_idx, self._group)
        if self._run.world.rank % self._args.tensor_parallel == 0:  # of each group of ranks one
            self._run.times.count_tokens(batch["real"], batch["input_ids"].numel())
        return None

    def forward(self, batch: dict[str, Any]) -> transformers.utils.ModelOutput:
        """The model's output for a batch, without the columns that are not inputs of the model."""
        not_inputs = {"units", "index", "weight", "is_padded", *self._task.extra}
        if not batch.get("is_padded", True):
            not_inputs.add("attention_mask")  # BERT would ask the GPU whether there is any padding, and wait
        return self.model(**{name: value for name, value in batch.items() if name not in not_inputs})

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """The loss of one part of a global batch; BatchSampler explains the weight."""
        batch = {name: value for name, value in batch.items() if name != "real"} | {
            "is_padded": batch["real"] < batch["input_ids"].numel()
        }
        if not self._args.cuda_graphs:
            return self._compute_loss(batch)
        if self._graphs is None:
            self._graphs = StepGraphs(self.parameters(), self._compute_loss)
        return self._graphs.run(batch)

    def _compute_loss(self, batch: dict[str, Any]) -> Tensor:
        output = self(batch)
        if self.class_weights is not None:
            batch = {**batch, "class_weights": self.class_weights}
        return self._task.compute_loss(output, batch) * batch["weight"]

    def backward(self, loss: Tensor, *_: Any, **__: Any) -> None:
        """Compute the gradients, unless the graph of the step has them already."""
        if self._graphs is None:
            loss.backward()
        else:
            self._graphs.give_gradients()

    def on_train_end(self) -> None:
        """Free the graphs, the gradients and the optimizer, which Lightning would copy to the host, seconds for each GB."""
        self._graphs = None
        for optimizer in self.trainer.optimizers:
            optimizer.state.clear()
            optimizer.zero_grad()

    # --- evaluation ---

    def make_evaluation_loader(
        self,
        name: str,
        examples: dict[str, list[Any]],
        features: dict[str, Features],
        padding: dict[str, int],
    ) -> DataLoader:
        """The batches of this rank of the "validation" or the "test" set."""
        self._sets[name] = (examples[name], features[name])
        world = self._group
        batch_size = max(1, self._args.batch_size // world.size)
        # A rank without any example gets an empty batch: otherwise Lightning would leave it out of the
        # collectives.
        indices = list(evaluation_batches(features[name].lengths, batch_size, world.rank, world.size))
        nothing = torch.empty(0, dtype=torch.int64)
        batches = [(index, {"index": index}) for index in indices or [nothing]]
        # all ranks gather weights in each forward pass, so they need as many of them
        if self._args.strategy == "fsdp":
            batches = [(index, {"index": index}) for index in indices]
            most = -(-len(features[name].lengths) // (batch_size * world.size))
            batches += [(torch.tensor([0]), {"index": nothing})] * (most - len(batches))
        return make_loader(features[name], padding, batches)

    def on_validation_epoch_start(self) -> None:
        """Reset the predictions and the sums: of the loss over all labels, and of the labels."""
        self._predictions, self._sums = [], torch.zeros(2, dtype=torch.float64, device=self.device)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Keep the predictions and add up the loss."""
        if not len(batch["index"]) and self._args.strategy != "fsdp":
            return
        output = self(batch)
        if not len(batch["index"]):
            return
        units = batch["units"].sum()
        if units:
            self._sums += torch.stack([self._task.compute_loss(output, batch) * units, units])
        self._predictions += zip(batch["index"].tolist(), self._task.predict(output, batch), strict=True)

    def on_validation_epoch_end(self, name: str = "validation") -> None:
        """Score the predictions of all ranks together on rank 0: each example counts once, on any number of ranks."""
        world = self._run.world
        examples, features = self._sets[name]
        if world.rank % self._args.tensor_parallel:  # another rank of the group has the same
            self._predictions = []
            self._sums.zero_()
        if world.size > 1:
            dist.all_reduce(self._sums)
        predictions_by_rank = gather(world, pack_predictions(self._predictions))
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
        scores = {**loss, **broadcast(world, scores)}
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
        """The score of an epoch by its validation; the loss, if any, breaks ties, which are frequent with few examples."""
        value = metrics[f"validation_{self.choose_metric(self._sets['validation'][0])}"]
        return value if self._task.higher_is_better else -value, -metrics.get("validation_loss", 0)

    on_test_epoch_start, test_step = on_validation_epoch_start, validation_step

    def on_test_epoch_end(self) -> None:
        """Score the test set like the validation set."""
        self.on_validation_epoch_end("test")


# --- exchanging predictions ---


def pack_predictions(numbered: list[tuple[int, numpy.ndarray]]) -> dict[str, list[Any]]:
    """Predictions and the numbers of their features as lists, which JSON can hold; each value comes back with the same bits."""
    return {
        "features": [feature for feature, _ in numbered],
        "shapes": [prediction.shape for _, prediction in numbered],
        "types": [prediction.dtype.name for _, prediction in numbered],
        "values": [prediction.ravel().tolist() for _, prediction in numbered],
    }


def unpack_predictions(packed: dict[str, list[Any]]) -> list[tuple[int, numpy.ndarray]]:
    """The predictions and the numbers of their features, from pack_predictions() of another rank."""
    columns = (packed[name] for name in ("features", "shapes", "types", "values"))
    return [
        (feature, numpy.array(values, type_).reshape(shape))
        for feature, shape, type_, values in zip(*columns, strict=True)
    ]
