"""The page of `hpctrain serve`, which needs no script: what the model is, a form, and the answer in HTML."""

import html
import itertools
import json
from contextlib import suppress
from typing import Any

from hpctrain.nlp.data.formats import list_names
from hpctrain.nlp.task import Task

# Colors of entity types in order of appearance, also for people who cannot see red or green (charts.py).
COLORS = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#0072b2")

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}: {name}</title>
<style>
:root {{ color-scheme: light dark; --accent: #0b62a8; --error: #b3450a; --line: #8886; }}
@media (prefers-color-scheme: dark) {{ :root {{ --accent: #7dbcf0; --error: #ff9d63; }} }}
body {{ font: 16px/1.6 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 44rem;
  overflow-wrap: anywhere; }}
h1 {{ font-size: 1.3rem; margin: .4rem 0; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: .1rem .8rem; margin: 0 0 1rem;
  font-size: .9rem; line-height: 1.4; }}
dt, .examples {{ opacity: .75; }}
dd {{ margin: 0; }}
label {{ display: block; margin-top: .8rem; }}
textarea {{ box-sizing: border-box; width: 100%; font: inherit; line-height: 1.4; padding: .5rem;
  border: 1px solid var(--line); border-radius: .4rem; }}
button {{ font: inherit; margin: .6rem 0; padding: .4rem 1.4rem; cursor: pointer; color: Canvas;
  background: var(--accent); border: 1px solid var(--accent); border-radius: .4rem; }}
.examples {{ font-size: .9rem; }}
.examples button {{ display: block; max-width: 100%; margin: .3rem 0; padding: .3rem .7rem; text-align: left;
  color: inherit; background: none; border-color: var(--line); }}
:focus-visible {{ outline: 2px solid var(--accent); outline-offset: 2px; }}
.answer {{ border-left: 3px solid var(--accent); margin: .6rem 0 1rem; padding: .2rem 0 .2rem .8rem;
  white-space: pre-wrap; }}
mark {{ color: inherit; background: var(--color, #e69f00);
  background: color-mix(in srgb, var(--color, #e69f00) 40%, transparent);
  border-radius: .2rem; padding: .1rem .2rem; }}
small {{ opacity: .8; margin-left: .3rem; }}
.bar {{ display: block; height: .6rem; background: #8883; border-radius: .3rem; overflow: hidden; }}
.bar span {{ display: block; height: 100%; background: var(--accent); }}
.error {{ color: var(--error); }}
</style>
<h1>{title}</h1>
<dl>{about}</dl>
<form method="post" action="/" accept-charset="utf-8">{fields}<button>Answer</button>
{answer}{examples}</form>
"""


def make_page(task: Task[Any], about: dict[str, str], row: tuple[str, ...] = (), answer: str = "") -> str:
    """The page in HTML; `about` has a term and its text for each line about the model, "Model" first.

    `row` fills the fields of the form. `answer` is HTML that stands below them.
    """
    fields = ""
    for field, text in itertools.zip_longest(task.inputs, row, fillvalue=""):
        height = 5 if field == "context" else 2
        fields += (
            f'<label>{field.capitalize()}<textarea name="{field}" rows="{height}" required>\n'
            f"{html.escape(text)}</textarea></label>"
        )
    examples = ""
    for number, texts in enumerate(task.examples):
        shown = " / ".join(text if len(text) <= 40 else f"{text[:38]}…" for text in texts)
        examples += f'<button name="example" value="{number}" formnovalidate>{html.escape(shown)}</button>'
    return PAGE.format(
        title=html.escape(task.title),
        name=html.escape(about["Model"]),
        about="".join(f"<dt>{term}</dt><dd>{html.escape(text)}</dd>" for term, text in about.items()),
        fields=fields,
        answer=answer,
        examples=examples and f'<div class="examples">Examples:{examples}</div>',
    )


def read_meanings(config: dict[str, Any]) -> dict[str, str]:
    """What the labels of a model mean that do not say it themselves, see Task.explain_labels()."""
    meanings = config.get("meanings")
    return {str(k): str(v) for k, v in meanings.items()} if isinstance(meanings, dict) else {}


def describe(task: Task[Any], config: dict[str, Any]) -> dict[str, str]:
    """What the page says about a model: a term and its text. Nothing if config.json does not say it."""
    found: dict[str, str] = {}
    with suppress(LookupError, TypeError, ValueError, AttributeError):  # an edited config.json
        about, meanings = config["about"], read_meanings(config)
        found |= {"Base": str(about["base"]), "Data": str(about["data"])}
        if classes := [name_label(label, meanings) for label in task.list_classes(config["labels"])]:
            found["Classes"] = list_names(classes)
        found["Scores"] = ", ".join(
            f"{name.removeprefix('test_').replace('_', ' ')} {value:.4g}"
            for name, value in about["scores"].items()
            if "/" not in name and name != "test_loss"
        )
    return found


def name_label(label: str, meanings: dict[str, str]) -> str:
    """A label, after its meaning if it does not say that itself."""
    return f"{meanings[label]} ({label})" if label in meanings else label


def show_answer(row: tuple[str, ...], answer: dict[str, Any], meanings: dict[str, str]) -> str:
    """The answer in HTML: entities in the text, the answer in its context, a probability as a bar."""
    if "entities" in answer:
        colors: dict[str, str] = {}
        marks = []
        for entity in answer["entities"]:
            color = colors.setdefault(entity["type"], COLORS[len(colors) % len(COLORS)])
            marks.append((entity["start"], entity["end"], color, entity["type"]))
        return _mark(row[0], marks) if marks else f"{html.escape(row[0])}\n<small>no entity</small>"
    if "answer" in answer:
        score = f"{answer['score']:.1%}"
        if not answer["answer"]:
            return f"{html.escape(row[1])}\n<small>no answer in this context ({score})</small>"
        return _mark(row[1], [(answer["start"], answer["start"] + len(answer["answer"]), COLORS[1], score)])
    if "label" in answer:
        width = round(100 * answer["probability"])
        text = (
            f"{html.escape(name_label(answer['label'], meanings))}<small>{answer['probability']:.1%}</small>"
        )
        return f'{text}<span class="bar"><span style="width:{width}%"></span></span>'
    if "labels" in answer:
        found = zip(answer["labels"], answer["probabilities"], strict=True)
        return (
            "\n".join(f"{html.escape(label)}<small>{p:.1%}</small>" for label, p in found)
            or "<small>no class</small>"
        )
    if "score" in answer:
        return f"{answer['score']:.4g}"
    if "generated" in answer:
        return f"{html.escape(row[0])}<mark>{html.escape(answer['generated'])}</mark>"
    return html.escape(json.dumps(answer, ensure_ascii=False, indent=2))


def _mark(text: str, marks: list[tuple[int, int, str, str]]) -> str:
    """The text with parts of it marked: start, end, color and what to write beside each."""
    parts, done = [], 0
    for start, end, color, name in marks:
        parts.append(html.escape(text[done:start]))
        marked = f"{html.escape(text[start:end])}<small>{html.escape(name)}</small>"
        parts.append(f'<mark style="--color:{color}">{marked}</mark>')
        done = end
    return "".join([*parts, html.escape(text[done:])])
