"""The best evaluation of a run so far, and how many evaluations have been no better since."""

from collections.abc import Sequence


def describe_position(epoch: int, step: int) -> str:
    """A position as text, for the log."""
    return f"step {step} of epoch {epoch}" if step else f"epoch {epoch}"


class Best:
    """The position of the best evaluation: after `step` steps of `epoch`, counted from 1, or after that whole epoch if step is 0.

    No evaluation yet: epoch 0.
    """

    def __init__(self) -> None:
        self.epoch = self.step = 0
        self._score: list[float] = []
        self._evaluations = self._number = 0  # all of them, and which one was the best

    @property
    def since(self) -> int:
        """The evaluations after the best one."""
        return self._evaluations - self._number

    def add(self, epoch: int, step: int, score: Sequence[float]) -> bool:
        """Count an evaluation at this position. Returns whether its score is the highest so far; the first one is."""
        self._evaluations += 1
        if list(score) <= self._score:
            return False
        self.epoch, self.step, self._score, self._number = epoch, step, list(score), self._evaluations
        return True

    def state(self) -> list[int | list[float]]:
        """Plain values for a checkpoint."""
        return [self.epoch, self._score, self.step, self._evaluations, self._number]

    def load(self, state: Sequence[int | list[float]], epochs: int) -> None:
        """Take over the state of a checkpoint. Earlier versions wrote two values, and evaluated once in each of `epochs`."""
        self.epoch, self._score, *more = state
        self.step, self._evaluations, self._number = more or (0, epochs, self.epoch)
