"""TextBatch: what a model gets of it, and what is done to all of its tensors."""

from dataclasses import replace

import torch
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
    batch = replace(make_batch([1, 2], [3]), weight=0.5, number=7)
    double = batch.map(lambda tensor: tensor * 2)
    assert len(batch.tensors()) == 6 and batch.tokens["input_ids"].tolist() == [[1, 2], [3, 9]]
    for tensor, doubled in zip(batch.tensors(), double.tensors(), strict=True):
        assert torch.equal(tensor * 2, doubled)
    assert (double.weight, double.number, double.real_tokens) == (0.5, 7, 3)


def test_a_data_loader_keeps_it_and_a_device_takes_all_of_it():
    batch = make_batch([1, 2], [3])
    assert default_convert(batch) is batch
    assert all(tensor.is_meta for tensor in batch.to(torch.device("meta")).tensors())
