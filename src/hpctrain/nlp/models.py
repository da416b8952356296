"""Where models come from and where they go: a folder, the hub, or from scratch; and a folder again.

A model folder is what from_pretrained() of transformers reads: config.json, the tokenizer and the weights. Whatever is written
here is complete under its name, or not there.
"""

import errno
import json
import os
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import huggingface_hub
import torch
import transformers
from huggingface_hub import EvalResult, HfApi, ModelCardData, constants, errors, snapshot_download
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer, models, trainers
from tokenizers.pre_tokenizers import ByteLevel
from transformers.utils import logging

from hpctrain import checkpoint
from hpctrain.run import Parser
from hpctrain.world import HpctrainError, World, all_or_none, gather

if TYPE_CHECKING:  # a class of transformers takes seconds to import, and `hpctrain fetch` needs none
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

    from hpctrain.nlp.task import Task

# These libraries would say of every retry and every new head what they think of it, once a rank. Errors are exceptions anyway.
logging.set_verbosity_error()
logging.disable_progress_bar()
huggingface_hub.utils.logging.set_verbosity_error()

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
# Of a repository only what from_pretrained() reads: nothing in folders (onnx/), for other frameworks or in another precision ...
NEEDED = [
    "config.json", "generation_config.json", "tokenizer*.json", "vocab*", "merges.txt", "special_tokens_map.json",
    "added_tokens.json", "chat_template*", "*.model", "model.safetensors*", "model-?????-of-?????.safetensors",
]  # fmt: skip
# ... and pickled weights only where there are no others.
PICKLES = ["pytorch_model.bin*", "pytorch_model-?????-of-?????.bin"]


# --- a model of a folder or of the hub ---


def local(name: str, world: World) -> Path:
    """The folder of a model on this node: `name` is a folder, or a name of the hub such as beomi/kcbert-base; collective.

    Rank 0 downloads it into the usual cache (HF_HOME). Then the first rank of each other node does, if it does not see it there,
    because a cache may lie on a node's own disk. All take the same commit. Raises HpctrainError, which says how to fetch a
    model beforehand.
    """
    here = gather(world, Path(name).is_dir())
    with all_or_none(world):
        if any(here):
            if not here[world.rank]:
                raise HpctrainError(f"{name}: no such folder on {os.uname().nodename}: put it where all nodes see it")
            return checked(Path(name))
        _refuse_what_is_no_name(name)
    snapshot = None
    with all_or_none(world):
        if world.rank == 0:
            snapshot = _download(name)
    commit = gather(world, snapshot.name if snapshot else "")[0]
    with all_or_none(world):
        if world.local_rank == 0 and world.rank != 0:
            snapshot = _cached(name, commit) or _download(name, commit)
    with all_or_none(world):
        snapshot = snapshot or _cached(name, commit)
        if snapshot is None:
            raise HpctrainError(
                f"{name}: the first rank of {os.uname().nodename} has it in its cache, but this one does not see it in "
                f"{constants.HF_HUB_CACHE}: set HF_HOME to one folder for all ranks of a node"
            )
    return snapshot


def checked(folder: Path) -> Path:
    """The folder itself, if it holds a configuration and all of its weights. Raises HpctrainError that says what is missing."""
    for wanted, names in (("config.json", ("config.json",)), ("model.safetensors", WEIGHTS)):
        if not any((folder / name).exists() for name in names):
            raise HpctrainError(
                f"{folder}: no {wanted} in it: name a folder with config.json, model.safetensors and the tokenizer, "
                "as hpctrain fetch and save_pretrained() write it"
            )
    _json(folder / "config.json")
    weights = next(name for name in WEIGHTS if (folder / name).exists())
    parts = sorted(set(_json(folder / weights).get("weight_map", {}).values())) if weights.endswith(".json") else [weights]
    for part in parts:
        if not (folder / part).exists():
            raise HpctrainError(f"{folder}: {part}, a part of the weights, is missing: fetch or copy it again")
        if part.endswith(".safetensors"):
            try:
                with safe_open(folder / part, "pt"):
                    pass  # its header and its size agree
            except (OSError, SafetensorError) as error:
                raise HpctrainError(f"{folder / part}: broken ({error}): fetch or copy it again") from error
    return folder


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HpctrainError(f"{path}: cannot be read as JSON ({error}): fetch or copy it again") from error
    if not isinstance(content, dict):
        raise HpctrainError(f"{path}: not a JSON object: fetch or copy it again")
    return content


def _refuse_what_is_no_name(name: str) -> None:
    try:
        validate_repo_id(name)
    except errors.HFValidationError as error:
        raise HpctrainError(
            f"{name}: there is no such folder, and it is no name of a model on the hub, such as beomi/kcbert-base"
        ) from error


def _snapshot(name: str, commit: str | None = None, **where: Any) -> Path:  # noqa: ANN401 - options of snapshot_download()
    """Download what is needed of a repository and not there yet; the folder that has it, in a cache named by the commit."""
    folder = Path(snapshot_download(name, revision=commit, allow_patterns=NEEDED, ignore_patterns="*/*", **where))
    if not any(folder.glob("*.safetensors")):
        snapshot_download(name, revision=commit, allow_patterns=PICKLES, ignore_patterns="*/*", **where)
    return checked(folder)


def _cached(name: str, commit: str) -> Path | None:
    """The folder of a commit in the cache, if it is there and whole; asks nobody."""
    try:
        return _snapshot(name, commit, local_files_only=True)
    except (errors.LocalEntryNotFoundError, HpctrainError):
        return None


def _download(name: str, commit: str | None = None) -> Path:
    """The folder in the cache, downloaded where it is not there. Raises HpctrainError."""
    remedy = f"fetch it where there is internet (hpctrain fetch {name} DIR), then give --model DIR"
    with _reasons(f"{name} (no folder here has this name)", remedy):
        return _snapshot(name, commit)


@contextmanager
def _reasons(what: str, remedy: str) -> Iterator[None]:
    """Say in one line why a download failed, and the remedy."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as that there is too little space: it ends in an error, or does not
            yield
    except HpctrainError:
        raise
    except Exception as error:  # of the HTTP library, of the hub's own, of its transport in Rust, or of the disk
        hub = constants.ENDPOINT
        if isinstance(error, errors.GatedRepoError):
            reason = f"gated: agree to its terms at {hub}, and log in (hf auth login, or HF_TOKEN)"
        elif isinstance(error, errors.RepositoryNotFoundError):
            reason = f"{hub} has no such model, or it is a private one (then hf auth login, or HF_TOKEN)"
        elif isinstance(error, errors.RevisionNotFoundError):
            reason = f"{hub} has no such revision of it"
        elif _is_of_the_disk(error):
            reason = f"it could not be written ({_line(error)})"
        elif constants.is_offline_mode():
            reason = f"not in the cache ({constants.HF_HUB_CACHE}), and HF_HUB_OFFLINE is set"
        else:
            reason = f"not in the cache ({constants.HF_HUB_CACHE}), and {hub} did not give it ({_line(error.__cause__ or error)})"
        raise HpctrainError(f"{what}: {reason}; {remedy}") from error


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__} {error}".split())[:200]


def _is_of_the_disk(error: Exception) -> bool:
    """Whether it is a full disk, a quota or a folder of somebody else; the libraries in Rust say so in words alone."""
    kinds = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO)
    return getattr(error, "errno", None) in kinds or any(f"(os error {kind})" in str(error) for kind in kinds)


# --- hpctrain fetch ---


def fetch(name: str, folder: Path, revision: str | None = None) -> str:
    """Download a model of the hub into a folder of its own, for nodes without internet; returns the commit that it is.

    The folder appears when all is there. Until then the files are beside it under a name with the commit, where another call
    finds those that are complete. Raises HpctrainError, also where the folder exists.
    """
    _refuse_what_is_no_name(name)
    if folder.exists():
        raise HpctrainError(f"{folder} exists already: use it by --model {folder}, or give another folder")
    with _reasons(name, "look at the name and the connection, and give the command again"):
        commit = HfApi().model_info(name, revision=revision).sha
    partial = folder.with_name(f".{folder.name}.{commit}.partial")
    with _reasons(name, f"the same command goes on with what is in {partial}"):
        _snapshot(name, commit, local_dir=partial)
        shutil.rmtree(partial / ".cache")  # the hub's notes of what is downloaded
        _put(partial, folder)
    return commit


def main(world: World, arguments: list[str]) -> None:
    """`hpctrain fetch MODEL DIR`."""
    parser = Parser(
        prog="hpctrain fetch", description="Download a model of the Hugging Face hub into a folder, for nodes without internet."
    )
    parser.add_argument("model", help="its name, such as beomi/kcbert-base")
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder to make; --model DIR then takes it")
    parser.add_argument("--revision", help="branch, tag or commit (default: main)")
    args = parser.parse_args(arguments)
    if world.rank == 0:
        commit = fetch(args.model, args.folder, args.revision)
        size = sum(path.stat().st_size for path in args.folder.iterdir())
        print(f"{args.folder} is {args.model} at commit {commit}, {size / 1e6:,.1f} MB; use it by --model {args.folder}")


# --- a model from scratch ---


class Size(NamedTuple):
    """Layers, width (a head is 64 wide, the inner layer four times the width), and pieces of the vocabulary at most."""

    layers: int
    hidden: int
    vocabulary: int


# Layers and widths of Turc et al. 2019 (arXiv 1908.08962), whose models all have BERT's 30,522 pieces.
SIZES = {
    "tiny": Size(2, 128, 8000),
    "mini": Size(4, 256, 12000),
    "small": Size(4, 512, 16000),
    "medium": Size(8, 512, 24000),
    "base": Size(12, 768, 32000),
}
POSITIONS = 512  # a model of these sizes has so many, or twice as many, ..., as the longest text wants
KINDS = {"bert": ("BertConfig", "BertModel"), "gpt2": ("GPT2Config", "GPT2LMHeadModel")}


def from_scratch(folder: Path, config: str, kind: str, texts: Sequence[str], seed: int, max_length: int) -> int:
    """Write a model with random weights and a tokenizer trained on the texts; returns the number of its pieces.

    `config` is one of SIZES or the path of a config.json of transformers, and kind "bert" (WordPiece that keeps case and
    accents, without which Hangul would fall apart) or "gpt2" (BPE of bytes). Texts may have too few different words for as many
    pieces as the size allows, and then there are fewer. The same texts and seed give the same files, bit for bit.

    Raises HpctrainError: another kind of configuration, no text, a folder that cannot be written.
    """
    if not any(text.strip() for text in texts):
        raise HpctrainError(f"a {kind} from scratch learns its tokenizer from the training texts, and all {len(texts)} are empty")
    settings = _settings(config, kind)
    tokenizer = _train_tokenizer(kind, texts, settings.vocab_size)
    settings.vocab_size = len(tokenizer)
    if settings.max_position_embeddings < max_length:
        settings.max_position_embeddings = -(-max_length // POSITIONS) * POSITIONS
    tokenizer.model_max_length = settings.max_position_embeddings
    settings.pad_token_id, settings.bos_token_id, settings.eos_token_id = (
        tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = getattr(transformers, KINDS[kind][1])(settings)
        except ValueError as error:  # such as a width that the heads cannot share
            raise HpctrainError(f"{config}: no {kind} can be made of it ({_line(error)})") from error
    save(folder, model, tokenizer)
    return len(tokenizer)


def _settings(config: str, kind: str) -> "PretrainedConfig":
    make = getattr(transformers, KINDS[kind][0])
    if config in SIZES:
        size = SIZES[config]
        # GPT-2's configuration knows these names, too
        shape = {"num_hidden_layers": size.layers, "hidden_size": size.hidden, "num_attention_heads": size.hidden // 64}
        inner = {"intermediate_size": 4 * size.hidden} if kind == "bert" else {}  # which of GPT-2 is four times the width
        return make(vocab_size=size.vocabulary, max_position_embeddings=POSITIONS, **shape, **inner)
    path = Path(config)
    if not path.is_file():
        raise HpctrainError(f"{config}: neither one of {', '.join(SIZES)} nor a file, config.json of a {kind} model")
    content = _json(path)
    if content.get("model_type") != kind:
        raise HpctrainError(f"{path}: its model_type is {content.get('model_type')!r}, but this task takes a {kind} from scratch")
    try:
        return make.from_dict(content)
    except Exception as error:  # each field has a check of its own
        raise HpctrainError(f"{path}: not the configuration of a {kind} model ({_line(error)})") from error


def _train_tokenizer(kind: str, texts: Sequence[str], vocabulary: int) -> "PreTrainedTokenizerFast":
    """A tokenizer of at most so many pieces (and no fewer than single characters or bytes are), a function of the texts alone."""
    # What is seen once is not worth a piece: it would learn by heart the words of a small text.
    options = {"vocab_size": vocabulary, "min_frequency": 2, "show_progress": False}
    if kind == "gpt2":
        end = "<|endoftext|>"
        special = [end, "<|pad|>"]
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(special_tokens=special, initial_alphabet=ByteLevel.alphabet(), **options)
        backend.train_from_iterator(texts, trainer)
        learnt = json.loads(backend.to_str())["model"]
        merges = [tuple(merge) for merge in learnt["merges"]]
        return transformers.GPT2Tokenizer(
            vocab=learnt["vocab"], merges=merges, unk_token=end, bos_token=end, eos_token=end, pad_token=special[1]
        )

    blank = transformers.BertTokenizer(do_lower_case=False, strip_accents=False)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = blank.backend_tokenizer.normalizer, blank.backend_tokenizer.pre_tokenizer
    counts = Counter()
    for text in texts:
        counts.update(backend.normalizer.normalize_str(text))
    # A character may take two pieces, at the start of a word and within; half of them are for longer ones.
    common = sorted((c for c in counts if not c.isspace()), key=lambda c: (-counts[c], c))[: max(1, vocabulary // 4)]
    options |= {"initial_alphabet": common, "limit_alphabet": len(common)}
    # The trainer numbers the characters within words in the order of a hash table, another in each process, and settles draws
    # between merges by these numbers. So a first round only finds these characters, and in the second they have a fixed place.
    backend.train_from_iterator(texts, trainers.WordPieceTrainer(special_tokens=special, **options | {"vocab_size": 0}))
    within = sorted(piece for piece in backend.get_vocab() if piece.startswith("##") and len(piece) == 3)
    backend.train_from_iterator(texts, trainers.WordPieceTrainer(special_tokens=special + within, **options))
    # These are no special tokens; a tokenizer made anew from the vocabulary has forgotten that they were.
    return transformers.BertTokenizer(vocab=backend.get_vocab(), do_lower_case=False, strip_accents=False)


# --- reading and writing model folders ---


def tokenizer_of(folder: Path) -> "PreTrainedTokenizerFast":
    """The tokenizer of a model folder, with a padding token. Raises HpctrainError where it has none in Rust, or none at all."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever the part that it trips over raises
        raise HpctrainError(f"{folder}: its tokenizer cannot be loaded ({_line(error)})") from error
    if not isinstance(tokenizer, transformers.PreTrainedTokenizerFast):
        raise HpctrainError(
            f"{folder}: its tokenizer ({type(tokenizer).__name__}) has no fast form, written in Rust, which knows where in the "
            "text each token stands: take a model that has a tokenizer.json"
        )
    files = sorted({"tokenizer.json", *tokenizer.vocab_files_names.values()})
    if not any((folder / name).exists() for name in files):  # transformers 5 makes an empty one then, and says nothing
        raise HpctrainError(
            f"{folder}: no tokenizer in it ({' or '.join(files)}): copy it there from the model that this one is of"
        )
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise HpctrainError(f"{folder}: its tokenizer has no pad_token and no eos_token: name one in tokenizer_config.json")
        tokenizer.pad_token = tokenizer.eos_token  # padding is masked, so it may be any token
    return tokenizer


def save(folder: Path, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerFast", card: str = "") -> None:
    """Write a model folder, with its card as README.md, on one rank; a model that is there is replaced when this one is whole.

    Raises HpctrainError where it cannot be written, naming the folder, or where something else is in it.
    """
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        if folder.exists() and any(folder.iterdir()) and not (folder / "config.json").exists():
            raise HpctrainError(f"{folder} holds something else than a model, so it is not replaced: give another folder")
        shutil.rmtree(unfinished, ignore_errors=True)  # in a container another job may have had the same number
        unfinished.mkdir(parents=True)
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        if card:
            (unfinished / "README.md").write_text(card, encoding="utf-8")
        for path in unfinished.iterdir():
            path.chmod((unfinished / "config.json").stat().st_mode)  # safetensors writes what nobody else may read
        checked(unfinished)
        _put(unfinished, folder)
    except Exception as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if isinstance(error, HpctrainError) or not (isinstance(error, OSError) or _is_of_the_disk(error)):
            raise
        raise HpctrainError(
            f"{folder}: the model could not be written ({_line(error)}): free some space, or give another folder"
        ) from error


def _put(unfinished: Path, folder: Path) -> None:
    """Give a complete folder its name, after all in it is on the disk, so that a power cut leaves no empty files."""
    for path in (*unfinished.iterdir(), unfinished):
        checkpoint.sync(path)
    earlier = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    shutil.rmtree(earlier, ignore_errors=True)
    if folder.exists():
        folder.rename(earlier)
    unfinished.rename(folder)
    checkpoint.sync(folder.parent)
    shutil.rmtree(earlier, ignore_errors=True)


def card(
    title: str,
    task: "Task",
    base: str,
    data: str,
    scores: Mapping[str, float],
    options: Mapping[str, Any],
    versions: Mapping[str, str],
) -> str:
    """A model card: what the model is, the numbers of its run, how to use it and how it was made; Markdown with YAML ahead.

    `base` is the model that it was tuned from and `data` what it was tuned on, both as given on the command line.
    """
    of_the_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", base) and not Path(base).exists()
    metadata = ModelCardData(
        library_name="transformers",
        pipeline_tag=task.pipeline_tag,
        base_model=base if of_the_hub else None,
        model_name=title,
        eval_results=[
            EvalResult(task.pipeline_tag, Path(data).name, Path(data).name, name, float(value))
            for name, value in scores.items()
            if "/" not in name
        ],
    )
    loader = task.model.__name__
    words = " ".join(name.upper() for name in task.inputs)
    return f"""---
{metadata.to_yaml()}
---

# {title}

`{base}`, fine-tuned on `{data}` by hpctrain ({task.name}).

## Numbers

| metric | value |
|---|---|
{chr(10).join(f"| {name} | {value:.4f} |" for name, value in scores.items())}

## Use

```
hpctrain predict FOLDER {words}
```

```python
from transformers import AutoTokenizer, {loader}

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
model = {loader}.from_pretrained("FOLDER")
```

## How it was made

```json
{json.dumps({"options": dict(options), "versions": dict(versions)}, indent=2, ensure_ascii=False, default=str)}
```
"""
