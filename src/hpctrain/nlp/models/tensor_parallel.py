"""--tensor-parallel N: which layers are split over N ranks, by transformers' plan of the architecture."""

import re
from collections.abc import Callable

import transformers
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from hpctrain.errors import HpctrainError
from hpctrain.training.strategies.fsdp import Whole

# The last one is of norms over each head: a rank has some of the heads, so their dimension is split.
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "replicated_with_grad_allreduce": lambda: Whole(Shard(1)),
}
# What is split: heads, and the inner size of the layers between them.
SIZES = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def choose_styles(model: transformers.PreTrainedModel, number: int) -> dict[str, ParallelStyle]:
    """The layers to split over this number of ranks, by name: by columns or rows.

    Raises HpctrainError if the architecture has no such plan, or its sizes are not multiples of the number.
    """
    plan = getattr(model.config, "base_model_tp_plan", None) or {}
    kind = model.config.model_type
    if not plan or not set(plan.values()) <= STYLES.keys():
        raise HpctrainError(
            f"--tensor-parallel {number}: no plan to split a model of type {kind}; those of llama, mistral "
            "and qwen3 have one: leave it out, or take --strategy fsdp"
        )
    for name in SIZES:
        size = getattr(model.config, name, None)
        if size is not None and size % number:
            raise HpctrainError(
                f"--tensor-parallel {number} does not divide the {name} of the model, {size}: "
                "give a divisor of it"
            )
    prefix = re.escape(f"{model.base_model_prefix}.")
    patterns = {
        re.compile(prefix + name.replace(".", r"\.").replace("*", r"\d+")): style
        for name, style in plan.items()
    }
    return {
        name: STYLES[style]()
        for name, _ in model.named_modules()
        for pattern, style in patterns.items()
        if pattern.fullmatch(name)
    }
