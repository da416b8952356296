"""The position of a run: what each of its checkpoints holds beside the weights and the optimizer."""

from collections.abc import Mapping
from typing import Any, NamedTuple

# Entries that the files of all ranks have in common, if they belong to one checkpoint.
SAME_ON_ALL_RANKS = ("epoch", "step", "global_step", "means", "options")
_COUNTS = ("epoch", "step", "steps", "skipped", "lines", "overflows")


class Evaluations(NamedTuple):
    """The best evaluation of a run so far, and the number of evaluations, in the order of a checkpoint."""

    epoch: int = 0  # of the best evaluation, from 1; 0 before the first evaluation
    score: tuple[float, ...] = ()
    step: int = 0  # steps of its epoch before the best evaluation; 0: it followed the whole epoch
    total: int = 0  # evaluations
    number: int = 0  # of the best evaluation among them, from 1
    latest: tuple[int, int] = (0, 0)  # epoch and step of the last evaluation


class Position(NamedTuple):
    """Where a run is when it saves a checkpoint."""

    epoch: int  # finished epochs
    step: int  # finished optimizer steps of the next epoch
    steps: int  # optimizer steps in an epoch
    best: Evaluations
    # For each rank, the values of its steps since the last line of metrics: their mean and their number.
    means: list[dict[str, tuple[float, int]]]
    skipped: int  # steps whose gradients were not finite
    lines: int  # of metrics.jsonl
    seconds: float  # since the start of the training
    options: dict[str, str]  # the options that change the weights
    overflows: int  # steps that a gradient scaler has skipped

    def to_entries(self) -> dict[str, Any]:
        """The entries of a checkpoint, of types that torch.load() accepts."""
        epoch, score, step, total, number, latest = self.best
        return self._asdict() | {
            "means": [{name: [*mean] for name, mean in of_rank.items()} for of_rank in self.means],
            "global_step": self.epoch * self.steps + self.step,
            "best": [epoch, [*score], step, total, number, [*latest]],
        }

    @classmethod
    def from_entries(cls, state: Mapping[str, Any]) -> "Position":
        """The position in the state of a checkpoint, which anybody may have written.

        Raises ValueError if an entry is missing or has values that to_entries() does not write.
        """
        entries: dict[str, Any] = {name: state.get(name) for name in cls._fields}
        options = entries["options"]
        match entries["best"]:
            case [int(epoch), list(score), int(step), int(total), int(number), [int(), int()] as latest]:
                best = Evaluations(epoch, (*score,), step, total, number, (latest[0], latest[1]))
            case _:
                raise ValueError("best")
        for name in _COUNTS:
            if type(entries[name]) is not int or not 0 <= entries[name] < 2**31:
                raise ValueError(name)
        if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
            raise ValueError("options")
        if not all(isinstance(value, int | float) for value in [*best.score, entries["seconds"]]):
            raise ValueError("score or seconds")
        return cls(**entries | {"best": best, "means": _read_means(state)})


def _read_means(state: Mapping[str, Any]) -> list[dict[str, tuple[float, int]]]:
    match state:
        case {"means": [*of_ranks]} if of_ranks:
            return [_read_means_of_rank(means) for means in of_ranks]
    raise ValueError("means")


def _read_means_of_rank(entry: Any) -> dict[str, tuple[float, int]]:
    means = {}
    for name, value in entry.items() if isinstance(entry, dict) else [(None, None)]:
        match name, value:
            case str(), [int() | float() as mean, int(number)] if 0 < number < 2**31:
                means[name] = mean, number
            case _:
                raise ValueError("means")
    return means
