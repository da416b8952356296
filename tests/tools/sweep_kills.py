"""A sweep as a job array on a real Slurm cluster: no killed trial may be lost or done twice.

    .venv/bin/python tests/tools/sweep_kills.py [--seed 1]

24 trials, 4 at a time. The first one is killed while it writes the study: sweep.json is there, and its
parameters are not. Five others are killed at random moments, in three ways. What Slurm does not requeue is
submitted again with the same command.
"""

import argparse
import json
import random
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "cluster"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from slurm_cluster import REPOSITORY, Cluster, bare_binds

from tests.helpers import write_digits

HOME = "/home/alice/hpctrain"
BARE = {"HPCTRAIN_RUNTIME": "none", "HPCTRAIN_PYTHON_ENV": "/opt/hpctrain", "OMP_NUM_THREADS": "1"}
TRIALS, AT_A_TIME, EPOCHS = 24, 4, 12
FILE = f"""
command: train_ddp --data few --epochs {EPOCHS} --checkpoint-every 1s
metric: test_accuracy
direction: maximize
trials: {TRIALS}
parameters:
  lr: {{low: 1e-3, high: 0.1, log: true}}
  batch-size: {{values: [16, 32]}}
"""
SUBMIT = [
    "sbatch",
    f"--array=0-{TRIALS - 1}%{AT_A_TIME}",
    "--nodes=1",
    "--ntasks-per-node=1",
    "--cpus-per-task=1",
]
SUBMIT += ["launch/apptainer_ddp.sh", "sweep", "search.yaml"]
SCANCEL = "scancel by the user"
WAYS = {"SIGKILL of the rank": "*/python3*", "SIGKILL of srun": "*/srun", SCANCEL: ""}  # the program to kill


def wait_for(path: Path, text: str, seconds: float = 600) -> None:
    """Wait until a file has this text. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while not path.exists() or text not in path.read_text():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {text!r} in {path}")
        time.sleep(0.01)


def kill(cluster: Cluster, number: int, way: str) -> None:
    """Kill processes of a trial on all nodes, or cancel its task."""
    if way == SCANCEL:
        shown = cluster.exec(
            "login", "squeue", "--noheader", "--array", "--format=%i", user="alice"
        ).stdout.split()
        cluster.exec(
            "login", "scancel", *[task for task in shown if task.endswith(f"_{number}")], user="alice"
        )
        return
    script = (
        "for p in $(pgrep -f 'hpctrain.* sweep search.yaml'); do "
        f"[[ $(readlink /proc/$p/exe) == {WAYS[way]} ]] && "
        f"grep -qzx SLURM_ARRAY_TASK_ID={number} /proc/$p/environ && kill -KILL $p; done"
    )
    for node in ("n1", "n2"):
        cluster.exec(node, "bash", "-c", script, check=False)


def run_array(cluster: Cluster) -> None:
    """Submit the array, and wait until no task is left, with those that were requeued."""
    cluster.exec("login", *SUBMIT, user="alice", cwd=HOME, env=BARE)
    while cluster.exec("login", "squeue", "--noheader", user="alice").stdout.strip():
        time.sleep(1)


def faults_of_trial(
    number: int, folder: Path, results: dict[str, int], parameters: dict[int, str | None]
) -> list[str]:
    """What is wrong with a trial at the end.

    `results` has the times of the results before the array was submitted again, by the names of trials;
    `parameters` those of each trial that was killed.
    """
    if not (folder / "result.json").exists():
        return [f"{folder.name} has no result"]
    wrong = []
    if results.get(folder.name, 0) not in (0, (folder / "result.json").stat().st_mtime_ns):
        wrong.append(f"{folder.name} had its result, and was done again")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    epochs = [line["epoch"] for line in lines if "test_accuracy" in line]
    if epochs != [*range(1, EPOCHS + 1)]:
        wrong.append(f"{folder.name} has the epochs {epochs}")
    if parameters.get(number) not in (None, (folder / "parameters.json").read_text()):
        wrong.append(f"{folder.name} went on with other parameters")
    starts = len([*folder.glob("config*.json")])
    if starts > 1:
        print(f"trial {number} started {starts} times")
    if starts > 1 and number not in parameters:
        wrong.append(f"{folder.name} was not killed, and started {starts} times")
    return wrong


def main() -> None:
    """Run the sweep, print what happened, and check what is left. Raises SystemExit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="of the victims, moments and ways (default: %(default)s)"
    )
    chosen = random.Random(parser.parse_args().seed)
    sif = REPOSITORY / "hpctrain-cpu.sif"
    sources = {REPOSITORY / "src/hpctrain": "/opt/hpctrain/lib/python3.11/site-packages/hpctrain"}
    with Cluster(nodes=2, binds={sif: f"/project/{sif.name}", **bare_binds(sif), **sources}) as cluster:
        cluster.install("alice")
        out = cluster.host_path(f"{HOME}/runs/search")
        write_digits(cluster.host_path(f"{HOME}/few"), train=160)
        cluster.host_path(f"{HOME}/search.yaml").write_text(FILE)
        parameters: dict[int, str | None] = {}

        def hurt(number: int, moment: str, way: str) -> None:
            folder = out / f"trial-{number:03d}"
            files = {"study": (out / "sweep.json", "metric"), "parameters": (folder / "parameters.json", "}")}
            wait_for(*files.get(moment, (folder / "metrics.jsonl", f'"epoch": {moment}')))
            kill(cluster, number, way)
            path = folder / "parameters.json"
            parameters[number] = path.read_text() if path.exists() else None
            has = "with a result" if (folder / "result.json").exists() else "without a result"
            print(
                f"trial {number}: {way}, at {moment if moment in files else f'epoch {moment}'}, {has}",
                flush=True,
            )

        # trials 0 to 3 start together, and any of them may be the writer
        victims = [(0, "study", "SIGKILL of the rank")]
        for number in chosen.sample(range(1, TRIALS), 5):
            victims.append((number, chosen.choice(["parameters", *"234"]), chosen.choice([*WAYS])))
        threads = [threading.Thread(target=hurt, args=victim, daemon=True) for victim in victims]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        run_array(cluster)
        for thread in threads:
            thread.join()
        results = {path.parent.name: path.stat().st_mtime_ns for path in out.glob("trial-*/result.json")}
        print(
            f"{len(results)} of {TRIALS} results after {time.monotonic() - began:.0f} s; "
            "submitting the same array again"
        )
        run_array(cluster)
        print(f"{time.monotonic() - began:.0f} s in all")

        wrong = []
        folders = sorted(out.glob("trial-*"))
        if len(folders) != TRIALS:
            wrong.append(f"there are {len(folders)} trials")
        for number, folder in enumerate(folders):
            wrong += faults_of_trial(number, folder, results, parameters)
        rates = {json.loads((folder / "parameters.json").read_text())["lr"] for folder in folders}
        if len(rates) != TRIALS:
            wrong.append(f"there are {len(rates)} different learning rates")
        logs = sorted(cluster.host_path(HOME).glob("slurm-*.out"), key=lambda path: path.stat().st_mtime)
        lines = [line for log in logs for line in log.read_text().splitlines()]
        print(*[line.removeprefix("0: ") for line in lines if "trials have a result" in line][-1:])
    if wrong:
        raise SystemExit("not as promised: " + "; ".join(wrong))
    print(f"{TRIALS} results, none lost or doubled")


if __name__ == "__main__":
    main()
