"""The loop over epochs and steps of train_ddp, train_fsdp and train_horovod."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hpctrain.run.record import Record
from hpctrain.training.batches import steps_per_epoch, training_batches
from hpctrain.vision.folder import ImageSet
from hpctrain.vision.recipe import ImageOptions


def train_epochs(
    run: Record,
    args: ImageOptions,
    device: torch.device,
    training_set: ImageSet,
    batch_size: int,
    optimizer: Optimizer,
    train_step: Callable[[Tensor, Tensor], Tensor],
    evaluate: Callable[[], tuple[float, float]],
    make_state: Callable[[], dict[str, Any]],
) -> tuple[float, float]:
    """Train the epochs that are left. After each, evaluate and save a checkpoint.

    Returns the loss and the accuracy of the last evaluation. A collective call. Raises HpctrainError.

    `batch_size` is the global one, in examples per optimizer step. `train_step(images, labels)` updates the
    weights and returns the mean loss of this rank's examples. `evaluate()` returns the mean loss and the
    accuracy over the test set. `make_state()` returns the content of a checkpoint.
    """
    if run.epoch >= args.epochs:  # resumed after the last epoch
        return evaluate()
    steps = steps_per_epoch(len(training_set), batch_size, run.world)
    for epoch in range(run.epoch + 1, args.epochs + 1):
        batches = partial(training_batches, len(training_set), batch_size, args.seed, epoch, run.world)
        done = run.start_epoch(epoch, steps, batch_size, partial(_examples_of, batches))
        loaded = training_set.batches(batches(done), device, args.image_size, epoch)
        for images, labels in run.time_data(loaded):
            loss = train_step(images, labels)
            run.step(loss, learning_rate=optimizer.param_groups[0]["lr"])
            if run.must_save():
                run.save(make_state())
        run.end_epoch()

        test_loss, test_accuracy = evaluate()
        run.metrics(test_loss=test_loss, test_accuracy=test_accuracy)
        run.save(make_state(), score=(test_accuracy, -test_loss))
    return test_loss, test_accuracy


def _examples_of(batches: Callable[[int], Iterator[Tensor]], step: int) -> Tensor:
    return next(batches(step))
