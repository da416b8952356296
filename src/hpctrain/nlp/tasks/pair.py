"""Classify sentence pairs, as in KLUE-NLI and KorNLI, or give them a number, as in KorSTS:

    hpctrain nlp.pair                                                  sample data, tiny model from scratch
    hpctrain nlp.pair --data klue-nli-v1.1 --model klue/bert-base
    hpctrain nlp.pair --data KorSTS --problem regression --model klue/bert-base

On two nodes, in the container, with Slurm:

    sbatch launch/apptainer_ddp.sh nlp.pair --data klue-nli-v1.1 --model klue/bert-base
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.errors import HpctrainError
from hpctrain.nlp.data import formats
from hpctrain.nlp.data.tables import read_columns
from hpctrain.nlp.tasks.classify import Label, Labeled, LabelTask

KORNLI_COLUMNS = ("sentence1", "sentence2", "gold_label")
KORSTS_COLUMNS = ("genre", "filename", "year", "id", "score", "sentence1", "sentence2")
KLUE_NAMES = ("premise", "hypothesis", "gold_label")
# for errors
EXPECTED = (
    "sentence1 and sentence2 (or premise and hypothesis), and gold_label or label; "
    "--columns first=COLUMN second=COLUMN label=COLUMN reads other names"
)


@dataclass(frozen=True, slots=True)
class Pair(Labeled):
    """Two sentences and their label, such as "entailment"."""

    id: str
    first: str
    second: str
    label: Label


class PairClassify(LabelTask[Pair]):
    """Classify sentence pairs."""

    name = "pair"
    title = "Sentence pair classification"
    formats = (
        "KLUE-NLI and KLUE-STS: JSON list; KorNLI: tsv with sentence1, sentence2, gold_label; KorSTS: tsv; "
        "jsonl with the names of either"
    )
    fields = ("first", "second", "label")
    inputs = ("first", "second")
    examples = (
        ("아이가 공원에서 강아지와 놀고 있다.", "아이가 밖에 있다."),
        ("지수는 시장에서 사과를 샀다.", "지수는 아무것도 사지 않았다."),
    )

    def read(
        self, path: Path, skipped: list[HpctrainError] | None = None, columns: dict[str, str] | None = None
    ) -> list[Pair]:
        """Read JSON, a list as of KLUE or JSON Lines, or a tsv of KorNLI or KorSTS; errors name guid or line.

        KLUE-STS has a number for each pair, and a class made from it.
        """
        expected = "two texts and a label" if columns else EXPECTED

        def make_from_json(location: str, record: dict[str, Any]) -> Pair:
            id_ = location.rpartition(", ")[2]
            if isinstance(record.get("guid"), str):
                id_ = record["guid"]
                location = f"{path}, {formats.excerpt(id_)}"
            *texts, key = self.fields if columns else _find_keys(record)
            first, second = (formats.get_field(location, record, text, str, expected) for text in texts)
            if "gold_label" in (key, (columns or {}).get("label")) and record.get(key) == "-":
                raise HpctrainError(
                    f"{location}: the gold_label is -: its annotators did not agree; remove the example"
                )
            if not columns and isinstance(record.get("labels"), dict):  # of KLUE-STS
                record, key = record["labels"], "label" if self.problem == "regression" else "binary-label"
            label = self.get_label(location, record, key, expected)
            return Pair(id_, first, second, label, location=location)

        def make_from_tsv(location: str, line: str) -> Pair:
            fields = dict(zip(names, formats.split_fields(location, line, names), strict=True))
            fields.setdefault("gold_label", fields.get("score", ""))
            return make_from_json(location, fields)

        if columns:
            return read_columns(path, columns, make_from_json, skipped)
        if path.suffix.lower() in formats.OBJECTS or formats.read_text(path).lstrip().startswith(("[", "{")):
            return formats.read_objects(path, make_from_json, skipped)
        is_korsts = formats.read_lines(path)[0].split("\t") == list(KORSTS_COLUMNS)
        names = KORSTS_COLUMNS if is_korsts else KORNLI_COLUMNS
        if is_korsts and self.problem != "regression":
            raise HpctrainError(f"{path}: its labels are numbers, as in KorSTS: give --problem regression")
        return formats.read_examples(path, make_from_tsv, formats.read_table(path, names), skipped)

    def make_example(self, texts: Sequence[str], **_: bool) -> Pair:
        """Two sentences with the relation unknown."""
        return Pair("", texts[0], texts[1], "")

    def get_texts(self, example: Pair) -> tuple[str, ...]:
        return (example.first, example.second)

    def score(self, examples: Sequence[Pair], answers: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Accuracy, and F1 averaged over the classes (macro)."""
        scores = super().score(examples, answers)
        return {name: scores[name] for name in ("accuracy", "f1")}


def _find_keys(record: dict[str, Any]) -> tuple[str, ...]:
    """The names of the two texts and of the label in an object; GLUE's is label."""
    *texts, label = KORNLI_COLUMNS if "sentence1" in record else KLUE_NAMES
    return (*texts, "label" if label not in record and "label" in record else label)


TASK = PairClassify()
