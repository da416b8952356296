"""The best evaluation of a run so far, and how many evaluations have been no better since."""

from collections.abc import Sequence


class Best:
    """The position of the best evaluation: after `step` steps of `epoch`, counted from 1, or after that whole
    epoch if step is 0.

    No evaluation yet: epoch 0. `patience`: after how many evaluations that are no better the run has stalled;
    None for never.
    """

    def __init__(self) -> None:
        self.epoch = self.step = 0
        self.patience: int | None = None
        self._latest = [0, 0]  # the position of the last evaluation
        self._score: list[float] = []
        self._evaluations = self._number = 0  # all of them, and which one was the best

    @property
    def since(self) -> int:
        """The evaluations after the best one."""
        return self._evaluations - self._number

    @property
    def has_stalled(self) -> bool:
        """Whether the last `patience` evaluations had no better score, the same on every rank: then the training is to end."""
        return self.patience is not None and self.since >= self.patience

    @property
    def place(self) -> str:
        """The position of the best evaluation, for the log."""
        return _describe(self.epoch, self.step)

    @property
    def latest(self) -> str:
        """The position of the last evaluation, for the log."""
        return _describe(*self._latest)

    def add(self, epoch: int, step: int, score: float | Sequence[float]) -> bool:
        """Count an evaluation at this position.

        Returns whether its score is the highest so far; the first one is.
        """
        self._evaluations += 1
        self._latest = [epoch, step]
        # also of numpy and torch
        score = [float(value) for value in (score if isinstance(score, Sequence) else [score])]
        if score <= self._score:
            return False
        self.epoch, self.step, self._score, self._number = epoch, step, score, self._evaluations
        return True

    def state(self) -> list[int | list[float] | list[int]]:
        """Plain values for a checkpoint."""
        return [self.epoch, self._score, self.step, self._evaluations, self._number, self._latest]

    def load(self, state: Sequence[int | list[float] | list[int]], epochs: int) -> None:
        """Take over the state of a checkpoint.

        Earlier versions wrote two values, and evaluated once in each of `epochs`.
        """
        self.epoch, self._score, *more = state
        self.step, self._evaluations, self._number, self._latest = more or (
            0,
            epochs,
            self.epoch,
            [epochs, 0],
        )


def _describe(epoch: int, step: int) -> str:
    return f"step {step} of epoch {epoch}" if step else f"epoch {epoch}"
