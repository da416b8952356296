"""A fine-tuning from the start of its command to the end, beside a script with Hugging Face's Trainer.

    OMP_NUM_THREADS=1 python benchmarks/nlp_commands.py --data nsmc

Both read the same film reviews, tokenize them, train the same model for an epoch, score the validation set,
save a checkpoint, score the test set, and save the model. The Trainer has the options with which it is
fastest (nlp.py). The figures are wall-clock times of whole processes, in turns, imports and writing included.
"""

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import records

SIZE, BATCH, LONGEST, RATE = "tiny", 32, 128, 5e-4
SPLITS = {"train": 9600, "dev": 1000, "test": 2000}
TIMES = "hpctrain in times of it"


def train_with_trainer(data: Path, model: Path, out: Path, precision: str, seed: int) -> None:
    """The script of a user of transformers."""
    import numpy
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.set_seed(seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)

    def read(name: str) -> list[dict]:
        lines = (data / f"ratings_{name}.txt").read_text(encoding="utf-8").splitlines()[1:]
        _, texts, labels = zip(*(line.split("\t") for line in lines), strict=True)
        rows = tokenizer(list(texts), truncation=True, max_length=LONGEST)
        return [
            {"input_ids": ids, "attention_mask": mask, "labels": int(label)}
            for ids, mask, label in zip(rows["input_ids"], rows["attention_mask"], labels, strict=True)
        ]

    sets = {name: read(name) for name in SPLITS}
    trainer = transformers.Trainer(
        model=transformers.AutoModelForSequenceClassification.from_pretrained(model, num_labels=2),
        args=transformers.TrainingArguments(
            output_dir=str(out),
            use_cpu=True,
            bf16=precision == "bf16",
            num_train_epochs=1,
            per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=64,
            learning_rate=RATE,
            warmup_steps=SPLITS["train"] // BATCH // 10,
            weight_decay=0.01,
            train_sampling_strategy="group_by_length",
            optim="adamw_torch_fused",
            logging_nan_inf_filter=False,
            eval_strategy="epoch",
            save_strategy="epoch",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=sets["train"],
        eval_dataset=sets["dev"],
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda found: {
            "accuracy": float((numpy.argmax(found.predictions, 1) == found.label_ids).mean())
        },
    )
    trainer.train()
    trainer.evaluate(sets["test"])
    trainer.save_model(str(out / "model"))
    tokenizer.save_pretrained(out / "model")


def write_reviews(nsmc: Path, folder: Path) -> None:
    """Write the first reviews of NSMC that have a text as files of three splits."""
    folder.mkdir()
    with (nsmc / "ratings_train.txt").open(encoding="utf-8") as file:
        header = next(file)
        lines = (line for line in file if line.split("\t")[1].strip())
        for name, count in SPLITS.items():
            some = itertools.islice(lines, count)
            (folder / f"ratings_{name}.txt").write_text(header + "".join(some), encoding="utf-8")


def main() -> None:
    """Run both in turns, and report the seconds."""
    parser = argparse.ArgumentParser(description="Compare whole commands that fine-tune on film reviews.")
    parser.add_argument("--data", type=Path, required=True, help="folder of NSMC")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16", help="(default: bf16)")
    parser.add_argument(
        "--trainer", nargs=4, metavar=("DATA", "MODEL", "OUT", "SEED"), help=argparse.SUPPRESS
    )
    records.add_options(parser, turns=5)
    args = parser.parse_args()
    if args.trainer:
        data, model, out, seed = args.trainer
        return train_with_trainer(Path(data), Path(model), Path(out), args.precision, int(seed))
    seconds: dict[str, list[float]] = {"Trainer at its best": [], "hpctrain nlp.classify": []}
    with tempfile.TemporaryDirectory(prefix="hpctrain-") as temporary:
        top = Path(temporary)
        data, model = top / "reviews", top / "initial/model"
        write_reviews(args.data, data)
        ours = [sys.executable, "-m", "hpctrain", "nlp.classify", "--device", "cpu", "--data", str(data)]
        ours += ["--batch-size", str(BATCH), "--max-length", str(LONGEST), "--lr", str(RATE), "--epochs"]
        theirs = [sys.executable, __file__, "--data", str(data), "--precision", args.precision, "--trainer"]
        # The initial weights of both.
        made = [*ours, "0", "--from-scratch", SIZE, "--out", str(model.parent)]
        subprocess.run(made, check=True, stdout=subprocess.DEVNULL)
        for turn in range(1, args.turns + 1):
            for way in sorted(seconds, reverse=turn % 2 == 1):
                out = top / f"{turn}-{way[0]}"
                command = [*theirs, str(data), str(model), str(out), str(turn)]
                if way.startswith("hpctrain"):
                    command = [*ours, "1", "--model", str(model), "--precision", args.precision]
                    command += ["--seed", str(turn), "--out", str(out)]
                began = time.perf_counter()
                subprocess.run(
                    command,
                    check=True,
                    stdout=subprocess.DEVNULL,
                    env=os.environ | {"HPCTRAIN_CACHE": str(out.with_suffix(".cache"))},
                )
                seconds[way].append(time.perf_counter() - began)
                print(f"turn {turn}  {way:24} {seconds[way][-1]:.2f} s", flush=True)
    ours_s = seconds["hpctrain nlp.classify"]
    rows = {
        way: {"seconds": values, TIMES: [a / b for a, b in zip(values, ours_s, strict=True)]}
        for way, values in seconds.items()
    }
    about = f"{SIZE}, {SPLITS['train']:,} reviews in batches of {BATCH}, {args.precision}, one epoch on a CPU"
    records.report(f"nlp-commands-{args.precision}", "command", rows, {"seconds": 1, TIMES: 2}, about, args)


if __name__ == "__main__":
    main()
