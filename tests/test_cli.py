"""The table of commands, where packages are missing."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("command", "package"),
    [
        ("train_lightning", "lightning_utilities"),
        ("nlp.classify", "transformers"),
        ("predict", "transformers"),
        ("serve", "transformers"),
    ],
)
def test_a_missing_package_of_the_extra_is_one_line(tmp_path, command, package):
    """After `pip install -e .` these ended in tracebacks of 20 lines."""
    hidden = "lightning", "lightning_utilities", "pytorch_lightning", "transformers"
    words = ["hpctrain", command, *(["a", "b"] if "." not in command and "_" not in command else [])]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({hidden})); sys.argv = {words}; "
        "from hpctrain.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == (
        f"hpctrain: error: this needs the package {package}, which is not installed: "
        "install the extra `image`, with pip install -e '.[image]' in the folder of hpctrain\n"
    )
