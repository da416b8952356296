"""The test accuracy that short trainings reach, each turn with its own seed.

python benchmarks/accuracy.py --mnist mnist --nsmc nsmc
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import records


def main() -> None:
    """Train on each data set that is given; report the accuracy."""
    parser = argparse.ArgumentParser(description="Measure the test accuracy of short trainings.")
    parser.add_argument("--mnist", type=Path, help="folder of MNIST")
    parser.add_argument("--nsmc", type=Path, help="folder of NSMC")
    records.add_options(parser, turns=3)
    args = parser.parse_args()
    commands = {"digits, 10 epochs": ["train_single", "--epochs", "10"]}
    if args.mnist:
        mnist = ["--data", str(args.mnist), "--epochs", "2", "--batch-size", "128", "--lr", "0.05"]
        commands["MNIST, 2 epochs"] = ["train_single", *mnist]
    if args.nsmc:
        nsmc = ["--data", str(args.nsmc), "--from-scratch", "tiny", "--epochs", "2", "--batch-size", "64"]
        commands["NSMC from scratch, 2 epochs"] = ["nlp.classify", *nsmc, "--lr", "1e-3"]
    rows: records.Rows = {what: {"accuracy": []} for what in commands}
    with tempfile.TemporaryDirectory(prefix="hpctrain-") as folder:
        for turn in range(1, args.turns + 1):
            for number, (what, words) in enumerate(commands.items()):
                out = Path(folder, f"{number}-{turn}")
                more = ["--seed", str(turn), "--device", "cpu", "--out", str(out)]
                subprocess.run(
                    [sys.executable, "-m", "hpctrain", *words, *more], check=True, stdout=subprocess.DEVNULL
                )
                result = json.loads((out / "result.json").read_text())
                rows[what]["accuracy"].append(result["test_accuracy"])
                print(f"turn {turn}  {what:28} {result['test_accuracy']:.4f}", flush=True)
    about = "test accuracy of one process"
    records.report("accuracy", "data", rows, {"accuracy": 4}, about, args)


if __name__ == "__main__":
    main()
