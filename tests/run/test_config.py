"""What config.json tells of a run."""

import json
import sys
from types import SimpleNamespace

from slurm_cluster import REPOSITORY

from hpctrain.run import config
from hpctrain.run.config import code_digest, describe_changes, revision
from tests.helpers import run_command


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
    assert revision() == run_command(head, check=True).stdout.strip()
    monkeypatch.setattr(config, "__file__", str(tmp_path / "lib/hpctrain/run/config.py"))
    assert revision() == "of the image"


def test_code_that_has_changed_since_the_last_start_is_named(tmp_path, monkeypatch):
    """A script that was edited while its job waited in the queue. Modules beside it belong to it."""
    script, module = tmp_path / "train.py", tmp_path / "net.py"
    for path in (script, module):
        path.write_text("1")
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=str(script)))
    monkeypatch.setitem(sys.modules, "net_of_a_test", SimpleNamespace(__file__=str(module)))
    digests = [code_digest()]
    for path in (script, module):
        path.write_text("2")
        digests.append(code_digest())
    assert len({*digests}) == 3 and all(digests)
    for name, digest in (("config.json", digests[0]), ("config.2.json", digests[1])):
        (tmp_path / name).write_text(json.dumps({"code": digest}))
    assert describe_changes(tmp_path / "config.2.json") == f"code {digests[1]} (was {digests[0]})"
    for main in (SimpleNamespace(), SimpleNamespace(__file__=config.__file__)):  # a notebook; hpctrain
        monkeypatch.setitem(sys.modules, "__main__", main)
        assert code_digest() is None
