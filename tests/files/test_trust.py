"""Caches, folders and links that another user may have prepared; tests/test_security.py has more of them."""

import os
from types import SimpleNamespace

import pytest

from hpctrain.errors import HpctrainError
from hpctrain.files.trust import is_own, refuse_changeable, refuse_links_out


def test_what_others_can_change_is_no_cache(tmp_path, monkeypatch):
    own, file = tmp_path / "own", tmp_path / "own/file"
    own.mkdir(mode=0o700)
    file.touch(mode=0o600)
    refuse_changeable(own, file, advice="move it")
    for path, mode in ((own, 0o770), (file, 0o602)):
        path.chmod(mode)
        with pytest.raises(HpctrainError, match=f"{path}.*move it"):
            refuse_changeable(own, file, advice="move it")
        path.chmod(0o700)
    link = tmp_path / "link"
    link.symlink_to(own)
    assert is_own(own) and not is_own(link) and not is_own(tmp_path / "missing")
    with pytest.raises(HpctrainError, match=r"link.*move it"):
        refuse_changeable(link, advice="move it")
    monkeypatch.setattr(
        "hpctrain.files.trust.os", SimpleNamespace(geteuid=lambda: os.geteuid() + 7, path=os.path)
    )
    file.chmod(0o600)
    if os.geteuid() != 0:  # root may make caches for others
        with pytest.raises(HpctrainError, match=r"own.*move it"):
            refuse_changeable(own, advice="move it")


def test_links_that_leave_a_folder_are_refused_and_those_of_the_hub_are_not(tmp_path):
    snapshot = tmp_path / "models--a--b/snapshots/0123"
    blob = tmp_path / "models--a--b/blobs/abc"
    for path in (snapshot, blob.parent):
        path.mkdir(parents=True)
    blob.touch()
    (snapshot / "config.json").symlink_to("../../blobs/abc")
    refuse_links_out(snapshot)
    (tmp_path / "link").symlink_to(snapshot)
    refuse_links_out(tmp_path / "link")
    (tmp_path / "secret").touch()
    (snapshot / "deep").mkdir()
    (tmp_path / "models--a--b/secret").touch()
    for target in (tmp_path / "secret", "../../../../secret", "../../../secret"):
        link = snapshot / "deep/chat_template.jinja"
        link.symlink_to(target)
        with pytest.raises(HpctrainError, match=r"chat_template\.jinja.*secret"):
            refuse_links_out(snapshot)
        link.unlink()
