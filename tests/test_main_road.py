"""Each section and row of README.md has a test of `make test`: its mark main_road quotes the README."""

import re

import pytest
from slurm_cluster import REPOSITORY

from tests.conftest import COLLECTED

README = (REPOSITORY / "README.md").read_text()


@pytest.fixture
def promises(request):
    """What the tests quote that pytest has found: not what stands in a comment, or in a test that is none."""
    items = request.config.stash[COLLECTED]
    if {item.path for item in items} < {*(REPOSITORY / "tests").rglob("test_*.py")}:
        pytest.skip("pytest was not given all tests")
    return {quote for item in items for mark in item.iter_markers("main_road") for quote in mark.args}


def test_each_promise_is_a_quote_from_the_readme(promises):
    assert len(promises) > 20
    assert not [promise for promise in promises if promise not in " ".join(README.split())]


def test_each_section_and_row_of_the_readme_has_a_test(promises):
    sections, rows = re.split("^#+ ", README, flags=re.M)[1:], re.findall(r"^\| `.*", README, re.M)
    assert len(sections) > 5 and len(rows) >= 11
    parts = (" ".join(part.split()) for part in (*sections, *rows))
    (without,) = (part for part in parts if not any(promise in part for promise in promises))
    assert without.startswith("Further reading")
