"""Classify texts, such as the film reviews of NSMC:

    hpctrain nlp.classify                                              sample data, tiny model from scratch
    hpctrain nlp.classify --data nsmc --model beomi/kcbert-base

On two nodes, in the container, with Slurm:

    sbatch launch/apptainer_ddp.sh nlp.classify --data nsmc --model beomi/kcbert-base
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from hpctrain.errors import HpctrainError
from hpctrain.nlp.batches.features import Features, encode_texts
from hpctrain.nlp.batches.text_batch import TextBatch
from hpctrain.nlp.data import formats
from hpctrain.nlp.data.tables import read_columns
from hpctrain.nlp.task import IGNORED, Example, Logits, Task
from hpctrain.nlp.tasks.problems import MultiLabel, Regression

# NSMC: the names of its files begin so, and its README says what its labels mean.
NSMC_FILES, NSMC_LABELS = "ratings_", {"0": "negative", "1": "positive"}
Label = str | tuple[str, ...] | float  # one class; with --problem several classes, or a number


class Labeled(Example):
    """An example with a label."""

    __slots__ = ()
    label: Label


AnyLabeled = TypeVar("AnyLabeled", bound=Labeled)


class LabelTask(Task[AnyLabeled]):
    """Assign one class to each example. for_problem() has the same task with several classes, or a number."""

    one_label = True
    model = AutoModelForSequenceClassification
    pipeline_tag = "text-classification"
    selection_metric = "accuracy"

    def for_problem(self, problem: str | None) -> Task[AnyLabeled]:
        """The same task for labels of another kind, see --problem."""
        kind = {"multi-label": MultiLabel, "regression": Regression}.get(problem or "")
        return type(f"{kind.__name__}{type(self).__name__}", (kind, type(self)), {})() if kind else self

    def get_label(self, location: str, item: object, key: str, expected: str) -> Label:
        """The label of an example. Raises HpctrainError."""
        return formats.get_label(location, item, key, expected)

    def has_answer(self, example: AnyLabeled) -> bool:
        """Whether it has a label but -1."""
        return example.label not in ("-1", ("-1",), (), -1.0)

    def collect_labels(self, examples: Sequence[AnyLabeled]) -> list[str]:
        """The classes in alphabetical order."""
        return sorted({str(example.label) for example in examples})

    def tokenize(
        self,
        tokenizer: PreTrainedTokenizerFast,
        examples: Sequence[AnyLabeled],
        labels: list[str],
        max_length: int,
        stride: int,
    ) -> Features:
        """One feature for each example.

        Long texts are truncated at their end, of a pair the longer first; [SEP] separates two texts.
        """
        texts = [self.get_texts(example) for example in examples]
        encodings = list(
            encode_texts(tokenizer, [text if len(text) > 1 else text[0] for text in texts], max_length)
        )
        columns = {"input_ids": [encoding.ids for encoding in encodings]}
        # For a single text they are all 0, the default of the models.
        if "token_type_ids" in tokenizer.model_input_names:
            columns["token_type_ids"] = [encoding.type_ids for encoding in encodings]
        return Features.from_lists(
            columns,
            self.make_targets(examples, labels),
            cut=[i for i, encoding in enumerate(encodings) if encoding.overflowing],
        )

    def make_targets(self, examples: Sequence[AnyLabeled], labels: list[str]) -> dict[str, Sequence[Any]]:
        """What the loss needs of each feature: the number of its class, and whether it has one."""
        number: dict[Label, int] = {label: i for i, label in enumerate(labels)}
        targets = [number.get(example.label, IGNORED) for example in examples]
        return {"labels": targets, "units": [target != IGNORED for target in targets]}

    def predict(self, output: Logits, batch: TextBatch) -> Tensor:
        """The probability of each class, [b, classes]."""
        return output.logits.float().softmax(-1)

    def make_answers(
        self,
        examples: Sequence[AnyLabeled],
        features: Features,
        predictions: Sequence[Any],
        labels: list[str],
    ) -> list[dict[str, Any]]:
        """The most probable class, and its probability."""
        return [{"label": labels[p.argmax()], "probability": round(float(p.max()), 6)} for p in predictions]

    def score(self, examples: Sequence[AnyLabeled], answers: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Accuracy; and the mean of precision, recall and F1 over the classes of the examples (macro)."""
        gold, predicted = [example.label for example in examples], [answer["label"] for answer in answers]
        right = Counter(label for label, answer in zip(gold, predicted, strict=True) if label == answer)
        of_gold, of_predicted = Counter(gold), Counter(predicted)
        # Not by scikit-learn, whose import takes a second. A class that was not in the training data counts
        # too: all answers for it are wrong. So does one that is never answered: its precision is 0.
        classes = {
            "precision": [right[label] / max(1, of_predicted[label]) for label in of_gold],
            "recall": [right[label] / count for label, count in of_gold.items()],
            "f1": [2 * right[label] / (count + of_predicted[label]) for label, count in of_gold.items()],
        }
        macro = {name: math.fsum(values) / len(of_gold) for name, values in classes.items()}
        return {"accuracy": right.total() / len(gold), **macro}


@dataclass(frozen=True, slots=True)
class Document(Labeled):
    """A text, which may be empty, and its label."""

    id: str
    text: str
    label: Label


class Classify(LabelTask[Document]):
    """Classify texts."""

    name = "classify"
    title = "Text classification"
    formats = "NSMC: tsv with id, document, label; jsonl with text, label"
    fields = ("text", "label")
    examples = (("어제 봤는데 끝까지 재미있었다. 감동 그 자체 ㅎㅎ",), ("A boring story, a waste of time.",))

    def read(
        self, path: Path, skipped: list[HpctrainError] | None = None, columns: dict[str, str] | None = None
    ) -> list[Document]:
        """Read the tsv of NSMC (id, document, label) or JSON Lines (text or document, label)."""

        def make(location: str, line: str) -> Document:
            id_, text, written = formats.split_fields(location, line, formats.NSMC_COLUMNS)
            label = self.get_label(location, {"label": written}, "label", "")
            return Document(id_, text, label, location=location)

        def make_from_json(location: str, item: dict[str, Any]) -> Document:
            expected = f"an object with text and label{formats.OTHER_NAMES}"
            key = "document" if "document" in item else "text"
            text = formats.get_field(location, item, key, str, expected)
            label = self.get_label(location, item, "label", expected)
            return Document(location.rpartition(", ")[2], text, label, location=location)

        if columns:
            return read_columns(path, columns, make_from_json, skipped)
        if path.suffix.lower() in formats.OBJECTS:
            return formats.read_objects(path, make_from_json, skipped)
        return formats.read_examples(path, make, formats.read_table(path, formats.NSMC_COLUMNS), skipped)

    def explain_labels(self, examples: Sequence[Document]) -> dict[str, str]:
        """What 0 and 1 mean in NSMC."""
        is_nsmc = all(Path(example.location).name.startswith(NSMC_FILES) for example in examples)
        return NSMC_LABELS if is_nsmc and {example.label for example in examples} <= {*NSMC_LABELS} else {}

    def make_example(self, texts: Sequence[str], **_: bool) -> Document:
        """A text with the class unknown."""
        return Document("", texts[0], "")

    def get_texts(self, example: Document) -> tuple[str, ...]:
        return (example.text,)


TASK = Classify()
