"""Reading texts to continue."""

import pytest

from hpctrain.nlp.tasks.generate import TASK, Passage
from tests.nlp.data.test_formats import NSMC_HEADER, assert_error, write


def test_reviews_get_a_prompt_and_plain_text_does_not(tmp_path):
    reviews = TASK.read(write(tmp_path / "a.txt", NSMC_HEADER + "1\t좋다\t1\n2\t나쁘다\t0\n"))
    assert reviews == [
        Passage("긍정: ", "좋다", location=f"{tmp_path}/a.txt, line 2"),
        Passage("부정: ", "나쁘다", location=f"{tmp_path}/a.txt, line 3"),
    ]
    assert TASK.read(write(tmp_path / "b.txt", "하나.\n\n둘\t셋.\n")) == [
        Passage("", "하나.", location=f"{tmp_path}/b.txt, line 1"),
        Passage("", "둘\t셋.", location=f"{tmp_path}/b.txt, line 3"),
    ]


@pytest.mark.parametrize(
    ("content", "message", "left"),
    [
        (
            NSMC_HEADER + "1\t좋다\t5\n2\t좋다\t1\n",
            "line 2: the label is '5', but only 0 and 1 have a prompt",
            1,
        ),
        (NSMC_HEADER + "1\t좋다\t1\n2\t좋다\n", "line 3: 2 fields", 1),
        (NSMC_HEADER + "1\t좋다\t\n", "line 2: the label is ''", 0),
        (NSMC_HEADER, "the file has no examples", 0),
        (" \n\n", "the file is empty", 0),
    ],
)
def test_error_in_texts_to_generate_names_the_line(tmp_path, content, message, left):
    assert_error(TASK.read, write(tmp_path / "a.txt", content), message, left)
