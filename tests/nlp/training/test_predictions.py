"""Predictions, which ranks send each other as JSON, keep their bits."""

import json

import numpy
import pytest

from hpctrain.nlp.training.steps import pack_predictions, unpack_predictions

RANDOM = numpy.random.default_rng(1)
MAKE = {
    "classify": lambda: RANDOM.random(3).astype(numpy.float32),
    "ner": lambda: RANDOM.integers(0, 9, RANDOM.integers(0, 5)).astype(numpy.int16),
    "qa": lambda: RANDOM.normal(size=(RANDOM.integers(0, 3), 3)).astype(numpy.float32),
    "generate": lambda: RANDOM.normal(size=2),
}


@pytest.mark.parametrize("task", MAKE)
def test_predictions_keep_their_bits(task):
    sent = [(i, MAKE[task]()) for i in range(50)]
    received = unpack_predictions(json.loads(json.dumps(pack_predictions(sent))))

    def bits(pairs):
        return [(i, array.dtype, array.shape, array.tobytes()) for i, array in pairs]

    assert bits(received) == bits(sent)
