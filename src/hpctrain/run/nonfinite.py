"""Losses and gradients that are not finite: where they began, and the steps that --on-nan skip skips."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from hpctrain.distributed.rendezvous import gather
from hpctrain.distributed.world import World
from hpctrain.errors import DivergedError

MOST_IN_A_ROW = 10  # skipped steps, after which training stops
MOST_LOSSES = 1000  # kept at a time
MOST_EXAMPLES = 16  # named in an error


class NonFinite:
    """Watches the steps of a run on `model`. `skipped` is the number of steps that were skipped so far."""

    def __init__(self, world: World, skip: bool) -> None:
        self._world, self._skip = world, skip
        self.model = nn.Module()  # until the run has one
        self.skipped = self._in_a_row = 0
        self._losses: list[tuple[int, Tensor]] = []
        self._examples_of: Callable[[int], Tensor] | None = None
        self._first_step = 0
        self._buffers: list[Tensor] = []

    @property
    def is_skipping(self) -> bool:
        """Whether the present step is skipped."""
        return self._in_a_row > 0

    def start_epoch(self, first_step: int, examples_of: Callable[[int], Tensor] | None) -> None:
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
            len(self._losses) >= MOST_LOSSES
            and torch.stack([loss for _, loss in self._losses]).isfinite().all()
        ):
            self._losses = []
        return loss

    def clear(self) -> None:
        """Forget the losses, which were finite."""
        self._losses = []

    def check(self, values: dict[str, float], place: str, advice: str) -> None:
        """End every rank if a value, the same on all, is not finite (DivergedError on rank 0)."""
        for name, value in values.items():
            if not math.isfinite(value):
                origin = self._origin()
                if self._world.rank != 0:
                    raise SystemExit(0)  # rank 0 prints the error: see all_or_none()
                skip = ", or --on-nan skip" if origin and not self._skip else ""
                raise DivergedError(
                    f"{name} is {value} at {place}{origin}: training diverged, "
                    f"use a smaller --lr{skip} ({advice})"
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
            return f", since step {number} on all ranks, so it was the gradients of step {number - 1}"
        rank, examples = ranks[0]
        shown = ", ".join(map(str, examples[:MOST_EXAMPLES])) + (
            ", ..." if len(examples) > MOST_EXAMPLES else ""
        )
        examples_there = f" with the training examples {shown} (counted from 0)" if shown else ""
        return f", since step {number} on rank {rank}{examples_there}"

    def check_gradients(self) -> bool:
        """With --on-nan skip: whether the gradients, which are the same on all ranks, are finite.

        If not, removes them, so that the optimizer changes nothing, and restores the statistics of batch
        normalization. Raises DivergedError after too many such steps in a row.
        """
        if not self._skip:
            return True
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        if not gradients or nn.utils.get_total_norm(gradients).isfinite():
            self._in_a_row = 0
            self._keep_buffers()
            return True
        self.skipped += 1
        self._in_a_row += 1
        if self._in_a_row > MOST_IN_A_ROW:
            if self._world.rank != 0:
                raise SystemExit(0)  # rank 0 prints the error: see all_or_none()
            raise DivergedError(
                f"the gradients of {MOST_IN_A_ROW} steps in a row were not finite: "
                "training diverged, use a smaller --lr"
            )
        for parameter in self.model.parameters():
            parameter.grad = None
        for buffer, before in zip(self.model.buffers(), self._buffers, strict=True):
            buffer.copy_(before)
        return False

    def _keep_buffers(self) -> None:
        if self._skip:
            self._buffers = [buffer.clone() for buffer in self.model.buffers()]
