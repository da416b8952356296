"""Schedules of the learning rate, as factors on its peak: transformers' get_*_schedule_with_warmup().

They depend on the options and the number of the step alone. A scheduler would be restored with the rates of
the checkpoint, also where --force changes them.
"""

import math
from collections.abc import Callable


def linear(step: int, steps: int, warmup: float) -> float:
    """The factor of a step, counted from 0, of all steps: a linear rise from 0, then a linear fall to 0.

    `warmup` is the fraction of the steps in which it rises.
    """
    return _rise(step, steps, warmup, lambda left: left)


def cosine(step: int, steps: int, warmup: float) -> float:
    """The factor of a step, as in linear(), but the fall is half a period of a cosine."""
    return _rise(step, steps, warmup, lambda left: 0.5 * (1 - math.cos(math.pi * left)))


def _rise(step: int, steps: int, warmup: float, fall: Callable[[float], float]) -> float:
    rising = round(warmup * steps)
    if step < rising:
        return step / rising
    return fall(max(0.0, (steps - step) / max(1, steps - rising)))
