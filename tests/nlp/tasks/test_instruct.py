"""nlp.instruct: which tokens are learned, and conversations that cannot be."""

import json
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pandas
import pytest
from transformers import AutoTokenizer

from hpctrain.errors import HpctrainError, UsageError
from hpctrain.nlp.data.splits import load_splits
from hpctrain.nlp.models import limits, scratch
from hpctrain.nlp.models.limits import LimitError
from hpctrain.nlp.models.tokenizer import load_tokenizer
from hpctrain.nlp.parser import parse_columns
from hpctrain.nlp.task import IGNORED
from hpctrain.nlp.tasks import instruct
from hpctrain.nlp.tasks.instruct import TASK, Conversation
from hpctrain.nlp.training.tokenize import describe_problems
from tests.nlp.helpers import metrics, train
from tests.tools import warm_start

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# as templates that leave out what the model thought in earlier answers
FORGETS = "{% for m in messages %}{{ m.role }}:{{ m.content if loop.last else m.content[:1] }} {% endfor %}"
# as templates whose models think before they answer
THINKS = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
TWO_TURNS = Conversation(
    (
        ("system", "짧게."),
        ("user", "하늘?"),
        ("assistant", "파란색"),
        ("user", "눈?"),
        ("assistant", "하얀색"),
    )
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "model"
    texts = [text for example in load_splits(TASK, None)["train"] for text in TASK.get_texts(example)]
    scratch.create_model(folder, "tiny", "gpt2", texts, 1, 64)
    return load_tokenizer(folder)


def learned(tokenizer, example, max_length=64):
    """The text that the labels are, for each answer."""
    made = TASK.tokenize(tokenizer, [example], [], max_length, 0)
    ids, labels = made.tokens["input_ids"].tolist(), made.tokens["labels"].tolist()
    assert all(label in (token, IGNORED) for token, label in zip(ids, labels, strict=True))
    assert made.values["units"].tolist() == [sum(label != IGNORED for label in labels)]
    parts = [[]]
    for label in labels:
        if label != IGNORED:
            parts[-1].append(label)
        elif parts[-1]:
            parts.append([])
    return [tokenizer.decode(part) for part in parts if part], tokenizer.decode(ids)


def test_all_answers_are_learned_and_nothing_else(tokenizer):
    end = tokenizer.eos_token
    answers, text = learned(tokenizer, TWO_TURNS)
    assert answers == [f"파란색{end}", f"하얀색{end}"]
    assert text == (
        f"{end}<|system|>\n짧게.\n<|user|>\n하늘?\n<|assistant|>\n파란색{end}\n"
        f"<|user|>\n눈?\n<|assistant|>\n하얀색{end}"
    )


@pytest.mark.parametrize("template", [None, CHATML])
def test_what_the_assistant_says_first_is_no_answer(tokenizer, monkeypatch, template):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    greeting = Conversation((("assistant", "파란색"), ("user", "눈?"), ("assistant", "하얀색")))
    answers, text = learned(tokenizer, greeting, 400)
    assert len(answers) == 1 and answers[0].startswith("하얀색") and "파란색" in text


def test_of_a_prompt_that_is_a_list_nothing_is_learned(tokenizer, tmp_path):
    """As trl does with its conversational prompt and completion."""
    messages = [{"role": role, "content": text} for role, text in TWO_TURNS.messages]
    item = {"prompt": messages[1:-1], "completion": messages[-1:]}
    lines = [item, item | {"system": "짧게."}, {"prompt": messages[:-1], "completion": messages[-1:]}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    read = TASK.read(tmp_path / "a.jsonl")
    assert [example.messages for example in read] == [
        TWO_TURNS.messages[1:],
        TWO_TURNS.messages,
        TWO_TURNS.messages,
    ]
    for example in read:
        answers, text = learned(tokenizer, example, 400)
        assert len(answers) == 1 and answers[0].startswith("하얀색") and "파란색" in text


def test_the_template_of_the_tokenizer_is_used(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", CHATML)
    answers, text = learned(tokenizer, TWO_TURNS, 400)
    assert answers == ["파란색<|im_end|>\n", "하얀색<|im_end|>\n"]
    assert text.startswith("<|im_start|>system\n짧게.<|im_end|>\n<|im_start|>user\n하늘?")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (FORGETS, "line 3: .* messages 1 and before when message 2"),
        (THINKS, r"line 3: .* asks for an answer by '<\|im_start\|>assistant\\n<think>\\n' and writes"),
        (NO_SYSTEM, r"line 3: .* refuses .*\(no system role\)"),
        ("{{ nothing.x }}", "line 3: .* refuses"),
    ],
)
def test_a_template_that_cannot_be_used_is_one_line(tokenizer, monkeypatch, template, message):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(HpctrainError, match=message):
        TASK.tokenize(tokenizer, [replace(TWO_TURNS, location="line 3")], [], 64, 0)


def grow(start, step):
    """A template that computes `step` of x 99 times."""
    each = f"{{% for i in range(99) %}}{{% set ns.x = {step.replace('x', 'ns.x')} %}}{{% endfor %}}"
    return f"{{% set ns = namespace(x={start}) %}}{each}{{{{ ns.x }}}}"


# Programs without an end, or for any memory: chat templates of a model that somebody has made.
TEXTS_WITHOUT_END = {
    "a long text": "{{ 'a' * 99999999999 }}",
    "a filter": "{{ 'a'|center(99999999999) }}",
    "a format": "{{ '%99999999999d' % 1 }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "megabytes": "{{ 'a' * 9999999 }}",
}
LOOPS_WITHOUT_END = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(99) }}",
    "a text that doubles": grow("'a'", "x ~ x"),
    "a list that doubles": grow("[1]", "x + x"),
    "a number that doubles": grow("9", "x * x"),
}


@pytest.mark.parametrize(
    "template",
    [
        *(pytest.param(text, id=name) for name, text in TEXTS_WITHOUT_END.items()),
        *(pytest.param(text, id=name, marks=pytest.mark.slow) for name, text in LOOPS_WITHOUT_END.items()),
    ],
)
def test_a_template_without_an_end_is_one_line(tokenizer, monkeypatch, template):
    """In a training of many conversations, and in predict and serve, in another thread."""
    monkeypatch.setattr(tokenizer, "chat_template", template)
    monkeypatch.setattr(limits, "SECONDS", 0.2)
    before = resource.getrlimit(resource.RLIMIT_AS)
    tasks = [
        lambda: TASK.tokenize(tokenizer, [TWO_TURNS] * 1000, [], 64, 0),
        lambda: TASK.encode_prompts(tokenizer, ["가"]),
    ]
    with ThreadPoolExecutor(1) as threads:
        for call in (tasks[0], threads.submit(tasks[1]).result):
            with pytest.raises(LimitError, match=r"model: its chat template .*: use another model") as error:
                call()
            assert "\n" not in str(error.value)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    monkeypatch.setattr(tokenizer, "chat_template", f"**{CHATML}**")  # bold, in Markdown
    assert TASK.encode_prompts(tokenizer, ["가"])


def test_what_is_too_long_is_truncated_or_left_out(tokenizer):
    short = Conversation((("user", "눈?"), ("assistant", "하얀색")))
    late = Conversation((("user", "눈? " * 40), ("assistant", "하얀색")))
    long = Conversation((("user", "눈?"), ("assistant", "하얀색 " * 40)))
    made = TASK.tokenize(tokenizer, [short, late, long], [], 40, 0)
    assert (made.cut.tolist(), made.lost.tolist(), made.example.tolist()) == ([1, 2], [1], [0, 2])
    assert made.lengths.max() == 40
    answers = TASK.make_answers([short, late, long], made, [[2.0, 4.0], [6.0, 8.0]], [])
    assert [answer["tokens"] for answer in answers] == [4, 0, 8]
    with pytest.raises(HpctrainError, match="--max-length 9"):
        TASK.tokenize(tokenizer, [late], [], 9, 0)


@pytest.mark.parametrize(
    ("item", "messages"),
    [
        (
            {"instruction": "색?", "input": "눈", "output": "하얀색"},
            (("user", "색?\n\n눈"), ("assistant", "하얀색")),
        ),
        ({"instruction": "색?", "input": "", "output": "하얀색"}, (("user", "색?"), ("assistant", "하얀색"))),
        ({"prompt": "색?", "completion": "하얀색"}, (("user", "색?"), ("assistant", "하얀색"))),
        (
            {"instruction": "색?", "context": "눈", "response": "하얀색"},
            (("user", "색?\n\n눈"), ("assistant", "하얀색")),
        ),
        (
            {"id": "x", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            (("user", "a"), ("assistant", "b")),
        ),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            (("user", "a"), ("assistant", "b")),
        ),
        (  # UltraChat, No Robots
            {
                "prompt": "a",
                "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            },
            (("user", "a"), ("assistant", "b")),
        ),
        (
            {
                "system": "짧게.",
                "tools": "[]",
                "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
            },
            (("system", "짧게."), ("user", "a"), ("assistant", "b")),
        ),
        (
            {"instruction": "a", "output": "b", "system": "", "history": []},
            (("user", "a"), ("assistant", "b")),
        ),
    ],
)
def test_published_forms_are_read(tmp_path, item, messages):
    for name, text in (
        ("lines.jsonl", json.dumps(item) + "\n"),
        ("list.json", json.dumps([item])),
        ("lines.json", json.dumps(item)),
    ):
        (tmp_path / name).write_text(text)
        assert [example.messages for example in TASK.read(tmp_path / name)] == [messages]


@pytest.mark.parametrize(
    ("row", "columns", "asked"),
    [
        # tatsu-lab/alpaca
        ({"instruction": "색?", "input": "눈", "output": "하얀색"}, ["input=input"], "색?\n\n눈"),
        ({"instruction": "색?", "input": "", "output": "하얀색"}, ["instruction=instruction"], "색?"),
        ({"instruction": "색?", "context": "눈", "response": "하얀색"}, ["response=response"], "색?\n\n눈"),
        ({"q": "색?", "a": "하얀색"}, ["prompt=q", "completion=a"], "색?"),
        ({"prompt": [{"role": "user", "content": "색?"}],
          "answer": [{"role": "assistant", "content": "하얀색"}]},
         ["completion=answer"], "색?"),
    ],
)  # fmt: skip
def test_tables_may_have_the_columns_of_any_published_form(tmp_path, row, columns, asked):
    table = pandas.DataFrame([row])
    table.to_parquet(tmp_path / "a.parquet")
    table.to_json(tmp_path / "a.jsonl", orient="records", lines=True)
    for name in ("a.parquet", "a.jsonl"):
        read = TASK.read(tmp_path / name, None, parse_columns(TASK, columns))
        assert [example.messages for example in read] == [(("user", asked), ("assistant", "하얀색"))]


def test_columns_of_several_forms_are_one_line():
    with pytest.raises(UsageError, match=r"--columns .* prompt, completion; or instruction, input"):
        parse_columns(TASK, ["prompt=a", "output=b"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"text": "a"}', "line 1 has no 'messages'"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "line 1: .*assistant"),
        ('{"messages": [{"role": "tool", "content": "a"}]}', "line 1, message 1: .*'tool'"),
        ('{"conversations": [{"from": "tool", "value": "a"}]}', "message 1: .*'tool'"),
        ('{"messages": [{"role": "user"}]}', "line 1, message 1 has no 'content'"),
        ('{"messages": ["a"]}', "line 1, message 1 has no 'role'"),
        ('{"instruction": "a", "output": 3}', "line 1 has no 'output'"),
        ('{"prompt": "a", "completion": ""}', "line 1: .*assistant"),
        ('{"prompt": "a", "completion": "b", "label": false}', "line 1: its label is false"),
        ('{"prompt": [{"role": "user", "content": "a"}], "completion": "b"}', "line 1 has no 'completion'"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "line 1: .*assistant"),
        ('{"tools": [{}], "messages": []}', "line 1 has 'tools'"),
        ('{"instruction": "a", "output": "b", "history": [["c", "d"]]}', "line 1 has 'history'"),
        (
            '{"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}',
            "line 1, message 1 has 'tool_calls'",
        ),
        (
            '{"messages": [{"role": "assistant", "content": "a", "weight": 0}]}',
            "line 1, message 1: its weight",
        ),
        ("[3]", r"\[0\]: not a JSON object"),
        ("[", "not valid JSON"),
    ],
)
def test_invalid_conversations_are_one_line(tmp_path, text, message):
    path = tmp_path / "chats.jsonl"
    path.write_text(text)
    with pytest.raises(HpctrainError, match=message):
        TASK.read(path)


@pytest.mark.slow
def test_a_model_answers_as_transformers_lets_it_and_on_two_ranks_alike(tmp_path, capfd):
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 600}
    no_dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"} | shape | no_dropout))
    options = ("--epochs", 2, "--limit", 40, "--batch-size", 20, "--max-length", 64)
    scratch = ("--from-scratch", tmp_path / "config.json")
    run = train("instruct", tmp_path / "one", *options, *scratch)
    saved = AutoTokenizer.from_pretrained(run / "model")
    asked = [{"role": "user", "content": "하늘의 색은?"}]
    ids = saved.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    assert ids == TASK.encode_prompts(saved, ["하늘의 색은?"])[0]
    assert saved.chat_template == instruct.TEMPLATE and "sample: " in capfd.readouterr().out
    words = ["nlp.instruct", *map(str, options + scratch), "--out", "two"]
    done = warm_start.run(warm_start.torchrun_ranks(2, words, dict(os.environ)), tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    folders = (run, tmp_path / "two")
    losses = [
        [line["validation_loss"] for line in metrics(path) if "validation_loss" in line] for path in folders
    ]
    assert len(losses[0]) == 2 and losses[0] == pytest.approx(losses[1], rel=1e-4)
    more = ("--model", run / "model", "--data", TASK.samples, "--lora-rank", 2)
    adapter = train("instruct", tmp_path / "lora", *options, *more)
    assert (adapter / "model/adapter_model.safetensors").exists()


def test_conversations_that_the_template_refuses_are_left_out_and_counted(tokenizer, monkeypatch, tmp_path):
    monkeypatch.setattr(
        tokenizer,
        "chat_template",
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}"
        "{% endif %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}",
    )
    good = Conversation((("user", "a"), ("assistant", "b")), location="line 1")
    refused = Conversation((("system", "s"), *good.messages), 1, location="line 2")
    made = TASK.tokenize(tokenizer, [good, refused, good], [], 64, 0)
    assert (made.example.tolist(), made.lost.tolist()) == ([0, 2], [1])
    problems = [*describe_problems(TASK, tokenizer, [good, refused, good], made, [], 64)]
    assert len(problems) == 1 and problems[0].startswith(
        "skipped 1 example (an error with --strict); the first: line 2: the chat template of the tokenizer "
        "refuses this conversation (no system role)"
    )
    with pytest.raises(HpctrainError, match=r"line 2: the chat template .* refuses"):
        TASK.tokenize(tokenizer, [refused], [], 64, 0)


def test_data_of_git_lfs_are_named_before_other_advice(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    for data in (path, tmp_path):
        with pytest.raises(HpctrainError, match=r"train.jsonl: a pointer of Git LFS"):
            train("instruct", tmp_path / "run", "--data", data)
    with pytest.raises(HpctrainError, match=r"train.jsonl: a pointer of Git LFS"):
        TASK.read(path)
