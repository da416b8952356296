"""The time from sbatch to the first training step, part by part, with apptainer and on the bare node.

    make benchmark

On the test cluster, an ordinary user submits the shipped scripts for 2 nodes with 2 ranks each. Each part
starts where the one before it ends, at the last rank, because all ranks wait for that one.
"""

import argparse
import json
import re
import sys
import time
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cluster"))
import records
from slurm_cluster import Cluster, bare_binds

from tests.helpers import SIF

HOME = "/home/alice/hpctrain"
SCRIPT = "benchmarks/first_step.py"
WAYS = {
    "apptainer": (["launch/apptainer_ddp.sh", SCRIPT], {}),
    "apptainer, SIF broadcast": (["launch/apptainer_ddp.sh", "--broadcast", SCRIPT], {}),
    "bare": (["launch/modules_ddp.sh", SCRIPT], {"HPCTRAIN_PYTHON_ENV": "/opt/hpctrain"}),
}


def launch(cluster: Cluster, way: str, name: str) -> dict[str, float]:
    """Run one job; return the seconds of each part, in order."""
    command, env = WAYS[way]
    submitted = time.time()
    job = cluster.submit(*command, "--out", f"runs/{name}", cwd=HOME, env=env)
    ended = cluster.wait(job)
    output = cluster.host_path(f"{HOME}/slurm-{job}.out").read_text()
    if ended.state != "COMPLETED":
        sys.exit(f"benchmark: {way}: job {job} is {ended.state}:\n{output}")
    began, took = re.search(r"began (\S+), ready (\d+) ms later", output).groups()
    script = datetime.fromisoformat(began).timestamp()
    ranks = [json.loads(text) for text in re.findall(r"marks (\{.*\})", output)]
    ends = {"Slurm: submit, schedule, start": script, "launch script": script + int(took) / 1000}
    ends |= {part: max(rank[part] for rank in ranks) for part in ranks[0]}
    parts, last = {}, submitted
    for part, end in ends.items():
        parts[part] = end - last
        last = end
    return parts | {"all": last - submitted}


def main() -> None:
    """Alternate the ways, so that other load on the machine affects all; print the medians."""
    parser = argparse.ArgumentParser(
        description="Measure the time from sbatch to the first training step, part by part."
    )
    records.add_options(parser, turns=7)
    args = parser.parse_args()
    seen: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with Cluster(nodes=2, binds={SIF: f"/project/{SIF.name}", **bare_binds(SIF)}) as cluster:
        cluster.install("alice")
        for turn in range(args.turns + 1):  # turn 0 warms the page cache and does not count
            for number, way in enumerate(sorted(WAYS, reverse=turn % 2 == 1)):
                parts = launch(cluster, way, f"{turn}-{number}")
                print(f"turn {turn}  {way:26}{parts['all']:6.2f} s", flush=True)
                if turn:
                    seen[way].append(parts)
    rows = {
        part: {way: [parts[part] for parts in found] for way, found in seen.items()}
        for part in seen["bare"][0]
    }
    about = "seconds from sbatch to the first training step, 2 nodes x 2 ranks"
    records.report("launch", "part", rows, dict.fromkeys(WAYS, 2), about, args)


if __name__ == "__main__":
    main()
