"""--cuda-graphs: record the thousands of kernels of a training step once; the GPU then starts them by itself.

A short text keeps a GPU busy for less time than a processor needs to start each kernel on it. The kernels,
and dropout's random numbers, are those of a step without graphs, so the weights are the same, bit for bit.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hpctrain.errors import HpctrainError
from hpctrain.nlp.batches.text_batch import TextBatch
from hpctrain.text import first_line

MAX_SHAPES = 100  # shapes, each of which takes memory; batches of further ones are computed without a graph


class _Recorded(NamedTuple):
    graph: torch.cuda.CUDAGraph
    loss: Tensor
    batch: TextBatch  # the graph reads its tensors


class StepGraphs:
    """Forward and backward pass, in a graph for each shape of a batch."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], compute_loss: Callable[[TextBatch], Tensor]
    ) -> None:
        self._parameters, self._compute_loss = list(parameters), compute_loss
        self._used: list[nn.Parameter] = []  # those that have a gradient,
        self._gradients: list[Tensor] = []  # into which all graphs write
        self._recorded: dict[Any, _Recorded] = {}
        self._pool: Any = None

    def run(self, batch: TextBatch) -> Tensor:
        """The loss of a batch, with its gradients. Raises HpctrainError if recording fails."""
        key = (batch.is_padded, batch.weight, *(tensor.shape for tensor in batch.tensors()))
        if key not in self._recorded and len(self._recorded) == MAX_SHAPES:
            self.give_gradients()
            return self._pass(batch)
        if key not in self._recorded:
            state = torch.cuda.get_rng_state()
            self._recorded[key] = self._record(batch)
            torch.cuda.set_rng_state(state)
        graph, loss, recorded = self._recorded[key]
        for mine, given in zip(recorded.tensors(), batch.tensors(), strict=True):
            mine.copy_(given)
        graph.replay()
        return loss.clone()

    def give_gradients(self) -> None:
        """Give the parameters their gradients of the last run()."""
        for parameter, gradient in zip(self._used, self._gradients, strict=True):
            parameter.grad = gradient

    def _record(self, batch: TextBatch) -> _Recorded:
        batch = batch.map(Tensor.clone)
        # First without recording: in their first call libraries prepare themselves, which no graph may hold.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._compute(batch)
        torch.cuda.current_stream().wait_stream(side)
        used = [parameter for parameter in self._parameters if parameter.grad is not None]
        if not self._gradients:
            self._used, self._gradients = used, [torch.zeros_like(parameter) for parameter in used]
        elif len(used) != len(self._used):
            raise HpctrainError(
                "--cuda-graphs: which weights this model trains depends on the batch: leave it out"
            )
        self.give_gradients()
        try:
            return _Recorded(*self._capture(batch), batch)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise HpctrainError(
                f"--cuda-graphs: the steps of this model cannot be recorded ({first_line(error)}): "
                "leave it out"
            ) from error

    def _capture(self, batch: TextBatch) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads may use the GPU meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            loss = self._pass(batch)
        self._pool = graph.pool()
        return graph, loss

    def _pass(self, batch: TextBatch) -> Tensor:
        torch._foreach_zero_(self._gradients)
        return self._compute(batch)

    def _compute(self, batch: TextBatch) -> Tensor:
        torch.clear_autocast_cache()  # the weights in bf16, of which each graph has to make its own
        loss = self._compute_loss(batch)
        with torch.autocast("cuda", enabled=False):  # as in a step without graphs
            loss.backward()
        torch.clear_autocast_cache()
        return loss.detach()


def check_layers(config: Any) -> None:
    """Raise HpctrainError for a model with LayerDrop, which chooses the layers of a step on the processor."""
    for name, value in config.to_dict().items():
        if name.endswith("layerdrop") and value:
            raise HpctrainError(
                f"--cuda-graphs is not for {name} {value} in the config.json of the model: leave out one"
            )
