"""hpctrain runs: a table of run folders."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.commands import runs
from hpctrain.distributed.world import ALONE
from hpctrain.errors import HpctrainError
from hpctrain.run import reader
from tests.helpers import DIGEST, make_run, run_command, run_hpctrain


def test_the_table(tmp_path):
    make_run(tmp_path / "runs/train_ddp/17", starts=2)
    make_run(tmp_path / "runs/mine", result=False, started="2026-11-21T10:00:00+0000", lines=[])
    done = run_hpctrain("runs", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == ""
    head, first, second = (re.split(r" {2,}", line) for line in done.stdout.splitlines())
    assert head == ["RUN", "STATE", "JOB", "EPOCH", "STEP", "SCORE", "EXAMPLES/S", "STARTED", "IMAGE"]
    expected = [
        "runs/train_ddp/17",
        "finished",
        "18 (2 starts)",
        "1/3",
        "10",
        "test_accuracy 0.875",
        "99.5",
        "2026-11-20 10:00",
    ]
    assert first == [*expected, "abababababab"]
    assert second == ["runs/mine", "stopped", "17", "0/3", "0", "-", "-", "2026-11-21 10:00", "abababababab"]
    # a script that does not say how many epochs it trains
    (config,) = (tmp_path / "runs/mine").glob("config.json")
    known = json.loads(config.read_text())
    config.write_text(json.dumps(known | {"options": known["options"] | {"epochs": None}}))
    assert "  0/?  " in run_hpctrain("runs", "runs/mine", cwd=tmp_path).stdout
    rows = json.loads(run_hpctrain("runs", "runs/mine", "--json", cwd=tmp_path).stdout)
    assert [(row["run"], row["state"], row["image_digest"]) for row in rows] == [
        ("runs/mine", "stopped", DIGEST)
    ]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"options": 5}', '{"options": {}, "world": [1]}', "\udcff"])
def test_a_folder_with_a_broken_config_is_named(tmp_path, text):
    make_run(tmp_path / "run")
    (tmp_path / "run/config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(HpctrainError, match=rf"{tmp_path}/run/config\.json"):
        runs.main(ALONE, [str(tmp_path)])


def test_each_file_of_a_run_is_opened_once(tmp_path):
    """benchmarks/runs.py measures the time that 1,000 folders take."""
    for number in range(20):
        make_run(tmp_path / f"train_ddp/{number}", starts=2)
    code = """
import collections, sys
opened = collections.Counter()
def count(event, values):
    if event == "open" and isinstance(values[0], str):
        opened[values[0]] += 1
sys.addaudithook(count)
from hpctrain.commands import runs
from hpctrain.distributed.world import ALONE
runs.main(ALONE, sys.argv[1:])
names = [name for name in opened.elements() if name.endswith((".json", ".jsonl")) and "train_ddp" in name]
print(len(names), len(set(names)))
"""
    done = run_command([sys.executable, "-c", code, str(tmp_path)])
    *table, opened = done.stdout.splitlines()
    assert len(table) == 21 and opened == "80 80", done


def test_no_run_folder(tmp_path):
    with pytest.raises(HpctrainError, match=f"{tmp_path}/runs"):
        runs.main(ALONE, [str(tmp_path / "runs")])
    with pytest.raises(HpctrainError, match=f"{tmp_path}"):
        runs.main(ALONE, [str(tmp_path)])


def test_a_name_that_controls_a_terminal_is_escaped(tmp_path):
    folder = make_run(tmp_path / "a\x1b[2Jb")
    assert r"a\x1b[2Jb" in runs.describe_runs([reader.summarize(folder)])


def test_torch_is_not_imported(tmp_path):
    code = (
        "import hpctrain.commands.runs, hpctrain.commands.report, sys; "
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    assert run_command([sys.executable, "-c", code]).stdout == "[]\n"


def test_a_reader_that_ends_and_folders_of_others(tmp_path):
    """No traceback: for `hpctrain runs | head`, on a full disk, and for a run that only its user may read."""
    make_run(tmp_path / "run")
    command = [sys.executable, "-m", "hpctrain"]
    with subprocess.Popen(
        [*command, "runs", tmp_path], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 141)
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*command, "runs", tmp_path], stdout=full, stderr=subprocess.PIPE, text=True)
    text = "hpctrain: error: the output cannot be written (No space left on device): free some space there\n"
    assert (done.returncode, done.stderr) == (1, text)
    (tmp_path / "run/config.json").unlink()
    (tmp_path / "run/config.json").mkdir()
    done = run_command([*command, "report", tmp_path / "run"])
    assert (
        done.returncode == 1 and "config.json: cannot be read" in done.stderr and done.stderr.count("\n") == 1
    )
