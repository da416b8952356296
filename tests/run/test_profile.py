"""--profile: a trace and a page about some steps."""

import gzip
import json
import os
import re
import time

import pytest

from hpctrain.run import profile
from hpctrain.vision.data import Images
from hpctrain.vision.folder import ImageDataset
from tests.helpers import write_digits
from tests.tools import warm_start


def event(start, end, name, category, **more):
    return {"ph": "X", "ts": start * 1e6, "dur": (end - start) * 1e6, "name": name, "cat": category, **more}


def test_exposed_is_communication_beside_which_nothing_is_computed():
    on_cpu = [
        event(0, 4, "aten::mm", "cpu_op"),
        event(1, 2, "aten::resolve_conj", "cpu_op"),  # within the first
        event(3, 9, "gloo:all_reduce", "user_annotation"),
        event(5, 8, "gloo:all_reduce", "user_annotation"),  # another thread
        event(4, 5, "c10d::allreduce_", "cpu_op"),  # only starts it
        event(6, 7, "aten::add_", "cpu_op"),
        event(0, 20, "DistributedDataParallel.forward", "user_annotation"),
        {"ph": "i", "ts": 0, "name": "no duration"},
    ]
    communication, other = profile.find_work(on_cpu, on_gpu=False)
    assert profile.total(communication) == pytest.approx(6)
    assert profile.total([*communication, *other]) - profile.total(other) == pytest.approx(6 - 1 - 1)
    on_gpu = [
        event(0, 4, "sgemm", "kernel"),
        event(0, 9, "aten::mm", "cpu_op"),
        event(3, 6, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "kernel"),
        event(5, 7, "Memcpy HtoD", "gpu_memcpy"),
    ]
    communication, other = profile.find_work(on_gpu, on_gpu=True)
    assert (profile.total(communication), profile.total(other)) == pytest.approx((3, 6))
    assert profile.total([*communication, *other]) - profile.total(other) == pytest.approx(1)


def load_slowly():
    """In a rank: each batch takes a fifth of a second."""

    def slowly(function):
        return lambda *arguments: time.sleep(0.2) or function(*arguments)

    Images.batch, ImageDataset.__getitem__ = slowly(Images.batch), slowly(ImageDataset.__getitem__)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["train_ddp", "train_lightning"])
def test_a_profile_of_two_ranks(tmp_path, trainer):
    data = str(write_digits(tmp_path / "data", 144, 16))
    arguments = [trainer, "--data", data, "--epochs", "1", "--batch-size", "8", "--out"]
    plain, profiled = (
        warm_start.run(warm_start.torchrun_ranks(2, [*arguments, *more], dict(os.environ), setup), tmp_path)
        for more, setup in ((["plain"], None), (["run", "--profile"], load_slowly))
    )
    assert plain.returncode == profiled.returncode == 0, plain.stderr + profiled.stderr
    assert "profile: run/profile/summary.txt" in profiled.stdout
    results = [
        json.loads((tmp_path / name / "result.json").read_text())["weights_sha256"]
        for name in ("plain", "run")
    ]
    assert results[0] == results[1]

    page = (tmp_path / "run/profile/summary.txt").read_text()
    assert page.startswith(f"{trainer} on rank 0 of 2, cpu: steps 11 to 15 since its start, ")
    times = {name: float(ms) for name, ms in re.findall(r"^(\S.*?) {2,}([\d.]+) +[\d.]+ %", page, re.M)}
    assert times["waiting for data"] >= 190
    assert 0 <= times["of it exposed"] <= times["communication"]
    assert times["aten::convolution_backward"] > 0
    assert len(page.splitlines()) < 40
    with gzip.open(tmp_path / "run/profile/trace.json.gz", "rt") as file:
        names = [one["name"] for one in json.load(file)["traceEvents"]]
    assert names.count("Optimizer.step#SGD.step") == profile.STEPS


def test_an_epoch_without_room_for_it_is_said(tmp_path):
    data = str(write_digits(tmp_path / "data", 64, 16))
    arguments = ["train_ddp", "--data", data, "--epochs", "1", "--out", "run", "--profile"]
    done = warm_start.run([warm_start.Rank(arguments, dict(os.environ))], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "no profile: no epoch had 5 steps after the first 10" in done.stdout
    assert not (tmp_path / "run/profile").exists()
