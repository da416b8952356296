"""A strategy of Lightning's Trainer for sharded models: see training/strategies/fsdp.py."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from hpctrain.distributed.lazy_imports import import_of_lightning
from hpctrain.distributed.world import World
from hpctrain.lightning.trainer import JsonStrategy
from hpctrain.training.strategies.fsdp import (
    copy_without_weights,
    gather_model,
    is_sharded,
    load_parts,
    shard,
    split,
    split_state,
)

with import_of_lightning():
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.trainer.states import TrainerFn


class ShardedStrategy(JsonStrategy):
    """Shards the `model` of a LightningModule over all ranks, for a Trainer.

    `dtype`, `tensor_parallel`, `styles` and `cpu_offload` are those of shard().
    """

    def __init__(
        self,
        world: World,
        *,
        dtype: torch.dtype | None = None,
        tensor_parallel: int = 1,
        styles: Mapping[str, ParallelStyle] | None = None,
        cpu_offload: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(world, **options)
        self._shard = partial(
            shard, dtype=dtype, tensor_parallel=tensor_parallel, styles=styles, cpu_offload=cpu_offload
        )

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module
        return self.lightning_module

    def setup(self, trainer: Trainer) -> None:
        """Shard the model, unless an earlier call has, and make its optimizer: to train and to test."""
        assert self.accelerator
        self.accelerator.setup(trainer)
        model = self._module.get_submodule("model")
        if not is_sharded(model):
            self._skeleton = copy_without_weights(model)
            self._shard(model, self.root_device)
        for name, buffer in self._module.named_buffers(recurse=False):
            setattr(self._module, name, buffer.to(self.root_device))
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def save_checkpoint(self, checkpoint: dict[str, Any], *arguments: Any, **options: Any) -> None:
        """Save the part of this rank, on every rank."""
        self.checkpoint_io.save_checkpoint(split(checkpoint), *arguments, **options)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: a rank loads its parts after the model is sharded."""
        return True

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load this rank's part of each weight."""
        load_parts(self._module, checkpoint["state_dict"])

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part of the state."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(split_state(optimizer, state))

    def gather_model(self) -> nn.Module:
        """The model before it was sharded, with its weights, in the memory of rank 0. A collective call."""
        return gather_model(self._module.get_submodule("model"), self._skeleton)

    def teardown(self) -> None:
        """Keep the model on its device: it is tested after the training."""
        assert self.accelerator
        self.precision_plugin.teardown()
        self.accelerator.teardown()
