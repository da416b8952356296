"""Find named entities, such as persons and places in KLUE-NER:

    hpctrain nlp.ner                                                   sample data, tiny model from scratch
    hpctrain nlp.ner --data klue-ner-v1.1 --model klue/bert-base

On two nodes, in the container, with Slurm:

    sbatch launch/apptainer_ddp.sh nlp.ner --data klue-ner-v1.1 --model klue/bert-base

An entity may end inside a subword token: 서울에서, "in Seoul", is one token if the vocabulary has it, but the
entity is 서울. So tags are not assigned to the tokenizer's tokens but to the units that the data set tags
(characters, or tokens separated by spaces): the first subword token of each unit carries its tag, and a token
that covers several units is split (alignment.py).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from numpy import ndarray
from torch import Tensor
from transformers import AutoModelForTokenClassification, PreTrainedTokenizerFast

from hpctrain.errors import HpctrainError, UsageError
from hpctrain.nlp.batches.features import Features, encode_texts
from hpctrain.nlp.batches.text_batch import TextBatch
from hpctrain.nlp.data.bio import Entity, from_bio, split_units, to_bio
from hpctrain.nlp.data.conll import Sentence, read_sentences
from hpctrain.nlp.task import IGNORED, Logits, Task
from hpctrain.nlp.tasks.alignment import NO_UNIT, UnitAligner, make_character_tokenizer, split_windows


class Ner(Task[Sentence]):
    """Find the named entities in a sentence, and the type of each."""

    name = "ner"
    title = "Named entity recognition"
    formats = (
        "KLUE-NER: tsv by character; lines of text␞text with <span:TAG>; "
        "CoNLL: a token and its tag per line (BIO, IOBES, BILOU or BMES); "
        "jsonl with tokens, tags or with text, entities, also as doccano and Prodigy export it"
    )
    fields = ("tokens", "tags")
    examples = (("김민수는 서울에 산다.",), ("이순신은 한산도에서 싸웠다.",))
    model = AutoModelForTokenClassification
    pipeline_tag = "token-classification"
    max_length = 256  # the longest sentence of KLUE-NER has 145 characters
    padding: ClassVar[Mapping[str, int]] = {"labels": IGNORED, "unit": NO_UNIT}
    extra = ("unit",)
    card_text = (
        '`hpctrain predict` gives the scores above. `pipeline("token-classification")` of transformers finds '
        "far fewer entities: it does not split the tokens in which an entity ends, as training and "
        "`hpctrain predict` do."
    )
    pipeline_text = """`hpctrain predict` gives the scores above. So does the code below, for texts that fit
into one window: the second tokenizer of this folder cuts a text into characters. With the first one a
pipeline finds far fewer entities, because it does not split the tokens in which an entity ends.
`aggregation_strategy="simple"` gives entities at once, but also those without a B- tag, which the scores do
not count.

```python
from transformers import pipeline

folder = "FOLDER"
tokenizer = f"{folder}/pipeline_tokenizer"
tag = pipeline("token-classification", model=folder, tokenizer=tokenizer, aggregation_strategy="none")


def find_entities(text):
    entities = []
    for token in tag(text):
        prefix, type_ = token["entity"].split("-", 1)
        start, end, index = token["start"], token["end"], token["index"]
        if prefix == "B":
            entities.append({"start": start, "end": end, "type": type_, "last": index})
        elif entities and (entities[-1]["type"], entities[-1]["last"] + 1) == (type_, index):
            entities[-1].update(end=end, last=index)
    return entities
```"""
    selection_metric = "f1"

    def read(
        self, path: Path, skipped: list[HpctrainError] | None = None, columns: dict[str, str] | None = None
    ) -> list[Sentence]:
        """Read CoNLL, the formats of KLUE-NER, or JSON Lines (conll.py)."""
        return read_sentences(path, skipped, columns)

    def make_example(self, texts: Sequence[str], by_token: bool = False, **_: bool) -> Sentence:
        """A sentence with the entities unknown; `by_token` as in the training data."""
        return Sentence("", texts[0], [], by_token)

    def get_texts(self, example: Sentence) -> tuple[str, ...]:
        return (example.text,)

    def collect_labels(self, examples: Sequence[Sentence]) -> list[str]:
        """O, and B- and I- of each entity type, also if only one of them occurs."""
        types = {entity.type for example in examples for entity in example.entities}
        return ["O", *sorted(f"{prefix}-{type_}" for prefix in "BI" for type_ in types)]

    def list_classes(self, labels: list[str]) -> list[str]:
        """The entity types."""
        return [label.removeprefix("B-") for label in labels if label.startswith("B-")]

    def collect_settings(self, examples: Sequence[Sentence]) -> dict[str, bool]:
        """Whether the data set tags tokens or characters."""
        return {"by_token": examples[0].by_token}

    def make_pipeline_tokenizer(self, tokenizer: PreTrainedTokenizerFast, settings: dict[str, bool]) -> str:
        """A tokenizer by character, for data tagged by character and WordPiece; "" otherwise.

        The models that the documents name for Korean entities (KLUE-BERT, KLUE-RoBERTa, KcBERT) are of this
        kind. In a pipeline of transformers they would miss each entity that ends inside a token, about one in
        five of KLUE-NER.
        """
        return "" if settings["by_token"] else make_character_tokenizer(tokenizer.backend_tokenizer)

    def tokenize(
        self,
        tokenizer: PreTrainedTokenizerFast,
        examples: Sequence[Sentence],
        labels: list[str],
        max_length: int,
        stride: int,
    ) -> Features:
        """One feature for each sentence, or consecutive windows if it is longer than max_length.

        Nothing is truncated. The column `unit` is the unit whose tag a token carries, or NO_UNIT, whose label
        is IGNORED. If all labels of a window are ignored, its first token gets O, because the mean over no
        labels is NaN. Raises UsageError if the special tokens fill the window.
        """
        aligner = UnitAligner(tokenizer.backend_tokenizer)
        before, after = aligner.before, aligner.after
        size = max_length - len(before) - len(after)
        if size < 1:
            raise UsageError(
                f"--max-length {max_length} has no room for text beside the tokenizer's special tokens: "
                f"give a larger one, such as {self.max_length}"
            )
        number = {label: i for i, label in enumerate(labels)}
        rows: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "unit": []}
        example_of = []
        encodings = encode_texts(tokenizer, [example.text for example in examples], None, offsets=True)
        for i, (example, encoding) in enumerate(zip(examples, encodings, strict=True)):
            spans = split_units(example.text, example.by_token)
            ids, units = aligner.align(encoding, example.text, spans)
            # Tag only units with a token, so that B- is not lost on a space at the start of an entity.
            tagged = [unit for unit in units if unit != NO_UNIT]
            tags = iter(to_bio([spans[unit] for unit in tagged], example.entities))
            targets = [IGNORED if unit == NO_UNIT else number.get(next(tags), IGNORED) for unit in units]
            after_space = [
                unit != NO_UNIT and example.text[spans[unit][0] - 1 : spans[unit][0]] == " " for unit in units
            ]
            if not ids and not before + after:
                # a model needs at least one token
                ids, units, targets = [tokenizer.pad_token_id or 0], [NO_UNIT], [IGNORED]
            for window in split_windows(units, after_space, size):
                target = [IGNORED] * len(before) + targets[window] + [IGNORED] * len(after)
                if all(label == IGNORED for label in target):
                    target[0] = number["O"]
                rows["input_ids"].append(before + ids[window] + after)
                rows["labels"].append(target)
                rows["unit"].append([NO_UNIT] * len(before) + units[window] + [NO_UNIT] * len(after))
                example_of.append(i)
        if "token_type_ids" in tokenizer.model_input_names:
            rows["token_type_ids"] = [[0] * len(row) for row in rows["input_ids"]]
        counts = [sum(label != IGNORED for label in target) for target in rows["labels"]]
        return Features.from_lists(rows, {"units": counts}, example=example_of)

    def predict(self, output: Logits, batch: TextBatch) -> Tensor:
        """The index of the most probable tag for each token, NO_UNIT without a unit, int16 [b, length]."""
        tags = output.logits.argmax(-1).to(torch.int16)
        return tags.masked_fill(batch.tokens["unit"] == NO_UNIT, NO_UNIT)

    def trim(self, prediction: ndarray) -> ndarray:
        """The tags of the units in a window, in their order."""
        return prediction[prediction != NO_UNIT]

    def make_answers(
        self, examples: Sequence[Sentence], features: Features, predictions: Sequence[Any], labels: list[str]
    ) -> list[dict[str, Any]]:
        """The entities of each sentence: start and end in its text, type, and text[start:end]."""
        spans = [split_units(example.text, example.by_token) for example in examples]
        tags = [[""] * len(places) for places in spans]
        for i, (example, prediction) in enumerate(zip(features.example, predictions, strict=True)):
            units = features.tokens["unit"][features.starts[i] : features.starts[i + 1]]
            for unit, tag in zip(units[units != NO_UNIT], prediction, strict=True):
                tags[example][unit] = labels[tag]
        answers = []
        for sentence, places, predicted in zip(examples, spans, tags, strict=True):
            # A unit without a token, such as a space, belongs to the entity that continues after it.
            for unit in reversed(range(len(predicted))):
                following = predicted[unit + 1] if unit + 1 < len(predicted) else "O"
                predicted[unit] = predicted[unit] or (following if following.startswith("I-") else "O")
            entities = from_bio(places, predicted, strict=True)
            shown = [{**each._asdict(), "text": sentence.text[each.start : each.end]} for each in entities]
            answers.append({"entities": shown})
        return answers

    def score(self, examples: Sequence[Sentence], answers: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Precision, recall and F1 of entities, and F1 of each type.

        An entity is correct if start, end and type match. The scores are equal to seqeval's micro average
        (mode="strict", scheme=IOB2) over the units of the data set. Entities of a type that was not in the
        training data count as missed.
        """
        correct: Counter[str] = Counter()
        gold: Counter[str] = Counter()
        predicted: Counter[str] = Counter()
        for example, answer in zip(examples, answers, strict=True):
            expected = set(example.entities)
            found = {Entity(each["start"], each["end"], each["type"]) for each in answer["entities"]}
            for count, entities in ((correct, expected & found), (gold, expected), (predicted, found)):
                count.update(entity.type for entity in entities)
        return {
            "f1": _divide(2 * correct.total(), gold.total() + predicted.total()),
            "precision": _divide(correct.total(), predicted.total()),
            "recall": _divide(correct.total(), gold.total()),
            **{
                f"f1/{type_}": _divide(2 * correct[type_], gold[type_] + predicted[type_])
                for type_ in sorted(gold)
            },
        }


def _divide(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


TASK = Ner()
