"""The parser of the options that all fine-tuning tasks share; options.py holds them."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hpctrain.distributed.world import World
from hpctrain.errors import UsageError
from hpctrain.nlp.data.formats import TABLES
from hpctrain.nlp.data.splits import refuse_pointers
from hpctrain.nlp.models.scratch import SIZES
from hpctrain.nlp.options import FineTuneOptions
from hpctrain.nlp.task import Task
from hpctrain.parser import (
    Parser,
    add_device,
    add_kernels,
    add_precision,
    fraction,
    positive,
    trainer_parser,
)
from hpctrain.training.batches import check_batch_size

# A model from scratch needs a higher learning rate; the small sample data need many steps.
DEFAULTS = {"epochs": 3, "batch_size": 32, "lr": 5e-5}
FROM_SCRATCH_DEFAULTS = {"epochs": 3, "batch_size": 32, "lr": 5e-4}
SAMPLE_DEFAULTS = {"epochs": 20, "batch_size": 8, "lr": 1e-3}

# Options that exclude or need each other: a condition, and its error, with {NAME} for option values.
REFUSED: list[tuple[Callable[[FineTuneOptions], object], str]] = [
    (
        lambda args: args.class_weights and args.problem,
        "--class-weights is for examples of one class: leave it out with --problem {problem}",
    ),
    (
        lambda args: args.columns and not args.data,
        "--columns needs --data: give the folder or the file of the tables",
    ),
    (
        lambda args: args.model and args.from_scratch,
        "--model and --from-scratch exclude each other: give only one",
    ),
    (
        lambda args: args.data and not args.model and not args.from_scratch,
        "--data needs a model: give --model NAME, such as beomi/kcbert-base, or --from-scratch with a size "
        f"({', '.join(SIZES)})",
    ),
    (
        lambda args: args.uses_lora and not args.model,
        "LoRA needs a trained model, which it leaves as it is: give --model NAME",
    ),
    (
        lambda args: args.lora_from and (args.lora_rank or args.lora_target),
        "--lora-from trains an adapter with its own rank and layers: leave out --lora-rank and --lora-target",
    ),
    (
        lambda args: (args.lora_target or args.lora_merge) and not args.uses_lora,
        "--lora-target and --lora-merge need --lora-rank: give the rank, such as 8",
    ),
    (
        lambda args: args.tensor_parallel > 1 and args.uses_lora,
        "--tensor-parallel splits no LoRA matrices: leave it out, --strategy fsdp shards them",
    ),
    (
        lambda args: args.tensor_parallel > 1 and args.compile,
        "--compile is not for --tensor-parallel: leave out one",
    ),
    (
        lambda args: args.tensor_parallel > 1 and args.cpu_offload,
        "--cpu-offload is not for --tensor-parallel: leave out one",
    ),
    (
        lambda args: args.cuda_graphs and args.accumulate > 1,
        "--accumulate is not for --cuda-graphs: leave out one",
    ),
    (
        lambda args: args.cuda_graphs and args.gradient_checkpointing,
        "--gradient-checkpointing is not for --cuda-graphs: leave out one",
    ),
]


def non_negative(text: str) -> int:
    """An argparse type."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative: give 0 or more")
    return value


non_negative.__name__ = "int"  # argparse prints it: "invalid int value"


def make_parser(task: Task) -> Parser:
    """The parser of `hpctrain nlp.<task>`."""
    parser = trainer_parser(
        f"nlp.{task.name}",
        f"{task.title}: fine-tune a model of transformers, on any number of ranks.",
        prog=f"hpctrain nlp.{task.name}",
    )
    add_model = parser.add_argument_group("model").add_argument
    add_data = parser.add_argument_group("data").add_argument
    add_training = parser.add_argument_group("training").add_argument
    add_lora = parser.add_argument_group("LoRA, which trains a small part of the weights").add_argument
    add_memory = parser.add_argument_group("ranks and memory").add_argument
    speed = parser.add_argument_group("speed and precision")
    add_speed = speed.add_argument
    add_data(
        "--data",
        type=Path,
        metavar="PATH",
        help=f"train on the files in this folder, as they were published, or on a single file, which is then "
        "split; or on a data set of the Hugging Face hub, OWNER/NAME or OWNER/NAME/FOLDER; "
        f"{task.formats} ({'default: sample data' if task.samples else 'required'})",
    )
    if task.fields:
        add_data(
            "--columns",
            nargs="+",
            metavar="FIELD=COLUMN",
            help=f"read --data as tables ({', '.join(sorted(TABLES))}), each field in the column of this "
            f"name; fields: {list_fields(task)} (default of a field: the column of its own name)",
        )
    add_model(
        "--model",
        metavar="NAME",
        help="model to fine-tune: a name on the Hugging Face hub, such as beomi/kcbert-base, or a folder",
    )
    add_model(
        "--from-scratch",
        metavar="SIZE",
        help=f"train a new model: {', '.join(SIZES)}, or the path of a config.json "
        "(default with the sample data: tiny)",
    )
    add_training(
        "--epochs",
        type=non_negative,
        metavar="N",
        help="passes over the training data; 0 only scores the test set "
        "(default: 3; 20 with the sample data)",
    )
    add_training(
        "--patience",
        type=positive(int),
        metavar="N",
        help="end the training after N evaluations without a better validation score "
        "(default: train all --epochs)",
    )
    add_training(
        "--eval-every",
        type=positive(int),
        metavar="N",
        help="score the validation set after every N steps, too (default: after each epoch only)",
    )
    add_training(
        "--batch-size",
        type=positive(int),
        metavar="N",
        help="global batch size, shared by all ranks (default: 32; 8 with the sample data)",
    )
    add_memory(
        "--accumulate",
        type=positive(int),
        default=1,
        metavar="N",
        help="accumulate gradients over N parts of each batch, to save memory (default: %(default)s)",
    )
    add_memory(
        "--strategy",
        choices=["ddp", "fsdp"],
        default="ddp",
        help="fsdp: shard the weights, gradients and optimizer over all ranks, for models that do not fit "
        "one GPU (default: %(default)s)",
    )
    add_memory(
        "--cpu-offload",
        action="store_true",
        help="keep the weights, gradients and optimizer in the memory of the node, and on the GPU what a "
        "layer needs while it computes; sets --strategy fsdp, and takes longer",
    )
    add_memory(
        "--tensor-parallel",
        type=positive(int),
        default=1,
        metavar="N",
        help="split each layer over N consecutive ranks, which compute the same examples; sets --strategy "
        "fsdp for the rest (default: %(default)s)",
    )
    add_memory(
        "--gradient-checkpointing",
        action="store_true",
        help="save memory: compute the activations of a layer again for its gradients, instead of keeping "
        "them",
    )
    add_training(
        "--lr",
        type=positive(float),
        metavar="RATE",
        help="peak learning rate (default: 5e-5; from scratch 5e-4, with the sample data 1e-3)",
    )
    add_training(
        "--warmup",
        type=fraction,
        default=0.1,
        metavar="FRACTION",
        help="fraction of all steps in which the learning rate rises to --lr (default: %(default)s)",
    )
    add_data(
        "--max-length",
        type=positive(int),
        default=task.max_length,
        metavar="TOKENS",
        help="maximum length of a text or window in tokens (default: %(default)s)",
    )
    if task.can_pack:
        add_speed(
            "--pack",
            action="store_true",
            default=None,
            help="train on several short texts in one row, without attention between them, where they would "
            "be padded",
        )
    if task.stride:
        add_data(
            "--stride",
            type=positive(int),
            metavar="TOKENS",
            help=f"tokens that consecutive windows share (default: {task.stride}, or a third of --max-length "
            "if that is less)",
        )
    add_data(
        "--validation-split",
        type=float,
        default=0.1,
        metavar="FRACTION",
        help="fraction of the training data for validation if there is no validation file "
        "(default: %(default)s)",
    )
    if task.one_label:
        add_data(
            "--problem",
            choices=["multi-label", "regression"],
            help="multi-label: an example has any number of classes, a list or with commas between them; "
            "regression: its label is a number (default: it has one class)",
        )
        add_training(
            "--class-weights",
            choices=["balanced"],
            help="balanced: weigh the loss of an example by examples / (classes * examples of its class), "
            "for rare classes",
        )
    add_lora(
        "--lora-rank",
        type=positive(int),
        metavar="N",
        help="LoRA: freeze the model, and train matrices of rank N beside its layers; model/ is then an "
        "adapter",
    )
    add_lora(
        "--lora-target",
        nargs="+",
        metavar="LAYER",
        help="names of the layers that get LoRA matrices, or all-linear (default: those of peft for this "
        "architecture)",
    )
    add_lora(
        "--lora-from",
        type=Path,
        metavar="FOLDER",
        help="train the LoRA adapter in this folder further, which is for --model; it has its own rank and "
        "layers",
    )
    add_lora(
        "--lora-merge",
        action="store_true",
        help="save the whole model, with the adapter merged into its weights",
    )
    add_data(
        "--limit",
        type=positive(int),
        metavar="N",
        help="use only the first N examples of each split, for a quick trial",
    )
    add_data(
        "--strict",
        action="store_true",
        help="fail on a malformed example, a truncated text or a label not in the training data (default: "
        "report how many)",
    )
    add_precision(speed, "auto")
    add_kernels(speed)
    add_speed(
        "--cuda-graphs",
        action="store_true",
        help="let a GPU start the kernels of a step by itself: faster for short texts; for one rank, without "
        "--accumulate",
    )
    add_device(speed)
    return parser


def parse_options(task: Task, arguments: list[str]) -> FineTuneOptions:
    """The options with all defaults filled in. Raises UsageError; HpctrainError for data of Git LFS."""
    given = vars(make_parser(task).parse_args(arguments))
    given["columns"] = parse_columns(task, given.get("columns"))
    given["stride"] = given.get("stride") or min(task.stride, given["max_length"] // 3)
    if not given["data"] and not given["model"] and not given["from_scratch"]:
        given["from_scratch"] = "tiny"
    for name, value in choose_defaults(given).items():
        if given[name] is None:
            given[name] = value
    if given["cpu_offload"] or given["tensor_parallel"] > 1:
        given["strategy"] = "fsdp"

    args = FineTuneOptions(**given)
    if args.data:  # before the long work, and before advice about other options
        refuse_pointers(args.data, tables=args.columns is not None)
    for is_refused, message in REFUSED:
        if is_refused(args):
            raise UsageError(message.format(**given))
    return args


def choose_defaults(given: dict[str, Any]) -> dict[str, float]:
    if given["model"]:
        return DEFAULTS
    return FROM_SCRATCH_DEFAULTS if given["data"] else SAMPLE_DEFAULTS


def check_ranks(args: FineTuneOptions, world: World, device: torch.device) -> None:
    """Raise UsageError for options that do not fit the number of ranks, the device or the precision."""
    if args.cpu_offload and world.size == 1:
        raise UsageError(
            "--cpu-offload is for the parts of --strategy fsdp, and one rank has all of them: "
            "start two or more"
        )
    if args.cuda_graphs and world.size > 1:
        raise UsageError(f"--cuda-graphs is for one rank, and there are {world.size}: leave it out")
    if args.cuda_graphs and device.type != "cuda":
        raise UsageError("--cuda-graphs needs a GPU, and this rank computes on the CPU: leave it out")
    if args.cuda_graphs and args.precision == "fp16":
        raise UsageError("--cuda-graphs is not for --precision fp16: leave it out, or give --precision fp32")
    group = world.in_groups_of(args.tensor_parallel)
    if args.epochs:
        check_batch_size(args.batch_size, group, args.accumulate)


def parse_columns(task: Task, texts: list[str] | None) -> dict[str, str] | None:
    """The column of each field of the task, from texts FIELD=COLUMN; None without any. Raises UsageError."""
    if not texts:
        return None
    columns: dict[str, str] = {}
    for text in texts:
        field, _, column = text.partition("=")
        fitting = [fields for fields in (task.fields, *task.other_fields) if {*columns, field} <= {*fields}]
        if not fitting or not column or field in columns:
            raise UsageError(
                f"--columns {text}: give each field once, as FIELD=COLUMN; fields are {list_fields(task)}"
            )
        columns[field] = column
    return {field: columns.get(field, field) for field in fitting[0]}


def list_fields(task: Task) -> str:
    return "; or ".join(map(", ".join, (task.fields, *task.other_fields)))
