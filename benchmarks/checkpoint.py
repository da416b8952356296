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

import records
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
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    records.add_options(parser, turns=5)
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
        whole_path = Path(folder) / "checkpoints/whole.pt"
        whole_path.parent.mkdir()
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
            saver.save_in_background(checkpoint.path_of(Path(folder), 1, turn), state(), whole_path)
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
            checkpoint.save(whole_path, state())
            whole.append(time.perf_counter() - started)
        size = whole_path.stat().st_size

    slower = [value / statistics.median(quiet) for value in busy] or [1.0]
    # The steps that run while a checkpoint is written take longer.
    cost = statistics.median(blocked) + statistics.median(written) * (1 - 1 / statistics.median(slower))
    figures = {
        "a save, in the background, blocks a step for, ms": [1000 * value for value in blocked],
        "of these the first save, ms": [1000 * blocked[0]],
        "a save in the step itself, ms": [1000 * value for value in whole],
        "writing in the background, ms": [1000 * value for value in written],
        "a step, ms": [1000 * value for value in quiet],
        "a step while one is written, times as long": slower,
        f"share of the time that a save every {INTERVAL} s takes, %": [100 * cost / INTERVAL],
    }
    rows = {name: {"figure": values} for name, values in figures.items()}
    about = f"{options.model}, a checkpoint of {size / 1e6:.0f} MB, one thread"
    records.report("checkpoint", "what", rows, {"figure": 2}, about, options)


if __name__ == "__main__":
    main()
