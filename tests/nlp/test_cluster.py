"""The fine-tuning tasks as users run them: with sbatch, in the container, four ranks on two nodes."""

import json
import os
import shutil

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from hpctrain.checkpoints import checkpoint
from hpctrain.nlp.tasks import instruct
from tests.helpers import DATA
from tests.launch.helpers import HOME, folder, job
from tests.nlp.models.test_tensor_parallel import make_model
from tests.tools import warm_start

TASKS = ("classify", "pair", "ner", "qa", "generate")
# Small, so that scoring takes seconds, but large enough that batches differ between four ranks and one.
FIVE = {
    "classify": ("nsmc", ["--limit", "400"]),
    "pair": ("klue/klue-nli-v1.1/klue-nli-v1.1_dev.json", ["--limit", "200"]),
    "ner": ("klue/klue-ner-v1.1/klue-ner-v1.1_dev.tsv", ["--limit", "300"]),
    "qa": ("korquad_v1/KorQuAD_v1.0_dev.json", ["--limit", "100"]),
    "generate": ("nsmc", ["--limit", "200"]),
}

MAIN_ROAD = pytest.mark.main_road("text classification, sentence pairs, named entities")


def scores(run):
    return {
        name: value
        for name, value in json.loads((run / "result.json").read_text()).items()
        if name.startswith("test_")
    }


@pytest.mark.parametrize(
    "task", [pytest.param(task, marks=MAIN_ROAD if task in ("qa", "generate") else ()) for task in TASKS]
)
def test_four_ranks_on_two_nodes_score_as_one_process_does(cluster, task, tmp_path):
    name, options = FIVE[task]
    if not (DATA / name).exists():
        pytest.skip(f"no {name} in {DATA}")
    options = [*options, "--from-scratch", "tiny", "--batch-size", "16"]
    ended, output = job(
        cluster,
        f"nlp.{task}",
        *options,
        "--data",
        f"/project/data/{name}",
        "--epochs",
        "1",
        "--out",
        f"runs/{task}",
    )
    assert ended.state == "COMPLETED" and "4 ranks on 2 nodes (slurm)" in output, output
    of_four = scores(folder(cluster, f"runs/{task}"))

    alone = [f"nlp.{task}", "--data", DATA / name, "--epochs", "0", "--out", "run", *options[:2]]
    alone += ["--model", folder(cluster, f"runs/{task}/model")]
    done = warm_start.run(
        [warm_start.Rank(list(map(str, alone)), os.environ | {"HPCTRAIN_CACHE": str(tmp_path)})], tmp_path
    )
    assert done.returncode == 0, done.stderr
    of_one = scores(tmp_path / "run")
    assert of_four.keys() == of_one.keys() and len(of_one) > 1
    for name, value in of_one.items():
        assert of_four[name] == pytest.approx(value, rel=1e-6, abs=1e-6), name


@pytest.mark.main_road("text classification, sentence pairs, named entities")
def test_sample_training_and_predict_need_only_the_image(cluster):
    """The model that comes out answers in the container."""
    ended, output = job(cluster, "nlp.ner", "--epochs", "1", "--out", "runs/sample")
    assert ended.state == "COMPLETED", output
    command = [
        "apptainer",
        "exec",
        "hpctrain-cpu.sif",
        "hpctrain",
        "predict",
        "runs/sample",
        "김민수는 서울에 산다.",
    ]
    done = cluster.exec("login", *command, user="alice", cwd=HOME)
    assert json.loads(done.stdout)["text"] == "김민수는 서울에 산다."


def test_a_sharded_model_on_two_nodes(cluster):
    """FSDP: every node writes the parts of its ranks, and the model is whole."""
    ended, output = job(cluster, "nlp.classify", "--strategy", "fsdp", "--epochs", "1", "--out", "runs/fsdp")
    assert ended.state == "COMPLETED" and "4 ranks on 2 nodes (slurm)" in output, output
    run = folder(cluster, "runs/fsdp")
    assert len(list((run / "checkpoints/epoch-0001.pt").iterdir())) == 4 and checkpoint.is_intact(
        run / "checkpoints/epoch-0001.pt"
    )
    saved = AutoModelForSequenceClassification.from_pretrained(run / "model").state_dict()
    whole = checkpoint.load(run / "checkpoints/epoch-0001.pt", torch.device("cpu"))["model"]
    assert all(torch.equal(saved[name], weight) for name, weight in whole.items())


@pytest.fixture(scope="module")
def instruct_words(cluster):
    """The words of a run of nlp.instruct on a tiny model."""
    make_model(folder(cluster, "qwen3"), "qwen3")
    shutil.copytree(instruct.TASK.samples, folder(cluster, "instruct"))
    options = ["--data=instruct", "--epochs=1", "--limit=64", "--batch-size=8", "--max-length=64"]
    return ["nlp.instruct", "--model", "./qwen3", *options]


@pytest.mark.parametrize(
    ("options", "alone"),
    [
        pytest.param(["--tensor-parallel", "2"], [], id="tensor-parallel", marks=MAIN_ROAD),
        pytest.param(["--strategy", "fsdp", "--lora-rank", "4"], ["--lora-rank", "4"], id="lora"),
    ],
)
def test_a_model_split_over_two_nodes_gives_the_loss_of_one_process(
    cluster, instruct_words, request, options, alone
):
    """Tensor parallelism within a node and FSDP between the nodes; and an adapter over a sharded model."""
    run = f"runs/{request.node.callspec.id}"
    ended, output = job(cluster, *instruct_words, *options, "--out", run)
    assert ended.state == "COMPLETED" and "4 ranks on 2 nodes (slurm)" in output, output
    cwd = folder(cluster, ".")
    done = warm_start.run(
        [warm_start.Rank([*instruct_words, *alone, "--out", f"{run}-alone"], dict(os.environ))], cwd
    )
    assert done.returncode == 0, done.stderr
    of_four, of_one = (scores(cwd / each)["test_loss"] for each in (run, f"{run}-alone"))
    assert of_four == pytest.approx(of_one, rel=1e-4)
    assert (cwd / run / "model/adapter_model.safetensors").exists() == bool(alone)
