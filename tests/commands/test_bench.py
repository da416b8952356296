"""hpctrain bench: what it measures is right, wrong values end it, and every backend has its operations."""

import json
import os
import re

import pytest
import torch

from hpctrain.commands import bench, bench_layernorm, rounds
from hpctrain.distributed.world import ALONE, World
from hpctrain.errors import HpctrainError, UsageError
from tests.launch.helpers import HOME, job
from tests.tools import warm_start


def short_rounds():
    rounds.ROUND_SECONDS = 0.01


def run(tmp_path, ranks, *arguments, setup=short_rounds):
    return warm_start.run(
        warm_start.torchrun_ranks(ranks, ["bench", *map(str, arguments)], dict(os.environ), setup), tmp_path
    )


@pytest.mark.parametrize(
    ("operation", "ranks", "seconds", "bus"),
    # By doc/PERFORMANCE.md of nccl-tests, for 8 MB in 1 ms, which is 8 GB/s.
    [
        ("all-reduce", 2, 1e-3, 8),
        ("all-reduce", 8, 1e-3, 14),
        ("all-gather", 4, 1e-3, 6),
        ("reduce-scatter", 4, 1e-3, 6),
        ("broadcast", 4, 1e-3, 8),
        ("point-to-point", 4, 1e-3, 8),
    ],
)
def test_bandwidth_of_the_bus(operation, ranks, seconds, bus):
    assert 8e6 / seconds / 1e9 * bench.BUS_FACTORS[operation](ranks) == pytest.approx(bus)


def test_sizes():
    assert list(bench.sizes(1024, 2**16)) == [2**10, 2**12, 2**14, 2**16]
    assert [bench.size_in_bytes(text) for text in ("4", "1K", "64k", "1G")] == [4, 1024, 65536, 2**30]


@pytest.mark.slow
def test_four_ranks(tmp_path):
    done = run(tmp_path, 4, "--max-size", "256K", "--out", "out")
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    record = json.loads((tmp_path / "out/bench.json").read_text())
    assert (record["backend"], record["world"]["size"], len(record["hosts"])) == ("gloo", 4, 4)
    by_operation = {}
    for one in record["results"]:
        by_operation.setdefault(one["operation"], []).append(one["bytes"])
        assert one["algbw_gb_per_s"] == pytest.approx(one["bytes"] / one["seconds"] / 1e9)
    assert by_operation == {name: [2**10, 2**12, 2**14, 2**16, 2**18] for name in bench.BUS_FACTORS}
    lines = [line.split() for line in done.stdout.splitlines()[2:-1]]
    assert [(line[0], int(line[1])) for line in lines] == [
        (one["operation"], one["bytes"]) for one in record["results"]
    ]
    assert (tmp_path / "out/bench.png").read_bytes().startswith(b"\x89PNG")
    again = run(tmp_path, 2, "--out", "out")
    assert again.returncode == 1 and re.search(
        "error: .*out holds a result already: give another --out\n$", again.stderr
    )


@pytest.mark.slow
def test_three_ranks_have_sizes_that_they_can_share(tmp_path):
    done = run(
        tmp_path, 3, "--max-size", "4K", "--operations", "all-gather", "reduce-scatter", "--out", "out"
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "out/bench.json").read_text())["results"]
    assert [one["bytes"] for one in results] == [1020, 4092] * 2


def lose_a_value():
    """On rank 1, the third value of each all-reduce is wrong."""
    if os.environ["RANK"] == "1":
        right = torch.distributed.all_reduce

        def all_reduce(values, *arguments, **options):
            right(values, *arguments, **options)
            if values.is_floating_point():
                values[2] += 1

        torch.distributed.all_reduce = all_reduce


def test_a_wrong_value_ends_it(tmp_path):
    done = run(tmp_path, 2, "--max-size", "1K", "--out", "out", setup=lose_a_value)
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if "hpctrain: error" in line]
    assert (
        len(errors) == 1 and "rank 1: all-reduce of 1024 bytes: 1 of 256 values arrived wrong" in errors[0]
    ), done.stderr
    assert not (tmp_path / "out/bench.json").exists()


def no_memory():
    bench.free_memory = lambda *_: 20_000


@pytest.mark.slow
def test_sizes_that_do_not_fit_are_left_out(tmp_path):
    done = run(tmp_path, 2, "--operations", "broadcast", "--out", "out", setup=no_memory)
    assert done.returncode == 0, done.stderr
    assert [one["bytes"] for one in json.loads((tmp_path / "out/bench.json").read_text())["results"]] == [
        1024,
        4096,
    ]
    assert "16384 left out: it needs 49,152 bytes, 20,000 are free" in done.stdout


@pytest.mark.parametrize(
    ("ranks", "arguments", "message"),
    [
        (1, [], "one rank has nobody to exchange data with"),
        (2, ["--max-size", "3"], "'3' is not a size between 4 bytes and 64G, such as 64K"),
        (2, ["--max-size", "lots"], "'lots' is not a size"),
        (
            2,
            ["--backend", "mpi"],
            "--backend mpi: these ranks were not started as an MPI program: use launch/apptainer_mpi.sh",
        ),
        (2, ["--out", "/proc/x"], "/proc/x: cannot be created"),
    ],
)
def test_invalid_input_is_one_line(tmp_path, ranks, arguments, message):
    done = run(tmp_path, ranks, *arguments)
    errors = [line for line in done.stderr.splitlines() if line.startswith("hpctrain: error")]
    assert done.returncode != 0 and len(errors) == 1 and message in errors[0], done.stderr
    assert "Traceback" not in done.stderr


LAYERNORM = ["layernorm", "--device", "cpu", "--shapes", "64x32", "8x16", "--dtypes", "fp32", "bf16"]


@pytest.mark.slow  # it draws
def test_layernorm(tmp_path, monkeypatch, capsys):
    """A row for each type and shape, of which both kinds give the same values."""
    monkeypatch.setattr(rounds, "ROUND_SECONDS", 0.001)
    bench.main(ALONE, [*LAYERNORM, "--out", str(tmp_path / "out")])
    rows = json.loads((tmp_path / "out/bench.json").read_text())["results"]
    assert [(row["dtype"], row["rows"], row["features"]) for row in rows] == [
        ("fp32", 64, 32), ("fp32", 8, 16), ("bf16", 64, 32), ("bf16", 8, 16),
    ]  # fmt: skip
    assert all(row["fused_seconds"] > 0 and row["composed_seconds"] > 0 for row in rows)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["DTYPE", "SHAPE", "FUSED", "(MS)", "COMPOSED", "(MS)", "RATIO"]
    assert [line.split()[:2] for line in lines[2:4]] == [["fp32", "64x32"], ["fp32", "8x16"]]
    assert (tmp_path / "out/bench.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(HpctrainError, match="holds a result already"):
        bench.main(ALONE, [*LAYERNORM, "--out", str(tmp_path / "out")])


def test_layernorm_that_is_wrong_or_measured_by_several(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="torchrun started 4"):
        bench.main(World(0, 4, 0, 4, 0, 1, "torchrun"), LAYERNORM)
    with pytest.raises(UsageError, match="'64' is not ROWSxFEATURES"):
        bench.main(ALONE, ["layernorm", "--shapes", "64"])
    monkeypatch.setitem(bench_layernorm.KINDS, "fused", lambda values, weight, bias: values)
    with pytest.raises(HpctrainError, match="64x32 in fp32 differs"):
        bench.main(ALONE, [*LAYERNORM, "--out", str(tmp_path / "other")])


@pytest.mark.parametrize(
    ("script", "backend", "name", "operations"),
    [
        ("launch/apptainer_mpi.sh", "mpi", "Open MPI v5", 5),
        ("launch/apptainer_horovod.sh", "horovod", "Horovod 0.28.1 over Gloo", 4),
        ("launch/apptainer_ddp.sh", "torch", "gloo", 5),
    ],
)
def test_on_two_nodes(cluster, script, backend, name, operations):
    ended, output = job(
        cluster,
        "bench",
        "--backend",
        backend,
        "--max-size",
        "4K",
        "--out",
        f"runs/bench-{backend}",
        script=script,
    )
    assert ended.state == "COMPLETED", output
    assert re.search(f"{name}.*, 4 ranks on 2 nodes;", output), output
    record = json.loads(cluster.host_path(f"{HOME}/runs/bench-{backend}/bench.json").read_text())
    assert len(record["results"]) == 2 * operations
    assert [one["node"] for one in record["between_nodes"]] == record["hosts"][2:3] * (operations == 5)
