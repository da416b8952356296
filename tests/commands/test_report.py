"""hpctrain report: its page, in Chromium as well, and its picture."""

import html.parser
import json
import math
import re
import struct

import pytest

from hpctrain.commands import export, report
from hpctrain.distributed.world import ALONE
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.run import charts, reader
from tests.helpers import make_run, run_hpctrain
from tests.tools.browser import Browser

WIDTHS = (360, 768, 1280, 1920)
FITS = "document.documentElement.scrollWidth <= window.innerWidth"
# The relative luminance of a color like "rgb(1, 2, 3)", without its gamma: enough to tell light from dark.
LIGHT = (
    "(element, name) => "
    "getComputedStyle(element)[name].match(/[0-9]+/g).slice(0, 3).map(Number).reduce((a, b) => a + b) / 765"
)


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


def test_the_page_shows_the_best_score_and_not_the_last(tmp_path):
    """And which line is which run, beside each chart."""
    values = ((1, 0.5), (2, 0.875), (3, 0.75))
    lines = [{"epoch": n, "step": 10 * n, "seconds": n, "test_accuracy": value} for n, value in values]
    runs = [make_run(tmp_path / name, lines=lines) for name in ("one", "two")]
    page = Page(report.page([report.read(run) for run in runs]))
    assert page.texts.count("test_accuracy 0.875 in epoch 2") == 2
    assert all(page.texts.count(str(run)) == 2 for run in runs)  # in the table, and in the legend


@pytest.mark.slow
def test_the_page(tmp_path):
    first = make_run(tmp_path / "runs/<b>first&", starts=2)
    second = make_run(tmp_path / "runs/second", lr=0.2)
    done = run_hpctrain("report", first, second, "--out", "both.html", cwd=tmp_path)
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
        {
            "epoch": 1,
            "step": step,
            "train_loss": 1.0,
            "loss_scale": 65536.0,
            "overflow_steps": 0,
            "peak_memory_mb": 900.0,
            "gpu_percent": 87.0,
        }
        for step in (5, 10)
    ]
    folder = make_run(tmp_path / "run", lines=lines)
    assert reader.summarize(folder)["score"] == "train_loss"
    run = report.read(folder)
    names = ["train_loss", "loss_scale", "overflow_steps", "peak_memory_mb", "gpu_percent"]
    assert report.metric_names([run]) == names
    report.main(ALONE, [str(folder), "--out", str(tmp_path / "page.html")])
    assert {"peak memory (MB)", "GPU use (%)"} <= set(Page((tmp_path / "page.html").read_text()).texts)


def test_more_metrics_than_anybody_looks_at_take_no_hours(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(charts, "MAX_METRICS", 3)
    content = report.read(
        make_run(tmp_path / "run", lines=[{"epoch": 1, "step": 1} | {f"m{i}": i for i in range(9)}])
    )
    assert report.metric_names([content]) == ["m0", "m1", "m2"]
    assert (
        capsys.readouterr().out
        == "hpctrain: the first 3 of 9 metrics are drawn; hpctrain export csv has all\n"
    )


def test_a_restart_is_a_dotted_line(tmp_path):
    for starts in (1, 2):
        content = report.read(make_run(tmp_path / str(starts), starts=starts))
        assert report.chart([content], "train_loss").count("stroke-dasharray: 2,3.3") == starts - 1


@pytest.mark.slow
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


def test_a_folder_of_runs_stands_for_those_that_have_metrics(tmp_path, capsys):
    for name, lines in (("a", None), ("b", None), ("begun", [])):
        make_run(tmp_path / "search" / name, **({} if lines is None else {"lines": lines}))
    report.main(ALONE, [str(tmp_path / "search"), "--out", str(tmp_path / "page.html")])
    text = (tmp_path / "page.html").read_text()
    assert all((f"{tmp_path}/search/{name}" in text) == (name != "begun") for name in ("a", "b", "begun"))


def test_what_cannot_be_reported(tmp_path):
    folder = make_run(tmp_path / "run", lines=[])
    with pytest.raises(HpctrainError, match=r"run/metrics\.jsonl"):
        report.main(ALONE, [str(folder)])
    with pytest.raises(HpctrainError, match=r"elsewhere: no run folder, .* config\.json"):
        report.main(ALONE, [str(tmp_path / "elsewhere")])
    with pytest.raises(UsageError, match=r"--out x\.pdf.*\.html.*\.png"):
        report.main(ALONE, [str(folder), "--out", "x.pdf"])
    whole = make_run(tmp_path / "whole")
    with pytest.raises(HpctrainError, match=r"no/where\.html.*--out"):
        report.main(ALONE, [str(whole), "--out", str(tmp_path / "no/where.html")])


def test_values_that_are_not_finite_are_left_out(tmp_path):
    lines = [
        {"epoch": 1, "step": step, "train_loss": value}
        for step, value in enumerate([1.0, float("nan"), float("inf"), 2.0])
    ]
    report.main(ALONE, [str(make_run(tmp_path / "run", lines=lines)), "--out", str(tmp_path / "page.html")])
    assert (tmp_path / "page.html").read_text().count("<svg") == 1


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_report_fits_every_width_in_light_and_dark(tmp_path):
    runs = [make_run(tmp_path / "first", starts=2), make_run(tmp_path / "second", lr=0.2)]
    report.main(ALONE, [*map(str, runs), "--out", str(tmp_path / "page.html")])
    with Browser() as browser:
        columns = []
        for width in WIDTHS:
            browser.resize(width, 900)
            for scheme in ("light", "dark"):
                browser.prefer(scheme)
                browser.open(f"file://{tmp_path}/page.html")
                assert browser.evaluate(FITS), width
                text = browser.evaluate(f"({LIGHT})(document.querySelector('svg text'), 'fill')")
                assert text > 0.7 if scheme == "dark" else text < 0.3
            tops = browser.evaluate(
                "[...document.querySelectorAll('.charts svg')].map(svg => svg.getBoundingClientRect().top)"
            )
            columns.append(tops.count(tops[0]))
        assert columns == [1, 2, 3, 4]
