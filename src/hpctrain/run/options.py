"""The options of a run, and which of them have to stay the same when the run is resumed."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from hpctrain.checkpoints.interval import Interval
from hpctrain.distributed.world import World, job_id
from hpctrain.errors import UsageError
from hpctrain.files.redaction import hide_secrets
from hpctrain.text import absolute, as_given

Prune = Callable[[World], bool]

# What the bundled trainers add to their options: the digest of their training examples.
DATA = "data_sha256"
# Options that may differ when a run is resumed: they change its weights by rounding at most. The path of the
# data may: jobs copy it to folders named after the job. Its content may not.
_FREE = {"out", "resume", "force", "data", "watchdog", "checkpoint_every", "keep_checkpoints", "strict"}
_FREE |= {"on_nan", "wandb", "profile", "device", "devices", "num_nodes", "accelerator", "strategy"}
_FREE |= {"workers", "gradient_checkpointing", "tensor_parallel", "cpu_offload"}
_FREE |= {"compile", "cuda_graphs", "deterministic", "tf32"}


@dataclass(frozen=True)
class RunOptions:
    """The options of a Run. A script without argparse constructs them, for example in a notebook:

        RunOptions(out="runs/mine", resume="auto", epochs=3, others={"lr": 0.1})

    out               run folder (default: the folder in `resume`, or runs/NAME/<job id>)
    resume            run folder whose last intact checkpoint the run resumes from;
                      "auto": that of `out`, or a new run if `out` has none (default: a new run)
    force             resume although options differ that change the result (default: False)
    epochs            passes over the data; Run.resume() replaces this value (default: unknown)
    checkpoint_every  steps (500) or time ("30s", "1h") between checkpoints (default: "10min")
    keep_checkpoints  how many of the newest checkpoints to keep beside the best one (default: 3)
    on_nan            when a gradient is not finite: "stop", or "skip" the step (default: "stop")
    wandb             log to Weights & Biases, too (default: False)
    profile           profile some steps (default: False)
    watchdog          seconds without an answer of a rank, or without a finished step, after which the job
                      ends; 0: never (default: 60)
    others            the script's own options, such as the learning rate, for config.json. A run is resumed
                      with the same ones. `precision`: "bf16" or "fp16" compares the speed with a GPU's peak
    prune             called on all ranks after the evaluation of an epoch; True ends the run

    Raises UsageError for a value that is none of these.
    """

    out: str | Path | None = None
    resume: str | Path | None = None
    force: bool = False
    epochs: int | None = None
    checkpoint_every: int | str = "10min"
    keep_checkpoints: int = 3
    on_nan: Literal["stop", "skip"] = "stop"
    wandb: bool = False
    profile: bool = False
    watchdog: float = 60.0
    others: Mapping[str, Any] = field(default_factory=dict)
    prune: Prune | None = None

    def __post_init__(self) -> None:
        for name in ("out", "resume"):
            if not isinstance(path := getattr(self, name), str | Path | None):
                auto = ' or "auto"' if name == "resume" else ""
                raise UsageError(f"{name}={path!r}: give the path of a run folder{auto}, or leave {name} out")
            if (path := getattr(self, name)) and str(path) != "auto":
                object.__setattr__(self, name, absolute(path))
        try:
            Interval.parse(str(self.checkpoint_every))
        except ValueError:
            raise UsageError(
                f"checkpoint_every={self.checkpoint_every!r}: give a number of steps (500) or a time (10min)"
            ) from None
        if self.keep_checkpoints < 1:
            raise UsageError(f"keep_checkpoints={self.keep_checkpoints}: keep at least 1")
        if self.on_nan not in ("stop", "skip"):
            raise UsageError(f'on_nan={self.on_nan!r}: choose "stop" or "skip"')

    @classmethod
    def from_args(cls, options: Mapping[str, Any]) -> "RunOptions":
        """The options that trainer_parser() has parsed, by name. `others` are all of them, in their order.

        `prune` may be among them, but is in no file: it is a function.
        """
        own = {name: options[name] for name in _list_names() if name in options}
        others = {name: value for name, value in options.items() if name != "prune"}
        return cls(**own, others=others, prune=options.get("prune"))

    @property
    def is_auto(self) -> bool:
        """Whether the run resumes its own folder, if that has a checkpoint."""
        return str(self.resume) == "auto"

    @property
    def source(self) -> Path | None:
        """The run folder in `resume`; None without one, and for "auto"."""
        return None if self.is_auto or self.resume is None else Path(self.resume)

    def choose_folder(self, name: str) -> Path:
        """The folder of a run of this name: `out`, the one in `resume`, or runs/NAME/<job id>."""
        return absolute(self.out or self.source or Path("runs") / name / job_id())

    def list_all(self) -> dict[str, Any]:
        """All options by name, as config.json has them."""
        own = {name: getattr(self, name) for name in _list_names()}
        paths = {name: Path(as_given(str(path))) for name, path in own.items() if isinstance(path, Path)}
        return {**self.others, **own, **paths}

    def list_weighty(self) -> dict[str, str]:
        """The options that change the weights by more than rounding, as a checkpoint has them."""
        options = hide_secrets(as_json(self.list_all()))
        return {name: str(value) for name, value in options.items() if name not in _FREE}


def as_json(value: Any) -> Any:
    """A value of an option as JSON has it: a script may have any, such as a DictConfig of Hydra."""
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, Sequence | Set) and not isinstance(value, str | bytes):
        return [as_json(item) for item in value]
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _list_names() -> list[str]:
    return [each.name for each in fields(RunOptions) if each.name not in ("others", "prune")]


def describe_differences(own: dict[str, str], saved: dict[str, str], free: tuple[str, ...]) -> str:
    """Weighty options that differ from a checkpoint's, but not those of `free`, as a text; "" if none."""
    if DATA not in saved:  # of an earlier version
        free = (*free, DATA)
    # An option that an earlier version did not have counts as one that was not given.
    names = [
        name for name in sorted({*own, *saved} - {*free}) if own.get(name, "None") != saved.get(name, "None")
    ]
    return ", ".join(
        "other examples in --data"
        if name == DATA
        else f"--{name.replace('_', '-')} {own.get(name)} instead of {saved.get(name)}"
        for name in names
    )
