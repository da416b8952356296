"""The report in Chromium: narrow and wide, light and dark."""

import pytest

from hpctrain.commands import report
from hpctrain.distributed.world import ALONE
from tests.commands.test_runs import make_run
from tests.tools.browser import Browser

WIDTHS = (360, 768, 1280, 1920)
FITS = "document.documentElement.scrollWidth <= window.innerWidth"
# The relative luminance of a color like "rgb(1, 2, 3)", without its gamma: enough to tell light from dark.
LIGHT = (
    "(element, name) => "
    "getComputedStyle(element)[name].match(/[0-9]+/g).slice(0, 3).map(Number).reduce((a, b) => a + b) / 765"
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
