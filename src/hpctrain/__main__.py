"""The command line: `hpctrain COMMAND ...`, or `python -m hpctrain COMMAND ...`."""

import os
import sys
from importlib import import_module

from hpctrain import __version__

# Each module has main(world, arguments). A module is imported only when its command is called:
# importing torch takes a second, and --help should not wait for it.
COMMANDS = {
    "train_ddp": ("hpctrain.vision.train_ddp", "train on MNIST or digits by PyTorch DDP, on any number of ranks"),
    "train_lightning": ("hpctrain.vision.train_lightning", "the same by PyTorch Lightning"),
    "train_horovod": ("hpctrain.vision.train_horovod", "the same by Horovod"),
    "train_single": ("hpctrain.vision.train_ddp", "the same in one process, with no launcher"),
    "nlp.classify": ("hpctrain.nlp.classify", "fine-tune a model of transformers to classify texts (NSMC)"),
    "nlp.pair": ("hpctrain.nlp.pair", "to say how two sentences are related (KLUE-NLI, KorNLI)"),
    "nlp.ner": ("hpctrain.nlp.ner", "to find names in texts (KLUE-NER, CoNLL)"),
    "nlp.qa": ("hpctrain.nlp.qa", "to answer questions out of a text (KorQuAD, SQuAD 1.1)"),
    "nlp.generate": ("hpctrain.nlp.generate", "to go on with a text"),
    "predict": ("hpctrain.nlp.predict", "ask a fine-tuned model"),
    "fetch": ("hpctrain.nlp.models", "download a model beforehand, for nodes without internet"),
    "check": ("hpctrain.check", "every rank looks at its node, software and folders, and they talk to each other"),
    "add": ("hpctrain.packages", "install packages of your own on top of the image, into a folder"),
    "plot": ("hpctrain.run", "draw the loss and accuracy of a run folder as curves.png"),
}


def usage() -> str:
    """The text of --help."""
    lines = [f"  {name:17}{text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            f"hpctrain {__version__}: distributed PyTorch training on supercomputers",
            "",
            "usage: hpctrain COMMAND [OPTION]...    (hpctrain COMMAND --help lists its options)",
            "",
            *lines,
        ]
    )


def say_what_is_hidden() -> None:
    """An import that failed, or gave a module that lacks what it should have, may be of a package in the wrong folder."""
    from hpctrain.surroundings import shadowed_packages

    for text in shadowed_packages():
        print(f"hpctrain: error: {text}", file=sys.stderr)


def main() -> None:
    """Run the command that the command line names; what the user can mend ends it with one line and exit status 1 or 2."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        sys.exit(0 if arguments else 2)
    if arguments[0] == "--version":
        print(__version__)
        return

    try:
        from hpctrain.world import HpctrainError, UsageError, detect
    except (ImportError, AttributeError):
        say_what_is_hidden()
        raise
    rank = 0
    try:
        world = detect()
        rank = world.rank
        name = arguments.pop(0)
        if name not in COMMANDS:
            raise UsageError(f"there is no command {name!r}: choose from {', '.join(COMMANDS)}, or name a .py file")
        import_module(COMMANDS[name][0]).main(world, arguments)
        status = 0
    except UsageError as error:
        # Every rank has the same command line: rank 0 says it and fails. The others leave as if all were well, because
        # at the first failure srun kills the rest, and that might be rank 0 in the middle of its sentence.
        status = 0
        if rank == 0:
            print(f"hpctrain: error: {error}", file=sys.stderr)
            status = 2
    except HpctrainError as error:
        print(f"hpctrain: error: {error}", file=sys.stderr)
        status = 1
    except (ImportError, AttributeError):
        say_what_is_hidden()
        raise
    except SystemExit as end:
        status = int(end.code or 0)
    # Python's own way out would wind up the interpreter first. DDP keeps threads of Gloo beyond
    # destroy_process_group(), and one that lets go of its last tensor at that moment aborts the process: seen in 3 of
    # 30 runs on a busy machine with torch 2.13; github.com/pytorch/pytorch/pull/179291 has the same.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
