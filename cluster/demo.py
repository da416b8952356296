"""make demo: train from the container on a Slurm cluster of two nodes on this machine, as on a supercomputer.

It needs root, hpctrain-cpu.sif and the cluster's root file system; make builds both first.
"""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from slurm_cluster import REPOSITORY, Cluster, missing

ACCURACY = 0.97  # at least, on the 360 handwritten digits of the test set


def main() -> None:
    """Submit launch/apptainer_ddp.sh as an ordinary user, print its output as it grows, check the result."""
    image = REPOSITORY / "hpctrain-cpu.sif"
    if reason := missing() or (None if image.exists() else f"there is no {image.name}; run make sif"):
        sys.exit(f"demo: {reason}")
    # With the record of its digest, or a busy machine may still be hashing the SIF when this short job ends.
    files = [path for path in (image, Path(f"{image}.digest")) if path.exists()]
    with Cluster(nodes=2, binds={path: f"/project/{path.name}" for path in files}) as cluster:
        cluster.install("alice")
        home = cluster.state / "home/alice/hpctrain"
        print("alice@login:~/hpctrain$ sbatch launch/apptainer_ddp.sh", flush=True)
        job = cluster.submit("launch/apptainer_ddp.sh", cwd="/home/alice/hpctrain")
        ended = cluster.wait(job, timeout=600, on_line=lambda line: print(" ", line, flush=True))
        print(f"Slurm job {job}: {ended.state}, exit code {ended.exit_code}, on {' '.join(ended.nodes)}")
        if ended.state != "COMPLETED":
            sys.exit("demo: the job failed; see its output above")
        run = home / "runs/train_ddp" / str(job)
        ranks = ranks_and_hosts(run)
        accuracy = json.loads((run / "result.json").read_text())["test_accuracy"]
        kept = REPOSITORY / "runs" / f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
        shutil.copytree(run, kept)
    print(f"{len(ranks)} ranks on {len(set(ranks))} hosts; test accuracy {accuracy:.4f} on 360 digits")
    print(f"run folder: {kept.relative_to(REPOSITORY)}")
    if accuracy < ACCURACY or len(ranks) != 4 or len(set(ranks)) != 2:
        sys.exit(f"demo: expected 4 ranks on 2 hosts and an accuracy of at least {ACCURACY}")


def ranks_and_hosts(run: Path) -> list[str]:
    """The host name of every rank, from the first line of its log."""
    return [
        log.read_text().split(" on ", 1)[1].split(",", 1)[0]
        for log in sorted((run / "logs").glob("rank-*.log"))
    ]


if __name__ == "__main__":
    # as for Ctrl-C: the cluster ends, and its temporary folder goes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("demo: terminated"))
    try:
        main()
    except (RuntimeError, TimeoutError, subprocess.CalledProcessError) as error:
        sys.exit(f"demo: {error}")
