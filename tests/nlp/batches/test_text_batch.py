"""TextBatch: what a model gets of it, and how libraries move it."""

from dataclasses import fields

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data._utils.collate import default_convert

from hpctrain.nlp.batches.features import Features


def make_batch(*texts):
    values = {"labels": [0] * len(texts), "units": [1] * len(texts)}
    features = Features.from_lists({"input_ids": texts, "unit": texts}, values)
    return features.batch(torch.arange(len(texts)), {"input_ids": 9})


def test_model_gets_a_mask_only_where_there_is_padding():
    """With a mask it asks the GPU whether there is any padding, and waits for the answer."""
    full, padded = make_batch([1, 2], [3, 4]), make_batch([1, 2], [3])
    assert (full.is_padded, full.real_tokens, padded.is_padded, padded.real_tokens) == (False, 4, True, 3)
    assert full.model_inputs(without={"unit"}).keys() == {"input_ids", "labels"}
    inputs = padded.model_inputs(without={"unit"})
    assert inputs.keys() == {"input_ids", "labels", "attention_mask"}
    assert inputs["input_ids"].tolist() == [[1, 2], [3, 9]]
    assert inputs["attention_mask"].tolist() == [[1, 1], [1, 0]]
    without = padded.model_inputs(without={"unit", "attention_mask"})  # for a causal model
    assert without.keys() == {"input_ids", "labels"}


def test_map_reaches_all_tensors_and_leaves_the_batch():
    batch = make_batch([1, 2], [3])
    double = batch.map(lambda tensor: tensor * 2)
    assert len(batch.tensors()) == 6 and batch.tokens["input_ids"].tolist() == [[1, 2], [3, 9]]
    for tensor, doubled in zip(batch.tensors(), double.tensors(), strict=True):
        assert torch.equal(tensor * 2, doubled)
    assert [field.name for field in fields(batch)] == [field.name for field in fields(double)]


def test_a_data_loader_and_lightning_take_it():
    """The first keeps it as it is, the second moves it, and takes single texts of it."""
    batch = make_batch([1, 2], [3])
    assert default_convert(batch) is batch
    assert move_data_to_device(batch, torch.device("meta")).attention_mask.is_meta
    one = apply_to_collection(batch, Tensor, lambda tensor: tensor[:1])
    assert one.tokens["input_ids"].tolist() == [[1, 2]] and one.units.tolist() == [1]
