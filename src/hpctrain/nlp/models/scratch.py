"""Models from scratch: random weights, and a tokenizer trained on the training texts (--from-scratch)."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers
from tokenizers import Tokenizer, models, trainers
from tokenizers.pre_tokenizers import ByteLevel

from hpctrain.errors import HpctrainError
from hpctrain.nlp.models.model_folder import check_sizes, describe_error, read_json_object, save_model

if TYPE_CHECKING:  # importing a class of transformers takes seconds
    from transformers import PretrainedConfig, PreTrainedTokenizerFast


class Size(NamedTuple):
    """Heads are 64 wide, and the feed-forward layer is four times as wide as the hidden size."""

    layers: int
    hidden: int
    vocabulary: int  # at most


# Layers and hidden sizes of Turc et al. 2019 (arXiv 1908.08962), with BERT's 30,522 subword tokens.
SIZES = {
    "tiny": Size(2, 128, 8000),
    "mini": Size(4, 256, 12000),
    "small": Size(4, 512, 16000),
    "medium": Size(8, 512, 24000),
    "base": Size(12, 768, 32000),
}
POSITIONS = 512  # positions of a model; a multiple of it if --max-length needs more
MAX_WORD = 1000  # characters without white space among them that a tokenizer is trained on
KINDS = {"bert": ("BertConfig", "BertModel"), "gpt2": ("GPT2Config", "GPT2LMHeadModel")}


def create_model(
    folder: Path, config: str, kind: str, texts: Sequence[str], seed: int, max_length: int
) -> int:
    """Write a model with random weights and a tokenizer trained on the texts; returns its vocabulary's size.

    `config` is one of SIZES or the path of a config.json of transformers. `kind` is "bert" (WordPiece that
    keeps case and accents; stripping accents would decompose Hangul) or "gpt2" (byte-level BPE). The
    vocabulary is smaller than the size allows if the texts have too few different words. The same texts and
    seed give the same files, bit for bit.

    Raises HpctrainError: a configuration of another kind, no text, a folder that cannot be written.
    """
    if not any(text.strip() for text in texts):
        raise HpctrainError(
            "--from-scratch trains a tokenizer on the training texts, but all of them are empty: check --data"
        )
    settings = make_config(config, kind)
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
        # such as a hidden size that is not a multiple of the number of heads, or too large for memory
        except Exception as error:
            raise HpctrainError(
                f"{config}: transformers cannot create a {kind} model from it ({describe_error(error)}): "
                "fix the file"
            ) from error
    save_model(folder, model, tokenizer)
    return len(tokenizer)


def make_config(config: str, kind: str) -> "PretrainedConfig":
    """The configuration for one of SIZES or the path of a config.json. Raises HpctrainError."""
    make = getattr(transformers, KINDS[kind][0])
    if config in SIZES:
        size = SIZES[config]
        # GPT-2's configuration accepts these names too
        shape = {
            "num_hidden_layers": size.layers,
            "hidden_size": size.hidden,
            "num_attention_heads": size.hidden // 64,
        }
        # GPT-2's is four times the hidden size anyway
        inner = {"intermediate_size": 4 * size.hidden} if kind == "bert" else {}
        return make(vocab_size=size.vocabulary, max_position_embeddings=POSITIONS, **shape, **inner)
    path = Path(config)
    if not path.is_file():
        raise HpctrainError(
            f"--from-scratch {config}: no such size or file: give {', '.join(SIZES)}, or the config.json of "
            f"a {kind} model"
        )
    content = read_json_object(path)
    check_sizes(path, content)
    if content.get("model_type") != kind:
        raise HpctrainError(
            f"{path}: its model_type is {content.get('model_type')!r}, but this task needs {kind!r}: "
            "give another config.json"
        )
    try:
        return make.from_dict(content)
    except Exception as error:  # each field has its own check
        raise HpctrainError(
            f"{path}: not the configuration of a {kind} model ({describe_error(error)}): fix the file"
        ) from error


def cut_words(text: str) -> str:
    """The text, with a line break after each MAX_WORD characters that have no white space among them.

    Trainers of tokenizers need time with the square of a word: a million such characters take hours.
    """
    return re.sub(rf"\S{{{MAX_WORD}}}(?=\S)", r"\g<0>\n", text)


def _train_tokenizer(kind: str, texts: Sequence[str], vocabulary: int) -> "PreTrainedTokenizerFast":
    """A tokenizer of the texts alone, with at most `vocabulary` subword tokens, or more if bytes need it."""
    texts = [cut_words(text) for text in texts]
    # A word that occurs once gets no token of its own: the model would memorize it.
    options: dict[str, Any] = {"vocab_size": vocabulary, "min_frequency": 2, "show_progress": False}
    if kind == "gpt2":
        end = "<|endoftext|>"
        special = [end, "<|pad|>"]
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(
            special_tokens=special, initial_alphabet=ByteLevel.alphabet(), **options
        )
        backend.train_from_iterator(texts, trainer)
        trained = json.loads(backend.to_str())["model"]
        merges: Any = [tuple(merge) for merge in trained["merges"]]  # its annotation has strings only
        return transformers.GPT2Tokenizer(
            vocab=trained["vocab"],
            merges=merges,
            unk_token=end,
            bos_token=end,
            eos_token=end,
            pad_token=special[1],
        )

    blank = transformers.BertTokenizer(do_lower_case=False, strip_accents=False)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = blank.backend_tokenizer.normalizer
    backend.pre_tokenizer = blank.backend_tokenizer.pre_tokenizer
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(backend.normalizer.normalize_str(text))
    # A character may take two tokens, at a word's start and within; half is left for longer ones.
    common = sorted((c for c in counts if not c.isspace()), key=lambda c: (-counts[c], c))[
        : max(1, vocabulary // 4)
    ]
    options |= {"initial_alphabet": common, "limit_alphabet": len(common)}
    # The trainer numbers the characters within words in the order of a hash table, which differs in each
    # process, and breaks ties between merges by these numbers. So a first round only collects these
    # characters, and the second gets them in a fixed order.
    backend.train_from_iterator(
        texts, trainers.WordPieceTrainer(special_tokens=special, **options | {"vocab_size": 0})
    )
    within = sorted(token for token in backend.get_vocab() if token.startswith("##") and len(token) == 3)
    backend.train_from_iterator(texts, trainers.WordPieceTrainer(special_tokens=special + within, **options))
    # Not as special tokens: a new tokenizer with this vocabulary treats them as ordinary ones.
    return transformers.BertTokenizer(vocab=backend.get_vocab(), do_lower_case=False, strip_accents=False)
