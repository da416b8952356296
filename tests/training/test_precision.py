"""--precision fp16 in every trainer: near fp32, resumed bit for bit, with the same scale on all ranks."""

import inspect
import os
import shutil
import threading
from functools import partial
from pathlib import Path

import pytest
import torch

from hpctrain.checkpoints import checkpoint
from hpctrain.distributed.world import ALONE
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.nlp.parser import check_ranks, parse_options
from hpctrain.nlp.tasks import classify
from hpctrain.training.precision import Scaler, load_scaler, make_autocast, set_precision
from hpctrain.training.strategies.dp import Dp
from hpctrain.vision import recipe
from tests.helpers import write_digits
from tests.nlp.conftest import feature_cache as feature_cache  # a fixture, for each test
from tests.nlp.helpers import TASKS, metrics, result
from tests.nlp.helpers import train as fine_tune
from tests.tools import warm_start
from tests.vision.test_train import HOROVOD_TWO, in_image, run

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
HIGH = 2.0**24  # a scale with which the gradients of the first steps overflow
FP16 = ["--precision", "fp16"]
IMAGES = ["--data", "digits", "--batch-size", "16", "--epochs", "2"]
TEXTS = ["nlp.classify", "--limit", "40", "--batch-size", "8", "--accumulate", "2", "--epochs", "2"]
TRAINERS = {
    "ddp": ["train_ddp", *IMAGES],
    "fsdp": ["train_fsdp", *IMAGES],
    "lightning": ["train_lightning", *IMAGES],
    "classify": TEXTS,
    "classify-fsdp": [*TEXTS, "--strategy", "fsdp"],
}


def begin_high():
    """In a rank: begin with the scale HIGH, and write the scale after each step into a file of the rank."""
    begin, update = Scaler.__init__, Scaler.update

    def init(self, *arguments, **options):
        begin(self, *arguments, **options)
        self._init_scale = HIGH

    def write(self, *arguments):
        update(self, *arguments)
        with Path(f"scales-{os.environ['RANK']}").open("a") as file:
            print(self.get_scale(), file=file)

    Scaler.__init__, Scaler.update = init, write


def begin_high_and_compile():
    """In a rank: see begin_high(), and compile without the kernels of C++, which take minutes."""
    begin_high()
    torch.compile = partial(torch.compile, backend="aot_eager")


def fill_with_nan(tensor, **options):
    """torch.empty_like(), in memory that had other values before."""
    return torch.full_like(tensor, torch.nan if tensor.is_floating_point() else 0, **options)


def begin_high_in_memory_of_nan():
    """In a rank: see begin_high() and fill_with_nan()."""
    begin_high()
    torch.empty_like = fill_with_nan


def overflow_on_rank_1():
    """In a rank: in the third step, only the gradients of rank 1 overflow."""
    scale, done = Scaler.scale, []

    def spoil(self, loss):
        if loss.requires_grad:
            done.append(0)
        return scale(self, loss) * (torch.inf if len(done) == 3 and os.environ["RANK"] == "1" else 1)

    Scaler.scale = spoil


def lose_a_loss():
    """In a rank: the loss of rank 1 is NaN in the third step."""
    from hpctrain.vision import train, train_lightning

    compute, done = train.cross_entropy, []

    def spoil(logits, labels, **options):
        loss = compute(logits, labels, **options)
        if loss.requires_grad and len(labels) > 1:  # not in an evaluation, nor for settle_buckets()
            done.append(0)
        return loss * (torch.nan if len(done) == 3 and os.environ["RANK"] == "1" else 1)

    for module in (train, train_lightning):
        module.cross_entropy = spoil


def train(folder: Path, name, *words, setup=None, ranks=2):
    folder.mkdir(exist_ok=True)
    if not (folder / "digits").exists():
        write_digits(folder / "digits", train=96, test=32)
    arguments = [*TRAINERS[name], *words, "--out", "run"]
    started = warm_start.torchrun_ranks(ranks, arguments, dict(os.environ), setup)
    done = warm_start.run(started, folder)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return folder / "run"


def numbers(run):
    """The metrics without what depends on the time."""
    without = ("seconds", "examples_per_s", "peak_memory_mb")
    return [{name: line[name] for name in line if name not in without} for line in metrics(run)]


def scales(folder):
    return [Path(folder, f"scales-{rank}").read_text().split() for rank in (0, 1)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A function: the folder of a run in fp16 that begins with overflows, with checkpoints every 3 steps."""
    runs = {}

    def run_of(name):
        if name not in runs:
            words = ["--checkpoint-every", "3", "--keep-checkpoints", "99"]
            runs[name] = train(tmp_path_factory.mktemp(name), name, *FP16, *words, setup=begin_high)
        return runs[name]

    return run_of


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINERS)
def test_overflows_are_skipped_counted_and_shown(whole, name):
    """On all ranks alike: the scale is halved in each of them, and only there."""
    run = whole(name)
    first, second = scales(run.parent)
    assert first == second
    overflows = result(run)["overflow_steps"]
    assert 3 <= overflows < len(first) and float(first[-1]) == HIGH / 2**overflows
    line = next(line for line in reversed(metrics(run)) if "loss_scale" in line)
    assert (line["loss_scale"], line["overflow_steps"]) == (HIGH / 2**overflows, overflows)
    assert f"overflow_steps {overflows}" in (run / "logs/rank-0000.log").read_text()
    assert "skipped_steps" not in result(run)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINERS)
def test_a_run_that_is_cut_while_the_scale_falls(whole, name, tmp_path):
    """Bit for bit. The resumed run would begin with another scale if the checkpoint had none."""
    run = whole(name)
    cut = tmp_path / "run"
    shutil.copytree(run, cut)
    (cut / "result.json").unlink()
    kept = checkpoint.path_of(cut, 1, step=3)
    for path in checkpoint.list_newest_first(cut):
        if path != kept:
            checkpoint.remove(path)
    assert kept.exists()
    train(tmp_path, name, *FP16, "--resume", "auto")
    assert result(cut)["weights_sha256"] == result(run)["weights_sha256"]
    assert result(cut)["overflow_steps"] == result(run)["overflow_steps"] > 3
    assert numbers(cut) == numbers(run)


@pytest.mark.parametrize("model", recipe.RECIPES)
def test_a_first_step_that_overflows_leaves_no_state(model, monkeypatch):
    """Nor memory without values as momentum, as a fused SGD has it."""
    args = recipe.ImageOptions(model=model, lr=0.1, fast_kernels=True)
    weight = torch.nn.Parameter(torch.ones(100))
    weight.grad = torch.full_like(weight, torch.inf)
    optimizer, scaler = recipe.make_optimizer(args, [weight], "fp16"), Scaler("fp16", CPU)
    scaler.scale(torch.ones(()))
    monkeypatch.setattr(torch, "empty_like", fill_with_nan)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert not any(value.any() for value in optimizer.state[weight].values())


@pytest.mark.slow
def test_fast_kernels_train_after_overflows(tmp_path):
    run = train(tmp_path, "ddp", *FP16, "--fast-kernels", setup=begin_high_in_memory_of_nan, ranks=1)
    assert 3 <= result(run)["overflow_steps"] < 12


@pytest.mark.slow
def test_trainers_agree_bit_for_bit_and_are_near_fp32(whole, tmp_path):
    """FSDP sums the same two terms. With torch's own scale, the losses are near those of fp32."""
    digests = {name: result(whole(name))["weights_sha256"] for name in ("ddp", "lightning", "fsdp")}
    assert len(set(digests.values())) == 1, digests
    halves, full = (train(tmp_path / word, "ddp", "--precision", word, ranks=1) for word in ("fp16", "fp32"))
    assert result(halves)["weights_sha256"] != result(full)["weights_sha256"]
    losses = [[line["train_loss"] for line in metrics(run) if "train_loss" in line] for run in (halves, full)]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
    weights = checkpoint.load(halves / "checkpoints/epoch-0002.pt", CPU)["model"]
    assert all(value.dtype == torch.float32 for value in weights.values())


def test_horovod_has_the_weights_of_ddp(whole, sif, tmp_path):
    """In the image. Its gradients are summed over the ranks before the scaler divides them."""
    write_digits(tmp_path / "digits", train=96, test=32)
    code = "import os, sys\nfrom pathlib import Path\nfrom hpctrain.__main__ import main\n"
    code += (
        f"from hpctrain.training.precision import Scaler\nHIGH = {HIGH}\n{inspect.getsource(begin_high)}\n"
    )
    code += "sys.argv[0] = 'hpctrain'\nbegin_high()\nmain()\n"
    (tmp_path / "high.py").write_text(code)
    launcher = in_image("torchrun", "--nproc-per-node=2", "--no-python", "python", "high.py")
    options = [*IMAGES, *FP16, "--checkpoint-every", 3, "--keep-checkpoints", 99, "--out", "run"]
    done = run(launcher, "train_horovod", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert scales(tmp_path) == scales(whole("ddp").parent)
    assert result(tmp_path / "run")["weights_sha256"] == result(whole("ddp"))["weights_sha256"]
    (tmp_path / "run/result.json").unlink()
    for path in checkpoint.list_newest_first(tmp_path / "run")[:-1]:
        checkpoint.remove(path)
    done = run(HOROVOD_TWO, "train_horovod", *options, "--resume", "auto", cwd=tmp_path)
    assert done.returncode == 0 and "resuming after epoch 0 and 3 steps" in done.stdout, done.stderr
    assert result(tmp_path / "run")["weights_sha256"] == result(whole("ddp"))["weights_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "classify-fsdp"])
def test_compiled_steps_are_scaled_as_others(whole, name, tmp_path):
    compiled = train(tmp_path, name, *FP16, "--compile", setup=begin_high_and_compile)
    ways = [
        [line["train_loss"] for line in metrics(run) if "train_loss" in line]
        for run in (compiled, whole(name))
    ]
    assert ways[0] == pytest.approx(ways[1], rel=0.01)
    assert scales(tmp_path) == scales(whole(name).parent)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINERS)
def test_an_overflow_on_one_rank_skips_the_step_on_all(name, tmp_path):
    run = train(tmp_path, name, *FP16, setup=overflow_on_rank_1)
    assert result(run)["overflow_steps"] == 1
    assert [line["loss_scale"] for line in metrics(run) if "loss_scale" in line][-1] == 2**15


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp", "lightning"])
def test_a_loss_that_is_nan_is_no_overflow(name, tmp_path):
    """--on-nan skip leaves out the step and keeps the scale; without it, the run ends."""
    run = train(tmp_path, name, *FP16, "--on-nan", "skip", setup=lose_a_loss)
    assert result(run)["skipped_steps"] == 1 and "overflow_steps" not in result(run)
    assert next(line for line in metrics(run) if "loss_scale" in line)["loss_scale"] == 2**16
    words = [*TRAINERS[name], *FP16, "--out", "stopped"]
    done = warm_start.run(warm_start.torchrun_ranks(2, words, dict(os.environ), lose_a_loss), tmp_path)
    assert done.returncode == 1 and "train_loss is nan at epoch 1" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_each_task_is_near_fp32(task, tmp_path):
    """With gradients that are accumulated and clipped, and --on-nan skip."""
    words = ["--limit", 24, "--batch-size", 8, "--epochs", 1, "--accumulate", 2, "--on-nan", "skip"]
    words += ["--max-length", 64, "--from-scratch", "tiny"]
    halves, full = (
        fine_tune(task, tmp_path / word, *words, "--precision", word) for word in ("fp16", "fp32")
    )
    assert result(halves)["weights_sha256"] != result(full)["weights_sha256"]
    assert result(halves)["test_loss"] == pytest.approx(result(full)["test_loss"], rel=0.02)
    assert "skipped_steps" not in result(halves)


# --- the choice ---


@pytest.fixture
def gpu(monkeypatch):
    """A function that lets this machine have a GPU that computes in bf16, or one that does not."""

    def have(has_bf16):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100-SXM2-32GB")

    return have


@pytest.mark.parametrize(
    ("wanted", "has_bf16", "said"),
    [
        ("auto", True, "precision bf16, TF32 for convolutions only\n"),
        ("auto", False, "precision fp16 (Tesla V100-SXM2-32GB has neither bf16 nor TF32)\n"),
        ("fp32", False, "precision fp32 (Tesla V100-SXM2-32GB has neither bf16 nor TF32)\n"),
    ],
)
def test_a_gpu_without_bf16_computes_in_fp16(gpu, capsys, wanted, has_bf16, said):
    gpu(has_bf16)
    assert set_precision(wanted, None, ALONE, GPU) == said.split()[1].strip(",")
    assert capsys.readouterr().out == said


def test_a_cpu_computes_in_fp32(capsys):
    assert [set_precision(name, None, ALONE, CPU) for name in ("auto", "bf16", "fp16")] == [
        "fp32",
        "bf16",
        "fp16",
    ]
    assert not capsys.readouterr().out
    assert parse_options(classify.TASK, []).precision == "auto"


def test_tf32_is_one_switch(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    before = torch.get_float32_matmul_precision()
    found = []
    for tf32 in (None, "on", "off"):
        set_precision("fp32", tf32, ALONE, CPU)
        found.append((torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32))
    torch.set_float32_matmul_precision(before)
    assert found == [("highest", True), ("high", True), ("highest", False)]  # the first is torch's default


def test_nothing_is_scaled_in_other_precisions():
    loss = torch.ones(())
    for name in ("fp32", "bf16"):
        scaler = Scaler(name, CPU)
        assert scaler.scale(loss) is loss and scaler.state_dict() == {}
    with make_autocast("fp32", CPU):
        assert not torch.is_autocast_enabled("cpu")
    with make_autocast("fp16", CPU):
        assert torch.get_autocast_dtype("cpu") == torch.float16


def test_the_threads_of_data_parallel_have_the_precision():
    """As parallel_apply() calls a replica: in a thread, with the default of torch, which is bf16 on a CPU."""
    model, found = torch.nn.Linear(2, 2), []

    def compute():
        with torch.autocast("cpu", enabled=True):
            found.append(model(torch.ones(1, 2)).dtype)

    for name in ("fp32", "fp16"):
        Dp(ALONE, CPU, name).wrap(model)
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
    assert found == [torch.bfloat16, torch.float16]


def test_cuda_graphs_are_refused():
    args = parse_options(classify.TASK, ["--cuda-graphs", *FP16])
    message = "--cuda-graphs is not for --precision fp16: leave it out, or give --precision fp32"
    with pytest.raises(UsageError, match=f"^{message}$"):
        check_ranks(args, ALONE, GPU)


# --- checkpoints ---


def test_a_scaler_goes_on_from_a_checkpoint():
    before, after = Scaler("fp16", CPU), Scaler("fp16", CPU)
    before._init_scale, before._init_growth_tracker = 512.0, 7
    load_scaler(after, before.state_dict(), Path("x.pt"))
    assert (after.get_scale(), after._get_growth_tracker()) == (512.0, 7)
    assert after.get_growth_interval() == 2000
    for state in (None, {}):  # of a run in fp32, with --force
        load_scaler(after, state, Path("x.pt"))
    assert after.get_scale() == 512.0
    load_scaler(Scaler("fp32", CPU), before.state_dict(), Path("x.pt"))


@pytest.mark.parametrize(
    "entry",
    [
        "text",
        [1.0],
        {"scale": 1.0},
        {"scale": "1e999", "_growth_tracker": 0},
        {"scale": -1.0, "_growth_tracker": 0},
        {"scale": float("nan"), "_growth_tracker": 0},
        {"scale": 1.0, "_growth_tracker": torch.ones(2)},
    ],
)
def test_the_entry_of_another_kind_is_one_line(entry):
    with pytest.raises(HpctrainError, match=r"^x\.pt: not the state of a gradient scaler \(.*another run"):
        load_scaler(Scaler("fp16", CPU), entry, Path("x.pt"))
