"""What config.json tells of a run."""

import json
import subprocess
import sys

from slurm_cluster import REPOSITORY

from hpctrain.run import config
from hpctrain.run.config import describe_changes, revision


def test_a_run_that_goes_on_in_another_world_or_image_says_so(tmp_path):
    first = {
        "world": {"size": 4},
        "image_digest": "sha256:1",
        "revision": "a",
        "versions": {"torch": "2.13.0", "numpy": "2.4"},
    }
    second = {
        "world": {"size": 2},
        "image_digest": "sha256:2",
        "revision": "a",
        "versions": {"torch": "2.12.0", "numpy": "2.4"},
    }
    for name, content in (("config.json", first), ("config.2.json", second), ("config.3.json", second)):
        (tmp_path / name).write_text(json.dumps(content))
    text = describe_changes(tmp_path / "config.2.json")
    assert text == "ranks 2 (was 4), image_digest sha256:2 (was sha256:1), torch 2.12.0 (was 2.13.0)"
    assert describe_changes(tmp_path / "config.3.json") == ""
    assert describe_changes(tmp_path / "config.json") == ""


def test_a_start_before_that_left_no_config_is_not_compared(tmp_path):
    (tmp_path / "config.2.json").write_text("{}")
    assert describe_changes(tmp_path / "config.2.json") == ""


def test_the_revision_of_a_checkout_is_not_that_of_the_image(tmp_path, monkeypatch):
    """With PYTHONPATH=~/hpctrain/src in the image, whose commit a run on changed code had recorded."""
    (tmp_path / "versions.json").write_text('{"revision": "of the image"}')
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    head = ["git", "-c", f"safe.directory={REPOSITORY}", "-C", REPOSITORY, "rev-parse", "HEAD"]
    assert revision() == subprocess.run(head, capture_output=True, text=True, check=True).stdout.strip()
    monkeypatch.setattr(config, "__file__", str(tmp_path / "lib/hpctrain/run/config.py"))
    assert revision() == "of the image"
