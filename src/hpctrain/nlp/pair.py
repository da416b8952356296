"""Classify sentence pairs, as in KLUE-NLI and KorNLI:

    hpctrain nlp.pair                                                  sample data, tiny model from scratch
    hpctrain nlp.pair --data klue-nli-v1.1 --model klue/bert-base

On two nodes, in the container, with Slurm:

    sbatch launch/apptainer_ddp.sh nlp.pair --data klue-nli-v1.1 --model klue/bert-base
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.cli import Parser
from hpctrain.errors import HpctrainError
from hpctrain.nlp import data, finetune, options
from hpctrain.nlp.classify import Classify
from hpctrain.nlp.tables import read_columns
from hpctrain.world import World

KORNLI_COLUMNS = ("sentence1", "sentence2", "gold_label")
KLUE_NAMES = ("premise", "hypothesis", "gold_label")


class Pair(NamedTuple):
    """Two sentences and their relation, such as "entailment"."""

    id: str
    first: str
    second: str
    label: str
    location: str = ""


class PairClassify(Classify):
    """Assign one class to two sentences; everything else is as for one text."""

    name = "pair"
    title = "Sentence pair classification"
    formats = "KLUE-NLI: JSON list; KorNLI: tsv with sentence1, sentence2, gold_label; jsonl with the names of either"
    fields = ("first", "second", "label")
    inputs = ("first", "second")

    def read(self, path: Path, skipped: list[HpctrainError] | None = None, columns: dict[str, str] | None = None) -> list[Pair]:
        """Read the JSON list of KLUE-NLI (errors name the guid), or the tsv of KorNLI or JSON Lines (errors name the line)."""
        expected = "KLUE-NLI's list of objects with guid, premise, hypothesis and gold_label"
        if columns:
            expected = "two texts and a label"

        def make_from_klue(number: int, item: object) -> Pair:
            id_ = data.get_field(f"{path}, [{number}]", item, "guid", str, expected)
            location = f"{path}, {data.shorten(id_)}"
            return make_from_object(id_, location, item)

        def make_from_object(id_: str, location: str, item: object) -> Pair:
            names = KORNLI_COLUMNS if isinstance(item, dict) and "sentence1" in item else KLUE_NAMES
            *names, label = self.fields if columns else names
            first, second = (data.get_field(location, item, key, str, expected) for key in names)
            return Pair(id_, first, second, data.get_label(location, item, label, expected), location)

        def make_from_json(location: str, item: dict[str, Any]) -> Pair:
            return make_from_object(location.rpartition(", ")[2], location, item)

        def make_from_kornli(location: str, line: str) -> Pair:
            fields = dict(zip(KORNLI_COLUMNS, data.split_fields(location, line, KORNLI_COLUMNS), strict=True))
            return make_from_object(location.rpartition(", ")[2], location, fields)

        if columns:
            return read_columns(path, columns, make_from_json, skipped)
        if path.suffix == data.JSON_LINES:
            return data.read_json_lines(path, make_from_json, skipped)
        if data.read_text(path).lstrip().startswith(("[", "{")):
            return data.read_examples(path, make_from_klue, enumerate(data.read_json(path, list, expected)), skipped)
        return data.read_examples(path, make_from_kornli, data.read_table(path, KORNLI_COLUMNS), skipped)

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


def parser() -> Parser:
    """The options of `hpctrain nlp.pair`."""
    return options.make_parser(TASK)


def main(world: World, arguments: list[str]) -> None:
    """Run `hpctrain nlp.pair`."""
    finetune.fine_tune(TASK, world, arguments)
