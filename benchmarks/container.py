"""The cost of the container: the time of a training step and of the start-up, inside and outside, in one run.

    make benchmark

On one node of the test cluster, an ordinary user trains on digits with one process and one thread,
alternately

    container   with apptainer exec
    unpacked    in the unpacked image, by chroot: the same files and the same C library, no container
    bare        with the image's Python environment on the node, which has a C library of its own

The first two differ by nothing but the container. All have the allocator's settings of the launch scripts.
The trainer measures a step (data to update, the median of the log lines of a run). Start-up is the rest: the
time from the command to the end of the process, less the time from opening the run folder to the result.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cluster"))
import records
from slurm_cluster import Cluster, bare_binds

from tests.helpers import BARE_PYTHON, MEMORY_AND_THREADS, SIF

BATCH = 32
STEP, START = "ms a step", "seconds to start and end"
UNPACKED = "/opt/unpacked"
CHROOT = f"""for folder in proc dev home tmp; do mount --rbind /$folder {UNPACKED}/$folder; done
exec chroot --userspec=1000:1000 {UNPACKED} env HOME=/home/alice sh -c 'cd && exec "$@"' sh "$@"
"""


def train(cluster: Cluster, user: str, command: list[str], name: str) -> tuple[float, float]:
    """Train once; return the median of a step in milliseconds, and the start-up in seconds."""
    start = time.monotonic()
    options = ["--epochs", "6", "--batch-size", str(BATCH), "--out", f"runs/{name}"]
    cluster.exec("n1", *command, "-m", "hpctrain", "train_ddp", *options, user=user, env=MEMORY_AND_THREADS)
    wall = time.monotonic() - start
    folder = cluster.state / "home/alice/runs" / name
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # Without the first epoch, in which torch selects its kernels.
    steps = [
        1000 * BATCH / line["examples_per_s"]
        for line in lines
        if "examples_per_s" in line and line["epoch"] > 1
    ]
    return statistics.median(steps), wall - json.loads((folder / "result.json").read_text())["seconds"]


def main() -> None:
    """Alternate the ways, as other load on the machine then affects all; print medians and ratios."""
    parser = argparse.ArgumentParser(
        description="Measure a training step and the start-up, in the container and outside."
    )
    records.add_options(parser, turns=7)
    args = parser.parse_args()
    ways = {
        "container": ("alice", ["apptainer", "exec", f"/project/{SIF.name}", "python"]),
        "unpacked": ("root", ["unshare", "--mount", "sh", "-c", CHROOT, "sh", BARE_PYTHON]),
        "bare": ("alice", [BARE_PYTHON]),
    }
    steps: dict[str, list[float]] = {way: [] for way in ways}
    starts: dict[str, list[float]] = {way: [] for way in ways}
    with Cluster(nodes=1, binds={SIF: f"/project/{SIF.name}", **bare_binds(SIF)}) as cluster:
        cluster.exec("n1", "apptainer", "build", "--sandbox", UNPACKED, f"/project/{SIF.name}")
        for turn in range(args.turns + 1):
            # The order changes from turn to turn. Turn 0 warms the page cache and does not count.
            for way in sorted(ways, reverse=turn % 2 == 1):
                step, start = train(cluster, *ways[way], f"{way}-{turn}")
                if turn:
                    steps[way].append(step)
                    starts[way].append(start)
                    print(f"turn {turn}  {way:9}  step {step:6.2f} ms  start-up {start:5.2f} s", flush=True)
    rows = {way: {STEP: steps[way], START: starts[way]} for way in ways}
    about = "train_ddp on digits, one process and one thread, batches of 32"
    records.report("container", "where", rows, {STEP: 1, START: 2}, about, args)


if __name__ == "__main__":
    main()
