"""The time of `hpctrain runs` over many run folders, beside listing and reading the same files in Python.

    .venv/bin/python benchmarks/runs.py [--folders 1000] [--turns 5]

Both are processes of their own, in turns, with warm caches.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cluster"))
import records

from tests.helpers import make_run

READ = (
    "import pathlib, sys\n"
    "print(sum(len(path.read_bytes()) for path in pathlib.Path(sys.argv[1]).glob('*/*/*.json*')))"
)


def main() -> None:
    """Measure, and print the medians and their range."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folders", type=int, default=1000, metavar="N")
    records.add_options(parser, turns=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.folders):
            make_run(Path(folder) / f"train_ddp/{number}")
        ways = {
            "hpctrain runs": ["-m", "hpctrain", "runs", folder],
            "reading the files": ["-c", READ, folder],
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(args.turns):
            for name, words in ways.items():
                began = time.perf_counter()
                subprocess.run([sys.executable, *words], check=True, capture_output=True)
                seconds[name].append(time.perf_counter() - began)
    rows = {name: {"seconds": values} for name, values in seconds.items()}
    about = f"{args.folders:,} run folders, warm"
    records.report("runs", "command", rows, {"seconds": 2}, about, args)


if __name__ == "__main__":
    main()
