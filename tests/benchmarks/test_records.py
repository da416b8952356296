"""The tables of the pages are what the records of the benchmarks say."""

import argparse
import json
import sys

import pytest
from slurm_cluster import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks"))
import records

from tests.helpers import run_command

RECORDS = sorted((REPOSITORY / "benchmarks/records").glob("*.json"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of benchmarks with a page that wants the table of a record `some`."""
    page = tmp_path / "page.md"
    page.write_text("before\n\n<!-- some -->\nold\n<!-- end -->\n\nafter\n")
    monkeypatch.setattr(records, "HERE", tmp_path)
    monkeypatch.setattr(records, "PAGES", [page])
    monkeypatch.setattr(records, "revision", lambda clean: "abc1234")
    monkeypatch.setattr(sys, "argv", ["/anywhere/some.py", "--data", "/data/nsmc", "--record"])
    return tmp_path


def test_the_tables_of_the_pages_are_those_of_the_records():
    """A figure that somebody changes in a page, or a record whose page is not written anew, fails here."""
    used = set()
    for page in records.PAGES:
        for _, name, end in records.TABLE.findall(text := page.read_text()):
            used.add(name)
            record = json.loads((REPOSITORY / f"benchmarks/records/{name}.json").read_text())
            assert f"<!-- {name} -->\n{records.format_table(record)}\n{end}" in text, (page, name)
    assert {path.stem for path in RECORDS} == used


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_is_of_a_commit_and_of_several_turns(path):
    record = json.loads(path.read_text())
    assert record["turns"] >= 3 and "dirty" not in record["revision"] and record["revision"]
    script = record["command"].split()[1]
    assert (REPOSITORY / script).is_file() and "/data" not in record["command"]


def test_a_benchmark_prints_its_table_and_writes_the_page(folder, capsys):
    options = argparse.Namespace(turns=3, record=True)
    rows = {"ours": {"ms": [3.0, 1.0, 2.0], "times": [1.0] * 3}, "theirs": {"ms": [4.0, 4.0, 4.0]}}
    records.report("some", "way", rows, {"ms": 1, "times": 2}, "a step", options)
    page = (folder / "page.md").read_text()
    assert page.startswith("before\n\n<!-- some -->\n| way | ms | times |\n|---|---|---|\n")
    assert "\n| ours | 2.0 (1.0 to 3.0) | 1.00 |\n| theirs | 4.0 |  |\n\na step; medians of 3 turns" in page
    assert "`python benchmarks/some.py --data nsmc`\nat abc1234" in page and page.endswith("\n\nafter\n")
    assert page.split("<!-- some -->\n")[1].split("\n<!--")[0] in capsys.readouterr().out
    (folder / "records/some.json").unlink()
    with pytest.raises(SystemExit, match=r"no record some\.json"):
        records.write_pages()


def test_only_a_commit_is_recorded(monkeypatch):
    def git(words, **_):
        text = "abc1234" if "rev-parse" in words else " M src/hpctrain/cli.py\n M benchmarks/records/a.json"
        return argparse.Namespace(stdout=text)

    monkeypatch.setattr(records.subprocess, "run", git)
    assert records.revision(clean=False) == "abc1234-dirty"
    with pytest.raises(SystemExit, match=r"--record: .*src/hpctrain/cli\.py"):
        records.revision(clean=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "checkpoint.py --model mnist",
        "loader.py --images 64",
        "runs.py --folders 3",
        "vision.py --model mnist",
    ],
)
def test_a_benchmark_runs(command):
    script, *options = command.split()
    words = [sys.executable, REPOSITORY / "benchmarks" / script, *options, "--turns", "1"]
    done = run_command(words)
    assert done.returncode == 0 and "medians of 1 turns" in done.stdout, done.stderr
