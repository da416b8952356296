"""docs/serve.png: the pages of the fine-tunings in Chromium, as wide as a telephone; those below are dark.

It needs a font with Hangul, such as fonts-nanum.

for task in classify pair ner qa generate instruct; do .venv/bin/hpctrain nlp.$task --out runs/$task; done
.venv/bin/python -m tests.tools.pictures runs docs/serve.png
"""

import argparse
import sys
import threading
from pathlib import Path

from PIL import Image

from hpctrain.nlp import serve
from tests.tools.browser import Browser

WIDTH, HEIGHT = 360, 840
# The task and what its page shows: no answer yet, or the answer to its first example.
PAGES = {
    "light": [("classify", False), ("classify", True), ("pair", True), ("ner", True)],
    "dark": [("qa", False), ("qa", True), ("generate", True), ("instruct", True)],
}


def take(browser: Browser, folder: Path, answered: bool) -> Image.Image:
    """The page of a model, before a question or with an answer."""
    args = argparse.Namespace(folder=folder, device="cpu", batch_size=1, max_new_tokens=16)
    serve.Handler.model, serve.Handler.token = serve.Model(args), "x"
    server = serve.Server(("127.0.0.1", 0), serve.Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    browser.open(f"http://127.0.0.1:{server.server_port}/?token=x")
    if answered:
        browser.click("[name=example]")
        browser.wait_for("document.querySelector('.answer')")
    picture = browser.take_picture()
    server.shutdown()
    return picture


def main(runs: Path, out: Path) -> None:
    columns = max(map(len, PAGES.values()))
    whole = Image.new("RGB", (columns * (WIDTH + 1) - 1, len(PAGES) * (HEIGHT + 1) - 1), "gray")
    with Browser() as browser:
        browser.resize(WIDTH, HEIGHT)
        for row, (scheme, pages) in enumerate(PAGES.items()):
            browser.prefer(scheme)
            for column, (task, answered) in enumerate(pages):
                picture = take(browser, runs / task, answered)
                whole.paste(picture, (column * (WIDTH + 1), row * (HEIGHT + 1)))
    whole.quantize().save(out, optimize=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
