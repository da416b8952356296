"""The options of a fine-tuning; parser.py parses them, and says what they mean."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FineTuneOptions:
    """The options of `hpctrain nlp.<task>`, with all defaults filled in; None where one is not given."""

    # the model
    model: str | None
    from_scratch: str | None
    max_length: int
    stride: int
    lora_rank: int | None
    lora_target: list[str] | None
    lora_from: Path | None
    lora_merge: bool

    # the data
    data: Path | None
    columns: dict[str, str] | None
    limit: int | None
    strict: bool
    validation_split: float

    # the training
    epochs: int
    batch_size: int
    accumulate: int
    lr: float
    warmup: float
    patience: int | None
    eval_every: int | None
    seed: int

    # how it is computed
    device: str
    precision: str
    tf32: str | None
    strategy: str
    tensor_parallel: int
    cpu_offload: bool
    gradient_checkpointing: bool
    compile: bool
    deterministic: bool
    cuda_graphs: bool

    # the run
    out: Path | None
    resume: Path | None
    force: bool
    checkpoint_every: str
    keep_checkpoints: int
    on_nan: str
    wandb: bool
    profile: bool
    watchdog: float

    # of some tasks only
    pack: bool | None = None
    problem: str | None = None
    class_weights: str | None = None

    @property
    def uses_lora(self) -> bool:
        return bool(self.lora_rank or self.lora_from)
