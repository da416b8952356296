"""make demo: a real Slurm cluster of two nodes on this machine trains from the container, as on a supercomputer.

It needs hpctrain-cpu.sif and the cluster's root file system, which make has made before; and root.
"""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from slurm_cluster import REPOSITORY, Cluster, missing

ACCURACY = 0.97  # of 360 handwritten digits that it has not seen


def main() -> None:
    """Submit launch/apptainer_ddp.sh as an ordinary user, show its progress, and say what came out."""
    image = REPOSITORY / "hpctrain-cpu.sif"
    if reason := missing() or (None if image.exists() else f"{image.name} is not built: make sif"):
        sys.exit(f"demo: {reason}")
    with Cluster(nodes=2, binds={image: f"/project/{image.name}"}) as cluster:
        cluster.install("alice")
        home = cluster.state / "home/alice/hpctrain"
        print("alice@login:~/hpctrain$ sbatch launch/apptainer_ddp.sh", flush=True)
        job = cluster.submit("launch/apptainer_ddp.sh", cwd="/home/alice/hpctrain")
        ended = cluster.wait(job, timeout=600, on_line=lambda line: print(" ", line, flush=True))
        print(f"Slurm job {job}: {ended.state}, exit code {ended.exit_code}, on {' '.join(ended.nodes)}")
        if ended.state != "COMPLETED":
            sys.exit("demo: the job failed; its output is above")
        run = home / "runs/train_ddp" / str(job)
        ranks = ranks_and_hosts(run)
        accuracy = json.loads((run / "result.json").read_text())["test_accuracy"]
        kept = REPOSITORY / "runs" / f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
        shutil.copytree(run, kept)
    print(f"{len(ranks)} ranks on {len(set(ranks))} hosts; test accuracy {accuracy:.4f} on 360 digits")
    print(f"run folder: {kept.relative_to(REPOSITORY)}   picture: {kept.relative_to(REPOSITORY)}/curves.png")
    if accuracy < ACCURACY or len(ranks) != 4 or len(set(ranks)) != 2:
        sys.exit(f"demo: expected 4 ranks on 2 hosts and an accuracy of at least {ACCURACY}")


def ranks_and_hosts(run: Path) -> list[str]:
    """The host of every rank, from the first line of its log."""
    return [log.read_text().split(" on ", 1)[1].split(",", 1)[0] for log in sorted((run / "logs").glob("rank-*.log"))]


if __name__ == "__main__":
    try:
        main()
    except (RuntimeError, TimeoutError, subprocess.CalledProcessError) as error:
        sys.exit(f"demo: {error}")
