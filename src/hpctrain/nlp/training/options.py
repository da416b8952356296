"""The options that all fine-tuning tasks share."""

import argparse
from pathlib import Path

import torch

from hpctrain.errors import UsageError
from hpctrain.nlp.data.formats import TABLES
from hpctrain.nlp.models.scratch import SIZES
from hpctrain.nlp.task import Task
from hpctrain.options import Parser, add_device, add_kernels, positive, trainer_parser

# A model from scratch needs a higher learning rate than a pretrained one. The sample data are small and need
# many steps.
DEFAULTS = {"epochs": 3, "batch_size": 32, "lr": 5e-5}
FROM_SCRATCH_DEFAULTS = {"epochs": 3, "batch_size": 32, "lr": 5e-4}
SAMPLE_DEFAULTS = {"epochs": 20, "batch_size": 8, "lr": 1e-3}


def make_parser(task: Task) -> Parser:
    """The parser of `hpctrain nlp.<task>`."""
    parser = trainer_parser(
        f"nlp.{task.name}", f"{task.title}: fine-tune a model of transformers, on any number of ranks."
    )
    add = parser.add_argument
    add(
        "--data",
        type=Path,
        metavar="PATH",
        help=f"train on the files in this folder, as they were published, or on a single file, which is then split; or on a "
        f"data set of the Hugging Face hub, OWNER/NAME or OWNER/NAME/FOLDER; {task.formats} "
        f"({'default: sample data' if task.samples else 'required'})",
    )
    if task.fields:
        add(
            "--columns",
            nargs="+",
            metavar="FIELD=COLUMN",
            help=f"read --data as tables ({', '.join(sorted(TABLES))}), each field in the column of this name; "
            f"fields: {list_fields(task)} (default of a field: the column of its own name)",
        )
    add(
        "--model",
        metavar="NAME",
        help="model to fine-tune: a name on the Hugging Face hub, such as beomi/kcbert-base, or a folder",
    )
    add(
        "--from-scratch",
        metavar="CONFIG",
        help=f"train a new model: {', '.join(SIZES)}, or the path of a config.json (default with the sample data: tiny)",
    )
    add(
        "--epochs",
        type=int,
        help="passes over the training data; 0 only scores the test set (default: 3; 20 with the sample data)",
    )
    add(
        "--patience",
        type=positive(int),
        metavar="N",
        help="end the training after N evaluations without a better validation score (default: train all --epochs)",
    )
    add(
        "--eval-every",
        type=positive(int),
        metavar="N",
        help="score the validation set after every N steps, too (default: after each epoch only)",
    )
    add(
        "--batch-size",
        type=positive(int),
        metavar="N",
        help="global batch size, shared by all ranks (default: 32; 8 with the sample data)",
    )
    add(
        "--accumulate",
        type=positive(int),
        default=1,
        metavar="N",
        help="accumulate gradients over N parts of each batch, to save memory (default: %(default)s)",
    )
    add(
        "--strategy",
        choices=["ddp", "fsdp"],
        default="ddp",
        help="fsdp: shard the weights, gradients and optimizer over all ranks, for models that do not fit one GPU "
        "(default: %(default)s)",
    )
    add(
        "--cpu-offload",
        action="store_true",
        help="keep the weights, gradients and optimizer in the memory of the node, and on the GPU what a layer needs while it "
        "computes; sets --strategy fsdp, and takes longer",
    )
    add(
        "--tensor-parallel",
        type=positive(int),
        default=1,
        metavar="N",
        help="split each layer over N consecutive ranks, which compute the same examples; sets --strategy fsdp for the rest "
        "(default: %(default)s)",
    )
    add(
        "--gradient-checkpointing",
        action="store_true",
        help="save memory: compute the activations of a layer again for its gradients, instead of keeping them",
    )
    add(
        "--lr",
        type=positive(float),
        help="peak learning rate (default: 5e-5; from scratch 5e-4, with the sample data 1e-3)",
    )
    add(
        "--warmup",
        type=float,
        default=0.1,
        metavar="FRACTION",
        help="fraction of all steps in which the learning rate rises to --lr (default: %(default)s)",
    )
    add(
        "--max-length",
        type=positive(int),
        default=task.max_length,
        metavar="TOKENS",
        help="maximum length of a text or window in tokens (default: %(default)s)",
    )
    if task.can_pack:
        add(
            "--pack",
            action="store_true",
            default=None,
            help="train on several short texts in one row, without attention between them, where they would be padded",
        )
    if task.stride:
        add(
            "--stride",
            type=positive(int),
            metavar="TOKENS",
            help=f"tokens that consecutive windows share (default: {task.stride}, or a third of --max-length if that is less)",
        )
    add(
        "--validation-split",
        type=float,
        default=0.1,
        metavar="FRACTION",
        help="fraction of the training data for validation if there is no validation file (default: %(default)s)",
    )
    if task.one_label:
        add(
            "--problem",
            choices=["multi-label", "regression"],
            help="multi-label: an example has any number of classes, a list or with commas between them; regression: its label "
            "is a number (default: it has one class)",
        )
        add(
            "--class-weights",
            choices=["balanced"],
            help="balanced: weigh the loss of an example by examples / (classes * examples of its class), for rare classes",
        )
    add(
        "--lora-rank",
        type=positive(int),
        metavar="N",
        help="LoRA: freeze the model, and train matrices of rank N beside its layers; model/ is then an adapter",
    )
    add(
        "--lora-target",
        nargs="+",
        metavar="LAYER",
        help="names of the layers that get LoRA matrices, or all-linear (default: those of peft for this architecture)",
    )
    add(
        "--lora-from",
        type=Path,
        metavar="FOLDER",
        help="train the LoRA adapter in this folder further, which is for --model; it has its own rank and layers",
    )
    add(
        "--lora-merge",
        action="store_true",
        help="save the whole model, with the adapter merged into its weights",
    )
    add(
        "--limit",
        type=positive(int),
        metavar="N",
        help="use only the first N examples of each split, for a quick trial",
    )
    add(
        "--strict",
        action="store_true",
        help="fail on a malformed example, a truncated text or a label not in the training data (default: report how many)",
    )
    add(
        "--precision",
        choices=["auto", "fp32", "bf16"],
        default="auto",
        help="fp32, or bf16 autocast; auto: bf16 on a GPU that supports it, else fp32 (default: %(default)s)",
    )
    add_kernels(parser)
    add(
        "--cuda-graphs",
        action="store_true",
        help="let a GPU start the kernels of a step by itself: faster for short texts; for one rank, without --accumulate",
    )
    add_device(parser)
    return parser


def parse_options(task: Task, arguments: list[str]) -> argparse.Namespace:
    """The options with all defaults filled in. Raises UsageError."""
    args = make_parser(task).parse_args(arguments)
    args.stride = getattr(args, "stride", None) or min(task.stride, args.max_length // 3)
    args.class_weights = getattr(args, "class_weights", None)
    args.problem, args.pack = getattr(args, "problem", None), getattr(args, "pack", None)
    if args.class_weights and args.problem:
        raise UsageError(
            f"--class-weights is for examples of one class: leave it out with --problem {args.problem}"
        )
    args.columns = parse_columns(task, getattr(args, "columns", None))
    if args.columns and not args.data:
        raise UsageError("--columns needs --data: give the folder or the file of the tables")
    if args.model and args.from_scratch:
        raise UsageError("--model and --from-scratch exclude each other: give only one")
    if not args.model and not args.from_scratch:
        if args.data:
            raise UsageError(
                "--data needs a model: give --model NAME, such as beomi/kcbert-base, or --from-scratch "
                f"with a size ({', '.join(SIZES)})"
            )
        args.from_scratch = "tiny"
    if (args.lora_rank or args.lora_from) and not args.model:
        raise UsageError("LoRA needs a trained model, which it leaves as it is: give --model NAME")
    if args.lora_from and (args.lora_rank or args.lora_target):
        raise UsageError(
            "--lora-from trains an adapter with its own rank and layers: leave out --lora-rank and --lora-target"
        )
    if (args.lora_target or args.lora_merge) and not (args.lora_rank or args.lora_from):
        raise UsageError("--lora-target and --lora-merge need --lora-rank: give the rank, such as 8")
    if args.cpu_offload or args.tensor_parallel > 1:
        args.strategy = "fsdp"
    if args.tensor_parallel > 1 and (args.lora_rank or args.lora_from):
        raise UsageError(
            "--tensor-parallel splits no LoRA matrices: leave it out, --strategy fsdp shards them"
        )
    for option, given in (("--compile", args.compile), ("--cpu-offload", args.cpu_offload)):
        if given and args.tensor_parallel > 1:
            raise UsageError(f"{option} is not for --tensor-parallel: leave out one")
    for option, given in (
        ("--accumulate", args.accumulate > 1),
        ("--gradient-checkpointing", args.gradient_checkpointing),
    ):
        if given and args.cuda_graphs:
            raise UsageError(f"{option} is not for --cuda-graphs: leave out one")
    for name, value in (
        DEFAULTS if args.model else FROM_SCRATCH_DEFAULTS if args.data else SAMPLE_DEFAULTS
    ).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.epochs < 0:
        raise UsageError(f"--epochs {args.epochs} is negative: give 0 or more")
    if not 0 <= args.warmup <= 1:
        raise UsageError(f"--warmup {args.warmup} is not a fraction: give a number from 0 to 1")
    if args.precision == "auto":
        bf16 = (
            args.device != "cpu"
            and torch.cuda.is_available()
            and torch.cuda.is_bf16_supported(including_emulation=False)
        )
        args.precision = "bf16" if bf16 else "fp32"
    return args


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
    """The names for --columns."""
    return "; or ".join(map(", ".join, (task.fields, *task.other_fields)))
