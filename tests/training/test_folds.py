"""A script with several runs and work after them, killed at any moment: equal weights, the work once."""

import itertools
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.helpers import MEMORY_AND_THREADS, REPOSITORY
from tests.lightning.test_run_folder import run_script
from tests.tools import warm_start

SCRIPTS = REPOSITORY / "tests/scripts/folds"
KILLS = 6


class KillAt:
    """In a rank: counts optimizer steps and files synced to disk, and kills itself at one of them."""

    def __init__(self, moment):
        self.moment, self.numbers = moment, itertools.count(1)

    def __call__(self):
        fsync, self.file = os.fsync, Path("moments").absolute()

        def sync(descriptor):
            self.count()
            fsync(descriptor)

        os.fsync = sync
        register_optimizer_step_post_hook(self.count)

    def count(self, *_):
        number = next(self.numbers)  # a thread writes the checkpoints
        self.file.write_text(str(number))
        if number == self.moment:
            os.kill(os.getpid(), signal.SIGKILL)


class Prepared:
    """In a rank: run a script, killed at this moment (0: never). A class, as forkserver pickles it."""

    def __init__(self, script, moment):
        self.script, self.moment = script, moment

    def __call__(self):
        sys.argv = [str(self.script)]
        run_script(self.script, KillAt(self.moment))


def start(script, folder, moment=0):
    """Start the script in this folder, as the next start of its job."""
    restart = len([*folder.glob("start-*")]) if folder.exists() else 0
    (folder / f"start-{restart}").mkdir(parents=True)
    job = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restart), "HPCTRAIN_JOB_SECRET": str(restart)}
    if script.stem == "as_it_is":
        job |= {"HPCTRAIN_CONTROL": str(folder / f"start-{restart}"), "HPCTRAIN_WORLD_SIZE": "1"}
    rank = warm_start.Rank([], os.environ | MEMORY_AND_THREADS | job, setup=Prepared(script, moment))
    return warm_start.run([rank], folder)


def results(folder):
    """The weights, epochs and scores of each fold, and what the work after them has written."""
    folds = [json.loads(path.read_text()) for path in sorted(folder.glob("runs/**/result.json"))]
    vary = ("seconds", "speed", "train_loss", "eval_runtime", "per_second")
    folds = [{name: fold[name] for name in fold if not name.endswith(vary)} for fold in folds]
    return folds, (folder / "after.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["with_run", "with_lightning", "with_transformers", "as_it_is"])
def test_a_script_with_three_runs_is_killed_at_any_moment(tmp_path, name):
    script = SCRIPTS / f"{name}.py"
    done = start(script, tmp_path / "whole")
    assert done.returncode == 0, done.stdout + done.stderr
    whole = results(tmp_path / "whole")
    best = [fold.get("best") for fold in whole[0]]
    assert best[1] or name in ("with_lightning", "as_it_is")  # whose scripts have no monitor
    moments = int((tmp_path / "whole/moments").read_text())
    cut, killed = tmp_path / "cut", 0
    for kill in range(KILLS):  # later and later: each start repeats a part of the one before
        done = start(script, cut, moments * (kill + 1) // (KILLS + 1) // (1 + kill % 2))
        assert done.returncode in (0, -signal.SIGKILL), done.stdout + done.stderr
        killed += done.returncode != 0
        if done.returncode == 0:
            break
    if done.returncode:
        done = start(script, cut)
    assert done.returncode == 0 and killed >= 3, done.stdout + done.stderr
    assert "nothing to do" in done.stdout
    assert results(cut) == whole
    assert len(whole[1].splitlines()) == 1

    once_more = start(script, cut)  # all three have nothing to do, and the work after them is the same
    assert once_more.returncode == 0 and once_more.stdout.count("nothing to do") == 3, once_more.stderr
    assert results(cut) == (whole[0], 2 * whole[1])
