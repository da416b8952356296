"""How often a checkpoint is saved."""

import re
from typing import NamedTuple

_UNITS = {"s": 1, "min": 60, "h": 3600}


class Interval(NamedTuple):
    """How often a checkpoint is saved: every so many steps, or seconds; the other one is 0."""

    steps: int
    seconds: float

    @classmethod
    def parse(cls, text: str) -> "Interval":
        """Parse a number of steps (500) or a time (30s, 10min, 1h). Raises ValueError."""
        match = re.fullmatch(r"(\d+)|(\d+(?:\.\d+)?)(s|min|h)", text)
        if not match or not float(match[1] or match[2]):
            raise ValueError(text)
        return cls(int(match[1]), 0) if match[1] else cls(0, float(match[2]) * _UNITS[match[3]])
