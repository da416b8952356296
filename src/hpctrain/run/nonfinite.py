"""Losses and gradients that are not finite: where they began, and the steps that are skipped."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from hpctrain.checkpoints.checkpoint import has_complete
from hpctrain.distributed.rendezvous import gather
from hpctrain.distributed.world import World
from hpctrain.errors import DivergedError

MAX_IN_A_ROW = 10  # skipped steps, after which training stops
MAX_LOSSES = 1000  # kept at a time
MAX_EXAMPLES = 16  # named in an error
MIN_SCALE = 1e-4  # of a gradient scaler, which begins with 65,536; that of fairseq


class NonFinite:
    """Watches the steps of a run on `model`.

    `skipped` is the number of steps that --on-nan skip has skipped so far. `overflows` is the number of those
    that a gradient scaler has skipped: their losses are finite, and their gradients exceed the range of fp16.
    """

    def __init__(self, world: World, skip: bool) -> None:
        self._world, self._skip = world, skip
        self.model = nn.Module()  # until the run has one
        self.skipped = self._in_a_row = 0
        self._overflows: Tensor | int = 0  # on the device: to read a value waits for a GPU
        self._scaler: GradScaler | None = None
        self._scale = torch.ones(())  # of the scaler in the present step
        self._losses: list[tuple[int, Tensor]] = []
        self._examples_of: Callable[[int], Tensor] | None = None
        self._first_step = 0
        self._buffers: list[Tensor] = []

    @property
    def is_skipping(self) -> bool:
        """Whether --on-nan skip skips the present step."""
        return self._in_a_row > 0

    def begin_epoch(self, first_step: int, examples_of: Callable[[int], Tensor] | None) -> None:
        """`first_step`: steps before this epoch. `examples_of`: this rank's examples in a step of it."""
        self._first_step, self._examples_of, self._losses = first_step, examples_of, []
        self._keep_buffers()

    def add(self, step: int, loss: Tensor) -> Tensor:
        """Remember the loss of this rank in a step of the epoch, counted from 0. Does not wait for a GPU.

        Returns the loss without its graph, which would keep the activations of the step in memory.
        """
        loss = torch.as_tensor(loss).detach()
        self._losses.append((step, loss))
        if (
            len(self._losses) >= MAX_LOSSES
            and torch.stack([loss for _, loss in self._losses]).isfinite().all()
        ):
            self._losses = []
        return loss

    def clear(self) -> None:
        """Forget the losses, which were finite."""
        self._losses = []

    def check(self, values: dict[str, float], place: str, can_skip: bool, folder: Path) -> None:
        """End every rank if a value, the same on all, is not finite (DivergedError on rank 0).

        `can_skip`: whether --on-nan skip is for this run. `folder`: its run folder.
        """
        for name, value in values.items():
            if not math.isfinite(value):
                origin = self._origin()
                skip = ", or --on-nan skip" if origin and can_skip and not self._skip else ""
                saved = "no checkpoint was saved before"
                if has_complete(folder):
                    saved = f"earlier checkpoints are in {folder}"
                self._end(
                    f"{name} is {value} at {place}{origin}: training diverged, "
                    f"use a smaller --lr{skip} ({saved})"
                )

    def _origin(self) -> str:
        """The first step whose loss is not finite, its rank and examples, on every rank (collective)."""
        step = next((step for step, loss in self._losses if not loss.isfinite()), None)
        examples = (
            [] if step is None or self._examples_of is None else self._examples_of(step).flatten().tolist()
        )
        found = [rank for rank in enumerate(gather(self._world, [step, examples])) if rank[1][0] is not None]
        if not found:
            return ""
        first = min(step for _, (step, _) in found)
        ranks = [(rank, examples) for rank, (step, examples) in found if step == first]
        number = self._first_step + first + 1
        if len(ranks) == self._world.size > 1:
            # A scaler applies no gradients that are not finite
            cause = "" if self._scaler else f", so it was the gradients of step {number - 1}"
            return f", since step {number} on all ranks{cause}"
        rank, examples = ranks[0]
        shown = ", ".join(map(str, examples[:MAX_EXAMPLES])) + (
            ", ..." if len(examples) > MAX_EXAMPLES else ""
        )
        examples_there = f" with the training examples {shown} (counted from 0)" if shown else ""
        return f", since step {number} on rank {rank}{examples_there}"

    def check_gradients(self, scaler: GradScaler | None = None, loss: Tensor | None = None) -> bool:
        """With --on-nan skip: whether the gradients, which are the same on all ranks, are finite.

        If not, removes them, so that the optimizer changes nothing, and restores the statistics of batch
        normalization. Raises DivergedError after too many such steps in a row. If the `loss` of each rank is
        finite, the step is the scaler's to skip. Call end_step() after the optimizer.
        """
        self._scaler = scaler if scaler and scaler.is_enabled() else None
        if self._scaler:
            self._scale = read_scale(self._scaler)
        if not self._skip:
            return True
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        if not gradients or nn.utils.get_total_norm(gradients).isfinite() or self._is_overflow(loss):
            self._in_a_row = 0
            self._keep_buffers()
            return True
        self.skipped += 1
        self._in_a_row += 1
        if self._in_a_row > MAX_IN_A_ROW:
            self._end(
                f"the gradients of {MAX_IN_A_ROW} steps in a row were not finite: "
                "training diverged, use a smaller --lr"
            )
        for parameter in self.model.parameters():
            parameter.grad = None
        for buffer, before in zip(self.model.buffers(), self._buffers, strict=True):
            buffer.copy_(before)
        return False

    def _is_overflow(self, loss: Tensor | None) -> bool:
        """Whether gradients that are not finite are due to the scale: the losses are finite (collective)."""
        if self._scaler is None:
            return False
        return all(gather(self._world, loss is None or bool(loss.isfinite())))

    def end_step(self) -> None:
        """Count the step if the scaler has skipped it. A loss that is not finite does not lower the scale."""
        if self._scaler is None:
            return
        if self.is_skipping:
            self._scaler.update(self._scale)
        else:
            self._overflows = self._overflows + (read_scale(self._scaler) < self._scale)

    @property
    def overflows(self) -> int:
        """See the class."""
        return int(self._overflows)

    @overflows.setter
    def overflows(self, number: int) -> None:
        self._overflows = number

    def describe_scale(self) -> dict[str, float]:
        """The scale and the overflows, the same on all ranks; {} without a scaler. Raises DivergedError."""
        if self._scaler is None:
            return {}
        scale = self._scaler.get_scale()
        if scale < MIN_SCALE:
            self._end(
                f"the gradients overflow in fp16 even with a loss scale of {scale:g}: "
                "training diverged, use a smaller --lr or --precision fp32"
            )
        return {"loss_scale": scale, "overflow_steps": self.overflows}

    def _end(self, text: str) -> NoReturn:
        if self._world.rank != 0:
            raise SystemExit(0)  # rank 0 prints the error: see all_or_none()
        raise DivergedError(text)

    def _keep_buffers(self) -> None:
        if self._skip:
            self._buffers = [buffer.clone() for buffer in self.model.buffers()]


def read_scale(scaler: GradScaler) -> Tensor:
    """The scale of a scaler that has scaled a loss, on its device: get_scale() would wait for a GPU."""
    return scaler.scale(torch.ones((), device=scaler._device))
