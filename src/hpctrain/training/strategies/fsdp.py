"""Fully sharded data parallelism (FSDP2, torch.distributed.fsdp.fully_shard).

Each rank holds a part of every weight, of its gradient and of its state in the optimizer. The weights of a
block are gathered while the block computes.

Each rank saves its own part (parts.py). Any number of ranks can resume from such a checkpoint, sharded or
not.
"""

import copy
import logging
import warnings
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_module
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.utils._pytree import tree_map_only

from hpctrain.checkpoints.parts import Pieces, has_memory
from hpctrain.training.strategies.strategy import Strategy


class Fsdp(Strategy):
    """On one rank nothing is sharded."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.in_parts = self.world.size > 1
        self._skeletons: dict[nn.Module, nn.Module] = {}

    def wrap(self, model: nn.Module, *, tensor_parallel: int = 1, **options: Any) -> nn.Module:
        """The model, sharded in place. The options are those of shard()."""
        if not self.in_parts:
            return super().wrap(model)
        self.data_world = self.world.in_groups_of(tensor_parallel)
        # fully_shard() takes no other memory format
        model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]  # torch's stub
        self._skeletons[model] = copy_without_weights(model)
        shard(model, self.device, tensor_parallel=tensor_parallel, **options)
        return model

    def state(self, state: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of each tensor: see parts.py."""
        return split(state) if self.in_parts else state

    def load(self, target: nn.Module | torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Load this rank's part."""
        if not self.in_parts:
            super().load(target, state)
        elif isinstance(target, nn.Module):
            load_parts(target, state)
        else:
            target.load_state_dict(split_state(target, state))

    def gather(self, model: nn.Module) -> nn.Module:
        """The model before it was sharded, with its weights, in the memory of rank 0."""
        return gather_model(model, self._skeletons[model]) if model in self._skeletons else model


STRATEGY = Fsdp


def shard(
    model: nn.Module,
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    cpu_offload: bool = False,
    tensor_parallel: int = 1,
    styles: Mapping[str, ParallelStyle] | None = None,
) -> None:
    """Shard a model, block by block, and move the parts to the device. A collective call.

    The weights are those of rank 0. Other ranks may have the model on the meta device: they never hold more
    than a block of it. With a `dtype`, weights are gathered in it. With `cpu_offload`, the parts of weights
    and gradients stay in the memory of the node, and only gathered weights are on the device.

    Groups of `tensor_parallel` ranks compute the same examples. Of the layers that `styles` names, each rank
    of a group computes its columns or rows; of the other layers, everything. A rank's share of a weight is
    then sharded over the groups.
    """
    ranks, group = dist.get_world_size(), None
    if tensor_parallel > 1:
        mesh = init_device_mesh(
            device.type, (ranks // tensor_parallel, tensor_parallel), mesh_dim_names=("data", "tensor")
        )
        mesh, group = mesh["data"], mesh["tensor"]
        # A norm is summed over groups, then within, in the same order. Nothing changes a logit in place.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    else:
        mesh = init_device_mesh(device.type, (ranks,))
    policy, offload = MixedPrecisionPolicy(), OffloadPolicy()
    if dtype:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    if cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    in_styles = {model.get_submodule(name): style for name, style in (styles or {}).items()}
    places: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)  # a tied weight has several
    for module in model.modules():
        for name, value in [*module._parameters.items(), *module._buffers.items()]:
            places[id(value)].append((module, name))
    done: set[nn.Module] = set()
    for block in [*find_blocks(model), model]:
        for tensor in [*block.parameters(), *block.buffers()]:
            if id(tensor) in places:
                owners = places.pop(id(tensor))
                _receive(tensor, device, owners, None if owners[0][0] in in_styles else group)
        for module in block.modules():
            if group is not None and module._parameters and module not in done:
                done.add(module)
                parallelize_module(module, group, in_styles.get(module) or Whole(Replicate()))
        fully_shard(block, mesh=mesh, mp_policy=policy, offload_policy=offload)


def _receive(
    tensor: Tensor, device: torch.device, places: list[tuple[nn.Module, str]], group: DeviceMesh | None
) -> None:
    """Receive a parameter or buffer from rank 0, and put it into its places in the modules, on the device.

    A parameter that all ranks of a `group` have becomes a DTensor.
    """
    values = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.detach().to(device)
    dist.broadcast(values.view(torch.uint8) if values.dtype == torch.bool else values, src=0)
    if not isinstance(tensor, nn.Parameter):
        for module, name in places:
            module._buffers[name] = values
        return
    if group is not None:
        values = DTensor.from_local(values, group, [Replicate()], run_check=False)
    parameter = nn.Parameter(values, tensor.requires_grad)
    for module, name in places:
        module._parameters[name] = parameter


class Whole(ParallelStyle):
    """A layer that is not split: every rank of a group has its weights.

    `placement` says how its inputs are placed in the group. If inputs are split, each rank computes a part of
    the weights' gradients, and the parts are summed.
    """

    def __init__(self, placement: Placement) -> None:
        super().__init__()
        self._placement = placement

    def _apply(self, module: nn.Module, group: DeviceMesh) -> nn.Module:
        enter: Any = self._enter  # torch declares that it returns None, and uses the result
        return distribute_module(module, group, None, enter, self._leave)

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...], group: DeviceMesh) -> tuple[Any, ...]:
        return tree_map_only(
            Tensor,
            lambda tensor: DTensor.from_local(tensor, group, [self._placement], run_check=False),
            inputs,
        )

    def _leave(self, module: nn.Module, output: Any, group: DeviceMesh) -> Any:
        return tree_map_only(DTensor, lambda tensor: tensor.to_local(), output)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The layers of a transformer: the elements of its outermost lists of modules."""
    if isinstance(model, nn.ModuleList):
        return [block for block in model if any(True for _ in block.parameters())]
    return [block for child in model.children() for block in find_blocks(child)]


def gather_state(state: Any) -> Any:
    """The whole state in the memory of rank 0, for a result; checkpoints have parts, see split().

    A collective call.
    """
    found: dict[tuple, Tensor] = {}

    def gather_one(part: DTensor) -> Tensor:
        whole = part.full_tensor().detach()
        local = part.to_local()
        if dist.get_rank() != 0:
            return local
        # Tied weights stay tied: a file has them once. Rank 0 has a part of every weight.
        return found.setdefault((local.data_ptr(), local.dtype, part.shape), whole.cpu())

    return tree_map_only(DTensor, gather_one, state)


def gather_model(model: nn.Module, skeleton: nn.Module) -> nn.Module:
    """The skeleton with all weights of a sharded model, in the memory of rank 0. A collective call.

    copy_without_weights() makes the skeleton, before the model is sharded.
    """
    weights = gather_state(model.state_dict())
    if dist.get_rank() == 0:
        for name, weight in skeleton.named_parameters():
            weight.data = weights[name]
        for name, buffer in model.named_buffers():
            skeleton.get_buffer(name).copy_(buffer)
    return skeleton


def split(state: Any) -> Any:
    """The state with this rank's part of each tensor, for a checkpoint in parts: see parts.py."""

    def split_one(tensor: DTensor) -> dict[str, Any]:
        offset, _ = _region(tensor)
        return {"part": tensor.to_local().detach(), "offset": offset, "shape": list(tensor.shape)}

    return tree_map_only(DTensor, split_one, state)


def split_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """This rank's part of an optimizer's state in a checkpoint. The model may be sharded or not."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    parts = {
        i: {name: _part(x, weights[i]) for name, x in entry.items()} for i, entry in state["state"].items()
    }
    return state | {"state": parts}


def load_parts(model: nn.Module, weights: Mapping[str, Tensor | Pieces]) -> None:
    """Load this rank's part of each weight of a checkpoint. The model may be sharded or not.

    A model on the meta device loads nothing: shard() gives it the weights of rank 0.
    """
    if any(weight.is_meta for weight in model.parameters()):
        return
    own = model.state_dict()
    model.load_state_dict({name: _part(weight, own.get(name)) for name, weight in weights.items()})


def _part(saved: Any, like: Any) -> Any:
    """This rank's part of a saved tensor, if `like` is sharded and has its shape; else all of the value."""
    if isinstance(saved, Tensor | Pieces) and isinstance(like, DTensor) and saved.shape == like.shape:
        offset, size = _region(like)
        if isinstance(saved, Pieces):
            local = saved.region(offset, size)
        else:
            region = [slice(start, start + n) for start, n in zip(offset, size, strict=True)]
            local = saved[tuple(region)].clone()
        place = like.device_mesh, like.placements
        return DTensor.from_local(
            local.to(like.device), *place, run_check=False, shape=like.shape, stride=like.stride()
        )
    if isinstance(saved, Pieces):
        return saved.whole()
    if isinstance(saved, Tensor):
        if not has_memory(saved):  # a copy may have any size
            raise ValueError("a tensor without values of its own")
        return saved.clone()  # it may be mapped from a file
    return saved


def _region(tensor: DTensor) -> tuple[list[int], list[int]]:
    """Where this rank's part of a tensor begins, and its size."""
    size, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return list(offset), list(size)


def copy_without_weights(model: nn.Module) -> nn.Module:
    """A copy of a model with empty parameters. Buffers are copied, and tied parameters stay tied."""
    empty = {
        id(weight): nn.Parameter(weight.new_empty(0), weight.requires_grad) for weight in model.parameters()
    }
    return copy.deepcopy(model, empty)
