"""The table of commands. It is the only module that names modules above it, as strings."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from hpctrain.parser import Parser

# The groups of `hpctrain --help`, in its order.
GROUPS = {
    "train": "Train an image classifier (digits, MNIST, class folders, tar files):",
    "fine-tune": "Fine-tune a model of transformers on texts:",
    "use": "Use models and packages:",
    "inspect": "Inspect nodes and runs:",
}

# Each command: its module (for two trainers the same one, with the name of the second), its group, and its
# line in --help. load_command() says what the module has. It is
# imported only when it is needed: importing torch takes a second, and --help should not wait for it.
COMMANDS = {
    "train_ddp": (
        "hpctrain.vision.train",
        "train",
        "train with PyTorch DistributedDataParallel, on any number of ranks",
    ),
    "train_lightning": (
        "hpctrain.vision.train_lightning",
        "train",
        "train with PyTorch Lightning, on any number of ranks",
    ),
    "train_fsdp": (
        "hpctrain.vision.train:train_fsdp",
        "train",
        "train with the model sharded over all ranks (PyTorch FSDP2)",
    ),
    "train_horovod": ("hpctrain.vision.train_horovod", "train", "train with Horovod, on any number of ranks"),
    "train_single": ("hpctrain.vision.train", "train", "another name of train_ddp, for one process"),
    "nlp.classify": (
        "hpctrain.nlp.tasks.classify",
        "fine-tune",
        "fine-tune a model to classify texts (NSMC)",
    ),
    "nlp.pair": (
        "hpctrain.nlp.tasks.pair",
        "fine-tune",
        "fine-tune a model to classify sentence pairs (KLUE-NLI, KorNLI)",
    ),
    "nlp.ner": (
        "hpctrain.nlp.tasks.ner",
        "fine-tune",
        "fine-tune a model to recognize named entities (KLUE-NER, CoNLL)",
    ),
    "nlp.qa": (
        "hpctrain.nlp.tasks.qa",
        "fine-tune",
        "fine-tune a model to answer questions from a text (KorQuAD, SQuAD)",
    ),
    "nlp.generate": ("hpctrain.nlp.tasks.generate", "fine-tune", "fine-tune a model to continue a text"),
    "nlp.instruct": ("hpctrain.nlp.tasks.instruct", "fine-tune", "fine-tune a model to answer chat messages"),
    "sweep": (
        "hpctrain.commands.sweep.sweep",
        "use",
        "search hyperparameters: each task of a job array is a trial",
    ),
    "predict": ("hpctrain.nlp.predict", "use", "answer texts with a fine-tuned model, as JSON lines"),
    "serve": ("hpctrain.nlp.serve", "use", "show a fine-tuned model as a web page and a JSON service"),
    "fetch": (
        "hpctrain.nlp.models.hub",
        "use",
        "download a model of the Hugging Face hub or a data set, for nodes without internet",
    ),
    "tensorboard": (
        "hpctrain.servers.tensorboard",
        "use",
        "run TensorBoard on a compute node, for you alone",
    ),
    "jupyter": ("hpctrain.servers.jupyter", "use", "run JupyterLab on a compute node, for you alone"),
    "proxy": ("hpctrain.servers.proxy", "use", "run any web server on a compute node, for you alone"),
    "add": ("hpctrain.commands.add", "use", "install Python packages into a folder, on top of the image"),
    "completion": ("hpctrain.commands.completion", "use", "print shell completion for bash or zsh"),
    "check": (
        "hpctrain.commands.check.check",
        "inspect",
        "check every rank's node, software and folders, and the network between them",
    ),
    "bench": (
        "hpctrain.commands.bench",
        "inspect",
        "measure how fast the ranks exchange data: bandwidth by operation and size",
    ),
    "scaling": (
        "hpctrain.commands.scaling",
        "inspect",
        "compare runs on 1, 2, 4, ... ranks: throughput, speedup, efficiency",
    ),
    "runs": ("hpctrain.commands.runs", "inspect", "list runs: state, position, score, speed"),
    "report": ("hpctrain.commands.report", "inspect", "compare runs on one HTML page"),
    "export": (
        "hpctrain.commands.export",
        "inspect",
        "write the metrics of runs as CSV, or for Weights & Biases",
    ),
    "plot": ("hpctrain.commands.plot", "inspect", "draw the losses and scores of a run as curves.png"),
}


class Command(NamedTuple):
    """`parser()` has the options, also for shell completion; `main()` runs the command.

    In the groups "train" and "fine-tune", main() also takes `prune` of RunOptions.
    """

    parser: "Callable[[], Parser]"
    main: "Callable[..., None]"


def load_command(name: str) -> Command:
    """Import a command. Its module has parser() and main(), except in the group "fine-tune".

    There it has TASK, a task (nlp/task.py), and the two functions that all tasks share get it.
    """
    path, group, _ = COMMANDS[name]
    path, _, trainer = path.partition(":")
    module = import_module(path)
    if trainer:
        return Command(partial(module.parser, trainer), partial(module.main, trainer=trainer))
    if group != "fine-tune":
        return Command(module.parser, module.main)
    parser = import_module("hpctrain.nlp.parser")
    finetune = import_module("hpctrain.nlp.training.finetune")
    return Command(partial(parser.make_parser, module.TASK), partial(finetune.fine_tune, module.TASK))
