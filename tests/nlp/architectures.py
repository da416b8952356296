"""Tiny models of the architectures that people use, with their classes of tokenizers."""

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoConfig, PreTrainedTokenizerFast

from hpctrain.nlp.models import scratch
from tests.nlp.helpers import TEXTS

WORDS = [*TEXTS, "<|user|>\n<|assistant|>\n", "Who wrote it? 누가 썼는가?"]
VOCABULARY = 800  # subword tokens
# by the names that the architectures have for them
SIZES = {
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "embedding_size": 32,
    "num_hidden_layers": 2, "n_layers": 2, "n_layer": 2, "num_layers": 2, "num_decoder_layers": 2,
    "encoder_layers": 2, "decoder_layers": 2,
    "num_attention_heads": 2, "n_heads": 2, "n_head": 2, "num_heads": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 64, "hidden_dim": 64, "d_inner": 64, "d_ff": 64, "d_kv": 16, "head_dim": 16,
    "ffn_dim": 64, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "word_embed_proj_dim": 32,
    "max_position_embeddings": 512,
}  # fmt: skip


class Architecture(NamedTuple):
    """An architecture: models of it that people use, its tokenizer, and what is published of it."""

    models: str
    tokenizer: Callable[[], PreTrainedTokenizerFast]
    head: str = "MaskedLM"  # AutoModelFor...
    sizes: Mapping[str, Any] = MappingProxyType({})


# --- tokenizers ---


@cache
def train_wordpiece() -> dict[str, int]:
    return scratch._train_tokenizer("bert", WORDS, VOCABULARY).get_vocab()


@cache
def train_bpe() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Byte-level BPE: the vocabulary without special tokens, and its merges."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.train_from_iterator(
        WORDS,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        ),
    )
    return _content(backend)


@cache
def train_metaspace_bpe() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """BPE of SentencePiece, as of Llama and Gemma: spaces are ▁."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<pad>", "</s>", "<s>", "<unk>", "<eos>", "<bos>", *(f"<0x{i:02X}>" for i in range(256))]
    backend.train_from_iterator(
        WORDS, trainers.BpeTrainer(vocab_size=VOCABULARY + 262, special_tokens=special, show_progress=False)
    )
    return _content(backend)


def _content(backend: Tokenizer) -> tuple[dict[str, int], list[tuple[str, str]]]:
    model = json.loads(backend.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


@cache
def train_unigram(*special: str) -> list[tuple[str, float]]:
    """Unigram of SentencePiece; the special tokens come first."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.train_from_iterator(
        WORDS,
        trainers.UnigramTrainer(
            vocab_size=VOCABULARY, special_tokens=list(special), unk_token="<unk>", show_progress=False
        ),
    )
    return [tuple(entry) for entry in json.loads(backend.to_str())["model"]["vocab"]]


def wordpiece(name: str = "BertTokenizer") -> Callable[[], PreTrainedTokenizerFast]:
    def make():
        vocab = dict(train_wordpiece())
        if name == "MPNetTokenizer":
            for token in ("<s>", "<pad>", "</s>", "<mask>", "<unk>"):
                vocab.setdefault(token, len(vocab))
        return getattr(transformers, name)(vocab=vocab)

    return make


def bpe(name: str = "GPT2Tokenizer", *special: str, **options: str) -> Callable[[], PreTrainedTokenizerFast]:
    def make():
        vocab, merges = train_bpe()
        names = dict.fromkeys([*special, *options.values()])
        vocab = {token: i for i, token in enumerate([*names, *sorted(vocab, key=vocab.__getitem__)])}
        return getattr(transformers, name)(vocab=vocab, merges=merges, **options)

    return make


def metaspace_bpe(name: str, **options: Any) -> Callable[[], PreTrainedTokenizerFast]:
    def make():
        vocab, merges = train_metaspace_bpe()
        return getattr(transformers, name)(vocab=dict(vocab), merges=merges, **options)

    return make


def unigram(name: str, *special: str, **options: Any) -> Callable[[], PreTrainedTokenizerFast]:
    def make():
        return getattr(transformers, name)(vocab=train_unigram(*special), **options)

    return make


ROBERTA = XLMR = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
ALBERT = ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")
END = "<|endoftext|>"
CAUSAL = "CausalLM"

ARCHITECTURES = {
    # encoders
    "bert": Architecture("klue/bert-base, beomi/kcbert-base", wordpiece()),
    "roberta": Architecture(
        "FacebookAI/roberta-base", bpe("RobertaTokenizer", *ROBERTA), sizes={"type_vocab_size": 1}
    ),
    "roberta+bert": Architecture("klue/roberta-base", wordpiece(), sizes={"type_vocab_size": 1}),
    "xlm-roberta": Architecture(
        "FacebookAI/xlm-roberta-base", unigram("XLMRobertaTokenizer", *XLMR), sizes={"type_vocab_size": 1}
    ),
    "camembert": Architecture(
        "almanach/camembert-base", unigram("CamembertTokenizer", *XLMR), sizes={"type_vocab_size": 1}
    ),
    "electra": Architecture("monologg/koelectra-base-v3-discriminator, beomi/KcELECTRA-base", wordpiece()),
    "distilbert": Architecture("distilbert-base-uncased, monologg/distilkobert", wordpiece()),
    "albert": Architecture("albert-base-v2, kykim/albert-kor-base", unigram("AlbertTokenizer", *ALBERT)),
    "deberta": Architecture(
        "microsoft/deberta-base",
        bpe("DebertaTokenizer", "[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"),
        sizes={"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "type_vocab_size": 0},
    ),
    "deberta-v2": Architecture(
        "microsoft/deberta-v3-base, mdeberta, team-lucid/deberta-v3-base-korean",
        unigram("DebertaV2Tokenizer", "[PAD]", "[CLS]", "[SEP]", "<unk>", "[UNK]", "[MASK]"),
        sizes={
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "type_vocab_size": 0,
            "position_buckets": 256,
            "max_relative_positions": -1,
        },
    ),
    "mpnet": Architecture("microsoft/mpnet-base", wordpiece("MPNetTokenizer")),
    "modernbert": Architecture(
        "answerdotai/ModernBERT-base", wordpiece(), sizes={"max_position_embeddings": 1024}
    ),
    "big_bird": Architecture(
        "google/bigbird-roberta-base, monologg/kobigbird-bert-base",
        unigram("BigBirdTokenizer", "<pad>", "<unk>", "<s>", "</s>", "[CLS]", "[SEP]", "[MASK]"),
        sizes={"block_size": 16},
    ),
    "longformer": Architecture(
        "allenai/longformer-base-4096",
        bpe("RobertaTokenizer", *ROBERTA),
        sizes={"type_vocab_size": 1, "attention_window": 16, "max_position_embeddings": 514},
    ),
    "convbert": Architecture("YituTech/conv-bert-base", wordpiece()),
    "xlnet": Architecture(
        "xlnet-base-cased",
        unigram("XLNetTokenizer", "<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>"),
        CAUSAL,
        {"max_position_embeddings": None},
    ),
    "funnel": Architecture(
        "funnel-transformer/small",
        wordpiece(),
        sizes={"block_sizes": [1, 1], "d_head": 16, "num_hidden_layers": None, "num_layers": None},
    ),
    "roformer": Architecture("junnyu/roformer", wordpiece()),
    "mobilebert": Architecture(
        "google/mobilebert-uncased", wordpiece(), sizes={"true_hidden_size": 16, "intra_bottleneck_size": 16}
    ),
    # decoders
    "gpt2": Architecture(
        "gpt2, skt/kogpt2-base-v2", bpe(bos_token=END, eos_token=END, unk_token=END), CAUSAL
    ),
    "gpt_neo": Architecture(
        "EleutherAI/gpt-neo-125m",
        bpe(bos_token=END, eos_token=END, unk_token=END),
        CAUSAL,
        {"attention_types": [[["global", "local"], 1]]},
    ),
    "gptj": Architecture(
        "EleutherAI/gpt-j-6b, kakaobrain/kogpt",
        bpe(bos_token=END, eos_token=END, unk_token=END),
        CAUSAL,
        {"rotary_dim": 8},
    ),
    "gpt_neox": Architecture(
        "EleutherAI/polyglot-ko-1.3b, pythia",
        bpe("GPTNeoXTokenizer", bos_token=END, eos_token=END, unk_token=END),
        CAUSAL,
    ),
    "bloom": Architecture(
        "bigscience/bloom-560m",
        bpe("TokenizersBackend", bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"),
        CAUSAL,
    ),
    "mpt": Architecture(
        "mosaicml/mpt-7b", bpe("GPTNeoXTokenizer", bos_token=END, eos_token=END, unk_token=END), CAUSAL
    ),
    "opt": Architecture(
        "facebook/opt-125m",
        bpe("GPT2Tokenizer", bos_token="</s>", eos_token="</s>", pad_token="<pad>", unk_token="</s>"),
        CAUSAL,
    ),
    "falcon": Architecture(
        "tiiuae/falcon-7b", bpe("TokenizersBackend", bos_token=END, eos_token=END), CAUSAL, {"head_dim": None}
    ),
    "llama": Architecture(
        "meta-llama, upstage/SOLAR-10.7B, beomi/Llama-3-Open-Ko-8B", metaspace_bpe("LlamaTokenizer"), CAUSAL
    ),
    "mistral": Architecture("mistralai/Mistral-7B-v0.3", metaspace_bpe("LlamaTokenizer"), CAUSAL),
    "mixtral": Architecture(
        "mistralai/Mixtral-8x7B-v0.1", metaspace_bpe("LlamaTokenizer"), CAUSAL, {"num_local_experts": 4}
    ),
    "qwen2": Architecture(
        "Qwen/Qwen2.5-0.5B", bpe("Qwen2Tokenizer", eos_token=END, pad_token=END, unk_token=END), CAUSAL
    ),
    "qwen3": Architecture(
        "Qwen/Qwen3-0.6B", bpe("Qwen2Tokenizer", eos_token=END, pad_token=END, unk_token=END), CAUSAL
    ),
    "gemma": Architecture("google/gemma-2b, beomi/gemma-ko-2b", metaspace_bpe("GemmaTokenizer"), CAUSAL),
    "gemma2": Architecture(
        "google/gemma-2-2b", metaspace_bpe("GemmaTokenizer"), CAUSAL, {"sliding_window": 64}
    ),
    "gemma3_text": Architecture(
        "google/gemma-3-1b-pt", metaspace_bpe("GemmaTokenizer"), CAUSAL, {"sliding_window": 64}
    ),
    "phi": Architecture("microsoft/phi-2", bpe(bos_token=END, eos_token=END, unk_token=END), CAUSAL),
    "phi3": Architecture(
        "microsoft/Phi-3-mini-4k-instruct", metaspace_bpe("LlamaTokenizer"), CAUSAL, {"pad_token_id": 0}
    ),
    "exaone4": Architecture(
        "LGAI-EXAONE/EXAONE-4.0-1.2B",
        bpe(
            "GPT2Tokenizer",
            bos_token="[BOS]",
            eos_token="[|endofturn|]",
            pad_token="[PAD]",
            unk_token="[UNK]",
        ),
        CAUSAL,
    ),
    # encoder-decoders
    "t5": Architecture(
        "google-t5/t5-small, paust/pko-t5-base", unigram("T5Tokenizer", "<pad>", "</s>", "<unk>"), "Seq2SeqLM"
    ),
    "bart": Architecture(
        "facebook/bart-base, gogamza/kobart-base-v2", bpe("RobertaTokenizer", *ROBERTA), "Seq2SeqLM"
    ),
}


def make_folder(folder: Path, kind: str) -> Path:
    """Write a tiny model with random weights, as models of this architecture are published."""
    architecture = ARCHITECTURES[kind]
    tokenizer = architecture.tokenizer()
    ids = {
        name: id_
        for name in ("pad_token_id", "bos_token_id", "eos_token_id")
        if (id_ := getattr(tokenizer, name)) is not None
    }
    sizes = SIZES | {"vocab_size": len(tokenizer)} | ids | architecture.sizes
    sizes = {name: size for name, size in sizes.items() if size is not None}
    config = AutoConfig.for_model(kind.partition("+")[0], **sizes)
    torch.manual_seed(1)
    model = getattr(transformers, f"AutoModelFor{architecture.head}").from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
