"""The report and the page of a model in Chromium: narrow and wide, light and dark."""

import argparse
import threading

import pytest

from hpctrain.commands import report
from hpctrain.distributed.world import ALONE
from hpctrain.nlp.use import serve
from tests.commands.test_runs import make_run
from tests.nlp.use.test_serve import Anything, Pairs
from tests.tools.browser import Browser

WIDTHS = (360, 768, 1280, 1920)
FITS = "document.documentElement.scrollWidth <= window.innerWidth"
# The relative luminance of a color like "rgb(1, 2, 3)", without its gamma: enough to tell light from dark.
LIGHT = "(element, name) => getComputedStyle(element)[name].match(/[0-9]+/g).slice(0, 3).map(Number).reduce((a, b) => a + b) / 765"


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


@pytest.mark.slow
def test_the_page_of_a_model_asks_for_the_token_and_marks_the_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(serve, "find_task", lambda folder: (Pairs(), {}))
    monkeypatch.setattr(serve, "load_tokenizer", lambda folder: None)
    monkeypatch.setattr(serve, "load_model", lambda task, folder, device: Anything())
    args = argparse.Namespace(device="cpu", batch_size=8, max_new_tokens=4)
    monkeypatch.setattr(serve.Handler, "model", serve.Model(tmp_path, args), raising=False)
    monkeypatch.setattr(serve.Handler, "token", "the-token", raising=False)
    server = serve.Server(("127.0.0.1", 0), serve.Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with Browser() as browser:
        browser.resize(360, 900)
        browser.open(f"http://127.0.0.1:{server.server_port}/")
        assert "the token is missing" in browser.evaluate("document.body.innerText")
        browser.evaluate("document.querySelector('[name=token]').value = 'the-token'")
        browser.click("button")
        browser.wait_for("document.querySelector('[name=question]')")
        assert "token" not in browser.evaluate("location.href")
        for name, text in (("question", "Who?"), ("context", "Kim <b>lives</b> in Seoul")):
            browser.evaluate(f"document.querySelector('[name={name}]').value = '{text}'")
        browser.click("button")
        browser.wait_for("document.querySelector('mark')")
        assert browser.evaluate("document.querySelector('mark').innerText").startswith("Kim")
        assert "Kim75.0% <b>lives</b> in Seoul" in browser.evaluate(
            "document.querySelector('.answer').innerText"
        )
        assert (
            browser.evaluate("getComputedStyle(document.querySelector('mark')).backgroundColor")
            != "rgba(0, 0, 0, 0)"
        )
        assert browser.evaluate(FITS)
    server.shutdown()
