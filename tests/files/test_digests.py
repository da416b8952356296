"""SHA256SUMS finds a changed file, and is read by sha256sum."""

import pytest
import torch

from hpctrain.errors import HpctrainError
from hpctrain.files.digests import check_digests, weights_sha256, write_digests
from tests.helpers import run_command


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "part").mkdir()
    for name in ("weights", "part/more", "README.md"):
        (tmp_path / name).write_bytes(name.encode())
    write_digests(tmp_path)
    return tmp_path


def test_sha256sum_reads_the_file(folder):
    done = run_command(["sha256sum", "--check", "SHA256SUMS"], cwd=folder)
    assert (done.returncode, done.stdout) == (0, "part/more: OK\nweights: OK\n")


def test_a_folder_as_it_was_written_passes_and_so_does_one_without_digests(folder):
    (folder / "README.md").write_text("a model card may be edited")
    check_digests(folder)
    (folder / "SHA256SUMS").unlink()
    (folder / "weights").write_bytes(b"changed")
    check_digests(folder)


@pytest.mark.parametrize("change", ["flip", "remove", "leave the folder", "garbage"])
def test_a_changed_file_is_named(folder, change):
    if change == "flip":
        (folder / "weights").write_bytes(b"weighty")
    elif change == "remove":
        (folder / "weights").unlink()
    else:
        name = "../weights" if change == "leave the folder" else "weights"
        (folder / "SHA256SUMS").write_text("0" * 64 + f"  {name}\n")
    with pytest.raises(HpctrainError, match=r"weights.*SHA256SUMS"):
        check_digests(folder)


def test_digests_that_cannot_be_read_are_one_line(folder):
    (folder / "SHA256SUMS").unlink()
    (folder / "SHA256SUMS").mkdir()
    with pytest.raises(HpctrainError, match=rf"{folder}.*Is a directory"):
        check_digests(folder)


def test_the_digest_of_weights_depends_on_names_and_bits():
    model, same, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    same.load_state_dict(model.state_dict())
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        other.bias.add_(1e-3)
    digests = [weights_sha256(each) for each in (model, same, other, torch.nn.Sequential(model))]
    assert digests[0] == digests[1] and len(set(digests)) == 3
