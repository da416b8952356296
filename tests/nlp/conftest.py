"""Fixtures of all tests of texts."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def feature_cache(tmp_path_factory):
    """The cache of tokenized texts for these tests."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPCTRAIN_CACHE", str(folder))
        # otherwise a run in this process sets it, also for later tests
        patch.setenv("MPLCONFIGDIR", str(folder))
        yield folder / "features"
