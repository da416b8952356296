"""hpctrain runs and hpctrain report: what they say of run folders, whole and broken."""

import html.parser
import json
import math
import os
import re
import signal
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from hpctrain.commands import export, plot, report, runs
from hpctrain.distributed.world import ALONE
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.files.plain import open_plain
from hpctrain.run import charts, reader
from hpctrain.run.metrics import format_seconds

DIGEST = "sha256:" + 64 * "ab"


def make_run(folder, *, starts=1, lines=None, result=True, started="2026-11-20T10:00:00+0000", **options):
    folder.mkdir(parents=True)
    for number in range(1, starts + 1):
        config = {
            "trainer": "train_ddp",
            "options": {"epochs": 3, "lr": 0.1, "out": str(folder), **options},
            "world": {"size": 4, "nodes": 2, "launcher": "slurm"},
            "job": str(16 + number),
            "device": "x86_64",
            "image_digest": DIGEST,
            "versions": {"torch": "2.13.0"},
            "started": started,
        } | ({"resumed_at": 10} if number > 1 else {})
        (folder / ("config.json" if number == 1 else f"config.{number}.json")).write_text(json.dumps(config))
    if lines is None:
        lines = [
            {"epoch": 1, "step": step, "seconds": step, "train_loss": 3 / step, "examples_per_s": 99.5}
            for step in (5, 10)
        ]
        lines.append(
            {
                "epoch": 1,
                "step": 10,
                "seconds": 11,
                "test_loss": 0.2,
                "test_accuracy": 0.875,
                "accuracy/part": 1.0,
            }
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if result:
        (folder / "result.json").write_text("{}")
    return folder


def run(*words, cwd):
    command = [sys.executable, "-m", "hpctrain", *map(str, words)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


# ---- hpctrain runs ----


def test_the_table(tmp_path):
    make_run(tmp_path / "runs/train_ddp/17", starts=2)
    make_run(tmp_path / "runs/mine", result=False, started="2026-11-21T10:00:00+0000", lines=[])
    done = run("runs", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == ""
    head, first, second = (re.split(r" {2,}", line) for line in done.stdout.splitlines())
    assert head == ["RUN", "STATE", "JOB", "EPOCH", "STEP", "SCORE", "EXAMPLES/S", "STARTED", "IMAGE"]
    expected = [
        "train_ddp/17",
        "finished",
        "18 (2 starts)",
        "1/3",
        "10",
        "test_accuracy 0.875",
        "99.5",
        "2026-11-20 10:00",
    ]
    assert first == [*expected, "abababababab"]
    assert second == ["mine", "stopped", "17", "0/3", "0", "-", "-", "2026-11-21 10:00", "abababababab"]
    rows = json.loads(run("runs", "runs/mine", "--json", cwd=tmp_path).stdout)
    assert [(row["run"], row["state"], row["image_digest"]) for row in rows] == [
        ("runs/mine", "stopped", DIGEST)
    ]


def test_the_state(tmp_path):
    folder = make_run(tmp_path / "run", result=False)
    assert reader.summarize(folder)["state"] == "stopped"
    (folder / "owner.json").write_text("{}")
    assert reader.summarize(folder)["state"] == "running"
    os.utime(folder / "owner.json", (0, time.time() - 100))  # its job has died
    assert reader.summarize(folder)["state"] == "stopped"
    (folder / "result.json").write_text("{}")
    assert reader.summarize(folder)["state"] == "finished"
    os.utime(folder / "result.json", (0, 0))  # resumed after that, for more epochs
    assert reader.summarize(folder)["state"] == "stopped"


def test_the_speed_of_a_finished_run_is_that_of_its_result(tmp_path):
    """The last line of metrics has that of a fifth of an epoch."""
    folder = make_run(tmp_path / "run")
    for content, speed in (({"examples_per_s": 80.25}, 80.25), ({}, 99.5), (None, 99.5)):
        (folder / "result.json").write_text(json.dumps({"speed": content}))
        assert reader.summarize(folder)["examples_per_s"] == speed


def test_the_score_that_selects_the_best_epoch_is_shown(tmp_path):
    """It was the last one: the recall of nlp.ner."""
    earlier = {"epoch": 1, "step": 5, "validation_loss": 1.9, "validation_f1": 0.25, "validation_recall": 0.5}
    last = {"epoch": 1, "step": 5, "test_loss": 2.0, "test_f1": 0.75, "test_recall": 1.0, "test_f1/PS": 0.0}
    row = reader.summarize(make_run(tmp_path / "run", lines=[earlier, last]))
    assert (row["score"], row["value"]) == ("test_f1", 0.75)


def test_without_a_score_the_loss_is_shown(tmp_path):
    folder = make_run(tmp_path / "run", lines=[{"epoch": 1, "step": 5, "train_loss": 0.5}])
    assert (reader.summarize(folder)["score"], reader.summarize(folder)["value"]) == ("train_loss", 0.5)


def test_a_long_file_of_metrics_is_read_from_its_end(tmp_path):
    lines = [{"epoch": 1, "step": step, "train_loss": 1.0} for step in range(5000)]
    folder = make_run(tmp_path / "run", lines=lines)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 1, "step": 50')  # is being written
    assert reader.summarize(folder)["step"] == 4999
    assert (
        len(reader.read_metrics(folder)) == 5000 and 50 < len(reader.read_metrics(folder, reader.TAIL)) < 300
    )


@pytest.mark.parametrize("text", ["", "{", "[]", '{"options": 5}', '{"options": {}, "world": [1]}', "\udcff"])
def test_a_folder_with_a_broken_config_is_named(tmp_path, text):
    make_run(tmp_path / "run")
    (tmp_path / "run/config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(
        HpctrainError, match=rf"{tmp_path}/run/config.json: (cannot be read|not a file of hpctrain)"
    ):
        runs.main(ALONE, [str(tmp_path)])


@pytest.mark.parametrize("kind", ["pipe", "huge"])
@pytest.mark.parametrize("name", ["config.json", "config.2.json", "metrics.jsonl", "result.json"])
def test_what_somebody_else_put_in_the_place_of_a_file_is_not_read_without_end(tmp_path, name, kind):
    folder = make_run(tmp_path / "run")
    (folder / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(folder / name)
    else:
        with (folder / name).open("wb") as file:
            file.truncate(2**42)
    signal.alarm(60)  # a reader of a pipe waits for its writer
    for read in (reader.summarize, charts.plot, report.read):
        with suppress(HpctrainError):
            read(folder)
    signal.alarm(0)
    with pytest.raises(OSError, match="not a plain file"):
        open_plain(Path("/dev/zero"))
    if name == "metrics.jsonl":  # no picture of nothing
        with pytest.raises(
            HpctrainError, match=r"metrics.jsonl cannot be read \((not a plain file|File too large)\)"
        ):
            charts.plot(folder)


def test_metrics_that_are_no_numbers_are_left_out(tmp_path, capsys):
    lines = [
        {"epoch": 1, "step": 1, "train_loss": 2.0},
        {"epoch": [1], "step": 1},
        {"epoch": 1, "step": 10**400},
        5,
    ]
    lines.append(
        {
            "epoch": 1,
            "step": 2,
            "test_accuracy": "\x1b[2J",
            "train_loss": 1.0,
            "examples_per_s": {},
            "seconds": None,
        }
    )
    folder = make_run(tmp_path / "run", lines=lines)
    (folder / "metrics.jsonl").write_text("[" * 100_000 + "\n" + (folder / "metrics.jsonl").read_text())
    (folder / "result.json").write_text(f'{{"speed": {{"examples_per_s": {10**400}}}}}')
    assert reader.read_metrics(folder) == [lines[0], {"epoch": 1, "step": 2, "train_loss": 1.0}]
    for main, options in (
        (runs.main, []),
        (plot.main, []),
        (report.main, ["--out", str(tmp_path / "page.html")]),
    ):
        main(ALONE, [str(folder), *options])
    assert re.search("train_loss 1 +- ", capsys.readouterr().out)


def test_a_run_folder_of_somebody_else_gives_no_traceback(tmp_path, capsys):
    """Formulas that are none, halves of characters, numbers beyond each axis, and what is no number."""
    odd = [math.inf, math.nan, 1e308, -1e308, 2**70]
    lines = [
        {"epoch": 1, "step": 1, "seconds": 1, "train_loss": 2.0, name: value}
        for name in ("step", "seconds")
        for value in odd
    ]
    lines += [
        {"epoch": value, "step": 2, "test_loss": value, "$\\frac{$": 1, "$\\frac{$_loss": 1}
        for value in (*odd, 2)
    ]
    lines[-1] |= {"half \ud800": 1, "\x1b[2J": 1, "x" * 5000: 1, "=HYPERLINK(1)": 5}
    folder = make_run(tmp_path / "$\\frac{$ \udcff", lines=lines, starts=10)
    for number, value in enumerate([*odd, "x", [], {}], 3):
        path = folder / f"config.{number}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"resumed_at": value}))
    report.main(ALONE, [str(folder), str(folder), "--out", str(tmp_path / "page.html")])
    report.main(ALONE, [str(folder), "--out", str(tmp_path / "page.png")])
    assert charts.plot(folder).stat().st_size > 10_000
    export.to_csv(folder)
    assert (
        (folder / "metrics.csv")
        .read_text()
        .splitlines()[0]
        .endswith(",$\\frac{$,$\\frac{$_loss,'=HYPERLINK(1)")
    )


def test_more_metrics_than_anybody_looks_at_take_no_hours(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(charts, "MOST_METRICS", 3)
    content = report.read(
        make_run(tmp_path / "run", lines=[{"epoch": 1, "step": 1} | {f"m{i}": i for i in range(9)}])
    )
    assert report.metric_names([content]) == ["m0", "m1", "m2"]
    assert (
        capsys.readouterr().out
        == "hpctrain: the first 3 of 9 metrics are drawn; hpctrain export csv has all\n"
    )


def test_a_plot_in_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    folder = make_run(tmp_path / "run")
    (folder / "curves.png").symlink_to("/proc/self/no-such-file")
    with pytest.raises(HpctrainError, match=r"run/curves.png: cannot be written \("):
        plot.main(ALONE, [str(folder)])


def test_each_file_of_a_run_is_opened_once(tmp_path):
    """benchmarks/runs.py measures the time that 1,000 folders take."""
    for number in range(20):
        make_run(tmp_path / f"train_ddp/{number}", starts=2)
    code = """
import collections, sys
opened = collections.Counter()
sys.addaudithook(lambda event, values: opened.update([values[0]] if event == "open" and isinstance(values[0], str) else []))
from hpctrain.commands import runs
from hpctrain.distributed.world import ALONE
runs.main(ALONE, sys.argv[1:])
names = [name for name in opened.elements() if name.endswith((".json", ".jsonl")) and "train_ddp" in name]
print(len(names), len(set(names)))
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    *table, opened = done.stdout.splitlines()
    assert len(table) == 21 and opened == "80 80", done


def test_no_run_folder(tmp_path):
    with pytest.raises(HpctrainError, match=f"{tmp_path}: no run folder in it"):
        runs.main(ALONE, [str(tmp_path)])


def test_a_name_that_controls_a_terminal_is_escaped(tmp_path):
    folder = make_run(tmp_path / "a\x1b[2Jb")
    assert r"a\x1b[2Jb" in runs.describe_runs([reader.summarize(folder)], tmp_path)


def test_torch_is_not_imported(tmp_path):
    code = (
        "import hpctrain.commands.runs, hpctrain.commands.report, sys; "
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


# ---- hpctrain report ----


class Page(html.parser.HTMLParser):
    """The text, the elements, and the addresses that a page refers to."""

    def __init__(self, text):
        super().__init__()
        self.texts, self.elements, self.addresses = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href", "xlink:href")]

    def handle_data(self, data):
        self.texts.append(data.strip())


def test_the_page(tmp_path):
    first = make_run(tmp_path / "runs/<b>first&", starts=2)
    second = make_run(tmp_path / "runs/second", lr=0.2)
    done = run("report", first, second, "--out", "both.html", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "both.html\n", "")
    text = (tmp_path / "both.html").read_text()
    page = Page(text)
    assert page.elements.count("svg") == 4 and "b" not in page.elements
    titles = [
        name for name in page.texts if name in ("train loss", "test loss", "test accuracy", "examples per s")
    ]
    assert titles == ["train loss", "test loss", "test accuracy", "examples per s"]
    assert (
        str(first) in page.texts
        and {"--lr", "0.1", "0.2"} <= set(page.texts)
        and "--epochs" not in page.texts
    )
    # no network: within the page alone; and no script
    assert (
        page.addresses
        and all(address.startswith("#") for address in page.addresses)
        and "script" not in page.elements
    )
    assert not re.search(r"url\((?!#)|@import", text) and "currentColor" in text and report.TEXT not in text
    ids = re.findall(r'clipPath id="(\w+)"', text)
    assert len(ids) == len(set(ids)) >= 4


def test_memory_and_use_of_gpus_have_charts(tmp_path):
    lines = [
        {"epoch": 1, "step": step, "train_loss": 1.0, "peak_memory_mb": 900.0, "gpu_percent": 87.0}
        for step in (5, 10)
    ]
    folder = make_run(tmp_path / "run", lines=lines)
    assert reader.summarize(folder)["score"] == "train_loss"
    assert report.metric_names([report.read(folder)]) == ["train_loss", "peak_memory_mb", "gpu_percent"]
    report.main(ALONE, [str(folder), "--out", str(tmp_path / "page.html")])
    assert {"peak memory (MB)", "GPU use (%)"} <= set(Page((tmp_path / "page.html").read_text()).texts)


def test_a_restart_is_a_dotted_line(tmp_path):
    for starts in (1, 2):
        content = report.read(make_run(tmp_path / str(starts), starts=starts))
        assert report.chart([content], "train_loss").count("stroke-dasharray: 2,3.3") == starts - 1


def test_one_run_and_equal_runs(tmp_path):
    folders = [make_run(tmp_path / name) for name in ("a", "b")]
    report.main(ALONE, [str(folders[0]), "--out", str(tmp_path / "one.html")])
    assert "There is only one run." in (tmp_path / "one.html").read_text()
    report.main(ALONE, [*map(str, folders), "--out", str(tmp_path / "two.html")])
    assert "options, versions, image and ranks are the same" in (tmp_path / "two.html").read_text()


def test_the_picture(tmp_path):
    report.main(ALONE, [str(make_run(tmp_path / "run")), "--out", str(tmp_path / "both.png")])
    content = (tmp_path / "both.png").read_bytes()
    width, height = struct.unpack(">II", content[16:24])
    assert content.startswith(b"\x89PNG") and width > 1500 and height > 600


def test_what_cannot_be_reported(tmp_path):
    folder = make_run(tmp_path / "run", lines=[])
    with pytest.raises(HpctrainError, match=r"run/metrics.jsonl has no line yet"):
        report.main(ALONE, [str(folder)])
    with pytest.raises(HpctrainError, match=r"elsewhere/config.json: cannot be read"):
        report.main(ALONE, [str(tmp_path / "elsewhere")])
    with pytest.raises(UsageError, match=r"--out x.pdf: give a name that ends in .html or .png"):
        report.main(ALONE, [str(folder), "--out", "x.pdf"])
    whole = make_run(tmp_path / "whole")
    with pytest.raises(HpctrainError, match=r"no/where.html: cannot be written"):
        report.main(ALONE, [str(whole), "--out", str(tmp_path / "no/where.html")])


def test_values_that_are_not_finite_are_left_out(tmp_path):
    lines = [
        {"epoch": 1, "step": step, "train_loss": value}
        for step, value in enumerate([1.0, float("nan"), float("inf"), 2.0])
    ]
    report.main(ALONE, [str(make_run(tmp_path / "run", lines=lines)), "--out", str(tmp_path / "page.html")])
    assert (tmp_path / "page.html").read_text().count("<svg") == 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (99, "99 s"),
        (100, "2 min"),
        (5900, "98 min"),
        (6000, "1 h 40 min"),
        (90000, "25 h 00 min"),
    ],
)
def test_a_time_as_people_say_it(seconds, text):
    assert format_seconds(seconds) == text


def test_a_reader_that_ends_and_folders_of_others(tmp_path):
    """No traceback: of `hpctrain runs | head`, on a full disk, and of a colleague's run, whose folder is for its user alone."""
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
    done = subprocess.run([*command, "report", tmp_path / "run"], capture_output=True, text=True)
    assert (
        done.returncode == 1 and "config.json: cannot be read" in done.stderr and done.stderr.count("\n") == 1
    )
