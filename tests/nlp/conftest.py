"""Fixtures of all tests of texts."""

import json

import pytest

from tests.nlp.helpers import NO_DROPOUT, SHAPE


@pytest.fixture(scope="module", autouse=True)
def feature_cache(tmp_path_factory):
    """The cache of tokenized texts for these tests."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPCTRAIN_CACHE", str(folder))
        # otherwise a run in this process sets it, also for later tests
        patch.setenv("MPLCONFIGDIR", str(folder))
        yield folder / "features"


@pytest.fixture(scope="session")
def config(tmp_path_factory):
    """The config.json of a small BERT without dropout, for --from-scratch."""
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps({"model_type": "bert"} | SHAPE | NO_DROPOUT))
    return path
