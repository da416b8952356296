"""What the benchmarks measured: tables on the terminal, records with --record, and pages made from these.

    python benchmarks/records.py        writes the tables of the pages from the records

A record is a file of records/: each turn's values, the command, the revision, the versions and the machine.
A page has its table between `<!-- NAME -->` and `<!-- end -->`; tests/benchmarks/test_records.py compares
them.
"""

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from hpctrain.files import atomic

HERE = Path(__file__).resolve().parent
PAGES = sorted(HERE.glob("*.md"))
TABLE = re.compile(r"(<!-- (\S+) -->\n).*?(<!-- end -->\n)", re.DOTALL)
LIBRARIES = ("torch", "transformers")

# Of each row and column the values of all turns: a row is a way, or a part of what is timed.
Rows = dict[str, dict[str, list[float]]]


def add_options(parser: argparse.ArgumentParser, turns: int) -> None:
    """Add --turns and --record."""
    parser.add_argument("--turns", type=int, default=turns, help="runs of each way (default: %(default)s)")
    parser.add_argument(
        "--record", action="store_true", help="keep the result in benchmarks/records, and in the pages"
    )


def report(
    name: str, first: str, rows: Rows, digits: dict[str, int], about: str, options: argparse.Namespace
) -> None:
    """Print the table; with --record, write the record and the pages.

    `first` is the title of the first column, `digits` has those of the others with their number of decimals,
    and `about` says in a few words what was measured.
    """
    # the folder of the data is that of this machine
    shown = [Path(word).name if "/" in word else word for word in sys.argv[1:] if word != "--record"]
    record = {
        "about": about,
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *shown]),
        "date": time.strftime("%F"),
        "revision": revision(options.record),
        "versions": {name: metadata.version(name) for name in LIBRARIES},
        "machine": f"{processor()}, {os.cpu_count()} cores",
        "turns": options.turns,
        "first": first,
        "digits": digits,
        "rows": rows,
    }
    print(f"\n{format_table(record)}", flush=True)
    if options.record:
        (HERE / "records").mkdir(exist_ok=True)
        atomic.write_text(HERE / "records" / f"{name}.json", f"{json.dumps(record, indent=1)}\n")
        write_pages()


def revision(clean: bool) -> str:
    """The commit that is measured. Exits if `clean` and a file differs from it."""

    def git(*words: str) -> list[str]:
        done = subprocess.run(["git", "-C", str(HERE), *words], capture_output=True, text=True)
        return done.stdout.splitlines()

    if (bundled := HERE / "revision").exists():  # of gpu_bundle.sh
        return bundled.read_text().strip()
    head = "".join(git("rev-parse", "--short", "HEAD"))
    # Records of several benchmarks are written one after the other, with the pages that they make.
    ours = re.compile(r"benchmarks/(records/|\w+\.md)")
    changes = [line[3:] for line in git("status", "--porcelain") if not ours.match(line[3:])]
    if clean and (changes or not head):
        sys.exit(f"benchmark: --record: {changes[0] if changes else 'no Git clone'}: commit it first")
    return head + ("-dirty" if changes else "")


def processor() -> str:
    """Its name, as Linux knows it."""
    found = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else "unknown processor"


def format_values(values: list[float], digits: int) -> str:
    """The median, and the lowest and the highest value of several."""
    text = f"{statistics.median(values):,.{digits}f}"
    more = f" ({min(values):,.{digits}f} to {max(values):,.{digits}f})"
    return text + more if len(set(values)) > 1 else text


def format_table(record: dict[str, Any]) -> str:
    """The Markdown of a record: a table, and a line that says what was measured, how, when and where."""
    digits, rows = record["digits"], record["rows"]
    lines = [f"| {' | '.join([record['first'], *digits])} |", "|---" * (1 + len(digits)) + "|"]
    for row, columns in rows.items():
        cells = [format_values(columns[name], digits[name]) if columns.get(name) else "" for name in digits]
        lines.append(f"| {' | '.join([row, *cells])} |")
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    lines += [
        "",
        f"{record['about']}; medians of {record['turns']} turns (lowest to highest).",
        f"`{record['command']}`",
        f"at {record['revision']}, {record['date']}; {versions}; {record['machine']}.",
    ]
    return "\n".join(lines)


def write_pages() -> None:
    """Write the table of each record into the pages. Exits if a page names a record that is not there."""

    def table(found: re.Match[str]) -> str:
        path = HERE / "records" / f"{found[2]}.json"
        if not path.exists():
            sys.exit(f"benchmark: {page.name}: no record {path.name}: run its benchmark with --record")
        return f"{found[1]}{format_table(json.loads(path.read_text()))}\n{found[3]}"

    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (made := TABLE.sub(table, text)) != text:
            atomic.write_text(page, made)


if __name__ == "__main__":
    write_pages()
