"""Everything that needs a GPU, in about ten minutes: how fast are the trainers, and are they right.

    python benchmarks/gpu.py --data nsmc
    python benchmarks/gpu.py --data nsmc --budget 780     ends after 780 seconds, whatever is left
    python benchmarks/gpu.py --dry-run                    on a CPU, with tiny sizes: shows only that it runs

The cases come in the order of their worth. In each, the ways take turns in one process. Every turn is a line
of gpu.jsonl as it happens; the table gpu.md and the picture gpu.png follow after each case. The same command
again measures what is missing, failed, or was measured with other code, versions or options.
"""

import argparse
import hashlib
import json
import os
import platform
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from records import revision

import hpctrain
from hpctrain.files import atomic
from hpctrain.files.plain import open_plain
from hpctrain.run.charts import folder_for_matplotlib
from hpctrain.run.config import versions

HERE = Path(__file__).parent
LIBRARIES = ("transformers", "lightning", "accelerate", "peft", "liger-kernel", "triton")
OURS = "hpctrain"  # ways whose names begin so are ours


class Case(NamedTuple):
    """What is measured side by side; `name` is that of gpu_speed.py, or "checks"."""

    name: str
    title: str
    unit: str = ""  # of a speed
    turns: int = 1


CASES = (
    Case("machine", "The machine"),
    Case("reviews", "BERT-base, film reviews, batches of 32", "reviews", 3),
    Case("windows", "BERT-large, windows of 384 tokens, batches of 64", "windows", 3),
    Case("lora", "Llama of 1.2 billion weights with LoRA, batches of 16", "conversations", 3),
    Case("whole", "Llama of 1.2 billion weights, all trained, batches of 16", "conversations", 3),
    Case("images", "ResNet-50, 224 pixels, batches of 256", "images", 3),
    Case("shapes", "BERT-base, film reviews: lengths, and attention of cuDNN", "reviews", 3),
    Case("windows-compiled", "BERT-large, compiled", "windows", 2),
    Case("whole-compiled", "Llama of 1.2 billion weights, all trained, compiled", "conversations", 2),
    Case("reviews-compiled", "BERT-base, film reviews, compiled", "reviews", 2),
    Case("deterministic", "BERT-large with --deterministic", "windows", 2),
    Case("checks", "Are the trainers right?"),
)


class Goal(NamedTuple):
    """Our way of a case, at least `times` as fast as another way of it or as a public figure.

    Like is compared with like: compiled with compiled, in bf16 all.
    """

    case: str
    ours: str
    beside: str  # a way, or the source of the public figure
    times: float
    public: float = 0.0  # a second


LAMBDA = "[Lambda](https://github.com/lambdal/deeplearning-benchmark), the best public figure for an H200"
MXNET = "[MLPerf 4.0](https://github.com/mlcommons/training_results_v4.0), MXNet, of eight H200"
TRAINER, LIGER = "Trainer at its best", "Trainer at its best, liger"
COMPILED = "Trainer at its best, torch_compile"
GOALS = (
    Goal("reviews", "hpctrain", TRAINER, 1.0),
    Goal("reviews-compiled", "hpctrain --compile", COMPILED, 1.0),
    Goal("reviews-compiled", "hpctrain --compile --cuda-graphs", COMPILED, 2.0),
    Goal("windows", "hpctrain", TRAINER, 1.0),
    Goal("windows-compiled", "hpctrain --compile", COMPILED, 1.0),
    Goal("windows-compiled", "hpctrain --compile", LAMBDA, 1.5, 350.0),
    Goal("lora", "hpctrain", LIGER, 1.1),
    Goal("whole", "hpctrain", LIGER, 1.1),
    Goal("images", "hpctrain --compile", MXNET, 0.9, 7953.0),
)


# --- measuring ---


class Child:
    """A process that measures a case, once go() has been called. It has a session of its own."""

    def __init__(self, case: Case, args: argparse.Namespace, temporary: str) -> None:
        if case.name == "checks":
            words = [str(HERE / "gpu_checks.py")]
        else:
            words = [str(HERE / "gpu_speed.py"), case.name, "--turns", str(1 if args.dry_run else case.turns)]
            words += ["--data", str(args.data.resolve())] if args.data else []
        words += ["--dry-run"] if args.dry_run else []
        self._log = (args.out / f"{case.name}.log").open("w", encoding="utf-8")
        self._process = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | {"TMPDIR": temporary},
            start_new_session=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def go(self) -> None:
        """Let it begin, now or as soon as it is ready. One that has ended is seen by lines()."""
        assert self._process.stdin
        with suppress(BrokenPipeError):
            self._process.stdin.write("go\n")
            self._process.stdin.flush()

    def lines(self, deadline: float) -> Iterator[dict[str, Any]]:
        """What it prints. Raises TimeoutError at the deadline, ChildProcessError if it ends with an error."""
        while True:
            try:
                left = min(threading.TIMEOUT_MAX, max(0.0, deadline - time.monotonic()))
                text = self._lines.get(timeout=left)
            except queue.Empty:
                raise TimeoutError from None
            if not text:
                break
            yield json.loads(text)
        if self._process.wait():
            raise ChildProcessError(f"exit code {self._process.returncode}: see {self._log.name}")

    def end(self) -> None:
        """End it and all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()


def measure(
    cases: list[Case], args: argparse.Namespace, results: "Results", deadline: float, temporary: str
) -> None:
    """Measure these cases; the next one gets ready meanwhile. TimeoutError at the deadline."""
    children: list[Child] = []
    try:
        for number, case in enumerate(cases):
            if not number:
                children.append(Child(case, args, temporary))
            child, began = children[-1], time.monotonic()
            child.go()
            if number + 1 < len(cases):
                children.append(Child(cases[number + 1], args, temporary))
            try:
                for line in child.lines(deadline):
                    if "ready" in line:
                        began = time.monotonic()
                    else:
                        results.add(case, line)
                wanted = 1 if args.dry_run else case.turns
                if few := [way for way, turns in results.turns(case).items() if len(turns) < wanted]:
                    raise ChildProcessError(f"fewer than {wanted} turns of {', '.join(few)}")
                results.add(case, {"done": True, "seconds": round(time.monotonic() - began, 1)})
            except ChildProcessError as error:
                results.add(case, {"failed": str(error)})
            results.show()
    finally:
        for child in children:
            child.end()


class Results:
    """The lines of gpu.jsonl: first what the machine is, then each turn of each way."""

    def __init__(self, folder: Path, record: dict[str, Any], keys: dict[str, str]) -> None:
        self._folder, self._keys, self.record = folder, keys, record
        self.lines = read_earlier(folder / "gpu.jsonl", record, keys)
        text = "".join(f"{json.dumps(line)}\n" for line in [record, *self.lines])
        atomic.write_text(folder / "gpu.jsonl", text)

    def missing(self, only: list[str]) -> list[Case]:
        """The cases that are not measured, of those whose name contains one of `only`, if there are any."""
        found = {line["case"] for line in self.lines if "done" in line}
        wanted = [case for case in CASES if not only or any(word in case.name for word in only)]
        return [case for case in wanted if case.name not in found]

    def add(self, case: Case, line: dict[str, Any]) -> None:
        """Write a line at once, and print it."""
        line = {"case": case.name, "key": self._keys[case.name], "date": time.strftime("%F %T")} | line
        self.lines.append(line)
        with (self._folder / "gpu.jsonl").open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(line)}\n")
        if "done" in line:
            text = f"done in {line['seconds']} s"
        else:
            text = f"FAILED: {line['failed']}" if "failed" in line else format_figures(line["figures"])
        print(f"{case.name:16} {line.get('way', ''):40} {text}", flush=True)

    def turns(self, case: Case) -> dict[str, list[dict[str, Any]]]:
        """The figures of each way in its turns, in the order of the first turn."""
        found: dict[str, list[dict[str, Any]]] = {}
        for line in self.lines:
            if line["case"] == case.name and "figures" in line:
                found.setdefault(line["way"], []).append(line["figures"])
        return found

    def failures(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if "failed" in line]

    def show(self) -> None:
        """Write the table and the picture of what there is."""
        atomic.write_text(self._folder / "gpu.md", format_page(self))
        with atomic.file(self._folder / "gpu.png", "wb") as file:
            draw(self, file)


def read_earlier(path: Path, record: dict[str, Any], keys: dict[str, str]) -> list[dict[str, Any]]:
    """The lines of cases that were measured whole, on the same device, with the same code and options.

    Exits if the file is not one that this program has written: it would be overwritten.
    """
    try:
        with open_plain(path) as file:
            text = file.read().decode()
        first, *lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        if first["device"] != record["device"]:
            return []
        current = [line for line in lines if line["key"] == keys.get(line["case"])]
    except FileNotFoundError:
        return []
    except Exception as error:
        sys.exit(
            f"gpu.py: cannot continue {path} ({type(error).__name__}: {error}): "
            "remove it, or give another --out"
        )
    done = {line["case"] for line in current if "done" in line}
    failed = {line["case"] for line in current if "failed" in line}
    return [line for line in current if line["case"] in done - failed]


def make_keys(args: argparse.Namespace, device: str) -> dict[str, str]:
    """Of each case, the hash of what its figures depend on: code, versions, options, and the device."""
    package = Path(hpctrain.__file__).parent
    sources = sorted(path for path in package.rglob("*.py") if path.parent.name != "servers")
    code = hashlib.sha256()
    for path in sources:
        code.update(path.read_bytes())

    def make_key(case: Case) -> str:
        whole = code.copy()
        names = ("gpu_checks.py",) if case.name == "checks" else ("gpu_speed.py", "nlp.py", "vision.py")
        for name in names:
            whole.update((HERE / name).read_bytes())
        whole.update(repr((case, device, str(args.data), args.dry_run, all_versions())).encode())
        return whole.hexdigest()[:16]

    return {case.name: make_key(case) for case in CASES}


def all_versions() -> dict[str, Any]:
    """Those of hpctrain, and of the libraries that are measured."""
    found = {}
    for name in LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return versions() | found


# --- the table and the picture ---


def format_figures(figures: dict[str, Any]) -> str:
    """Figures in a line."""
    return "  ".join(
        f"{name} {value:,.4g}" if isinstance(value, int | float) else f"{name} {value}"
        for name, value in figures.items()
    )


def spread(values: list[float], digits: int) -> str:
    """The median, and the lowest and the highest value if there are several."""
    low, high, median = min(values), max(values), statistics.median(values)
    more = f" ({low:,.{digits}f} to {high:,.{digits}f})" if len(values) > 1 else ""
    return f"{median:,.{digits}f}{more}"


def format_page(results: Results) -> str:
    """The page of all tables: the machine, the goals, each case, the failures."""
    record = results.record
    parts = [f"# {record['device']}, {record['date']}\n\n| what | version |\n|---|---|\n"]
    versions = {"revision": record["revision"]} | record["versions"]
    parts += [f"| {name} | {version} |\n" for name, version in versions.items()]
    parts.append(f"| command | `{record['command']}` |\n")
    for case in CASES:
        turns = results.turns(case)
        if not turns:
            continue
        parts.append(f"\n## {case.title}\n\n")
        if not case.unit:
            parts.append("| what | result |\n|---|---|\n")
            for way, (figures, *_) in turns.items():
                rows = (
                    [(way, format_figures(figures))]
                    if way
                    else [
                        (name, f"{value:,.4g}" if isinstance(value, float) else str(value))
                        for name, value in figures.items()
                    ]
                )
                parts += [f"| {name} | {value} |\n" for name, value in rows]
            continue
        parts.append(format_speeds(case, turns))
    if goals := "".join(format_goal(goal, results) for goal in GOALS):
        parts.append(f"\n## Goals\n\n| case | ours | beside | times | goal |\n|---|---|---|---|---|\n{goals}")
    if failures := results.failures():
        parts.append("\n## Failed\n\n")
        parts += [f"- {line['case']} {line.get('way', '')}: {line['failed']}\n" for line in failures]
    return "".join(parts)


def format_speeds(case: Case, turns: dict[str, list[dict[str, Any]]]) -> str:
    """The table of a case: medians over its turns, and in parentheses the lowest and the highest value."""
    lines = [
        f"| way | turns | {case.unit} a second | ms a step | s before the timed steps | TFLOP/s | MFU |",
        "|---|" + "---|" * 6,
    ]
    for way, figures in turns.items():
        columns = [
            [turn[name] for turn in figures if name in turn]
            for name in ("a second", "ms a step", "s before", "tflops_per_gpu")
        ]
        texts = [
            spread(column, digits) if column else ""
            for column, digits in zip(columns, (0, 1, 1, 0), strict=True)
        ]
        mfu = [turn["mfu"] for turn in figures if "mfu" in turn]
        texts.append(f"{statistics.median(mfu):.1%}" if mfu else "")
        lines.append(f"| {way} | {len(figures)} | {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"


def format_goal(goal: Goal, results: Results) -> str:
    """The row of a goal; "" if one of its sides is not measured."""
    (case,) = (case for case in CASES if case.name == goal.case)
    turns = results.turns(case)
    medians = {way: statistics.median(turn["a second"] for turn in each) for way, each in turns.items()}
    if goal.public:
        medians[goal.beside] = goal.public
    if not {goal.ours, goal.beside} <= medians.keys():
        return ""
    fast, other = medians[goal.ours], medians[goal.beside]
    verdict = "reached" if fast >= goal.times * other else "not reached"
    return (
        f"| {case.title} | {goal.ours}: {fast:,.0f} | {goal.beside}: {other:,.0f} | {fast / other:.2f} "
        f"| {goal.times:g}: {verdict} |\n"
    )


def draw(results: Results, file: IO[bytes]) -> None:
    """A panel for each case with speeds: bars of medians, the range over the turns, and a public figure."""
    cases = [case for case in CASES if case.unit and results.turns(case)]
    public = {goal.case: goal.public for goal in GOALS if goal.public}
    heights = [1.2 + len(results.turns(case)) for case in cases] or [1]
    with folder_for_matplotlib():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 0.6 + 0.38 * sum(heights)), layout="constrained")
        figure.suptitle(f"{results.record['device']}, {results.record['date']}")
        panels = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
        for case, axes in zip(cases, panels, strict=False):
            turns = results.turns(case)
            speeds = {way: [turn["a second"] for turn in figures] for way, figures in turns.items()}
            medians = [statistics.median(values) for values in speeds.values()]
            errors = [
                [median - min(values) for median, values in zip(medians, speeds.values(), strict=True)],
                [max(values) - median for median, values in zip(medians, speeds.values(), strict=True)],
            ]
            colors = ["tab:blue" if way.startswith(OURS) else "tab:gray" for way in speeds]
            bars = axes.barh(list(speeds), medians, xerr=errors, color=colors)
            axes.bar_label(bars, labels=[f"{median:,.0f}" for median in medians], padding=4)
            title = f"{case.title}: {case.unit} a second"
            if case.name in public:
                axes.axvline(public[case.name], color="tab:red", linestyle="--")
                title += "; dashed: the best public figure"
            axes.set_title(title, loc="left", fontsize=10)
            axes.margins(x=0.12)
            axes.invert_yaxis()
        if not cases:
            panels[0].set_axis_off()
        figure.savefig(file, format="png")


# --- the program ---


def main() -> None:
    """Measure what is missing. Exits 1 if a way or a check failed, also if the time ended before others."""
    parser = argparse.ArgumentParser(description="Measure and check on one GPU all that needs one.")
    add = parser.add_argument
    add("--dry-run", action="store_true", help="on a CPU, with tiny sizes: shows only that everything runs")
    add("--data", type=Path, help="folder of NSMC for the reviews (default: the sample data, repeated)")
    add("--budget", type=float, default=float("inf"), metavar="SECONDS", help="time to measure")
    add("--only", action="append", default=[], metavar="CASE", help="only cases whose name contains this")
    add("--out", type=Path, default=Path("runs/gpu"), help="folder of the result (default: %(default)s)")
    args = parser.parse_args()
    deadline = time.monotonic() + args.budget
    if not args.dry_run and not torch.cuda.is_available():
        sys.exit("gpu.py: torch sees no GPU here: run it on a node with one, or with --dry-run on a CPU")
    if args.only and not any(word in case.name for word in args.only for case in CASES):
        names = ", ".join(case.name for case in CASES)
        sys.exit(f"gpu.py: --only {' '.join(args.only)}: no such case: give some of {names}")
    device = torch.cuda.get_device_name() if not args.dry_run else f"{platform.machine()}, a dry run"
    args.out.mkdir(parents=True, exist_ok=True)
    record = {"device": device, "date": time.strftime("%F"), "revision": revision(clean=False)}
    record["versions"] = all_versions()
    record["command"] = f"python benchmarks/gpu.py {' '.join(sys.argv[1:])}".strip()
    results = Results(args.out, record, make_keys(args, device))
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // 2))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("gpu.py: ended by SIGTERM; the same command goes on"))
    missing, ended = results.missing(args.only), ""
    try:
        with tempfile.TemporaryDirectory(prefix="hpctrain-gpu-") as temporary:
            measure(missing, args, results, deadline, temporary)
    except TimeoutError:
        ended = f"; the time of --budget {args.budget:g} s is over: the same command goes on"
    finally:
        results.show()
    failures = len(results.failures())
    left = len(results.missing(args.only))
    print(
        f"{len(missing) - left} of {len(missing)} cases measured, {failures} failed{ended}; {args.out}/gpu.md"
    )
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("gpu.py: interrupted; the same command goes on")
