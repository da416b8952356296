"""Chromium without a window, for tests of what people see.

It is controlled over two pipes, by the DevTools protocol.
"""

import base64
import io
import json
import os
import shutil
import subprocess
import tempfile
import time
from typing import Any

from PIL import Image

# Nothing that asks a network for anything but the page.
OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
]
OPTIONS += ["--disable-component-update", "--disable-sync", "--remote-debugging-pipe"]


class Browser:
    """A page of a new Chromium, in a with block. `prefix` is a command before its own, such as nsenter."""

    def __init__(self, *prefix: str) -> None:
        self._number, self._prefix = 0, prefix

    def __enter__(self) -> "Browser":
        self._profile = tempfile.mkdtemp(prefix="hpctrain-chromium.")
        ours, theirs = os.pipe(), os.pipe()
        script = 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"'  # the descriptors that Chromium reads and writes
        command = ["bash", "-c", script, "-", str(ours[0]), str(theirs[1])]
        command += [*self._prefix, "chromium", *OPTIONS, f"--user-data-dir={self._profile}", "about:blank"]
        self._process = subprocess.Popen(command, pass_fds=(ours[0], theirs[1]), stderr=subprocess.DEVNULL)
        os.close(ours[0])
        os.close(theirs[1])
        self._write, self._read, self._text = ours[1], theirs[0], b""
        self._session = ""
        deadline = time.monotonic() + 60
        while not (
            pages := [each for each in self.ask("Target.getTargets")["targetInfos"] if each["type"] == "page"]
        ):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        self._session = self.ask("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)[
            "sessionId"
        ]
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
        shutil.rmtree(self._profile, ignore_errors=True)

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol, and wait for its result. Raises RuntimeError."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._text:
                part = os.read(self._read, 1 << 20)
                if not part:
                    raise RuntimeError("Chromium has ended")
                self._text += part
            text, _, self._text = self._text.partition(b"\0")
            answer = json.loads(text)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def resize(self, width: int, height: int) -> None:
        """Give the page this many pixels."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def prefer(self, scheme: str) -> None:
        """Let the user prefer light or dark pages."""
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, address: str) -> None:
        """Go to an address, and wait until its page is there."""
        self.ask("Page.navigate", url=address)
        self.wait_for("document.readyState == 'complete'")

    def press_shift_enter(self) -> None:
        """Press the keys that run a cell of a notebook."""
        for kind in ("rawKeyDown", "keyUp"):
            self.ask(
                "Input.dispatchKeyEvent",
                type=kind,
                key="Enter",
                code="Enter",
                modifiers=8,
                windowsVirtualKeyCode=13,
            )

    def take_picture(self) -> Image.Image:
        """What the page shows, in 256 colors: the pictures of the documents are small."""
        png = base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"])
        return Image.open(io.BytesIO(png)).convert("RGB").quantize()

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression; None while a page is being replaced."""
        try:
            result = self.ask("Runtime.evaluate", expression=script, returnByValue=True)["result"]
        except RuntimeError as error:
            if "context" in str(error).lower() or "navigated" in str(error):
                return None
            raise
        return result.get("value")

    def wait_for(self, script: str, seconds: float = 180) -> None:
        """Wait until an expression is true. Raises TimeoutError with the text of the page."""
        deadline = time.monotonic() + seconds
        while not self.evaluate(f"Boolean({script})"):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{script}: {self.evaluate('document.body.innerText')}")
            time.sleep(0.2)

    def click(self, selector: str) -> None:
        """Click in the middle of the first element that a CSS selector finds."""
        box = f"document.querySelector({selector!r}).getBoundingClientRect()"
        x, y = self.evaluate(f"(box => [box.x + box.width / 2, box.y + box.height / 2])({box})")
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
