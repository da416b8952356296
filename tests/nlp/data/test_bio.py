"""BIO tags of entities, and back; compared with seqeval."""

import re
from itertools import pairwise, product

import numpy
import pytest
from seqeval.metrics import f1_score
from seqeval.scheme import IOB2, Entities

from hpctrain.nlp.data.bio import Entity, from_bio, split_units, to_bio
from hpctrain.nlp.data.splits import load_splits
from hpctrain.nlp.task import SAMPLES
from hpctrain.nlp.tasks.ner import TASK
from tests.nlp.data.test_formats import find_data, write


def pass_through_bio(sentence):
    units = split_units(sentence.text, sentence.by_token)
    return from_bio(units, to_bio(units, sentence.entities))


@pytest.mark.parametrize("task", ["ner", "ner_lines", "ner_conll"])
def test_sample_entities_survive_a_round_trip_through_bio(task):
    sentences = [s for part in load_splits(TASK, SAMPLES / task).values() for s in part]
    touching = sum(
        a.end == b.start or s.text[a.end : b.start] == " " for s in sentences for a, b in pairwise(s.entities)
    )
    assert touching >= 1
    for sentence in sentences:
        assert pass_through_bio(sentence) == sentence.entities


def test_adjacent_entity_begins_with_b():
    spans = split_units("서울부산", by_token=False)
    entities = [Entity(0, 2, "LC"), Entity(2, 4, "LC")]
    assert to_bio(spans, entities) == ["B-LC", "I-LC", "B-LC", "I-LC"]
    assert from_bio(spans, ["B-LC", "I-LC", "B-LC", "I-LC"]) == entities


def test_strict_entities_match_seqeval():
    def entities(tags):
        return {
            (e.type, e.start, e.end)
            for e in from_bio([(i, i + 1) for i in range(len(tags))], tags, strict=True)
        }

    some = ["O", "B-PS", "I-PS", "B-LC", "I-LC"]
    sequences = [list(tags) for length in range(6) for tags in product(some, repeat=length)]
    random = numpy.random.default_rng(0)
    sequences += [
        random.choice([*some, "B-A-B", "I-A-B"], random.integers(6, 40)).tolist() for _ in range(2000)
    ]
    theirs = Entities(sequences, IOB2).entities
    assert sum(map(len, theirs)) > 10_000
    for tags, found in zip(sequences, theirs, strict=True):
        assert entities(tags) == {(e.tag, e.start, e.end) for e in found}, tags

    # F1 computed from them matches too, here of random tags against others.
    wanted = sequences[-2000:]
    predicted = [random.permutation(tags).tolist() for tags in wanted]
    right, of_wanted, of_predicted = 0, 0, 0
    for a, b in ((entities(a), entities(b)) for a, b in zip(wanted, predicted, strict=True)):
        right, of_wanted, of_predicted = right + len(a & b), of_wanted + len(a), of_predicted + len(b)
    assert right > 100 and 2 * right / (of_wanted + of_predicted) == pytest.approx(
        f1_score(wanted, predicted, mode="strict", scheme=IOB2)
    )


def test_stray_inside_tag_is_an_entity_unless_strict():
    spans = split_units("가나다라", by_token=False)
    assert from_bio(spans, ["B-A", "I-B", "I-B", "I-A"]) == [
        Entity(0, 1, "A"),
        Entity(1, 3, "B"),
        Entity(3, 4, "A"),
    ]
    assert from_bio(spans, ["B-A", "I-B", "I-B", "I-A"], strict=True) == [Entity(0, 1, "A")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count", "in_brackets"),
    [("klue-ner-v1.1_dev.tsv", 14_257, 3), ("klue-ner-mini_train.tsv", 12_197, 1)],
    ids=["dev", "train"],
)
def test_klue_entities_survive_a_round_trip_through_bio(name, count, in_brackets, tmp_path):
    path = find_data(f"klue/klue-ner-v1.1/{name}")
    sentences = TASK.read(path)
    assert len(sentences) == 5000 and sum(len(s.entities) for s in sentences) == count
    assert all(pass_through_bio(sentence) == sentence.entities for sentence in sentences)
    # The header of each sentence repeats it with its entities marked, so a second reader must find the same.
    headers = re.findall(r"^## (klue-ner-v1_\S+)\t(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert [s.id for s in sentences] == [id_ for id_, _ in headers]
    lines = [
        f"{s.text.rstrip()}␞{marked.rstrip()}" for s, (_, marked) in zip(sentences, headers, strict=True)
    ]
    again = TASK.read(write(tmp_path / "lines.txt", "\n".join(lines)))
    other = [
        (s.entities, t.entities) for s, t in zip(sentences, again, strict=True) if s.entities != t.entities
    ]
    # If an entity is in brackets that belong to the text (<<레이:PS>>), KLUE's tags begin at the bracket.
    assert len(other) == in_brackets
    for mine, theirs in other:
        assert {entity.end for entity in mine} == {entity.end for entity in theirs} and len(
            set(mine) - set(theirs)
        ) == 1
