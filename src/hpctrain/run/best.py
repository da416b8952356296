"""The best evaluation of a run so far, and how many evaluations have been no better since."""

from collections.abc import Mapping, Sequence

from hpctrain.checkpoints.position import Evaluations
from hpctrain.errors import UsageError


def is_loss(name: str) -> bool:
    """Whether a metric is better when it is lower, by its name. All others are scores."""
    return name.endswith("loss")


class Best:
    """The best evaluation so far. The run stalls after `patience` in a row no better (None: never).

    `by` is the name of the score that decides (None: the first that is no loss, or the first loss), and
    `lowest` whether a lower one is better (None: if its name ends in "loss").
    """

    def __init__(self) -> None:
        self.patience: int | None = None
        self.by: str | None = None
        self.lowest: bool | None = None
        self.evaluations = Evaluations()
        self._before = Evaluations()  # those before the last evaluation

    @property
    def epoch(self) -> int:
        """The epoch of the best evaluation, counted from 1; 0 before the first evaluation."""
        return self.evaluations.epoch

    @property
    def step(self) -> int:
        """The steps of its epoch before the best evaluation; 0 if it followed the whole epoch."""
        return self.evaluations.step

    @property
    def since(self) -> int:
        """The number of evaluations after the best one."""
        return self.evaluations.total - self.evaluations.number

    @property
    def has_stalled(self) -> bool:
        """Whether the training is to end, for lack of a better evaluation. The same on every rank."""
        return self.patience is not None and self.since >= self.patience

    @property
    def place(self) -> str:
        """The position of the best evaluation, for the log."""
        return _describe(self.epoch, self.step)

    @property
    def latest(self) -> str:
        """The position of the last evaluation, for the log."""
        return _describe(*self.evaluations.latest)

    def choose(self, scores: Mapping[str, float]) -> tuple[float, ...]:
        """What add() compares of these scores: the one that decides, and the first other loss for ties.

        Raises UsageError without the one that decides.
        """
        self.by = self._name(scores)
        if self.by not in scores:
            raise UsageError(
                f"the scores {', '.join(scores)} lack {self.by}, which decides on the best checkpoint: "
                "give each evaluation this score, or another name to run.best.by"
            )
        losses = [value for name, value in scores.items() if is_loss(name) and name != self.by]
        score = scores[self.by]
        return self._sign(self.by) * score, -losses[0] if losses else 0.0

    def describe(self, scores: Mapping[str, float]) -> dict[str, float]:
        """The name and the value of the best score, for result.json; `scores` are the last ones."""
        name = self._name(scores)
        return {name: self._sign(name) * self.evaluations.score[0]}

    def _name(self, scores: Mapping[str, float]) -> str:
        return self.by or min(scores, key=is_loss, default="score")

    def _sign(self, name: str) -> int:
        return -1 if (is_loss(name) if self.lowest is None else self.lowest) else 1

    def add(self, epoch: int, step: int, score: float | Sequence[float]) -> bool:
        """Count an evaluation here, in place of an earlier one here.

        Returns whether its score is the highest so far; the first one is.
        """
        latest = epoch, step
        if self.evaluations.latest != latest:
            self._before = self.evaluations
        earlier = self._before
        total = earlier.total + 1
        # scalars of numpy and torch become numbers of Python
        values = tuple(float(value) for value in (score if isinstance(score, Sequence) else [score]))
        if values <= earlier.score:
            self.evaluations = earlier._replace(total=total, latest=latest)
            return False
        self.evaluations = Evaluations(epoch, values, step, total, total, latest)
        return True


def _describe(epoch: int, step: int) -> str:
    return f"step {step} of epoch {epoch}" if step else f"epoch {epoch}"
