"""A flipped bit in a stored file is never loaded as another value. The bits depend on a seed."""

import random
import shutil
import sys
import zipfile

import numpy
import pytest
import torch
from safetensors.torch import save_file

import hpctrain
from hpctrain.checkpoints import checkpoint, parts
from hpctrain.distributed.world import ALONE
from hpctrain.errors import HpctrainError
from hpctrain.files import digests
from hpctrain.nlp.batches import features
from hpctrain.nlp.models.scratch import create_model
from hpctrain.nlp.models.tokenizer import load_tokenizer
from hpctrain.transformers import RunFolder
from tests.helpers import POSITION, run_command

FLIPS = 40  # of each format


def flip_a_bit(path, chance):
    content = bytearray(path.read_bytes())
    place = chance.randrange(len(content))
    content[place] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def same(one, other):
    """Whether two states are equal: dictionaries and lists of tensors and plain values."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and list(one) == list(other)
            and all(same(one[name], other[name]) for name in one)
        )
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def test_checkpoints(tmp_path):
    """A bit of the archive that holds no content, such as a date, may be flipped."""
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 20)).sum().backward()
    optimizer.step()
    state = POSITION | {"epoch": 3, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    chance, refused = random.Random(1), 0
    for _ in range(FLIPS):
        path = checkpoint.path_of(tmp_path, 3)
        path.parent.mkdir(exist_ok=True)
        checkpoint.save(path, state)
        flip_a_bit(path, chance)
        try:
            loaded = checkpoint.load(
                checkpoint.find_fitting(checkpoint.find_newest(tmp_path), model, "optimizer"),
                torch.device("cpu"),
            )
        except HpctrainError:
            refused += 1
        else:
            assert same(loaded, state)
    assert refused > FLIPS / 2


def test_weights_that_a_script_loads(tmp_path):
    """Also from a file that is not of hpctrain; one of torch before 1.6 has no checksums, and loads."""
    saved, loaded, path = torch.nn.Linear(20, 30), torch.nn.Linear(20, 30), tmp_path / "file.pt"
    chance, refused = random.Random(2), 0
    for _ in range(FLIPS):
        torch.save({"state_dict": saved.state_dict()}, path)
        flip_a_bit(path, chance)
        try:
            checkpoint.load_weights(loaded, path)
        except HpctrainError:
            refused += 1
        else:
            assert same(dict(loaded.state_dict()), dict(saved.state_dict()))
    assert refused > FLIPS / 2
    torch.save(saved.state_dict(), path, _use_new_zipfile_serialization=False)
    checkpoint.load_weights(loaded, str(path))
    with pytest.raises(HpctrainError, match=str(tmp_path)):
        checkpoint.load_weights(loaded, tmp_path)  # the run folder


def test_the_best_weights_of_a_run(tmp_path, monkeypatch):
    """Their checkpoint may have been damaged since it was saved."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    saved, model = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    with hpctrain.Run("mine", out=tmp_path / "run", watchdog=0) as run:
        run.track(model=model)
        for epoch, score in ((1, 0.9), (2, 0.8)):
            run.best.add(epoch, 0, score)
        path = checkpoint.path_of(tmp_path / "run", 1)
        checkpoint.save(path, {"model": saved.state_dict()})
        assert run.load_best() and same(dict(model.state_dict()), dict(saved.state_dict()))
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        with pytest.raises(HpctrainError, match=r"epoch-0001.pt: damaged since it was written"):
            run.load_best()


def test_checkpoints_in_parts(tmp_path):
    """After a flipped bit in a rank's file, the checkpoint before is the newest, or the bit has no effect."""
    state = {
        "epoch": 1,
        "step": 0,
        "model": {"weight": torch.randn(20, 30)},
        "optimizer": {"momentum": torch.randn(20, 30)},
    }
    for epoch in (1, 2):
        for rank in (0, 1):
            part = parts.path_of_rank(checkpoint.path_of(tmp_path, epoch), rank, 2)
            part.parent.mkdir(parents=True, exist_ok=True)
            checkpoint.save(part, state | {"epoch": epoch})
    older, newest = (checkpoint.path_of(tmp_path, epoch) for epoch in (1, 2))
    contents = {path: path.read_bytes() for path in newest.iterdir()}
    chance, skipped = random.Random(4), 0
    for _ in range(FLIPS):
        for path, content in contents.items():
            path.write_bytes(content)
        flip_a_bit(chance.choice(sorted(contents)), chance)
        found = checkpoint.find_newest(tmp_path)
        skipped += found == older
        assert found == older or same(checkpoint.load(found, torch.device("cpu")), state | {"epoch": 2})
    assert skipped > FLIPS / 2


def test_checkpoints_of_a_trainer_of_transformers(tmp_path, monkeypatch):
    """They are folders of transformers, with the digests of hpctrain."""
    monkeypatch.setattr(RunFolder, "__init__", lambda self: None)
    run = RunFolder()
    run.folder, run._world = tmp_path, ALONE
    for step in (5, 10):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        torch.save({"momentum": torch.randn(30)}, folder / "optimizer.pt")
        save_file({"weight": torch.randn(30)}, folder / "model.safetensors")
        (folder / "trainer_state.json").write_text('{"global_step": 10}')
        digests.write_digests(folder)
    assert run._newest_whole() == folder
    contents = {path: path.read_bytes() for path in folder.iterdir()}
    chance = random.Random(5)
    for _ in range(FLIPS):
        for path, content in contents.items():
            path.write_bytes(content)
        flip_a_bit(chance.choice(sorted(contents)), chance)
        assert run._newest_whole() == tmp_path / "checkpoint-5"


def test_model_folders(tmp_path):
    """The card is for readers, and may be edited."""
    create_model(tmp_path / "model", "tiny", "bert", ["한 줄", "두 줄"], 1, 128)
    files = sorted(path.name for path in (tmp_path / "model").iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json", "SHA256SUMS"} <= set(files)
    chance = random.Random(2)
    for _ in range(FLIPS):
        shutil.rmtree(tmp_path / "broken", ignore_errors=True)
        shutil.copytree(tmp_path / "model", tmp_path / "broken")
        flip_a_bit(tmp_path / "broken" / chance.choice(files), chance)
        with pytest.raises(HpctrainError, match="SHA256SUMS"):
            load_tokenizer(tmp_path / "broken")
    load_tokenizer(tmp_path / "model")


def test_tokenized_texts(tmp_path, monkeypatch):
    monkeypatch.setenv("HPCTRAIN_CACHE", str(tmp_path))
    columns = {"input_ids": [[1, 2, 3], [4]], "token_type_ids": [[0, 0, 1], [0]]}
    starts = []

    def make():
        starts.append("made")
        return features.Features.from_lists(columns, {"units": [1, 1]})

    made = features.load_or_make("key", make, ALONE)
    assert numpy.array_equal(made.tokens["input_ids"], [1, 2, 3, 4])
    folder = tmp_path / "features/key"
    contents = {path: path.read_bytes() for path in folder.iterdir()}
    chance = random.Random(3)
    for _ in range(FLIPS):
        for path, content in contents.items():
            path.write_bytes(content)
        flip_a_bit(chance.choice(sorted(contents)), chance)
        assert numpy.array_equal(features.load_or_make("key", make, ALONE).tokens["input_ids"], [1, 2, 3, 4])
    assert len(starts) == 1 + FLIPS


def insert(opcodes):
    """Opcodes before the last one of a pickle: they act on the tensor that it holds."""
    return lambda pickled: pickled[:-1] + opcodes + pickled[-1:]


def enlarge(pickled):
    """The numbers of elements (BININT2) of the storage and of the tensor."""
    assert pickled.count(b"M\xe8\x03") == 2  # 1000
    return pickled.replace(b"M\xe8\x03", b"M\xff\xff")


def change_at_random(pickled, chance):
    """Another byte in some places, or a part that is missing or there twice."""
    pickled = bytearray(pickled)
    for _ in range(chance.randint(1, 4)):
        begin, length = chance.randrange(len(pickled)), chance.randrange(1, 12)
        part = pickled[begin : begin + length]
        pickled[begin : begin + length] = chance.choice(
            [b"", part + part, chance.randbytes(1), chance.choice([b"s", b"u", b"R", b"b", b"Q", b"\x85"])]
        )
    return bytes(pickled)


# of the kind of CVE-2026-24747, with which torch before 2.10 wrote outside of a tensor's memory
CRAFTED = {
    "an entry of a tensor": insert(b"K\x00K\x01s"),
    "entries of a tensor": insert(b"(K\x00K\x01K\x01K\x01u"),
    "a storage larger than its file": enlarge,
}
LOAD = """if True:
    import sys, torch
    from pathlib import Path
    from hpctrain.checkpoints import checkpoint
    from hpctrain.errors import HpctrainError
    def add(state):
        if isinstance(state, torch.Tensor):
            return float(state.double().abs().sum()) if state.dtype.is_floating_point else 0.0
        return sum(map(add, state.values())) if isinstance(state, dict) else 0.0
    for path in sorted(Path(sys.argv[1]).iterdir()):
        try:
            add(checkpoint.load(path, torch.device("cpu")))
            print(path.name, "loaded", flush=True)
        except HpctrainError as error:
            print(path.name, str(error).count(chr(10)), flush=True)
"""


@pytest.mark.slow
def test_crafted_checkpoints_neither_load_nor_end_the_process(tmp_path):
    """With the check sums of their archives right. Those that are changed at random may load as something."""
    chance, files = random.Random(1), tmp_path / "files"
    files.mkdir()
    torch.save(torch.ones(1000), tmp_path / "tensor.pt")
    model = torch.nn.Linear(20, 30)
    torch.save(POSITION | {"model": model.state_dict()}, tmp_path / "model.pt")
    for name, change in CRAFTED.items():
        rewrite(tmp_path / "tensor.pt", files / name, change)
    for number in range(4 * FLIPS):
        rewrite(tmp_path / "model.pt", files / f"random {number}", lambda old: change_at_random(old, chance))
    done = run_command([sys.executable, "-c", LOAD, files])
    said = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    assert done.returncode == 0 and len(said) == len(CRAFTED) + 4 * FLIPS, done.stderr + done.stdout[-500:]
    assert {said[name] for name in CRAFTED} == {"0"}
    assert sum(said[name] != "loaded" for name in said) > len(said) / 2


def rewrite(source, target, change):
    """The archive `source`, with another pickle in it."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            new.writestr(name, change(old.read(name)) if name.endswith("/data.pkl") else old.read(name))
