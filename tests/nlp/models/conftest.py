"""Small models from scratch."""

import json

import pytest

from hpctrain.nlp.models.scratch import create_model
from tests.nlp.helpers import TEXTS


@pytest.fixture(scope="session")
def small_config(tmp_path_factory):
    """The config.json of a very small BERT."""
    path = tmp_path_factory.mktemp("config") / "config.json"
    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 900,
    }
    path.write_text(json.dumps({"model_type": "bert", **shape, "max_position_embeddings": 300}))
    return path


@pytest.fixture(scope="session")
def bert(small_config, tmp_path_factory):
    """The folder of a BERT from scratch; tests must not change it."""
    folder = tmp_path_factory.mktemp("models") / "bert"
    create_model(folder, str(small_config), "bert", TEXTS, seed=1, max_length=128)
    return folder


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "gpt2"
    create_model(folder, "tiny", "gpt2", TEXTS, seed=1, max_length=128)
    return folder
