"""Fully sharded data parallelism (FSDP2, torch.distributed.fsdp.fully_shard): each rank holds a part of every weight, of its
gradient and of what the optimizer keeps about it. The weights of a block are gathered while the block computes.

A checkpoint has the whole weights, gathered on rank 0, so it can be resumed on any number of ranks, sharded or not.
"""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from hpctrain.lazy_imports import import_of_lightning
from hpctrain.lightning_plugins import JsonStrategy

with import_of_lightning():
    from lightning.pytorch import Trainer
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning_utilities.core.apply_func import apply_to_collection


class ShardedStrategy(JsonStrategy):
    """Shards the `model` of a LightningModule over all ranks, for a Trainer. In bf16, weights are gathered as bf16 as well."""

    def setup(self, trainer: Trainer) -> None:
        """Shard the model, if it is not yet, and make its optimizer. Lightning calls this to train and to test."""
        self.accelerator.setup(trainer)
        model = self.lightning_module.model
        if not is_sharded(model):
            self._skeleton = copy_without_weights(model)
            shard(model, self.root_device, bf16=trainer.precision == "bf16-mixed")
        for name, buffer in self.lightning_module.named_buffers(recurse=False):
            setattr(self.lightning_module, name, buffer.to(self.root_device))
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def save_checkpoint(self, checkpoint: dict[str, Any], *arguments: Any, **options: Any) -> None:  # noqa: ANN401
        """Save whole tensors. A collective call."""
        names = checkpoint.pop("model")  # the same weights, by other names
        checkpoint = gather(checkpoint)
        checkpoint["model"] = {name: checkpoint["state_dict"][f"model.{name}"] for name in names}
        super().save_checkpoint(checkpoint, *arguments, **options)

    def load_optimizer_state_dict(self, checkpoint: dict[str, Any]) -> None:
        """Load whole tensors into the sharded optimizer."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            parts = {i: {name: _part(x, weights[i]) for name, x in entry.items()} for i, entry in state["state"].items()}
            optimizer.load_state_dict(state | {"state": parts})

    def gather_model(self) -> nn.Module:
        """The model as it was before it was sharded, with its weights, in the memory of rank 0. A collective call."""
        weights = gather(self.lightning_module.model.state_dict())
        if dist.get_rank() == 0:
            for name, weight in self._skeleton.named_parameters():
                weight.data = weights[name]
        return self._skeleton

    def teardown(self) -> None:
        """Keep the model where it is: it is tested after the training."""
        self.precision_plugin.teardown()
        self.accelerator.teardown()


def shard(model: nn.Module, device: torch.device, *, bf16: bool) -> None:
    """Shard a model, block by block, and move the parts to the device. Every rank has the same whole model before."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else MixedPrecisionPolicy()
    for block in find_blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The layers of a transformer: the elements of each list of modules that is not inside of another such list."""
    if isinstance(model, nn.ModuleList):
        return [block for block in model if any(True for _ in block.parameters())]
    return [block for child in model.children() for block in find_blocks(child)]


def is_sharded(model: nn.Module) -> bool:
    """Whether shard() was called for the model."""
    return any(isinstance(weight, DTensor) for weight in model.parameters())


def gather(state: Any) -> Any:  # noqa: ANN401 - nested dictionaries, lists and tensors
    """The state with whole tensors in the memory of rank 0; other ranks keep their parts. A collective call."""
    found: dict[tuple, Tensor] = {}

    def gather_one(part: DTensor) -> Tensor:
        whole = part.full_tensor().detach()
        local = part.to_local()
        if dist.get_rank() != 0:
            return local
        # Tied weights stay tied, so that a checkpoint has them once. Rank 0 has a part of every weight.
        return found.setdefault((local.data_ptr(), local.dtype, part.shape), whole.cpu())

    return apply_to_collection(state, DTensor, gather_one)


def load_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Load whole weights, which every rank has, into a model that is sharded or not."""
    own = model.state_dict()
    model.load_state_dict({name: _part(weight, own.get(name)) for name, weight in weights.items()})


def _part(whole: Any, like: Any) -> Any:  # noqa: ANN401 - a tensor, or another value
    """This rank's part of a whole tensor, if `like` is sharded and of the same shape; otherwise the value itself."""
    if not isinstance(like, DTensor) or not isinstance(whole, Tensor) or whole.shape != like.shape:
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def copy_without_weights(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters have no values yet. Buffers have theirs, and tied parameters stay tied."""
    empty = {id(weight): nn.Parameter(weight.new_empty(0), weight.requires_grad) for weight in model.parameters()}
    return copy.deepcopy(model, empty)
