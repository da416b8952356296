"""benchmarks/gpu.py, without a GPU: it runs whole in the image, and sees wrong results."""

import json
import os
import shutil
import sys

import pytest
import torch
from slurm_cluster import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks"))
import gpu


@pytest.mark.slow
def test_a_dry_run_in_the_image(site):
    here = site.host_path("/project/gpu")
    here.mkdir(mode=0o777)
    here.chmod(0o777)
    for name in ("gpu.py", "nlp.py"):
        shutil.copy(REPOSITORY / "benchmarks" / name, here)
    command = ["apptainer", "exec", "--bind", "/project", "/project/hpctrain-cpu.sif", "python", "gpu.py"]
    refused = site.exec("n1", *command, cwd="/project/gpu", user="alice", check=False)
    assert (
        "gpu.py: torch sees no GPU here: run it on a node with one, or with --dry-run on a CPU\n"
        in refused.stderr
    )
    assert refused.returncode == 1
    done = site.exec("n1", *command, "--dry-run", cwd="/project/gpu", user="alice", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((here / "runs/gpu/gpu.json").read_text())
    cases = {case["case"]: case["figures"] for case in record["cases"]}
    trainers = ["train_ddp", "train_fsdp", "train_lightning", "train_horovod"]
    assert {f"{trainer}, CPU, GPU, resumed" for trainer in trainers} < set(cases)
    assert {
        f"nlp.{task}, CPU and GPU" for task in ("classify", "pair", "ner", "qa", "generate", "instruct")
    } < set(cases)
    assert cases["ResNet-50, 224 pixels"]["examples_per_s"] > 0
    assert cases["DDP, one rank of NCCL"] == {"ranks": 1}
    assert len(cases["BERT-base, reviews"]) >= 3
    assert cases["BERT-large, 384 tokens"]["padding_share"] < 0.25
    assert cases["Llama 1B, LoRA"]["tokens_per_s"] > 0
    assert (here / "runs/gpu/gpu.png").stat().st_size > 10_000
    shutil.rmtree(here)


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

    monkeypatch.setattr(gpu, "train", train)
    difference, digest = 0.001, "a"
    assert gpu.check_trainer(tmp_path / "1", "train_ddp", "cuda")["largest_difference"] == pytest.approx(
        0.001, rel=1e-3
    )
    difference = 0.1
    with pytest.raises(gpu.Failed, match=r"a weight differs by 0\.1 from the CPU's, more than 0\.01"):
        gpu.check_trainer(tmp_path / "2", "train_ddp", "cuda")
    difference, digest = 0.0, "b"
    with pytest.raises(gpu.Failed, match="a resumed run has other weights"):
        gpu.check_trainer(tmp_path / "3", "train_ddp", "cuda")


def test_the_start_of_a_run_is_no_part_of_its_speed(tmp_path):
    figures = {"examples_per_s": 50.0, "tflops_per_gpu": 5.0, "mfu": 0.2, "step_ms_p50": 10.0}
    (tmp_path / "result.json").write_text(json.dumps({"speed": figures}))
    rates = [10.0, 90.0, 100.0, 110.0]  # of the first line, and of the others
    lines = [{"step": 1, "test_loss": 1.0}, *({"examples_per_s": rate} for rate in rates)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    warm = {"examples_per_s": 100.0, "tflops_per_gpu": 10.0, "mfu": 0.4, "step_ms_p50": 10.0}
    assert gpu.speed(tmp_path) == pytest.approx(warm)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(lines[1]) + "\n")
    with pytest.raises(gpu.Failed, match="too few steps"):
        gpu.speed(tmp_path)


def test_a_command_that_fails_is_named():
    with pytest.raises(gpu.Failed, match="exit code 3: last words"):
        gpu.run([sys.executable, "-c", "print('last words'); raise SystemExit(3)"])
    with pytest.raises(gpu.Failed, match=r"exit code 3: ValueError: the reason$"):
        gpu.run(
            [
                sys.executable,
                "-c",
                "print('ValueError: the reason'); print('=====\\n' * 9); raise SystemExit(3)",
            ]
        )


def test_a_second_run_does_what_failed_or_is_missing_if_it_is_of_the_same_gpu_and_versions(tmp_path):
    record = {"device": "NVIDIA H200", "command": [], "versions": {"torch": "2.13.0"}, "revision": "a"}
    path = tmp_path / "gpu.json"
    assert gpu.read_earlier(path, record) == []
    passed, failed = (
        {"case": "one", "figures": {}, "seconds": 1.0},
        {"case": "two", "failed": "error", "seconds": 1.0},
    )
    path.write_text(json.dumps(record | {"cases": [passed, failed]}))
    assert gpu.read_earlier(path, record) == [passed]
    for other in ({"device": "NVIDIA A100"}, {"revision": "b"}):
        assert gpu.read_earlier(path, record | other) == []
    for content in ("", "[]", "{", json.dumps(record), json.dumps(record | {"cases": [{"case": "one"}]})):
        path.write_text(content)
        with pytest.raises(
            SystemExit, match=r"^gpu\.py: cannot continue .*gpu\.json .*: remove it, or give another"
        ):
            gpu.read_earlier(path, record)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(SystemExit, match="not a plain file"):
        gpu.read_earlier(path, record)


def test_the_speed_of_each_way_is_read(monkeypatch):
    ways = [
        "(a) tutorial",
        "(b3) Trainer, group_by_length, torch_compile",
        "(e2) hpctrain --compile --cuda-graphs",
    ]
    lines = [
        f"turn {turn}  {way:30} examples/s {10 * number + turn}  share 0.9"
        for number, way in enumerate(ways)
        for turn in (1, 3)
    ]
    monkeypatch.setattr(gpu, "run", lambda *_: "\n".join(lines))
    figures = gpu.texts(None, "cuda", False)
    assert figures == {
        **{f"{way}, examples/s": 10 * number + 2 for number, way in enumerate(ways)},
        "times the tutorial": 11,
        "times the best other": 22 / 12,
    }
