"""launch/scaling.sh and hpctrain scaling."""

import json
import re
import shutil
import sys
from dataclasses import asdict

import pytest
from slurm_cluster import REPOSITORY

from hpctrain.commands import scaling
from hpctrain.distributed.world import ALONE, World
from hpctrain.errors import HpctrainError
from tests.helpers import run_command, write_digits

SCRIPT = REPOSITORY / "launch/scaling.sh"


def write_run(
    folder, ranks, speed, launcher="slurm", batch_size=64, trainer="train_ddp", strategy="ddp", **more
):
    run = folder / f"{launcher}-{ranks}{strategy.removeprefix('ddp')}"
    run.mkdir(parents=True)
    world = asdict(World(0, ranks, 0, min(ranks, 4), 0, -(-ranks // 4), launcher))
    options = {"batch_size": batch_size, "strategy": strategy}
    (run / "config.json").write_text(
        json.dumps({"trainer": trainer, "options": options, "world": world, **more})
    )
    if speed:
        (run / "result.json").write_text(
            json.dumps({"speed": {"step_ms_p50": 10.0, "examples_per_s": speed}, "seconds": 1e4 / speed})
        )


def test_efficiency_is_against_the_fewest_ranks_of_a_launcher(tmp_path, capsys):
    for ranks, speed in ((2, 200.0), (4, 360.0), (8, None), (16, 800.0)):
        write_run(tmp_path, ranks, speed)
    write_run(tmp_path, 4, 300.0, "openmpi")
    scaling.main(ALONE, [str(tmp_path)])
    rows = json.loads((tmp_path / "scaling.json").read_text())
    found = [(row["launcher"], row["ranks"], row["speedup"], row["efficiency"]) for row in rows]
    assert found == [("mpirun", 4, 1, 1), ("srun", 2, 1, 1), ("srun", 4, 1.8, 0.9), ("srun", 16, 4, 0.5)]
    said = capsys.readouterr().out
    assert (
        "slurm-8: left out, as it has no result yet" in said
        and "strong scaling: 64 examples in a step" in said
    )
    assert said.splitlines()[-2].split() == [
        "ddp",
        "srun",
        "4",
        "16",
        "16",
        "64",
        "10",
        "800",
        "4",
        "50.0%",
        "12.5",
    ]
    assert (tmp_path / "scaling.png").stat().st_size > 10_000


def test_the_table_of_strategies_of_a_tutorial(tmp_path, capsys):
    """DataParallel, one rank on four GPUs, has the efficiency of four, beside the run on one GPU."""
    write_run(tmp_path, 1, 100.0, "single")
    write_run(tmp_path, 1, 320.0, "single", strategy="dp", devices=4)
    write_run(tmp_path, 4, 380.0, "torchrun")
    write_run(tmp_path, 8, 720.0, "torchrun")
    scaling.main(ALONE, [str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()[1:-1]
    columns = [0, 1, 2, 4, 8, 9, 10]
    cells = [[re.split(r"  +", line.strip())[column] for column in columns] for line in lines]
    assert cells == [
        ["STRATEGY", "LAUNCHER", "NODES", "DEVICES", "SPEEDUP", "EFFICIENCY", "RUNTIME (S)"],
        ["ddp", "single", "1", "1", "1", "100.0%", "100"],
        ["ddp", "torchrun", "1", "4", "3.8", "95.0%", "26.32"],
        ["ddp", "torchrun", "2", "8", "7.2", "90.0%", "13.89"],
        ["dp", "single", "1", "4", "3.2", "80.0%", "31.25"],
    ]


def test_what_kind_of_scaling_it_is(tmp_path):
    for ranks, kind, batch_size in ((1, "weak", 8), (4, "weak", 32), (1, "mixed", 8), (4, "mixed", 9)):
        write_run(tmp_path / kind, ranks, 10.0, batch_size=batch_size)
    assert (
        scaling.describe(scaling.read_rows(tmp_path / "weak"))
        == "weak scaling: 8 examples in a step of a device"
    )
    assert scaling.describe(scaling.read_rows(tmp_path / "mixed")) == "different batch sizes"
    with pytest.raises(HpctrainError, match="/nothing"):
        scaling.main(ALONE, [str(tmp_path / "nothing")])


def test_runs_of_several_trainers_are_not_compared(tmp_path):
    """As in the folder runs, for which it printed a speedup of one over the other."""
    # with another launcher it is a curve of its own
    write_run(tmp_path, 4, 300.0, "openmpi", trainer="train_horovod")
    write_run(tmp_path, 2, 200.0)
    assert len(scaling.read_rows(tmp_path)) == 2
    write_run(tmp_path, 4, 9.0, trainer="nlp.ner")
    with pytest.raises(HpctrainError, match=r"slurm-4.*nlp\.ner.*train_ddp"):
        scaling.main(ALONE, [str(tmp_path)])


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("world", []), ("world", {"size": 1}), ("size", 0), ("size", "4"), ("size", 2**70),
        ("launcher", []), ("batch_size", [1]),
        ("speed", "examples_per_s"), ("step_ms_p50", "\x1b[2J"), ("step_ms_p50", None), ("examples_per_s", 0),
        ("examples_per_s", float("nan")), ("examples_per_s", 10**400),
    ],
)  # fmt: skip
def test_a_run_that_somebody_else_has_made_is_one_line(tmp_path, place, value):
    write_run(tmp_path, 2, 200.0)
    for path in tmp_path.glob("*/*.json"):
        content = json.loads(path.read_text())
        for part in (content, *(each for each in content.values() if isinstance(each, dict))):
            part |= {place: value} if place in part else {}
        path.write_text(json.dumps(content))
    with pytest.raises(HpctrainError, match=r"slurm-2.*config\.json.*result\.json"):
        scaling.main(ALONE, [str(tmp_path)])


def test_names_that_are_no_formulas(tmp_path):
    write_run(tmp_path / "$\\frac{$", 2, 200.0, "half \udcff $\\frac{$")
    scaling.main(ALONE, [str(tmp_path / "$\\frac{$")])


def submit(tmp_path, *words, **env):
    """Run the script with an sbatch that prints its arguments."""
    (tmp_path / "sbatch").write_text('#!/bin/sh\necho sbatch "$@"\n')
    (tmp_path / "sbatch").chmod(0o755)
    env |= {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    return run_command([SCRIPT, *words], cwd=REPOSITORY, env=env)


def test_a_job_for_each_number_of_ranks(tmp_path):
    words = ["launch/apptainer_ddp.sh", "train_ddp", "--batch-size", "64"]
    done = submit(tmp_path, "runs/none", "1,2,8", "4", *words)
    command = "launch/apptainer_ddp.sh train_ddp --batch-size 64 --out runs/none"
    assert done.stdout.splitlines() == [
        f"sbatch --nodes=1 --ntasks-per-node=1 {command}/1-ranks",
        f"sbatch --nodes=1 --ntasks-per-node=2 {command}/2-ranks",
        f"sbatch --nodes=2 --ntasks-per-node=4 {command}/8-ranks",
        "when the jobs have ended: hpctrain scaling runs/none",
    ]
    # as `module load hpctrain` has them: on the PATH
    done = submit(tmp_path, "runs/none", "1", "4", "sbatch", "train_ddp")
    assert done.stdout.startswith(f"sbatch --nodes=1 --ntasks-per-node=1 {tmp_path}/sbatch train_ddp --out")
    done = submit(tmp_path, "--weak", "--gpus", "runs/none", "8", "4", *words)
    assert (
        "--ntasks-per-node=4 --gpus-per-node=4 launch/apptainer_ddp.sh train_ddp --batch-size 512 --out"
        in done.stdout
    )
    # Slurm 24.11 gives a job of SBATCH_GRES=gpu:2 and --gpus-per-node=1 two GPUs.
    done = submit(tmp_path, "--gpus", "runs/none", "1", "4", *words, SBATCH_GRES="gpu:2")
    assert "--ntasks-per-node=1 --gres=gpu:1 launch/apptainer_ddp.sh" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["runs/none", "1,2"], "give FOLDER RANKS RANKS_PER_NODE LAUNCH_SCRIPT TRAINER"),
        (["runs/none", "1,x", "4", "launch/local.sh", "train_ddp"], "RANKS is '1,x'"),
        (["runs/none", "1", "0", "launch/local.sh", "train_ddp"], "RANKS_PER_NODE is '0'"),
        (["runs/none", "1", "4", "launch/nothing.sh", "train_ddp"], "there is no launch/nothing.sh"),
        (["docs", "1", "4", "launch/local.sh", "train_ddp"], "docs has files already"),
        (["runs/none", "1,6", "4", "launch/local.sh", "train_ddp"], "6 ranks do not fill nodes of 4"),
        (["--weak", "runs/none", "6", "4", "launch/local.sh", "train_ddp"], "--weak needs --batch-size N"),
    ],
)
def test_invalid_use_is_one_line(tmp_path, words, message):
    done = submit(tmp_path, *words)
    assert (
        done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1 and not done.stdout
    )


def test_without_slurm_it_is_one_line(tmp_path):
    for name in ("bash", "ls", "hostname"):
        (tmp_path / name).symlink_to(shutil.which(name))
    words = [SCRIPT, "runs/none", "1", "4", "launch/local.sh", "train_ddp"]
    done = run_command(words, cwd=REPOSITORY, env={"PATH": str(tmp_path)})
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not done.stdout
    assert (
        "there is no sbatch on the PATH of " in done.stderr
        and "a login node of a Slurm cluster" in done.stderr
    )


def test_the_model_of_start_up():
    """The table of benchmarks/scale.md is what the script prints, and the figures of a site count."""

    def rows(*options):
        command = [sys.executable, REPOSITORY / "benchmarks/startup_model.py", *options]
        lines = run_command(command, check=True).stdout.splitlines()
        assert options or "\n".join(lines) in (REPOSITORY / "benchmarks/scale.md").read_text()
        return [
            [float(cell.strip(" s").replace(",", "")) for cell in line.split("|")[1:8]] for line in lines[2:]
        ]

    assert [row[0] for row in rows()] == [8, 512, 4096]
    # 1 GB read by 100 nodes at 10 GB/s; 10 blocks of 100 MB, to 10 nodes each over 1 GB/s, on 2 levels, each
    # written at 1 GB/s
    numbers = ["--read-mb=1000", "--image-mb=1000", "--file-system=10", "--node=1", "--link=1", "--disk=1"]
    numbers += ["--fanout=10"]
    (row,) = rows(
        "--nodes=100",
        "--ranks-per-node=10",
        "--fixed=1",
        "--block-mb=100",
        "--latency-ms=0",
        "--rank-ms=2",
        *numbers,
    )
    assert row == [100, 1000, 10, 1 + 10 * 2 * 1.1, 2, 1 + 10 + 2, 1 + 23 + 1 + 2]


def test_a_script_by_its_name_alone_is_that_of_the_path(tmp_path):
    """Another user could put one into the folder where one stands."""
    for folder in ("here", "bin"):
        (tmp_path / folder).mkdir()
        for name in ("ddp.sh", "sbatch"):
            script = tmp_path / folder / name
            script.write_text(f'#!/bin/sh\necho "{folder}: $*"\n')
            script.chmod(0o755)
    command = [SCRIPT, "runs", "1", "1", "ddp.sh", "train_ddp"]
    env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    done = run_command(command, env=env, cwd=tmp_path / "here")
    assert done.stdout.startswith("bin: ") and f" {tmp_path}/bin/ddp.sh train_ddp" in done.stdout, done


def test_two_launchers_with_one_and_two_ranks_on_the_cluster(cluster):
    home = "/home/alice/hpctrain"
    write_digits(cluster.host_path(f"{home}/scaling-digits"))
    env = {"HPCTRAIN_RUNTIME": "none", "HPCTRAIN_PYTHON_ENV": "/opt/hpctrain", "OMP_NUM_THREADS": "1"}
    trainer = ["train_ddp", "--data=scaling-digits", "--epochs=1", "--batch-size=32"]
    numbers = []
    for name, script in (("srun", "modules_ddp.sh"), ("torchrun", "apptainer_torchrun.sh")):
        words = ["launch/scaling.sh", f"runs/scaling/{name}", "1,2", "1", f"launch/{script}", *trainer]
        submitted = cluster.exec("login", *words, user="alice", cwd=home, env=env).stdout
        numbers += [
            int(line.split()[-1]) for line in submitted.splitlines() if line.startswith("Submitted batch job")
        ]
    assert [cluster.wait(number).state for number in numbers] == ["COMPLETED"] * 4
    scaling.main(ALONE, [str(cluster.host_path(f"{home}/runs/scaling"))])
    rows = json.loads(cluster.host_path(f"{home}/runs/scaling/scaling.json").read_text())
    assert [tuple(row[name] for name in ("launcher", "ranks", "nodes", "batch_size")) for row in rows] == [
        ("srun", 1, 1, 32),
        ("srun", 2, 2, 32),
        ("torchrun", 1, 1, 32),
        ("torchrun", 2, 2, 32),
    ]
    assert 0 < rows[1]["efficiency"] < 3 and 0 < rows[3]["efficiency"] < 3
