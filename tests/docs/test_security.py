"""docs/reference/security.md: each row of its table names a test that there is."""

import re

from slurm_cluster import REPOSITORY

ROWS = re.findall(r"^\| (?!what |-).*", (REPOSITORY / "docs/reference/security.md").read_text(), re.M)
NAMED = re.compile(r"((?:`test_\w+`(?:, | and |, and )?)+)[^`|]*? of `(tests/[\w/.]+)`")


def test_each_row_names_a_test():
    assert len(ROWS) > 60
    without = [row for row in ROWS if not re.search(r"`tests/[\w/.]+`", row.split(" | ")[-1])]
    missing = [path for row in ROWS for path in re.findall(r"`(tests/[\w/.]+)`", row) if not exists(path)]
    assert not without and not missing
    for names, path in [found for row in ROWS for found in NAMED.findall(row)]:
        text = (REPOSITORY / path).read_text()
        assert not [name for name in re.findall(r"test_\w+", names) if f"def {name}(" not in text], path


def exists(path):
    return (REPOSITORY / path).is_file()
