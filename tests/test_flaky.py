"""Tests on the cluster have a second try, with a new cluster; what needed it is printed and recorded."""

import json

import pytest

pytest_plugins = ["pytester"]

# A project whose cluster is a counter, and whose tests fail in one of the ways below.
CONFTEST = """
import pathlib
import pytest
from tests import flaky

def pytest_configure(config):
    flaky.register(config, pathlib.Path("build/flaky.jsonl"))

def pytest_collection_modifyitems(items):
    flaky.mark(items)

started = 0

@pytest.fixture(scope="session")
def cluster():
    global started
    started += 1
    return started
"""
FILE = """
def test_good(cluster):
    pass

def test_once(cluster):
    ready = cluster > 1
    assert ready, "not within 300 s"

def test_new_cluster(cluster):
    assert cluster == 2

def test_bad(cluster):
    assert False

tries = 0

def test_without_a_cluster():
    global tries
    tries += 1
    assert tries > 1
"""


@pytest.fixture(params=[[], ["-n1"]], ids=["one process", "a worker"])
def result(pytester, request):
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(FILE)
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", *request.param)


def test_only_a_test_on_the_cluster_is_tried_again(result):
    assert result.parseoutcomes() == {"passed": 3, "failed": 2, "rerun": 2}


def test_the_end_of_a_run_names_flaky_tests_and_what_they_waited_for(result):
    result.stdout.fnmatch_lines(
        [
            "*flaky: 1 of 4 tests on the cluster passed the second time*",
            '*.py::test_once: assert ready, "not within 300 s": AssertionError: not within 300 s',
        ]
    )
    assert not [line for line in result.outlines if "find out why" in line]


def test_a_test_that_is_flaky_again_within_ten_runs_is_named(pytester, result):
    record = pytester.path / "build/flaky.jsonl"
    (last,) = record.read_text().splitlines()
    assert len(json.loads(last)["flaky"]) == 1
    record.write_text(f"{last}\n" * 12)
    again = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    again.stdout.fnmatch_lines(["*.py::test_once was flaky in 10 of the last 10 runs: find out why"])
    assert len(record.read_text().splitlines()) == 10
