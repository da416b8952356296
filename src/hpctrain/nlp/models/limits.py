"""Limits for what a model folder makes the process compute: it is data, and may be made by anybody.

A chat template is a program in Jinja, whose loops may have no end, and a tokenizer can replace each character
by a longer text, again and again.
"""

import ctypes
import json
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment
from tokenizers import Tokenizer

from hpctrain.errors import HpctrainError

SECONDS, MEMORY = 20, 2**30  # of a call; templates of published models take milliseconds and kilobytes
MAX_GROWTH = 1_000  # how much longer a tokenizer may make a text; Unicode's normal forms make it 18 times


class LimitError(HpctrainError):
    """Something in a model folder takes more time or memory than anything of its kind needs."""


class _TooLong(BaseException):
    """Raised in a thread whose time is up. Not an Exception, which a library may catch."""


class _Watch:
    """The threads with a limit: when their time is up. A thread of its own looks at them each second."""

    def __init__(self) -> None:
        self._lock, self._ends = threading.Lock(), dict[int, float]()
        self._thread = threading.Thread()

    def begin(self, end: float) -> None:
        with self._lock:
            self._ends[threading.get_ident()] = end
            if not self._thread.is_alive():  # a fork has none
                self._thread = threading.Thread(target=self._look, daemon=True)
                self._thread.start()

    def end(self) -> None:
        """Raise nothing in this thread after this."""
        with self._lock:
            if self._ends.pop(threading.get_ident(), None) is None:
                _raise_in(threading.get_ident(), None)

    def _look(self) -> None:
        while True:
            time.sleep(1)
            with self._lock:
                for thread, end in [*self._ends.items()]:
                    if end < time.monotonic():
                        del self._ends[thread]
                        _raise_in(thread, _TooLong)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise an exception in a thread before its next bytecode; None takes back one that is not raised yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), ctypes.py_object(error) if error else None
    )


WATCH, ONE_AT_A_TIME = _Watch(), threading.Lock()


@contextmanager
def limited(what: str) -> Iterator[None]:
    """Raise LimitError, which begins with `what`, if the block needs more than SECONDS or MEMORY.

    One thread at a time: the limit of the memory is that of the process.
    """
    advice = "use another model, or correct it"
    with ONE_AT_A_TIME:
        before = resource.getrlimit(resource.RLIMIT_AS)
        most = _measure_memory(int(time.monotonic())) + MEMORY
        if before[0] in range(most):  # RLIM_INFINITY is negative
            most = before[0]
        try:
            WATCH.begin(time.monotonic() + SECONDS)
            try:
                resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
                yield
            finally:
                WATCH.end()
        except _TooLong:
            raise LimitError(f"{what} needs more than {SECONDS} s: {advice}") from None
        except MemoryError:
            raise LimitError(f"{what} needs more than {MEMORY / 2**30:g} GiB of memory: {advice}") from None
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)


@lru_cache(1)
def _measure_memory(second: int) -> int:
    """The address space of this process, in bytes, measured at most once a second: calls are many."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()


@cache
def refuse_powers(what: str, template: str) -> None:
    """Raise LimitError for a template that computes a power: 9 ** 9 ** 9 cannot be interrupted."""
    if any(token[1:] == ("operator", "**") for token in Environment().lex(template)):
        raise LimitError(
            f"{what} computes a power (**), which takes any time: use another model, or correct it"
        )


def refuse_growth(folder: Path, backend: Tokenizer) -> None:
    """Raise LimitError for a tokenizer that makes texts, or what it decodes, much longer."""
    for part in (backend.normalizer, backend.decoder):
        if part is not None and _count_growth(json.loads(part.__getstate__())) > MAX_GROWTH:
            raise LimitError(
                f"{folder}: its tokenizer makes a text over {MAX_GROWTH:,} times longer: use another model"
            )
    processor = json.loads(backend.post_processor.__getstate__()) if backend.post_processor else {}
    if max((len(processor.get(name) or ()) for name in ("single", "pair")), default=0) > MAX_GROWTH:
        raise LimitError(
            f"{folder}: its tokenizer adds over {MAX_GROWTH:,} tokens to each text: use another model"
        )


def _count_growth(part: dict[str, Any]) -> float:
    """At most how many times longer the steps of a normalizer or a decoder make a text."""
    growth, written = 1.0, ""
    for step in part.get("normalizers") or part.get("decoders") or [part]:
        if step.get("type") == "Sequence":
            growth *= _count_growth(step)
            continue
        pattern, content = step.get("pattern") or {}, str(step.get("content") or step.get("prepend") or "")
        replaced = str(pattern.get("String") or "")
        own = max(1.0, len(content) / max(1, len(replaced)))
        # What earlier steps have written may be replaced again.
        is_again = not replaced or any(character in written for character in replaced)
        growth = growth * own if is_again else max(growth, own)
        written += content
    return growth
