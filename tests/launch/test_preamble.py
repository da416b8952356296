"""The lines with which each launch script finds its functions: one text, in every script."""

import re

from slurm_cluster import REPOSITORY

PREAMBLE = re.compile(r"\n# Slurm and PBS run a copy of this script\. .*?\nsource \"\$_main\"\n", re.S)


def test_every_script_has_the_same_preamble():
    """After its comment, its #SBATCH lines and `set`, and before all else. scaling.sh runs no functions."""
    scripts = [
        path for path in (REPOSITORY / "launch").glob("*.sh") if path.name not in ("site.sh", "scaling.sh")
    ]
    assert len(scripts) == 11
    texts = {path.name: path.read_text() for path in scripts}
    (preamble,) = {PREAMBLE.search(text)[0] for text in texts.values()}
    for name, text in texts.items():
        head = text.partition(preamble)[0].splitlines()
        assert head.pop() == "set -euo pipefail", name
        assert all(line.startswith("#") for line in head), name


def test_slurm_takes_no_option_from_the_lines_for_pbs():
    """sbatch reads them, too: with `ncpus=2` it refused a job of one task on each node."""
    for script in (REPOSITORY / "launch").glob("*.sh"):
        text = script.read_text()
        assert not ("\n#SBATCH" in text and "\n#PBS" in text) or "\n#SBATCH --ignore-pbs\n" in text, script
