"""Which models need an attention mask for padding on the right, and what transformers does without one."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, masking_utils

SEARCH = "find_packed_sequence_indices"
_search = vars(masking_utils).get(SEARCH)


@torch.no_grad()
def needs_mask(model: PreTrainedModel) -> bool:
    """Whether the output for a text changes if the padding after it is not masked.

    It does not change in a causal model, whose tokens attend to none that follow. Not all language models
    are causal, and config.json does not always tell, so the model computes a batch in both ways. The
    auxiliary loss of a mixture of experts is over all tokens that are not masked.
    """
    tokens = torch.tensor([[3, 1, 2, 0, 1, 2], [1, 2, 0, 3, 3, 3]], device=model.device)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]], device=model.device)
    model.eval()
    masked, plain = model(input_ids=tokens, attention_mask=mask), model(input_ids=tokens)
    model.train()
    real = mask == 1
    return "aux_loss" in plain or not agree(plain.logits[real], masked.logits[real])


@torch.no_grad()
def is_causal(model: PreTrainedModel) -> bool:
    """Whether the output for a token does not depend on the tokens after it, as a language model needs.

    Masked or not, BERT's does. config.json does not always tell, so the model computes a text and its
    beginning.
    """
    tokens = torch.tensor([[3, 1, 2, 0, 1, 2]], device=model.device)
    model.eval()
    whole, beginning = model(input_ids=tokens).logits[:, :3], model(input_ids=tokens[:, :3]).logits
    model.train()
    return agree(whole, beginning)


def agree(found: Tensor, expected: Tensor) -> bool:
    """Whether two outputs for the same text differ by rounding only."""
    return torch.allclose(found, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


def skip_searches(model: PreTrainedModel, packed: bool) -> None:
    """Keep transformers from reading values of each batch from the GPU, for which a step would wait.

    Call it once for a loaded model. For a batch without a mask, transformers looks whether the tokens have
    padding, of which it warns, and whether the positions are of texts that are `packed` in rows. If none are,
    the answer is known. A recording of --cuda-graphs cannot read values: in it, transformers takes all texts
    for packed, and makes a mask, with which attention is slower. transformers has no option for either, and
    the second is a function for all models of the process; its version is in test_masks.py.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.warn_if_padding_and_no_attention_mask = _find_nothing  # type: ignore[method-assign]
    vars(masking_utils)[SEARCH] = _search if packed else _find_nothing


def _find_nothing(*_: Any) -> None: ...
