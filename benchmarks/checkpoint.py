"""What a checkpoint costs: how long a save blocks a step, and how much writing slows the steps after it.

    .venv/bin/python benchmarks/checkpoint.py [--model resnet50] [--turns 5]

One process trains on the CPU. Each turn saves once as the trainers do, a copy in memory and a thread that
writes it, and once with all of the writing in the step. Steps without a save run between them, so all are
measured side by side.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from hpctrain.checkpoints import checkpoint
from hpctrain.checkpoints.interval import Interval
from hpctrain.checkpoints.saver import Checkpointer
from hpctrain.distributed.world import ALONE
from hpctrain.vision import recipe

INTERVAL = 600  # s: the default of --checkpoint-every


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=recipe.RECIPES, default="resnet50")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    options = parser.parse_args()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = recipe.RECIPES[options.model].model()
    optimizer = recipe.RECIPES[options.model].optimizer(model.parameters(), lr=0.001)
    side = recipe.RECIPES[options.model].side
    images, labels = torch.rand(4, 1, side, side), torch.arange(4)

    def step() -> float:
        started = time.perf_counter()
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
        return time.perf_counter() - started

    def state() -> dict:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        (Path(folder) / "checkpoints").mkdir()
        saver = Checkpointer(ALONE, Path(folder), Interval(0, INTERVAL), 3, lambda: None)
        quiet = [step() for _ in range(3)][1:]
        blocked, whole, busy, written, waited = [], [], [], [], []
        wait_for_copy = saver._copied.wait

        def timed() -> None:
            started = time.perf_counter()
            wait_for_copy()
            waited.append(time.perf_counter() - started)

        saver._copied.wait = timed  # each optimizer.step() calls it
        for turn in range(1, options.turns + 1):
            started = time.perf_counter()
            saver.save_in_background(checkpoint.path_of(Path(folder), 1, turn), state(), 0)
            blocked.append(time.perf_counter() - started)
            waited.clear()
            busy.append(step())
            blocked[-1] += waited[0]  # that of the step after it
            while saver._writer and saver._writer.is_alive():
                busy.append(step())
            saver.wait()
            written.append(time.perf_counter() - started)
            quiet += [step() for _ in range(3)]
            started = time.perf_counter()
            checkpoint.save(Path(folder) / "checkpoints/whole.pt", state())
            whole.append(time.perf_counter() - started)
        size = (Path(folder) / "checkpoints/whole.pt").stat().st_size

    slower = statistics.median(busy) / statistics.median(quiet) if busy else 1.0
    # The steps that run while a checkpoint is written take longer by this factor.
    cost = statistics.median(blocked[1:] or blocked) + statistics.median(written) * (1 - 1 / slower)
    print(f"{options.model}, {size / 1e6:.0f} MB; medians of {options.turns} turns")
    print(f"first save blocks for            {blocked[0] * 1000:8.0f} ms")
    print(f"later saves block for            {statistics.median(blocked[1:] or blocked) * 1000:8.0f} ms")
    print(f"a save in the step itself takes  {statistics.median(whole) * 1000:8.0f} ms")
    print(f"writing in the background takes  {statistics.median(written) * 1000:8.0f} ms")
    print(f"a step without a save            {statistics.median(quiet) * 1000:8.0f} ms")
    print(f"a step while one is written      {slower:8.2f} times as long")
    print(f"share of the time, every {INTERVAL} s:  {100 * cost / INTERVAL:8.3f} %")


if __name__ == "__main__":
    main()
