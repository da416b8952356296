"""How the end of an attempt is decided: `conclude` of launch/lib/requeue.sh, over combinations of its facts.

One process of bash gets them all, with functions in the place of Slurm and PBS.
"""

import itertools
import random

from slurm_cluster import REPOSITORY

from tests.helpers import run_command
from tests.launch.helpers import BARE

DRIVER = """
set -euo pipefail
source launch/lib/main.sh
requeue() { echo "requeue because $1, after $4 s, node $5"; }
say() { [[ $1 == @(the launcher|task 3)* ]] || echo "$1"; }
how_to_resume() { :; }
longer_wait() { echo 30; }
is_current() {
    RESTARTS=$ATTEMPT
    [[ $HOW != replaced ]] || RESTARTS=$((ATTEMPT + 1))
    [[ $HOW != @(replaced|ended) ]]
}
job_field() { [[ $HOW != preempted || $1 != PreemptTime ]] || echo @1795176000; }
find_earlier_checkpoint() { [[ -n $EARLIER ]]; }
first_failure() { [[ -z $FIRST ]] || printf 'n2 3 %s\\n\\n' "$FIRST"; }
while IFS=/ read -r folder status STOPPING HPCTRAIN_RESTARTS HPCTRAIN_REQUEUES EARLIER HOW FIRST; do
    HPCTRAIN_CONTROL=$1/$folder ATTEMPT=$HPCTRAIN_RESTARTS LAUNCHED=$SECONDS
    [[ $HOW != pbs ]] && SLURM_JOB_ID=7 || unset SLURM_JOB_ID
    if said=$(conclude "$status"); then status=0; else status=$?; fi
    echo "$status $said"
done
"""

CONTROL = ("stop", "saved", "stopped", "failed", "trains")
TASKS = ((), ("task.1",), ("lonely",), ("lonely", "failed.1"))
FACTS = list(
    itertools.product(
        [set(files) for count in range(6) for files in itertools.combinations(CONTROL, count)],
        TASKS,
        (0, 1, 2, 75, 137, 233),
        ("", "USR1"),
        # restarts, HPCTRAIN_REQUEUES, whether an earlier attempt has saved a checkpoint
        ((0, 10, ""), (1, 10, ""), (1, 1, ""), (1, 10, "x"), (1, 1, "x")),
        ("running", "preempted", "replaced", "ended", "pbs"),
        ("", "Exited with exit code 3", "Killed"),
    )
)


def expected(files, tasks, status, stopping, restarts, how, first):
    """The exit status, and words that the log ends with, if any. docs/guides/results.md has the rows."""
    saved, limit = "saved" in files, restarts[1]
    resumable = saved or restarts[2]
    again = resumable and not files & {"saved", "trains"}
    if tasks == ("lonely",):
        status = 0
    stopped = ("stopped" in files and status in (0, 75)) or ("stop" in files and status == 75)
    if stopped:
        status = 75
    elif status == 0 and tasks != ("task.1",):
        return 0, ""
    status = status or 137
    if how == "replaced":
        return status, "goes on by itself"
    if how == "ended":
        return status, "Slurm has ended the job" if resumable else ""

    failed_first = first and not stopping
    if failed_first:
        status = 3 if first.startswith("Exited") else max(status, 137)
    later = 30 if not files & {"saved", "stop"} else 0
    killed = status >= 128
    asked = "stop" in files and (killed or status == 75)
    further = saved or again or asked or status == 233 or (killed and restarts[0])
    rows = [
        (stopped and saved, "because the ranks have saved a checkpoint and stopped, after 0 s"),
        (
            ("failed" in files or status == 2) and not again,
            "a restart does not correct" if resumable else "",
        ),
        (how == "preempted", "because the job is preempted, after 0 s"),
        (not further, "before this attempt has saved"),
        (stopping and saved, "after the request to stop, after 0 s"),
        (restarts[0] < limit, f"{restarts[0] + 1} of at most {limit} (HPCTRAIN_REQUEUES), after {later} s"),
        (True, "not requeued: exit status"),
    ]
    words = next(words for applies, words in rows if applies)
    return status, words + f", node {'n2' if failed_first else ''}" * words.endswith(" s")


def test_the_first_row_that_applies_decides(tmp_path):
    some = random.Random(0).sample(FACTS, 800)
    lines = ""
    for files, tasks, *facts, restarts, how, first in some:
        folder = tmp_path / "-".join([*sorted(files), *tasks, "x"])
        folder.mkdir(exist_ok=True)
        for name in (*files, *tasks):
            (folder / name).touch()
        lines += "/".join(map(str, (folder.name, *facts, *restarts, how, first))) + "\n"
    command = ["bash", "-c", DRIVER, "driver", tmp_path]
    done = run_command(command, input=lines, cwd=REPOSITORY, env=BARE)
    assert done.stderr == ""
    for facts, line in zip(some, done.stdout.splitlines(), strict=True):
        status, words = expected(*facts)
        returned, _, said = line.partition(" ")
        assert int(returned) == status and words in said and bool(words) == bool(said), (facts, line, words)
