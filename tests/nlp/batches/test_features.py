"""Features: batches of them, and their cache."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hpctrain.distributed.world import ALONE
from hpctrain.files.trust import hold_folder
from hpctrain.nlp.batches import features
from hpctrain.nlp.batches.features import Features
from hpctrain.nlp.data.splits import load_splits
from hpctrain.nlp.models import initial_model
from hpctrain.nlp.models.scratch import create_model
from hpctrain.nlp.models.tokenizer import load_tokenizer
from hpctrain.nlp.parser import parse_options
from hpctrain.nlp.training.steps import Steps
from tests.nlp.helpers import TASKS


def test_batches_are_padded_to_a_multiple():
    features = Features.from_lists({"input_ids": [[1, 2, 3], [4]]}, {"units": [1, 1]})
    batch = features.batch(torch.tensor([0, 1]), {"input_ids": 9}, round_up_to=64)
    assert batch.tokens["input_ids"].tolist() == [[1, 2, 3, 9, 9, 9, 9, 9], [4, 9, 9, 9, 9, 9, 9, 9]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0]]
    # --max-length, beyond which a model may have no positions
    batches = [features.batch(torch.tensor([0, 1]), {}, most) for most in (0, 3, 5)]
    assert [batch.attention_mask.shape[1] for batch in batches] == [3, 3, 5]


@pytest.mark.parametrize("task", TASKS)
def test_padding_does_not_change_the_output(task, tmp_path):
    """A text gets the same output alone and in a batch with a longer one."""
    examples = sorted(
        load_splits(TASKS[task].TASK, None)["train"][:20],
        key=lambda x: len("".join(TASKS[task].TASK.get_texts(x))),
    )
    examples = [examples[0], examples[-1]]
    module = TASKS[task].TASK
    create_model(
        tmp_path / "model", "tiny", module.kind, [t for x in examples for t in module.get_texts(x)], 1, 512
    )
    tokenizer = load_tokenizer(tmp_path / "model")
    labels = module.collect_labels(examples)
    args = parse_options(module, ["--epochs", "0"])
    model = initial_model.load_model(module, tmp_path / "model", tokenizer, labels, args).eval()
    made = module.tokenize(tokenizer, examples, labels, module.max_length, module.stride)
    run = SimpleNamespace(world=ALONE, device=torch.device("cuda"))
    steps = Steps(module, model, labels, args, run)
    padding = {**module.padding, "input_ids": tokenizer.pad_token_id}
    with torch.no_grad():
        alone, both = (
            steps.forward(model, made.batch(torch.tensor(rows), padding))
            for rows in ([0], [0, len(made.lengths) - 1])
        )
    first = alone.start_logits if task == "qa" else alone.logits
    beside = both.start_logits if task == "qa" else both.logits
    width = () if task in ("classify", "pair") else (slice(None, first.shape[1]),)
    assert made.lengths[-1] > made.lengths[0]
    assert torch.allclose(beside[(slice(0, 1), *width)], first, atol=1e-5)
    # on a GPU, where lengths are rounded up, the loss is the same
    losses = {}
    for device in ("cpu", "cuda"):
        run.device = torch.device(device)
        steps = Steps(module, model, labels, args, run)
        steps.add_set("test", examples, made, padding)
        (batch,) = steps._sets["test"][-1]
        with torch.no_grad():
            losses[batch.attention_mask.shape[1]] = module.compute_loss(
                steps.forward(model, batch), batch
            ).item()
    longest = int(made.lengths.max())
    assert list(losses) == list(dict.fromkeys([longest, min(module.max_length, -(-longest // 8) * 8)]))
    assert max(losses.values()) - min(losses.values()) < 1e-5


def test_cache_key_depends_on_text_label_tokenizer_length_stride_and_task():
    """Without any one of them in the key, a run would train on the wrong features."""
    rows = [("1", "글", "0"), ("2", "둘", "1")]
    parts = ["classify", '{"vocab": 1}', ["0", "1"], 128, 0, rows]
    changed = [
        ["pair", *parts[1:]],
        [parts[0], '{"vocab": 2}', *parts[2:]],
        [*parts[:2], ["1", "0"], *parts[3:]],
        [*parts[:3], 64, *parts[4:]],
        [*parts[:4], 16, parts[5]],
        [*parts[:5], [("1", "글", "1"), rows[1]]],
        [*parts[:5], rows[:1]],
        [*parts[:5], rows[::-1]],
        [*parts[:5], [("1", "글\0('2'", "0"), rows[1]]],
    ]
    keys = [features.make_cache_key(*each) for each in [parts, *changed]]
    assert len(set(keys)) == len(keys) and keys[0] == features.make_cache_key(*parts)


MAKE = """
import sys, time
from pathlib import Path
from hpctrain.nlp.batches.features import Features, load_or_make
from hpctrain.distributed.rendezvous import process_group
from hpctrain.distributed.device import choose_device
from hpctrain.distributed.world import detect
world = detect()
def make():
    with Path(sys.argv[1]).open("a") as file:
        file.write(f"rank {world.rank}\\n")
    time.sleep(1)
    return Features.from_lists({"input_ids": [[1, 2, 3], [4]]}, {"units": [1, 1]})
with process_group(world, choose_device(world, "cpu")):
    found = load_or_make("the key", make, world)
assert found.tokens["input_ids"].tolist() == [1, 2, 3, 4]
"""


@pytest.mark.slow
def test_one_rank_of_a_job_tokenizes_while_another_job_does_the_same(tmp_path):
    (tmp_path / "make.py").write_text(MAKE)
    env = os.environ | {"HPCTRAIN_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "make.py"]
    jobs = [
        subprocess.Popen([*command, name], cwd=tmp_path, env=env, stderr=subprocess.PIPE)
        for name in ("first", "second")
    ]
    errors = [job.communicate()[1].decode()[-3000:] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], "\n".join(errors)
    for name in ("first", "second"):
        made = (tmp_path / name).read_text().splitlines() if (tmp_path / name).exists() else []
        assert made in (["rank 0"], [])
    assert (tmp_path / "first").exists() or (tmp_path / "second").exists()
    assert [path.name for path in (tmp_path / "cache/features").iterdir()] == ["the key"]


def test_features_that_another_job_wrote_meanwhile_are_not_replaced(feature_cache):
    """Its ranks have mapped the files: on NFS, reading a removed one fails."""

    def make():
        features.load_or_make(
            "twice", lambda: features.Features.from_lists({"input_ids": [[1]]}, {"units": [1]}), ALONE
        )
        inodes.append((feature_cache / "twice/starts.npy").stat().st_ino)
        return features.Features.from_lists({"input_ids": [[1]]}, {"units": [1]})

    inodes = []
    made = features.load_or_make("twice", make, ALONE)
    assert made.tokens["input_ids"].tolist() == [1]
    assert [(feature_cache / "twice/starts.npy").stat().st_ino] == inodes
    assert not list(feature_cache.glob(".twice*"))


def test_what_killed_jobs_have_left_in_the_cache_is_removed_after_a_day(feature_cache):
    """A job of today may still be writing."""
    left = [feature_cache / f".{name}.0123456789ab.tmp" for name in ("yesterday", "today")]
    for folder in left:
        folder.mkdir(parents=True)
        (folder / "starts.npy").touch()
    os.utime(left[0], (time.time() - 90_000,) * 2)
    features.load_or_make(
        "new", lambda: features.Features.from_lists({"input_ids": [[1]]}, {"units": [1]}), ALONE
    )
    assert [folder.exists() for folder in left] == [False, True]
    shutil.rmtree(left[1])


def test_what_an_unwritable_cache_cannot_take_stays_in_memory(tmp_path, monkeypatch, capsys):
    """A job that started again ended on a node whose /tmp others had filled."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HPCTRAIN_CACHE", str(tmp_path / "file"))
    made = features.Features.from_lists({"input_ids": [[1]]}, {"units": [1]})
    said = load_and_tell(capsys, made)
    assert re.search(
        r"file/features on \S+: the tokenized texts cannot be written .*set HPCTRAIN_CACHE", said
    )


@pytest.mark.parametrize("damaged", ["starts.npy", "tokens.input_ids.npy", "SHA256SUMS"])
def test_a_damaged_cache_is_made_again(feature_cache, capsys, damaged):
    """It ended each start of a job whose checkpoints were intact."""
    made = features.Features.from_lists({"input_ids": [[1]]}, {"units": [1]})
    features.load_or_make("broken", lambda: made, ALONE)
    path = feature_cache / "broken" / damaged
    before = path.read_bytes()
    path.write_bytes(before[:-9] + b"\xff" + before[-8:])
    again = features.load_or_make("broken", lambda: made, ALONE)
    assert again is not made and again.last_token == 1 and path.read_bytes() == before
    said = capsys.readouterr().err
    assert said.startswith("hpctrain: warning: the texts are tokenized again, as the cache is damaged: ")
    assert features.load_or_make("broken", lambda: None, ALONE).last_token == 1


def load_and_tell(capsys, made):
    """Load features of an untrusted cache; they are made in memory, and one warning says so."""
    for _ in range(2):  # as for two splits
        assert features.load_or_make("key", lambda: made, ALONE) is made
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hpctrain: warning: ") and "$USER" in line
    return line


def test_a_cache_that_others_can_change_is_not_used(tmp_path, monkeypatch, capsys):
    """They could flip labels and compute SHA256SUMS again."""
    monkeypatch.setenv("HPCTRAIN_CACHE", str(tmp_path / "cache"))
    made = Features.from_lists({"input_ids": [[1]]}, {"units": [1]})
    before = os.umask(0o002)
    try:
        features.load_or_make("key", lambda: made, ALONE)
    finally:
        os.umask(before)
    assert features.load_or_make("key", lambda: None, ALONE).last_token == 1
    (tmp_path / "cache/features/key/starts.npy").chmod(0o660)
    said = load_and_tell(capsys, made)
    assert "starts.npy: another user has made it or can change it: each rank keeps" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become two other users")
@pytest.mark.parametrize("opened", ["", "features", "features -R", "nothing"])
def test_a_cache_that_a_group_shares_costs_no_job(monkeypatch, capsys, opened):
    """The job of the second member died, also after chmod -R g+rwX of the cache."""
    made = Features.from_lists({"input_ids": [[1]]}, {"units": [1]})
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("HPCTRAIN_CACHE", f"{folder}/cache")
        Path(folder).chmod(0o755)
        (shared := Path(folder) / "cache").mkdir()
        shared.chmod(0o700 if opened == "nothing" else 0o2777)
        os.chown(shared, 20001, -1)
        try:
            os.seteuid(20001)
            features.load_or_make("key", lambda: made, ALONE)
            if opened.startswith("features"):
                for path in (
                    shared / "features",
                    *(shared / "features").rglob("*" if "-R" in opened else ""),
                ):
                    path.chmod(0o777)
            os.seteuid(0)
            os.seteuid(20002)
            load_and_tell(capsys, made)
        finally:
            os.seteuid(0)


def test_nothing_is_written_into_a_cache_that_others_can_change(tmp_path, monkeypatch, capsys):
    """Somebody put a folder in the place of the new one, and read the texts as they were written."""
    monkeypatch.setenv("HPCTRAIN_CACHE", str(tmp_path))
    (tmp_path / "features").mkdir()
    (tmp_path / "features").chmod(0o777)
    made = Features.from_lists({"input_ids": [[1]]}, {"units": [1]})
    assert "features: another user has made it or can change it" in load_and_tell(capsys, made)
    assert not list((tmp_path / "features").iterdir())


def test_a_new_folder_of_the_cache_is_written_wherever_somebody_moves_it(tmp_path):
    new = tmp_path / "new"
    new.mkdir()
    with hold_folder(new) as held:
        new.rename(tmp_path / "moved")
        new.mkdir()
        (held / "text").write_text("secret")
    assert not list(new.iterdir()) and (tmp_path / "moved").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("home", ["nowhere/home", "file", ""])
def test_without_a_home_the_cache_is_where_temporary_files_are(tmp_path, monkeypatch, home):
    """A home in a folder that cannot be made, one that is no folder, or a user without a name."""
    (tmp_path / "file").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr("os.access", lambda path, _: Path(path).is_dir() and path != tmp_path)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # there is no home of this user
    env = {"HOME": f"{tmp_path}/{home}" if home else ""}
    found = features.get_cache_folder(env)
    assert found == tmp_path / f"tmp/hpctrain-{os.geteuid()}/features"
    assert features.get_cache_folder(env | {"HPCTRAIN_CACHE": "/no/such"}) == Path("/no/such/features")
    assert features.get_cache_folder({"HOME": "/usr"}) == Path("/usr/.cache/hpctrain/features")


def test_a_cache_among_temporary_files_that_others_can_change_is_not_used(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(features, "get_cache_folder", lambda: tmp_path / "hpctrain-1/features")
    made = Features.from_lists({"input_ids": [[1, 2]]}, {"units": [1]})
    assert features.load_or_make("key", lambda: made, ALONE).last_token == 2
    (tmp_path / "hpctrain-1").chmod(0o777)
    assert "hpctrain-1: another user has made it or can change it" in load_and_tell(capsys, made)
