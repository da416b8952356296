"""Every task with a tiny model of each architecture: it trains and predicts, or one line says why not.

`pytest tests/nlp/models/test_architectures.py --write-table` writes the table of docs/reference/models.md.
"""

import pytest
from slurm_cluster import REPOSITORY

from hpctrain.errors import HpctrainError
from tests.nlp.architectures import ARCHITECTURES, make_folder
from tests.nlp.helpers import TASKS, run_predict, train

PAGE = REPOSITORY / "docs/reference/models.md"
BEGIN = "<!-- what tests/nlp/models/test_architectures.py saw -->\n"
# what a cell without "yes" says, by a part of the error
REASONS = {
    "an encoder (": "encoder",
    "has an encoder and a decoder": "encoder-decoder",
    "which transformers does not have for": "no class",
    "none of its weights is one of": "no weights",
}
# for each kind of what people met, one that told it
TELLING = [
    ("roberta+bert", "pair"),  # two token types, of which the model has one
    ("deberta-v2", "ner"),  # no sdpa
    ("xlnet", "classify"),  # no limit of positions
    ("t5", "classify"),  # no decoder_start_token_id
    ("gpt_neo", "generate"),
    ("bert", "generate"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = {}

    def get(kind):
        if kind not in made:
            made[kind] = make_folder(tmp_path_factory.mktemp("models") / kind, kind)
        return made[kind]

    return get


def run_cell(model, task, out, capfd):
    """ "yes" if the task trains the model, and it answers; else why not. Any other error is raised."""
    data = ("--data", TASKS[task].TASK.samples, "--limit", 4, "--batch-size", 2)
    try:
        run = train(task, out, "--model", model, *data, "--epochs", 1, "--device", "cpu")
    except HpctrainError as error:
        assert str(model) in str(error) and "give " in str(error)
        return next(word for part, word in REASONS.items() if part in str(error))
    texts = ["누가 썼는가? Who?"] * len(TASKS[task].TASK.inputs)
    assert len(run_predict(capfd, run, *texts, "--max-new-tokens", 4, "--device", "cpu")) == 1
    return "yes"


def read_table():
    """The cells of the page, by architecture and task."""
    text = PAGE.read_text().partition(BEGIN)[2].partition("<!-- end -->")[0]
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return {(row[0], task): cell for row in rows[2:] for task, cell in zip(rows[0][2:], row[2:], strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "task"), TELLING)
def test_a_telling_cell_is_as_the_page_says(kind, task, folder, tmp_path, capfd):
    assert run_cell(folder(kind), task, tmp_path / "run", capfd) == read_table()[kind, f"nlp.{task}"]


@pytest.mark.slow
def test_the_table_of_the_page_is_what_happens(folder, tmp_path, capfd, check_table):
    names = [f"nlp.{task}" for task in TASKS]
    lines = [f"| architecture | such as | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for kind, architecture in ARCHITECTURES.items():
        cells = [run_cell(folder(kind), task, tmp_path / f"{kind}-{task}", capfd) for task in TASKS]
        lines.append(f"| `{kind}` | {architecture.models} | {' | '.join(cells)} |")
    check_table(PAGE, BEGIN, lines)
    assert len(ARCHITECTURES) >= 25 and not [line for line in lines if "|  |" in line]
