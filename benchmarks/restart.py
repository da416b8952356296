"""The time from a fault to the first new step of the job that Slurm requeued, part by part.

    python benchmarks/restart.py

On the test cluster, an ordinary user submits train_ddp for 2 nodes with 2 ranks each. Its last rank kills
itself (SIGKILL) after three epochs. Each part starts where the one before it ends, at the last rank, because
all ranks wait for that one. Slurm's own part, from the request to requeue the job to the start of its script,
depends on the site, and is shown apart.

This file is the program of that job as well.
"""

import time

began = time.time()

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import re  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from contextlib import contextmanager  # noqa: E402
from datetime import datetime  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

HOME = "/home/alice/hpctrain"
SLURM, LAST = "Slurm: end the job, requeue it, start it", "data, run folder, resume, first step"


def be_a_rank() -> None:
    """Train.

    In the first attempt the last rank kills itself; in the second one, every rank prints when each part
    ended.
    """
    marks = {"srun, container, Python": began}
    from hpctrain.distributed import entry
    from hpctrain.distributed.world import detect, restart_count
    from hpctrain.training.run import Run
    from hpctrain.vision import train

    marks["imports"] = time.time()
    process_group, step = train.process_group, Run.step
    world = detect()

    @contextmanager
    def marked_process_group(*args: Any) -> Iterator[None]:
        with process_group(*args):
            marks["rendezvous of the ranks"] = time.time()
            yield

    def marked_step(run: Run, *args: Any, **values: float) -> None:
        step(run, *args, **values)
        if restart_count() and LAST not in marks:
            marks[LAST] = time.time()
            print("marks", json.dumps(marks), flush=True)
        if (
            not restart_count()
            and world.rank == world.size - 1
            and (run.folder / "checkpoints/epoch-0003.pt").exists()
        ):
            print("killed", time.time(), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    train.process_group, Run.step = marked_process_group, marked_step
    entry.main(lambda world: train.main(world, sys.argv[1:]))


def restart(cluster: Any, name: str) -> dict[str, float]:
    """Run one job; return the seconds of each part, in order."""
    number = cluster.submit(
        "launch/apptainer_ddp.sh", "benchmarks/restart.py", "--out", f"runs/{name}", "--epochs", "4", cwd=HOME
    )
    output, asked = cluster.host_path(f"{HOME}/slurm-{number}.out"), 0.0
    while not asked:
        time.sleep(0.01)
        if output.exists() and ": requeuing the job" in output.read_text():
            asked = time.time()
    ended, text = cluster.wait(number), output.read_text()
    if ended.state != "COMPLETED":
        sys.exit(f"benchmark: job {number} is {ended.state}:\n{text}")
    script, took = re.findall(r"began (\S+), ready (\d+) ms later", text)[1]
    started = datetime.fromisoformat(script).timestamp()
    ranks = [json.loads(found) for found in re.findall(r"marks (\{.*\})", text)]
    last = float(re.search(r"killed (\S+)", text)[1])
    ends = {
        "end of the attempt: srun, launch script": asked,
        SLURM: started,
        "launch script": started + int(took) / 1000,
    }
    ends |= {part: max(rank[part] for rank in ranks) for part in ranks[0]}
    parts = {}
    for part, end in ends.items():
        parts[part] = end - last
        last = end
    return parts | {"all": sum(parts.values()), "all without Slurm": sum(parts.values()) - parts[SLURM]}


def main() -> None:
    """Print each turn, and the median, least and most of each part."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cluster"))
    import records
    from slurm_cluster import REPOSITORY, Cluster

    parser = argparse.ArgumentParser(
        description="Measure the time from a fault to the first new step of the requeued job."
    )
    records.add_options(parser, turns=5)
    args = parser.parse_args()
    sif = REPOSITORY / "hpctrain-cpu.sif"
    seen = []
    with Cluster(nodes=2, binds={sif: f"/project/{sif.name}"}) as cluster:
        cluster.install("alice")
        for turn in range(args.turns):
            seen.append(restart(cluster, f"turn-{turn}"))
            print(
                f"turn {turn + 1}: {seen[-1]['all']:.2f} s, "
                f"without Slurm {seen[-1]['all without Slurm']:.2f} s",
                flush=True,
            )
    rows = {part: {"seconds": [parts[part] for parts in seen]} for part in seen[0]}
    about = "from the SIGKILL of a rank to the first new step of the requeued job, 2 nodes x 2 ranks"
    records.report("restart", "part", rows, {"seconds": 2}, about, args)


if __name__ == "__main__":
    be_a_rank() if "HPCTRAIN_JOB" in os.environ else main()
