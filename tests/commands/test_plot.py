"""hpctrain plot."""

import pytest

from hpctrain.commands import plot
from hpctrain.distributed.world import ALONE
from hpctrain.errors import HpctrainError
from tests.helpers import make_run


def test_the_picture(tmp_path, capsys):
    folder = make_run(tmp_path / "run")
    plot.main(ALONE, [str(folder)])
    assert capsys.readouterr().out == f"{folder}/curves.png\n"
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    folder = make_run(tmp_path / "run")
    (folder / "curves.png").symlink_to("/proc/self/no-such-file")
    with pytest.raises(HpctrainError, match=r"run/curves.png: cannot be written \("):
        plot.main(ALONE, [str(folder)])
