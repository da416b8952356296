"""Each section and row of README.md has a test of `make test`: its mark main_road quotes the README."""

import re

from slurm_cluster import REPOSITORY

README = (REPOSITORY / "README.md").read_text()
SOURCES = "".join(path.read_text() for path in (REPOSITORY / "tests").rglob("test_*.py"))
MARKS = re.findall(r"mark\.main_road\(([^)]*)\)", SOURCES)
PROMISES = {quote for mark in MARKS for quote in re.findall('"(.*?)"', mark)}


def test_each_promise_is_a_quote_from_the_readme():
    assert not [promise for promise in PROMISES if promise not in " ".join(README.split())]


def test_each_section_and_row_of_the_readme_has_a_test():
    sections, rows = re.split("^#+ ", README, flags=re.M)[1:], re.findall(r"^\| `.*", README, re.M)
    assert len(sections) > 5 and len(rows) >= 11
    parts = (" ".join(part.split()) for part in (*sections, *rows))
    (without,) = (part for part in parts if not any(promise in part for promise in PROMISES))
    assert without.startswith("Further reading")
