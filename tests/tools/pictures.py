"""docs/serve.png: the pages of the five fine-tunings in Chromium, as wide as a telephone, the last one dark.

for task in classify pair ner qa generate; do .venv/bin/hpctrain nlp.$task --out runs/$task; done
.venv/bin/python tests/tools/pictures.py runs docs/serve.png
"""

import argparse
import sys
import threading
from pathlib import Path

from PIL import Image

from hpctrain.nlp.use import serve
from hpctrain.nlp.use.predict import find_model_folder
from tests.tools.browser import Browser

WIDTH, HEIGHT = 360, 550
# From the test sets of the samples, but that of ner, which is of README.md.
TEXTS = {
    "classify": ("어제 봤는데 끝까지 재미있었다. 감동 그 자체 ㅎㅎ",),
    "pair": ("아이가 공원에서 강아지와 놀고 있다.", "아이가 밖에 있다."),
    "ner": ("김민수는 서울에 산다.",),
    "qa": (
        "바다 등대는 어디에 서 있는가?",
        "바다 등대는 1998년 봄에 세워졌다. 등대는 부산 바닷가에 서 있다. 벽은 검은 빛깔이다.",
    ),
    "generate": ("After the rain",),
}


def take(browser: Browser, folder: Path, texts: tuple[str, ...], scheme: str) -> Image.Image:
    """The page of a model with its answer to texts."""
    args = argparse.Namespace(device="cpu", batch_size=1, max_new_tokens=16)
    serve.Handler.model, serve.Handler.token = serve.Model(find_model_folder(folder), args), "x"
    server = serve.Server(("127.0.0.1", 0), serve.Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    browser.prefer(scheme)
    browser.open(f"http://127.0.0.1:{server.server_port}/?token=x")
    for name, text in zip(serve.Handler.model.task.inputs, texts, strict=True):
        browser.evaluate(f"document.querySelector('[name={name}]').value = {text!r}")
    browser.click("button")
    browser.wait_for("document.querySelector('.answer')")
    picture = browser.take_picture()
    server.shutdown()
    return picture


def main(runs: Path, out: Path) -> None:
    whole = Image.new("RGB", (3 * WIDTH + 2, 2 * HEIGHT + 1), "gray")
    with Browser() as browser:
        browser.resize(WIDTH, HEIGHT)
        pictures = [take(browser, runs / task, texts, "light") for task, texts in TEXTS.items()]
        pictures.append(take(browser, runs / "ner", TEXTS["ner"], "dark"))
    for number, picture in enumerate(pictures):
        whole.paste(picture, (number % 3 * (WIDTH + 1), number // 3 * (HEIGHT + 1)))
    whole.quantize().save(out, optimize=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
