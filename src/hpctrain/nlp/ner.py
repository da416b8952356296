"""Find the names in sentences, such as those of persons and places in KLUE-NER:

    hpctrain nlp.ner                                                   a model of its own on a small sample
    hpctrain nlp.ner --data klue-ner-v1.1 --model klue/bert-base

Two nodes, from the container, by Slurm:

    sbatch launch/apptainer_ddp.sh nlp.ner --data klue-ner-v1.1 --model klue/bert-base

A name may end inside of a piece of the tokenizer: 서울에서, "in Seoul", is one where the vocabulary has it. So it is not pieces
that are labelled, but the units that the data have a tag for (characters, or tokens by space): the first piece of each unit
carries its tag, and a piece that covers several units is cut.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy
from tokenizers import Encoding, Tokenizer
from transformers import AutoModelForTokenClassification, PreTrainedTokenizerFast
from transformers.modeling_outputs import TokenClassifierOutput

from hpctrain.nlp import data, finetune
from hpctrain.nlp.data import Sentence
from hpctrain.nlp.features import Features, encode, features
from hpctrain.nlp.task import IGNORED, Task
from hpctrain.world import UsageError, World

NONE = -1  # of a piece that carries the tag of no unit
SPACES = "Ġ▁"  # what stands for a space at the beginning of a piece: of byte-level BPE, and of SentencePiece


class Ner(Task):
    """The names in a sentence, and what each is."""

    name = "ner"
    title = "Named entity recognition"
    model = AutoModelForTokenClassification
    pipeline_tag = "token-classification"
    max_length = 256  # KLUE-NER's longest sentence has 145 characters
    padding = {"labels": IGNORED, "unit": NONE}  # noqa: RUF012 - Task declares it
    extra = ("unit",)
    score = "f1"

    def labels(self, examples: Sequence[Sentence]) -> list[str]:
        """O, and B- and I- of each type."""
        types = {entity.type for example in examples for entity in example.entities}
        return ["O", *sorted(f"{place}-{type_}" for place in "BI" for type_ in types)]

    def settings(self, examples: Sequence[Sentence]) -> dict[str, Any]:
        """Whether the data are labelled by token."""
        return {"by_token": examples[0].by_token}

    def texts(self, example: Sentence) -> tuple[str, ...]:
        """The sentence."""
        return (example.text,)

    def example(self, texts: Sequence[str], by_token: bool = False) -> Sentence:
        """A sentence whose names are not known; `by_token` as in the data that the model has learnt from."""
        return Sentence("", texts[0], [], by_token, "")

    def tokenise(
        self, tokenizer: PreTrainedTokenizerFast, examples: Sequence[Sentence], labels: list[str], max_length: int, stride: int
    ) -> Features:
        """A feature a sentence, or several where it is longer than the window, one after the other, so that nothing is cut off.

        The column `unit` says which unit of the sentence a token carries the tag of, NONE for none, which is IGNORED. A window in
        which no tag counts has O on its first token, because the mean over no label is not a number.
        Raises UsageError where the special tokens fill the window.
        """
        cutter = _Cutter(tokenizer.backend_tokenizer)
        before, after = cutter.before, cutter.after
        room = max_length - len(before) - len(after)
        if room < 1:
            raise UsageError(
                f"--max-length {max_length}: the special tokens of the tokenizer leave no room in it: {self.max_length} is usual"
            )
        number = {label: i for i, label in enumerate(labels)}
        rows: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "unit": []}
        of_example = []
        encodings = encode(tokenizer, [example.text for example in examples], None, offsets=True)
        for i, (example, encoding) in enumerate(zip(examples, encodings, strict=True)):
            spans = data.spans(example.text, example.by_token)
            ids, units = cutter.cut(encoding, example.text, spans)
            # Of the units that have a piece only, so that B- is not on the space with which a name begins by mistake.
            tagged = [unit for unit in units if unit != NONE]
            tags = iter(data.to_bio([spans[unit] for unit in tagged], example.entities))
            targets = [IGNORED if unit == NONE else number.get(next(tags), IGNORED) for unit in units]
            after_space = [unit != NONE and example.text[spans[unit][0] - 1 : spans[unit][0]] == " " for unit in units]
            if not ids and not before + after:
                ids, units, targets = [tokenizer.pad_token_id or 0], [NONE], [IGNORED]  # no model takes a feature without tokens
            for window in _windows(units, after_space, room):
                target = [IGNORED] * len(before) + targets[window] + [IGNORED] * len(after)
                if all(label == IGNORED for label in target):
                    target[0] = number["O"]
                rows["input_ids"].append(before + ids[window] + after)
                rows["labels"].append(target)
                rows["unit"].append([NONE] * len(before) + units[window] + [NONE] * len(after))
                of_example.append(i)
        if "token_type_ids" in tokenizer.model_input_names:
            rows["token_type_ids"] = [[0] * len(row) for row in rows["input_ids"]]
        counts = [sum(label != IGNORED for label in target) for target in rows["labels"]]
        return features(rows, {"units": counts}, example=of_example)

    def predict(self, output: TokenClassifierOutput, batch: dict[str, Any]) -> list[Any]:
        """The number of the most probable tag of each unit that a window carries, in their order."""
        tags = output.logits.argmax(-1).cpu().numpy().astype(numpy.int16)
        carried = batch["unit"].cpu().numpy() != NONE
        return [row[where] for row, where in zip(tags, carried, strict=True)]

    def answers(
        self, examples: Sequence[Sentence], features: Features, predictions: Sequence[Any], labels: list[str]
    ) -> list[dict[str, Any]]:
        """The names in each sentence: start and end as places in its text, the type, and the text between them."""
        spans = [data.spans(example.text, example.by_token) for example in examples]
        tags = [[""] * len(places) for places in spans]
        for i, (example, prediction) in enumerate(zip(features.example, predictions, strict=True)):
            units = features.tokens["unit"][features.starts[i] : features.starts[i + 1]]
            for unit, tag in zip(units[units != NONE], prediction, strict=True):
                tags[example][unit] = labels[tag]
        found = []
        for example, places, said in zip(examples, spans, tags, strict=True):
            # A unit without a piece, as a space is, belongs to a name that goes on after it.
            for unit in reversed(range(len(said))):
                following = said[unit + 1] if unit + 1 < len(said) else "O"
                said[unit] = said[unit] or (following if following.startswith("I-") else "O")
            entities = data.from_bio(places, said, strict=True)
            found.append([{**entity._asdict(), "text": example.text[entity.start : entity.end]} for entity in entities])
        return [{"entities": entities} for entities in found]

    def metric(self, examples: Sequence[Sentence], answers: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Precision, recall and F1 of the names, right where start, end and type are; F1 of each type as well.

        This is seqeval's micro average (mode="strict", scheme=IOB2) at the level of the data. A type that training never had
        counts as missed.
        """
        right, there, said = Counter(), Counter(), Counter()
        for example, answer in zip(examples, answers, strict=True):
            gold = {tuple(entity) for entity in example.entities}
            found = {(entity["start"], entity["end"], entity["type"]) for entity in answer["entities"]}
            for count, entities in ((right, gold & found), (there, gold), (said, found)):
                count.update(type_ for _, _, type_ in entities)
        return {
            "f1": _ratio(2 * right.total(), there.total() + said.total()),
            "precision": _ratio(right.total(), said.total()),
            "recall": _ratio(right.total(), there.total()),
            **{f"f1/{type_}": _ratio(2 * right[type_], there[type_] + said[type_]) for type_ in sorted(there)},
        }


class _Cutter:
    """Brings the pieces that a tokenizer makes of a text into line with the units of the text."""

    def __init__(self, backend: Tokenizer) -> None:
        self.backend = backend
        # What WordPiece writes before a piece that does not begin a word; the others mark those that do, with a space.
        self.prefix = getattr(backend.model, "continuing_subword_prefix", None) or ""
        self.spaces = {backend.token_to_id(space) for space in SPACES}
        self.pieces = cache(self._pieces)  # a language has few characters
        # The special tokens around a text, as [CLS] and [SEP].
        backend.no_padding()
        backend.no_truncation()
        letter = backend.encode("a")
        special = letter.special_tokens_mask
        self.before = letter.ids[: special.index(0)]
        self.after = letter.ids[len(special) - special[::-1].index(0) :]

    def cut(self, encoding: Encoding, text: str, spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
        """The pieces of a text, and for each the unit that it carries the tag of, NONE for none.

        A piece of several units becomes one for each; a space is no unit here, because most tokenizers have no piece for it.
        """
        unit_of = [NONE] * len(text)
        for unit, (start, end) in enumerate(spans):
            if not text[start:end].isspace():
                unit_of[start:end] = [unit] * (end - start)
        ids: list[int] = []
        units: list[int] = []
        last = done = NONE  # the last unit that has a piece, and that was cut out of one, so that it has all of its own
        for id_, piece, (start, end) in zip(encoding.ids, encoding.tokens, encoding.offsets, strict=True):
            covered = sorted({unit for unit in unit_of[start:end] if unit != NONE})
            if covered and covered[-1] == done:
                continue
            if len(covered) > 1:
                mark = self._mark(piece)
                for unit in covered:
                    if unit > last and (pieces := self.pieces(mark, text[slice(*spans[unit])])):
                        ids += pieces
                        space = len(pieces) > 1 and pieces[0] in self.spaces
                        units += [NONE] * space + [unit] + [NONE] * (len(pieces) - space - 1)
                        last = done = unit
                        mark = self.prefix
            else:
                ids.append(id_)
                units.append(covered[0] if covered and covered[0] > last else NONE)
                last = max(last, units[-1])
        return ids, units

    def _mark(self, piece: str) -> str:
        """How a piece begins to say whether it begins a word."""
        if self.prefix:
            return self.prefix if piece.startswith(self.prefix) else ""
        return piece[: len(piece) - len(piece.lstrip(SPACES))]

    def _pieces(self, mark: str, unit: str) -> list[int]:
        """The pieces of a unit alone, the first with `mark`; none where the normaliser drops it."""
        backend = self.backend
        normal = backend.normalizer.normalize_str(unit) if backend.normalizer else unit
        ids = []
        for word, _ in backend.pre_tokenizer.pre_tokenize_str(normal) if backend.pre_tokenizer else [(normal, None)]:
            if not self.prefix:
                word = mark + word.lstrip(SPACES)
            known = backend.token_to_id(mark + word if self.prefix else word)
            ids += [known] if known is not None else [token.id for token in backend.model.tokenize(word)]
            mark = ""
        return ids


def _windows(units: list[int], after_space: list[bool], room: int) -> Iterator[slice]:
    """The pieces of a sentence in windows of at most `room`, cut where a unit begins, and after a space if one is in reach."""
    start = 0
    while len(units) - start > room:
        end = start + room
        begins = [i for i in range(start + 1, end + 1) if units[i] != NONE]
        words = [i for i in begins if after_space[i] and i > start + room // 2]
        end = (words or begins or [end])[-1]
        yield slice(start, end)
        start = end
    yield slice(start, len(units))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


TASK = Ner()


def main(world: World, arguments: list[str]) -> None:
    """Fine-tune as the flags say."""
    finetune.run(TASK, world, arguments)
