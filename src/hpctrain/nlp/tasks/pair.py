"""Classify sentence pairs, as in KLUE-NLI and KorNLI, or give them a number, as in KorSTS:

    hpctrain nlp.pair                                                  sample data, tiny model from scratch
    hpctrain nlp.pair --data klue-nli-v1.1 --model klue/bert-base
    hpctrain nlp.pair --data KorSTS --problem regression --model klue/bert-base

On two nodes, in the container, with Slurm:

    sbatch launch/apptainer_ddp.sh nlp.pair --data klue-nli-v1.1 --model klue/bert-base
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.errors import HpctrainError
from hpctrain.nlp.data import formats
from hpctrain.nlp.data.tables import read_columns
from hpctrain.nlp.tasks.classify import Classify

KORNLI_COLUMNS = ("sentence1", "sentence2", "gold_label")
KORSTS_COLUMNS = ("genre", "filename", "year", "id", "score", "sentence1", "sentence2")
KLUE_NAMES = ("premise", "hypothesis", "gold_label")


class Pair(NamedTuple):
    """Two sentences and their relation, such as "entailment"; with --problem several classes, or a number."""

    id: str
    first: str
    second: str
    label: str | tuple[str, ...] | float
    location: str = ""


class PairClassify(Classify):
    """Assign one class to two sentences; everything else is as for one text."""

    name = "pair"
    title = "Sentence pair classification"
    formats = (
        "KLUE-NLI and KLUE-STS: JSON list; KorNLI: tsv with sentence1, sentence2, gold_label; KorSTS: tsv; jsonl with the names "
        "of either"
    )
    fields = ("first", "second", "label")
    inputs = ("first", "second")

    def read(
        self, path: Path, skipped: list[HpctrainError] | None = None, columns: dict[str, str] | None = None
    ) -> list[Pair]:
        """Read the JSON list of KLUE (errors name the guid), or a tsv of KorNLI or KorSTS or JSON Lines
        (errors name the line).

        KLUE-STS has a number and a class for each pair, from the number.
        """
        expected = "KLUE-NLI's list of objects with guid, premise, hypothesis and gold_label"
        if columns:
            expected = "two texts and a label"

        def make_from_klue(number: int, item: object) -> Pair:
            id_ = formats.get_field(f"{path}, [{number}]", item, "guid", str, expected)
            location = f"{path}, {formats.shorten(id_)}"
            return make_from_object(id_, location, item)

        def make_from_object(id_: str, location: str, item: object) -> Pair:
            names = KORNLI_COLUMNS if isinstance(item, dict) and "sentence1" in item else KLUE_NAMES
            *names, label = self.fields if columns else names
            first, second = (formats.get_field(location, item, key, str, expected) for key in names)
            if "gold_label" in (label, (columns or {}).get("label")) and item.get(label) == "-":
                raise HpctrainError(
                    f"{location}: the gold_label is -: its annotators did not agree; remove the example"
                )
            if not columns and isinstance(item, dict) and isinstance(item.get("labels"), dict):  # of KLUE-STS
                item, label = item["labels"], "label" if self.problem == "regression" else "binary-label"
            return Pair(id_, first, second, self.get_label(location, item, label, expected), location)

        def make_from_json(location: str, item: dict[str, Any]) -> Pair:
            return make_from_object(location.rpartition(", ")[2], location, item)

        def make_from_tsv(location: str, line: str) -> Pair:
            fields = dict(zip(names, formats.split_fields(location, line, names), strict=True))
            fields.setdefault("gold_label", fields.get("score", ""))
            return make_from_object(location.rpartition(", ")[2], location, fields)

        if columns:
            return read_columns(path, columns, make_from_json, skipped)
        if path.suffix.lower() == formats.JSON_LINES:
            return formats.read_json_lines(path, make_from_json, skipped)
        if formats.read_text(path).lstrip().startswith(("[", "{")):
            return formats.read_examples(
                path, make_from_klue, enumerate(formats.read_json(path, list, expected)), skipped
            )
        names = (
            KORSTS_COLUMNS
            if formats.read_lines(path)[0].split("\t") == list(KORSTS_COLUMNS)
            else KORNLI_COLUMNS
        )
        if names == KORSTS_COLUMNS and self.problem != "regression":
            raise HpctrainError(f"{path}: its labels are numbers, as in KorSTS: give --problem regression")
        return formats.read_examples(path, make_from_tsv, formats.read_table(path, names), skipped)

    def make_example(self, texts: Sequence[str]) -> Pair:
        """Two sentences with the relation unknown."""
        return Pair("", texts[0], texts[1], "")

    def get_texts(self, example: Pair) -> tuple[str, ...]:
        """Both sentences; a tokenizer takes a tuple of two as a pair."""
        return (example.first, example.second)

    def score(self, examples: Sequence[Pair], answers: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Accuracy, and F1 averaged over the classes (macro)."""
        scores = super().score(examples, answers)
        return {name: scores[name] for name in ("accuracy", "f1")}


TASK = PairClassify()
