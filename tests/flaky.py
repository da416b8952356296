"""A test on the cluster that fails is tried once more; the end of a run lists those that then passed.

The list of each run is kept in build/flaky.jsonl, so that a test that is flaky again is named.
"""

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

RUNS = 10  # that are kept
FAILED = pytest.StashKey[bool]()


def on_cluster(item: pytest.Item) -> bool:
    return not {"cluster", "site", "in_background"}.isdisjoint(getattr(item, "fixturenames", ()))


def mark(items: list[pytest.Item]) -> None:
    """Let pytest-rerunfailures try the tests on the cluster again, and no others."""
    for item in items:
        if on_cluster(item):
            item.add_marker(pytest.mark.flaky(reruns=1))


def reason(report: pytest.TestReport) -> str:
    """The line of the test that failed, which names what it waited for, and the first line of the error."""
    lines = report.longreprtext.splitlines()
    line = next((line[1:].strip() for line in lines if line.startswith(">")), "")
    error = next((line[1:].strip() for line in lines if line.startswith("E ")), lines[-1] if lines else "")
    return f"{line}: {error}" if line else error


class SecondTries:
    """Gives the second try of a test a cluster of its own, where no job of the first one runs."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report = yield
        if report.failed:
            item.stash[FAILED] = True
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        if item.stash.get(FAILED, False) and item.get_closest_marker("flaky"):
            item.session._setupstate.teardown_exact(None)  # as pytest does after the last test
            item.stash[FAILED] = False


class Summary:
    """What needed a second try in this run, and in the last runs."""

    def __init__(self, record: Path) -> None:
        self.record = record
        self.tests: set[str] = set()  # on the cluster
        self.reasons: dict[str, str] = {}
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome == "rerun":
            self.reasons.setdefault(report.nodeid, reason(report))
        elif report.failed:
            self.failed.add(report.nodeid)
        if report.when == "setup" and hasattr(report, "rerun"):
            self.tests.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.tests:
            return
        flaky = {test: why for test, why in self.reasons.items() if test not in self.failed}
        runs = (
            [json.loads(line) for line in self.record.read_text().splitlines()]
            if self.record.exists()
            else []
        )
        runs = [
            *runs,
            {"time": time.strftime("%FT%TZ", time.gmtime()), "tests": len(self.tests), "flaky": [*flaky]},
        ]
        runs = runs[-RUNS:]
        self.record.parent.mkdir(exist_ok=True)
        self.record.write_text("".join(json.dumps(run) + "\n" for run in runs))
        say = terminalreporter.write_line
        terminalreporter.section(
            f"flaky: {len(flaky)} of {len(self.tests)} tests on the cluster passed the second time"
        )
        for test, why in flaky.items():
            say(f"{test}: {why}")
        for test, times in Counter(test for run in runs for test in run["flaky"]).items():
            if times > 1:
                say(f"{test} was flaky in {times} of the last {len(runs)} runs: find out why")


def register(config: pytest.Config, record: Path) -> None:
    config.pluginmanager.register(SecondTries())
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Summary(record))
