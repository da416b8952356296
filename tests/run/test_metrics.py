"""The lines of a run's metrics."""

import pytest

from hpctrain.run.metrics import format_seconds


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
