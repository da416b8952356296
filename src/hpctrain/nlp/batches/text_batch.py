"""A batch of tokenized texts."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class TextBatch:
    """b features in rows: one per row and padded on the right, or packed, several per row.

    index: int64 [b], the numbers of the features
    tokens: by name, int64 [rows, length]: input_ids, and what a task adds, such as the labels of tokens
    values: by name, int64 or float32 [b] or [b, k]: what a task has for a whole feature, such as its label
    units: int64 [b], the number of labels that the loss of a feature is the mean of
    attention_mask: int64 [rows, length], 1 for a token and 0 for padding
    position_ids: int64 [rows, length] if packed: each feature in a row starts again at 0
    real_tokens: the number of tokens that are not padding
    weight: the factor of the loss in training; in an evaluation, 0 for a batch that does not count
    number: of the batch in its epoch, from 0, in training
    """

    index: Tensor
    tokens: dict[str, Tensor]
    values: dict[str, Tensor]
    units: Tensor
    attention_mask: Tensor
    real_tokens: int
    position_ids: Tensor | None = None
    weight: float = 1.0
    number: int = 0

    @property
    def is_padded(self) -> bool:
        return self.real_tokens < self.attention_mask.numel()

    def model_inputs(self, without: Collection[str] = ()) -> dict[str, Tensor]:
        """The keyword arguments of a model of transformers, except for the names in `without`.

        There is no attention_mask where there is no padding: with one, a model would ask the GPU whether
        there is any, and wait. There is none for packed rows either: models tell the texts of a row apart by
        their position_ids, and no text attends to the padding, which comes last. A causal model does not
        need one for any batch (needs_mask() of models/masks.py): "attention_mask" is then in `without`.
        """
        columns = self.tokens | self.values
        inputs = {name: column for name, column in columns.items() if name not in without}
        if self.position_ids is not None:
            inputs["position_ids"] = self.position_ids
        elif self.is_padded and "attention_mask" not in without:
            inputs["attention_mask"] = self.attention_mask
        return inputs

    def map(self, function: Callable[[Tensor], Tensor]) -> "TextBatch":
        """A batch whose tensors are those that the function returns."""
        return replace(
            self,
            index=function(self.index),
            tokens={name: function(column) for name, column in self.tokens.items()},
            values={name: function(column) for name, column in self.values.items()},
            units=function(self.units),
            attention_mask=function(self.attention_mask),
            position_ids=None if self.position_ids is None else function(self.position_ids),
        )

    def tensors(self) -> list[Tensor]:
        """All tensors, in the same order for all batches of a task."""
        positions = [] if self.position_ids is None else [self.position_ids]
        own = [self.index, self.units, self.attention_mask, *positions]
        return [*own, *self.tokens.values(), *self.values.values()]

    def to(self, device: torch.device) -> "TextBatch":
        """Copies from pinned memory to a GPU do not wait for it."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=device.type != "cpu"))

    def pin_memory(self) -> "TextBatch":
        """A DataLoader calls this."""
        return self.map(Tensor.pin_memory)
