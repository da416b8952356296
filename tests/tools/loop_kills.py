"""SIGKILL at any moment of a training: does it end with the weights of one to which nothing happened?

    .venv/bin/python tests/tools/loop_kills.py                   five kills of each trainer and task
    .venv/bin/python tests/tools/loop_kills.py --only nlp --kills 20 --seed 2

Each case trains once without a fault. Then it trains again, and a rank is killed at a line of Python that is
drawn from all that the loop and the writer of its checkpoints execute, at one of the times when they do; the
same command goes on, until the last kill. Prints a row per case; exits with 1 if weights or metrics differ.
train_horovod, and launchers, are in faults.py.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from subprocess import CompletedProcess
from types import FrameType
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "cluster"))

import torch

import hpctrain
from hpctrain.checkpoints import checkpoint
from tests.helpers import MEMORY_AND_THREADS, write_digits
from tests.nlp.helpers import NO_DROPOUT, SHAPE
from tests.tools import warm_start

# Where a rank may be killed, from the first epoch on.
FILES = {
    str(Path(hpctrain.__file__).parent / name)
    for name in (
        "training/run.py", "training/tracked.py", "lightning.py", "run/record.py",
        "run/metrics.py", "checkpoints/saver.py", "checkpoints/checkpoint.py", "checkpoints/parts.py",
        "files/atomic.py",
    )
}  # fmt: skip


class Case(NamedTuple):
    """The arguments of hpctrain, and the numbers of ranks that take turns."""

    arguments: list[str]
    ranks: tuple[int, ...] = (2,)


DIGITS = ["--data", "digits", "--batch-size", "8", "--epochs", "2"]
TEXTS = ["--from-scratch", "tiny", "--max-length", "32", "--limit", "40", "--batch-size", "8"]
TEXTS += ["--epochs", "2", "--accumulate", "2", "--eval-every", "2"]
FP16, BF16, SHARDED = ["--precision", "fp16"], ["--precision", "bf16"], ["--strategy", "fsdp"]
OTHER_RANKS = (2, 4, 1)
CASES = {
    "train_ddp": Case(["train_ddp", *DIGITS]),
    "train_ddp, fp16": Case(["train_ddp", *DIGITS, *FP16]),
    "train_fsdp, fp16": Case(["train_fsdp", *DIGITS, *FP16]),
    "train_fsdp on 2, 4 and 1 ranks": Case(["train_fsdp", *DIGITS], OTHER_RANKS),
    "train_lightning": Case(["train_lightning", *DIGITS]),
    "nlp.classify, fp16": Case(["nlp.classify", *TEXTS, *FP16]),
    "nlp.classify, FSDP2 on 2, 4 and 1 ranks": Case(
        ["nlp.classify", *TEXTS, *SHARDED, "--from-scratch", "config.json"], OTHER_RANKS
    ),
    "nlp.pair, bf16": Case(["nlp.pair", *TEXTS, *BF16]),
    "nlp.ner": Case(["nlp.ner", *TEXTS]),
    "nlp.qa, FSDP2, fp16": Case(["nlp.qa", *TEXTS, *SHARDED, *FP16]),
    "nlp.generate, bf16": Case(["nlp.generate", *TEXTS, *BF16]),
    "nlp.instruct, fp16": Case(["nlp.instruct", *TEXTS, *FP16]),
}


def count_lines() -> None:
    """In a rank: count how often each line of FILES is executed in training, for the file `lines-RANK`.

    Rank KILL_RANK kills itself at KILL_AT, a line and one of these times. The file `killed` then says so.
    """
    rank, place = os.environ["RANK"], os.environ["KILL_AT"]
    line, _, times = place.rpartition(" ") if rank == os.environ["KILL_RANK"] else ("", "", "0")
    counts: Counter[str] = Counter()
    is_training = False

    def in_line(frame: FrameType, event: str, _: Any) -> Any:
        here = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        counts[here] += event == "line"
        if here == line and counts[here] == int(times):
            Path("killed").write_text(line)
            os.kill(os.getpid(), signal.SIGKILL)
        return in_line

    def in_call(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal is_training
        if frame.f_code.co_filename not in FILES:
            return None
        is_training |= frame.f_code.co_name == "start_epoch"
        if frame.f_code.co_name == "finish":
            Path(f"lines-{rank}").write_text(json.dumps(counts))
        return in_line if is_training else None

    threading.settrace(in_call)
    sys.settrace(in_call)


def start(
    case: Case, folder: Path, ranks: int, kill_at: str = "", kill_rank: int = 0
) -> CompletedProcess[str]:
    """Start a case in folder/run, or go on with it. For `kill_at`, see count_lines()."""
    words = [*case.arguments, "--checkpoint-every", "1", "--keep-checkpoints", "2", "--watchdog", "10"]
    words += ["--out", "run", "--resume", "auto"]
    env = os.environ | MEMORY_AND_THREADS | {"HPCTRAIN_CACHE": str(folder.parent / "cache")}
    env |= {"RANK": "0", "KILL_AT": kill_at, "KILL_RANK": str(kill_rank)}
    return warm_start.run(warm_start.torchrun_ranks(ranks, words, env, count_lines), folder)


def compare(one: Path, other: Path, *, exactly: bool) -> str:
    """What differs between two runs: in weights and metrics, or, if not `exactly`, in weights to rounding."""
    if exactly:
        digests = [json.loads((run / "result.json").read_text())["weights_sha256"] for run in (one, other)]
        if digests[0] != digests[1]:
            return "the weights differ"
        return "" if read_metrics(one) == read_metrics(other) else "the metrics differ"
    cpu = torch.device("cpu")
    weights = [checkpoint.load(checkpoint.find_newest(run), cpu)["model"] for run in (one, other)]
    for name, weight in weights[0].items():
        if not torch.allclose(weight, weights[1][name], rtol=1e-3, atol=1e-4):
            return f"the weights differ in {name}"
    return ""


def read_metrics(run: Path) -> list[dict[str, float]]:
    """The lines of metrics without what the time decides on."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    vary = {"seconds", "examples_per_s", "peak_memory_mb"}
    return [{name: line[name] for name in line.keys() - vary} for line in lines]


def prove(case: Case, folder: Path, kills: int, chance: random.Random) -> tuple[list[str], str]:
    """Where a case was killed, and what is wrong with its end: "" if nothing is."""
    for name in ("whole", "cut"):
        (folder / name).mkdir(parents=True)
        write_digits(folder / name / "digits", train=64, test=16)
        # dropout depends on the rank
        shape = json.dumps({"model_type": "bert"} | SHAPE | NO_DROPOUT)
        (folder / name / "config.json").write_text(shape)
    done = start(case, folder / "whole", case.ranks[0])
    if done.returncode:
        return [], f"it fails without a fault: {done.stderr[-2000:]}"
    lines = [json.loads((folder / f"whole/lines-{rank}").read_text()) for rank in range(case.ranks[0])]

    places: list[str] = []
    cut, killed = folder / "cut", folder / "cut/killed"
    while not (cut / "run/result.json").exists():
        ranks = case.ranks[len(places) % len(case.ranks)]
        rank = chance.randrange(min(ranks, len(lines)))
        place = chance.choice(sorted(lines[rank]))
        kill_at = f"{place} {chance.randint(1, 1 + lines[rank][place] // kills)}"
        done = start(case, cut, ranks, kill_at if len(places) < kills else "", rank)
        if killed.exists():
            places.append(killed.read_text())
            killed.unlink()
        elif done.returncode:
            return places, f"it does not go on: {done.stderr[-2000:]}"
    return places, compare(cut / "run", folder / "whole/run", exactly=len(case.ranks) == 1)


def main() -> None:
    """Prove each case, and print the rows. Raises SystemExit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="the cases whose name has this text")
    parser.add_argument("--kills", type=int, default=5, metavar="N", help="of a case (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the lines and ranks (default: %(default)s)")
    args = parser.parse_args()
    wrong = 0
    for name, case in CASES.items():
        if args.only not in name:
            continue
        with tempfile.TemporaryDirectory(prefix="hpctrain-kills.") as folder:
            places, problem = prove(case, Path(folder, "case"), args.kills, random.Random(args.seed))
        wrong += bool(problem)
        equal = "equal" if len(case.ranks) == 1 else "equal to rounding"
        print(f"| {name} | {len(places)} | {problem or equal} | {', '.join(places)} |", flush=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
