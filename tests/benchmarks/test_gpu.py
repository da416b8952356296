"""benchmarks/gpu.py, without a GPU: it runs whole in the image, and sees wrong results."""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch
from slurm_cluster import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks"))
import gpu
import gpu_checks

from tests.helpers import run_command

PROGRAMS = ("gpu.py", "gpu_speed.py", "gpu_checks.py", "nlp.py", "vision.py")


def test_a_dry_run_in_the_image(site):
    here = site.host_path("/project/gpu")
    here.mkdir(mode=0o777)
    here.chmod(0o777)
    for name in PROGRAMS:
        shutil.copy(REPOSITORY / "benchmarks" / name, here)
    command = ["apptainer", "exec", "--bind", "/project", "/project/hpctrain-cpu.sif", "python", "gpu.py"]
    refused = site.exec("n1", *command, cwd="/project/gpu", user="alice", check=False)
    assert refused.returncode == 1 and re.search("^gpu.py: .*--dry-run", refused.stderr, re.M)
    for options in (["--budget", "60"], []):  # cut off, and continued
        done = site.exec("n1", *command, "--dry-run", *options, cwd="/project/gpu", user="alice", check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        record, *lines = [json.loads(line) for line in (here / "runs/gpu/gpu.jsonl").read_text().splitlines()]
        assert "a dry run" in record["device"]
        page = (here / "runs/gpu/gpu.md").read_text()
        assert page.startswith(f"# {record['device']}")
        assert (here / "runs/gpu/gpu.png").read_bytes().startswith(b"\x89PNG")
    assert {line["case"] for line in lines if "done" in line} == {case.name for case in gpu.CASES}
    assert "\n## Failed" not in page
    ways = {line["way"] for line in lines if line["case"] == "checks" and "figures" in line}
    trainers = ["train_ddp", "train_fsdp", "train_lightning", "train_horovod"]
    assert {f"{trainer}, CPU, GPU, resumed" for trainer in trainers} < ways
    assert {f"nlp.{task}, CPU and GPU" for task in gpu_checks.TASKS} < ways
    for case in gpu.CASES:
        if case.unit:
            speeds = [
                line["figures"]["a second"]
                for line in lines
                if line["case"] == case.name and "figures" in line
            ]
            assert speeds and min(speeds) > 0, case
            assert f"## {case.title}\n" in page
    assert page.count("reached |\n") == len(gpu.GOALS), page
    shutil.rmtree(here)


@pytest.mark.slow
@pytest.mark.main_road
def test_whatever_ends_it_leaves_a_table_and_the_next_one_goes_on(tmp_path):
    command = [sys.executable, "benchmarks/gpu.py", "--dry-run", "--only", "machine", "--only", "lora"]
    command += ["--out", tmp_path]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=REPOSITORY, env=env, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if "done in" in line:  # of the machine
            break
    deadline = time.monotonic() + 60
    while not (tmp_path / "gpu.png").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    children = run_command(["pgrep", "-P", str(process.pid)], check=True).stdout.split()
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{child}").exists() for child in children) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert children and not any(Path(f"/proc/{child}").exists() for child in children)
    with (tmp_path / "gpu.jsonl").open("a") as file:
        file.write('{"case": "lora", "key')  # killed within a line
    assert "## The machine\n" in (tmp_path / "gpu.md").read_text()
    done = run_command([*command, "--budget", "0"], cwd=REPOSITORY, env=env, check=True)
    assert re.search("0 of 1 .*--budget 0 ", done.stdout)
    _, *lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert [line["case"] for line in lines] == ["machine", "machine"]
    assert "## The machine\n" in (tmp_path / "gpu.md").read_text()


def make_results(tmp_path, lines, keys=None):
    """Results with these lines of (case, way, turn, what)."""
    keys = keys or {case.name: "k" for case in gpu.CASES}
    record = {"device": "NVIDIA H200", "date": "2026-11-27", "versions": {"torch": "2"}, "command": "gpu.py"}
    record["revision"] = "abc1234"
    text = [
        record,
        *({"case": case, "key": "k", "way": way, "turn": turn} | what for case, way, turn, what in lines),
    ]
    (tmp_path / "gpu.jsonl").write_text("".join(json.dumps(line) + "\n" for line in text))
    return gpu.Results(tmp_path, record, keys)


def test_what_is_measured_again(tmp_path):
    speed = {"figures": {"a second": 1.0}}
    lines = [
        ("lora", "one", 1, speed), ("lora", "", 0, {"done": True}),
        ("whole", "one", 1, speed),  # not done
        ("images", "one", 1, {"failed": "error"}), ("images", "", 0, {"done": True}),
    ]  # fmt: skip
    assert {line["case"] for line in make_results(tmp_path, lines).lines} == {"lora"}
    missing = make_results(tmp_path, lines).missing(["lora", "whole", "images"])
    assert [case.name for case in missing] == ["whole", "images", "whole-compiled"]
    other = {case.name: "of other code" for case in gpu.CASES}
    assert make_results(tmp_path, lines, other).lines == []
    for content in ("", "[]\n", "{}\n[]\n", '{"device": "NVIDIA H200"}\n{"case": "lora"}\n'):
        (tmp_path / "gpu.jsonl").write_text(content)
        with pytest.raises(SystemExit, match=r"gpu\.jsonl"):
            gpu.read_earlier(tmp_path / "gpu.jsonl", {"device": "NVIDIA H200"}, other)
    (tmp_path / "gpu.jsonl").unlink()
    os.mkfifo(tmp_path / "gpu.jsonl")
    with pytest.raises(SystemExit, match=r"gpu\.jsonl"):
        gpu.read_earlier(tmp_path / "gpu.jsonl", {"device": "NVIDIA H200"}, other)


def test_the_table_compares_with_the_goals(tmp_path):
    lines = [
        *(("whole", way, turn, {"figures": {"a second": speed + turn, "ms a step": 1.0, "mfu": 0.5}})
          for way, speed in ((gpu.LIGER, 100.0), ("hpctrain", 104.0)) for turn in (1, 2, 3)),
        ("whole-compiled", "hpctrain --compile", 1, {"figures": {"a second": 204.0, "ms a step": 1.0}}),
        ("images", "hpctrain --compile", 1, {"figures": {"a second": 7000.0, "ms a step": 1.0}}),
        ("images", "AMP", 1, {"failed": "no memory"}),
    ]  # fmt: skip
    lines += [(name, "", 0, {"done": True}) for name in ("whole", "whole-compiled")]
    results = make_results(tmp_path, lines)
    for case, way, turn, what in lines:
        if case == "images":
            results.add(
                next(each for each in gpu.CASES if each.name == case), {"way": way, "turn": turn} | what
            )
    results.show()
    page = (tmp_path / "gpu.md").read_text()
    assert "| hpctrain | 3 | 106 (105 to 107) | 1.0 (1.0 to 1.0) |  |  | 50.0% |\n" in page
    assert f" | hpctrain: 106 | {gpu.LIGER}: 102 | 1.04 | 1.1: not reached |\n" in page
    assert "hpctrain --compile: 204" not in page  # compiled, beside what is not
    assert "| 0.88 | 0.9: not reached |\n" in page
    assert "- images AMP: no memory\n" in page
    assert (tmp_path / "gpu.png").stat().st_size > 10_000


def test_the_key_of_a_case_follows_its_own_code(tmp_path, monkeypatch):
    for name in PROGRAMS:
        shutil.copy(REPOSITORY / "benchmarks" / name, tmp_path)
    monkeypatch.setattr(gpu, "HERE", tmp_path)
    args = argparse.Namespace(data=None, dry_run=False)
    before = gpu.make_keys(args, "NVIDIA H200")
    (tmp_path / "gpu_checks.py").write_text("")
    after = gpu.make_keys(args, "NVIDIA H200")
    assert {name for name in before if before[name] != after[name]} == {"checks"}
    assert set(before.values()).isdisjoint(gpu.make_keys(args, "NVIDIA H100").values())


@pytest.mark.slow
def test_the_bundle_has_what_a_machine_without_a_network_needs(tmp_path):
    repository = tmp_path / "hpctrain"
    for name in ("benchmarks", "src", "containers"):
        shutil.copytree(REPOSITORY / name, repository / name)
    reviews = tmp_path / "nsmc"
    reviews.mkdir()
    command = [repository / "benchmarks/gpu_bundle.sh", reviews]
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    refused = run_command(command, env=env, check=False)
    assert refused.returncode == 1 and "ratings_train.txt" in refused.stderr
    assert not any((repository / "build").iterdir())
    for name in ("train", "test"):
        (reviews / f"ratings_{name}.txt").write_text(
            "id\tdocument\tlabel\n" + "1\tgood film\t1\n2\tbad\t0\n" * 40
        )
    run_command(command, env=env, check=True)
    moved = (repository / "build/gpu").rename(tmp_path / "elsewhere")
    shutil.rmtree(repository)
    size = sum(path.stat().st_size for path in moved.rglob("*"))
    assert size < 60e6
    done = run_command(
        [moved / "run.sh", "--dry-run", "--only", "reviews-compiled"],
        env=env | {"OMP_NUM_THREADS": "1"}, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search("1 of 1 .*0 failed", done.stdout)
    assert (moved / "packages/liger_kernel").is_dir()


def test_wrong_results_are_seen(tmp_path, monkeypatch):
    def train(folder, trainer, device, *options, **variables):
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        (folder / "result.json").touch()
        shift = {"cpu": 0.0, "cuda": difference, "parts": difference}.get(folder.name, 0.0)
        for epoch in (1, 2):
            torch.save(
                {"model": {"weight": torch.ones(2) + shift}}, folder / f"checkpoints/epoch-000{epoch}.pt"
            )
        return {"test_accuracy": 0.9, "weights_sha256": digest if "--resume" in options else "a"}

    monkeypatch.setattr(gpu_checks, "train", train)
    difference, digest = 0.001, "a"
    checked = gpu_checks.check_trainer(tmp_path / "1", "train_ddp", "cuda")
    assert checked["largest_difference"] == pytest.approx(0.001, rel=1e-3)
    difference = 0.1
    with pytest.raises(gpu_checks.Failed, match=r"0\.1 .* 0\.01"):
        gpu_checks.check_trainer(tmp_path / "2", "train_ddp", "cuda")
    difference, digest = 0.0, "b"
    with pytest.raises(gpu_checks.Failed, match="resumed"):
        gpu_checks.check_trainer(tmp_path / "3", "train_ddp", "cuda")


def test_a_command_that_fails_is_named():
    with pytest.raises(gpu_checks.Failed, match="3: last words"):
        gpu_checks.run([sys.executable, "-c", "print('last words'); raise SystemExit(3)"])
    with pytest.raises(gpu_checks.Failed, match=r"3: ValueError: the reason$"):
        gpu_checks.run(
            [
                sys.executable,
                "-c",
                "print('ValueError: the reason'); print('=====\\n' * 9); raise SystemExit(3)",
            ]
        )


def test_the_page_of_the_h200_is_made_of_its_record(tmp_path):
    record, *lines = map(json.loads, (REPOSITORY / "benchmarks/gpu-h200.jsonl").read_text().splitlines())
    results = gpu.Results(tmp_path, record, {})
    results.lines = lines
    assert gpu.format_page(results) == (REPOSITORY / "benchmarks/gpu-h200.md").read_text()


def test_a_case_with_fewer_turns_is_not_done(tmp_path, monkeypatch):
    """As when a way fails in its second turn."""
    results = make_results(tmp_path, [])
    case = next(case for case in gpu.CASES if case.turns == 3)
    turn = {"way": "hpctrain", "turn": 1, "figures": {"a second": 1.0, "ms a step": 1.0}}
    child = types.SimpleNamespace(go=lambda: None, lines=lambda deadline: [turn, turn], end=lambda: None)
    monkeypatch.setattr(gpu, "Child", lambda *_: child)
    gpu.measure([case], argparse.Namespace(dry_run=False), results, 0.0, "")
    assert results.failures()[0]["failed"] == "fewer than 3 turns of hpctrain"
    assert case in results.missing([case.name])
