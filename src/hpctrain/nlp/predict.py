"""Ask a fine-tuned model: `hpctrain predict FOLDER TEXT...`, one JSON object a line.

hpctrain predict runs/nlp.classify/17/model "다시 보고 싶은 영화"
hpctrain predict runs/nlp.qa/18/model "수도는?" "대한민국의 수도는 서울이다."
hpctrain predict runs/nlp.classify/17/model --file reviews.txt --out answers.jsonl
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from hpctrain.nlp import batches, models
from hpctrain.nlp.generate import go_on
from hpctrain.nlp.task import Task
from hpctrain.run import Parser, positive
from hpctrain.world import HpctrainError, UsageError, World, choose_device

TASKS = ("classify", "pair", "ner", "qa", "generate")
CHUNK = 2048  # texts that are sorted by length together, and answered before the next ones are read


def main(world: World, arguments: list[str]) -> None:
    """Answer what the flags at the foot of this file say, in one process."""
    if world.size > 1:
        raise UsageError(f"predict is for one process, and {world.size} were started: run it without a launcher")
    args = parse(arguments)
    device = choose_device(world, args.device)
    folder = args.folder / "model" if (args.folder / "model/config.json").exists() else args.folder
    task, config = task_of(folder)
    rows = list(read(args, task))

    tokenizer = models.tokenizer_of(folder)
    model = load(task, folder).to(device).eval()
    if args.out:
        unfinished = args.out.with_name(f".{args.out.name}.{os.getpid()}.tmp")
        try:
            with unfinished.open("w", encoding="utf-8") as out:
                cut = answer_all(task, model, tokenizer, config, rows, args, out)
            unfinished.replace(args.out)
        except OSError as error:
            raise HpctrainError(f"{args.out}: cannot be written ({error.strerror}): give another --out") from error
        finally:
            unfinished.unlink(missing_ok=True)
    else:
        cut = answer_all(task, model, tokenizer, config, rows, args, sys.stdout)
    if cut:
        print(
            f"{cut:,} of {len(rows):,} texts are longer than {config['max_length']} tokens, and their ends were cut",
            file=sys.stderr,
        )


def answer_all(
    task: Task,
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerFast,
    config: dict[str, Any],
    rows: list[tuple[str, ...]],
    args: argparse.Namespace,
    out: TextIO,
) -> int:
    """Write a line for each row, in their order; returns how many texts were cut."""
    cut = 0
    with tqdm(total=len(rows), desc="predict", unit="text", disable=None if len(rows) > args.batch_size else True) as bar:
        for start in range(0, len(rows), CHUNK):
            part = rows[start : start + CHUNK]
            if task.name == "generate":
                answers = []
                for i in range(0, len(part), args.batch_size):
                    prompts = [row[0] for row in part[i : i + args.batch_size]]
                    seed = args.seed + (start + i) // args.batch_size
                    answers += [{"generated": text} for text in go_on(model, tokenizer, prompts, args.max_new_tokens, seed)]
            else:
                answers, more = answer(
                    task, model, tokenizer, config, [task.example(row, **config["settings"]) for row in part], args.batch_size
                )
                cut += more
            for row, said in zip(part, answers, strict=True):
                out.write(json.dumps(dict(zip(task.inputs, row, strict=True)) | said, ensure_ascii=False) + "\n")
            bar.update(len(part))
    return cut


@torch.inference_mode()
def answer(
    task: Task,
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerFast,
    config: dict[str, Any],
    examples: Sequence[Any],
    batch_size: int,
) -> tuple[list[dict[str, Any]], int]:
    """The answer to each example, and how many examples were cut; batches are of similar length."""
    labels = config["labels"]
    features = task.tokenise(tokenizer, examples, labels, config["max_length"], config["stride"])
    padding = {**task.padding, "input_ids": tokenizer.pad_token_id}
    ours = {"units", "labels", *task.extra}
    predictions: list[Any] = [None] * len(features.lengths)
    for index in batches.for_evaluation(features.lengths, batch_size, World(0, 1, 0, 1, 0, 1, "single")):
        batch = {name: column.to(model.device) for name, column in features.batch(index, padding).items()}
        output = model(**{name: column for name, column in batch.items() if name not in ours})
        for i, said in zip(index.tolist(), task.predict(output, batch), strict=True):
            predictions[i] = said
    return task.answers(examples, features, predictions, labels), len(features.cut)


def task_of(folder: Path) -> tuple[Task, dict[str, Any]]:
    """The task of a model that was fine-tuned here, and what its config.json says of it. Raises HpctrainError."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))["hpctrain"]
        if config["task"] in TASKS:
            return import_module(f"hpctrain.nlp.{config['task']}").TASK, config
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise HpctrainError(
        f"{folder}: not a model that hpctrain has fine-tuned: name the folder model/ of a run, such as runs/nlp.classify/17/model"
    )


def load(task: Task, folder: Path) -> torch.nn.Module:
    """The model of a folder. Raises HpctrainError where it is not whole."""
    try:
        return task.model.from_pretrained(folder, dtype=torch.float32)
    except Exception as error:  # whatever the file that it trips over raises
        raise HpctrainError(
            f"{folder}: the model cannot be loaded ({str(error).splitlines()[0]}): copy the folder again"
        ) from error


def read(args: argparse.Namespace, task: Task) -> Iterator[tuple[str, ...]]:
    """What to ask, a row of texts each: the words of the command line, or the lines of --file."""
    names = task.inputs
    if not args.file:
        if not args.text or len(args.text) % len(names):
            raise UsageError(
                f"{len(args.text)} texts, but {task.name} takes {' and '.join(names)}: give them one after the other, or a --file"
            )
        yield from (tuple(args.text[i : i + len(names)]) for i in range(0, len(args.text), len(names)))
        return
    try:
        text = args.file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise HpctrainError(f"{args.file}: cannot be read ({error}): --file takes a text file in UTF-8") from error
    lines = text.removesuffix("\n").split("\n") if text else []  # an empty line is a text, too
    if not lines:
        raise HpctrainError(f"{args.file}: the file is empty: put a text on each line")
    for number, line in enumerate(lines, 1):
        line = line.removesuffix("\r")
        if args.file.suffix == ".jsonl":
            try:
                found = json.loads(line)
                row = tuple(found[name] for name in names)
                good = all(isinstance(text, str) for text in row)
            except (ValueError, KeyError, TypeError):
                good = False
            what = f"an object with {' and '.join(names)}"
        else:
            row = tuple(line.split("\t")) if len(names) > 1 else (line,)
            good, what = len(row) == len(names), f"{' and '.join(names)}, with a tab between them"
        if not good:
            raise HpctrainError(f"{args.file}, line {number}: expected {what}: mend the line")
        yield row


def parse(arguments: list[str]) -> argparse.Namespace:
    """The flags. Raises UsageError."""
    parser = Parser(prog="hpctrain predict", description="Ask a fine-tuned model; prints one JSON object a line.")
    add = parser.add_argument
    add("folder", type=Path, help="the model of a run, such as runs/nlp.classify/17/model")
    add("text", nargs="*", help="what to ask; of pairs first and second, of questions question and context, one after the other")
    add("--file", type=Path, help="ask each line instead: a text, or two with a tab between them; .jsonl: objects")
    add("--out", type=Path, help="write the answers into this file, whole or not at all (default: standard output)")
    add("--batch-size", type=positive(int), default=32, help="texts that are computed at once (default: %(default)s)")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="(default: a GPU where there is one)")
    add("--max-new-tokens", type=positive(int), default=64, help="of a generated text (default: %(default)s)")
    add("--seed", type=int, default=1, help="of generated texts (default: %(default)s)")
    args = parser.parse_args(arguments)
    if args.file and args.text:
        raise UsageError("texts and --file: give one of them")
    return args
