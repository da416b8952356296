"""Continue texts, such as a film review that begins with "긍정: " (positive) or "부정: " (negative):

    hpctrain nlp.generate                                              sample data, tiny model from scratch
    hpctrain nlp.generate --data nsmc --model skt/kogpt2-base-v2

On two nodes, in the container, with Slurm:

    sbatch launch/apptainer_ddp.sh nlp.generate --data nsmc --model skt/kogpt2-base-v2
"""

import argparse
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from hpctrain.errors import HpctrainError, UsageError
from hpctrain.nlp.batches.features import Features, check_tokens, encode_texts
from hpctrain.nlp.batches.text_batch import TextBatch
from hpctrain.nlp.data import formats
from hpctrain.nlp.data.tables import read_columns
from hpctrain.nlp.models.model_folder import count_own_positions
from hpctrain.nlp.task import IGNORED, AnyExample, Example, Logits, Task

ENDLESS = 1_000_000  # positions of a model that has no limit
PROMPTS = {"1": "긍정: ", "0": "부정: "}  # the prompt for each label of NSMC: positive, negative


class LanguageModelTask(Task[AnyExample]):
    """Continue a text. The loss is over the tokens that have a label."""

    can_pack = True
    model = AutoModelForCausalLM
    pipeline_tag = "text-generation"
    kind = "gpt2"
    padding: ClassVar[Mapping[str, int]] = {"labels": IGNORED}
    # its outputs are a number for each token and each word of the vocabulary: gigabytes, as in training
    evaluation_factor = 1
    selection_metric = "perplexity"
    higher_is_better = False

    def predict(self, output: Logits, batch: TextBatch) -> Tensor:
        """The negative log likelihood of the labels in each feature, and their number, [b, 2]."""
        logits, targets = output.logits[:, :-1].float(), batch.tokens["labels"][:, 1:]
        losses = cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")
        return torch.stack([losses.double().sum(1), (targets != IGNORED).sum(1).double()], 1)

    def make_answers(
        self,
        examples: Sequence[AnyExample],
        features: Features,
        predictions: Sequence[Any],
        labels: list[str],
    ) -> list[dict[str, Any]]:
        """The negative log likelihood of each text, and its number of tokens."""
        sums = numpy.zeros((len(examples), 2))
        numpy.add.at(sums, features.example, numpy.asarray(predictions).reshape(-1, 2))
        return [{"negative_log_likelihood": float(loss), "tokens": int(tokens)} for loss, tokens in sums]

    def score(self, examples: Sequence[AnyExample], answers: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Perplexity: e to the mean negative log likelihood of a token, over all tokens of all texts."""
        loss, tokens = (
            math.fsum(answer[name] for answer in answers) for name in ("negative_log_likelihood", "tokens")
        )
        return {"perplexity": math.exp(min(loss / tokens, 700))}

    def answer(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        rows: Sequence[tuple[str, ...]],
        config: dict[str, Any],
        args: argparse.Namespace,
        first: int,
    ) -> tuple[list[dict[str, Any]], int]:
        """Continue each text; no text counts as truncated."""
        answers = []
        for i in range(0, len(rows), args.batch_size):
            prompts = [row[0] for row in rows[i : i + args.batch_size]]
            seed = args.seed + (first + i) // args.batch_size
            texts = self.generate_texts(model, tokenizer, prompts, args.max_new_tokens, seed)
            answers += [{"generated": text} for text in texts]
        return answers, 0

    @abstractmethod
    def encode_prompts(self, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str]) -> list[list[int]]:
        """The tokens of each prompt that a user gives, up to where the model continues it."""

    @torch.inference_mode()
    def generate_texts(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        prompts: Sequence[str],
        max_new_tokens: int,
        seed: int,
    ) -> list[str]:
        """Continue each prompt by at most max_new_tokens, sampled with the seed from the top 95 % (top-p).

        A long prompt loses its beginning. Raises UsageError if the new tokens leave no position for it.
        """
        positions = count_own_positions(model) or ENDLESS
        room = positions - max_new_tokens
        if room < 1:
            raise UsageError(
                f"--max-new-tokens {max_new_tokens} leaves no room for a text in the {positions:,} positions "
                f"of the model: give at most {positions - 1}"
            )
        rows = [row[-room:] for row in self.encode_prompts(tokenizer, prompts)]
        check_tokens(model.name_or_path, model, max(map(max, rows)))
        longest = max(map(len, rows))
        # Padded on the left, because generation continues at the right.
        ids = torch.tensor(
            [[tokenizer.pad_token_id] * (longest - len(row)) + row for row in rows], device=model.device
        )
        mask = torch.tensor(
            [[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=model.device
        )
        torch.manual_seed(seed)
        generated = model.eval().generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            do_sample=True,
            top_p=0.95,
            top_k=0,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        return tokenizer.batch_decode(generated[:, longest:], skip_special_tokens=True)


@dataclass(frozen=True, slots=True)
class Passage(Example):
    """A text, and the prompt that it continues; plain text has an empty prompt."""

    prompt: str
    text: str


class Generate(LanguageModelTask[Passage]):
    """Continue a prompt. The loss is over the text only, not over the prompt."""

    name = "generate"
    title = "Text generation"
    formats = "plain text, one paragraph per line; or NSMC, with a prompt for each label; jsonl with text"
    fields = ("text",)
    examples = (("저녁이 되자 할아버지는",), ("After the rain",))

    def read(
        self, path: Path, skipped: list[HpctrainError] | None = None, columns: dict[str, str] | None = None
    ) -> list[Passage]:
        """Read plain text, one paragraph per line; the tsv of NSMC; or JSON Lines (text)."""

        def make_from_json(location: str, item: dict[str, Any]) -> Passage:
            text = formats.get_field(location, item, "text", str, f"an object with text{formats.OTHER_NAMES}")
            return Passage("", text, location=location)

        if columns:
            return read_columns(path, columns, make_from_json, skipped)
        if path.suffix.lower() in formats.OBJECTS:
            return formats.read_objects(path, make_from_json, skipped)
        lines = formats.read_lines(path)
        if lines[0].split("\t") != list(formats.NSMC_COLUMNS):
            return [
                Passage("", line, location=f"{path}, line {number}")
                for number, line in enumerate(lines, 1)
                if line.strip()
            ]

        def make(location: str, line: str) -> Passage:
            _, text, label = formats.split_fields(location, line, formats.NSMC_COLUMNS)
            label = label.strip()
            if label not in PROMPTS:
                known = " and ".join(sorted(PROMPTS))
                raise formats.line_error(
                    location, f"the label is {label[:80]!r}, but only {known} have a prompt"
                )
            return Passage(PROMPTS[label], text, location=location)

        return formats.read_examples(path, make, formats.read_table(path, formats.NSMC_COLUMNS), skipped)

    def make_example(self, texts: Sequence[str], **_: bool) -> Passage:
        """A prompt with the text unknown."""
        return Passage(texts[0], "")

    def get_texts(self, example: Passage) -> tuple[str, ...]:
        return (example.prompt, example.text)

    def tokenize(
        self,
        tokenizer: PreTrainedTokenizerFast,
        examples: Sequence[Passage],
        labels: list[str],
        max_length: int,
        stride: int,
    ) -> Features:
        """Begin, prompt, text, end. A longer one has several windows; each token is predicted in one."""
        begin, end = _get_begin_and_end(tokenizer)
        columns: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
        units, example_of = [], []
        prompts, texts = (
            encode_texts(tokenizer, column, None)
            for column in zip(*map(self.get_texts, examples), strict=True)
        )
        for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            ids = [begin, *prompt.ids, *text.ids, end]
            targets = [IGNORED] * (1 + len(prompt.ids)) + [*text.ids, end]
            for start in range(0, len(ids) - 1, max_length - 1):
                # The first token of a window is only context: it was predicted in the window before.
                window = [IGNORED, *targets[start + 1 : start + max_length]]
                if start and all(label == IGNORED for label in window):
                    continue
                columns["input_ids"].append(ids[start : start + max_length])
                columns["labels"].append(window)
                units.append(sum(label != IGNORED for label in window))
                example_of.append(i)
        return Features.from_lists(columns, {"units": units}, example=example_of)

    def generate_samples(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, examples: Sequence[Passage]
    ) -> list[str]:
        """Two texts for each prompt in the data, or for the first two words of two texts without a prompt."""
        prompts = sorted({example.prompt for example in examples})
        if prompts == [""]:
            prompts = [" ".join(example.text.split()[:2]) for example in examples[:2]]
        prompts = [prompt for prompt in prompts for _ in range(2)]
        texts = self.generate_texts(
            model, tokenizer, prompts, min(40, (count_own_positions(model) or ENDLESS) // 2), seed=1
        )
        return [prompt + text for prompt, text in zip(prompts, texts, strict=True)]

    def prepare_tokenizer(self, tokenizer: PreTrainedTokenizerFast, max_length: int) -> None:
        """Also let the tokenizer add the token that each text begins with in training."""
        super().prepare_tokenizer(tokenizer, max_length)
        begin, _ = _get_begin_and_end(tokenizer)
        if tokenizer("a")["input_ids"][:1] != [begin]:
            tokenizer.bos_token_id = begin
            tokenizer.add_bos_token = True  # type: ignore[misc]  # it has a setter, which mypy does not see

    def encode_prompts(self, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str]) -> list[list[int]]:
        """The tokens of each prompt, with the token that a text begins with in training."""
        begin, _ = _get_begin_and_end(tokenizer)
        return [[begin, *encoding.ids] for encoding in encode_texts(tokenizer, list(prompts), None)]


def _get_begin_and_end(tokenizer: PreTrainedTokenizerFast) -> tuple[int, int]:
    """The tokens before and after a text. fit_together() makes sure that there is one for the end."""
    end = tokenizer.eos_token_id
    return (end if tokenizer.bos_token_id is None else tokenizer.bos_token_id), end


TASK = Generate()
