"""The tests of `make test` cover what README.md promises."""

import re

import pytest
from slurm_cluster import REPOSITORY

from tests.main_road import MAIN_ROAD, TESTS, names

README = (REPOSITORY / "README.md").read_text()
PLAIN = " ".join(README.split())
WITHOUT_PROMISES = {"Further reading"}


def is_promised(text):
    """Whether a quote of MAIN_ROAD is in a part of the README."""
    return any(promise in " ".join(text.split()) for promise in MAIN_ROAD)


def test_each_promise_is_a_quote_from_the_readme():
    assert not [promise for promise in MAIN_ROAD if promise not in PLAIN]


def test_each_section_and_row_of_the_readme_has_a_test():
    sections = re.split("^#+ ", README, flags=re.M)[1:]
    rows = re.findall(r"^\| `.*", README, re.M)
    assert len(sections) > 5 and len(rows) >= 11
    titles = [section.partition("\n")[0] for section in sections if not is_promised(section)]
    assert set(titles) == WITHOUT_PROMISES
    assert not [row for row in rows if not is_promised(row)]


@pytest.mark.parametrize("test", sorted(set(TESTS)))
def test_each_test_of_the_main_road_exists(test):
    path, _, function = test.partition("::")
    files = [REPOSITORY / "tests" / path, (REPOSITORY / "tests" / path).with_name("helpers.py")]
    text = "".join(file.read_text() for file in files if file.exists())  # helpers may have the parameters
    name, _, parameters = function.partition("[")
    assert not name or re.search(rf"^def {name}\(", text, re.M)
    for parameter in parameters.rstrip("]").split("-"):
        assert parameter in text


@pytest.mark.parametrize(
    ("test", "node", "named"),
    [
        ("nlp/test_a.py", "tests/nlp/test_a.py::test_b", True),
        ("nlp/test_a.py::test_b", "tests/nlp/test_a.py::test_b[x-y]", True),
        ("nlp/test_a.py::test_b[x]", "tests/nlp/test_a.py::test_b[x]", True),
        ("nlp/test_a.py::test_b[x]", "tests/nlp/test_a.py::test_b[x-y]", False),
        ("nlp/test_a.py::test_b", "tests/nlp/test_a.py::test_b_and_c", False),
    ],
)
def test_an_entry_names_a_file_a_function_or_one_set_of_parameters(test, node, named):
    assert names(test, node) is named
