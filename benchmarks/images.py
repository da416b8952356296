"""The size of an image, part by part, and its start-up time, cold and warm.

    .venv/bin/python benchmarks/images.py hpctrain-*.sif

On a node of the test cluster. Sizes are in MB (10^6 bytes): the files of a part, and these files compressed
on their own as in the SIF. An ordinary user starts it. Cold means that nothing of the SIF is in the page
cache, as on a node that has not run it yet. The disk is this machine's, not a parallel file system.
"""

import argparse
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cluster"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "containers"))
import records
from sif import squashfs
from slurm_cluster import Cluster

PACKAGES = "opt/hpctrain/lib/python3.11/site-packages/"
PARTS: dict[str, str | tuple[str, ...]] = {  # a path belongs to the first part with a prefix of it
    "NVIDIA's libraries": (PACKAGES + "nvidia", PACKAGES + "cusparselt/"),
    "torch": PACKAGES + "torch/",
    "triton": PACKAGES + "triton",
    "transformers": PACKAGES + "transformers/",
    "scipy": PACKAGES + "scipy",
    "Horovod": PACKAGES + "horovod/",
    "other Python packages, and MPI": "opt/hpctrain/",
    "Debian": "",
}
PACK = (
    "tar --create --null --files-from=- | "
    # as apptainer/build_sif.sh
    "mksquashfs - /tmp/part -tar -noappend -comp zstd -Xcompression-level 9 -all-root -no-xattrs"
)
SIZES = ("files, MB", "compressed, MB")
STARTS = {
    "true": ["true"],
    "import torch": ["python", "-c", "import torch"],
    "import all": ["python", "-c", "import horovod.torch, lightning, mpi4py.MPI, torch, transformers"],
}


def weigh(cluster: Cluster, sif: Path) -> dict[str, tuple[int, int]]:
    """For each part, the bytes of its files, and the bytes of these files compressed."""
    offset = str(squashfs(sif))
    cluster.exec(
        "n1",
        "unsquashfs",
        "-quiet",
        "-no-progress",
        "-o",
        offset,
        "-d",
        "/project/unpacked",
        f"/project/{sif.name}",
    )
    root = cluster.host_path("/project/unpacked")
    paths, sizes = defaultdict(list), defaultdict(int)
    for folder, folders, files in os.walk(root):
        for name in files + [name for name in folders if Path(folder, name).is_symlink()]:
            path = Path(folder, name)
            within = str(path.relative_to(root))
            part = next(part for part, start in PARTS.items() if within.startswith(start))
            paths[part].append(within)
            sizes[part] += path.lstat().st_size
    packed = {}
    for part in paths:
        cluster.exec("n1", "sh", "-c", PACK, cwd="/project/unpacked", input="\0".join(paths[part]))
        packed[part] = int(cluster.exec("n1", "stat", "--format=%s", "/tmp/part").stdout)
    cluster.exec("n1", "rm", "-r", "/project/unpacked", "/tmp/part")
    return {part: (sizes[part], packed[part]) for part in PARTS if part in sizes}


def start(cluster: Cluster, sif: Path, what: str, cold: bool) -> float:
    """Start the image once, as alice; return the seconds."""
    if cold:
        with sif.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    began = time.monotonic()
    cluster.exec("n1", "apptainer", "exec", f"/project/{sif.name}", *STARTS[what], user="alice")
    return time.monotonic() - began


def main() -> None:
    """Measure each SIF; print the medians of its turns."""
    parser = argparse.ArgumentParser(
        description="Measure the size of an image, part by part, and its start-up time."
    )
    parser.add_argument("sif", type=Path, nargs="+", help="SIFs from make sif")
    records.add_options(parser, turns=5)
    options = parser.parse_args()
    subprocess.run(["sync"], check=True)  # dirty pages cannot be dropped from the page cache
    with Cluster(nodes=1, binds={sif.resolve(): f"/project/{sif.name}" for sif in options.sif}) as cluster:
        for sif in options.sif:
            parts = {
                part: [[size / 1e6], [packed / 1e6]] for part, (size, packed) in weigh(cluster, sif).items()
            }
            rows = {part: dict(zip(SIZES, sizes, strict=True)) for part, sizes in parts.items()}
            about = f"{sif.name}, {sif.stat().st_size / 1e6:.0f} MB in all"
            records.report(f"{sif.stem}-sizes", "part", rows, dict.fromkeys(SIZES, 0), about, options)
            rows = {}
            for what in STARTS:
                start(cluster, sif, what, cold=False)
                rows[what] = {
                    kind: [start(cluster, sif, what, kind == "cold, s") for _ in range(options.turns)]
                    for kind in ("cold, s", "warm, s")
                }
            digits = {"cold, s": 2, "warm, s": 2}
            records.report(f"{sif.stem}-starts", "start", rows, digits, about, options)


if __name__ == "__main__":
    main()
