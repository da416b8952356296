"""The argument parser that commands share."""

import argparse
import difflib
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hpctrain.checkpoints.interval import Interval
from hpctrain.errors import UsageError


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UsageError, so that one rank prints the error and not all of them.

    An option has to be written out: what begins like one today may begin like two in the next version.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    # argparse overloads the method by the type of `namespace`
    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """Parse the command line. Raises UsageError; for an unknown option, it names the most similar one."""
        # bash expands ~ at the beginning of a word only, and not in --out=~/runs.
        args = [
            f"{name}={Path(value).expanduser()}" if equals and value.startswith("~/") else word
            for word in (sys.argv[1:] if args is None else args)
            for name, equals, value in [word.partition("=")]
        ]
        # Otherwise argparse takes no positional argument of nargs "*" or "+" after an option.
        many = any(action.nargs in ("*", "+") and not action.option_strings for action in self._actions)
        found, unknown = (self.parse_known_intermixed_args if many else self.parse_known_args)(
            args, namespace
        )
        if unknown:
            option = next((word for word in unknown if word.startswith("-")), "").partition("=")[0]
            guess = did_you_mean(option, [name for action in self._actions for name in action.option_strings])
            self.error(f"unrecognized arguments: {' '.join(unknown)}{guess and f': {guess}'}")
        return found

    def convert_arg_line_to_args(self, line: str) -> list[str]:
        """The words in a line of a file of options, as a shell would have them; # begins a comment."""
        return shlex.split(line, comments=True)

    def error(self, message: str) -> NoReturn:
        message = message.replace("ignored explicit argument", "it takes no value: leave out")
        raise UsageError(f"{self.prog}: {message} ({self.prog} --help lists the options)")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A question with the known word that is most similar to a mistyped one; "" if no word is similar.

    If one known word alone begins with it, that one.
    """
    known = [*dict.fromkeys(known)]
    longer = [name for name in known if len(word) > 2 and name.startswith(word)]
    found = longer if len(longer) == 1 else difflib.get_close_matches(word, known, 1, 0.75)
    return "".join(f"did you mean {name}?" for name in found)


def trainer_parser(trainer: str, description: str, prog: str | None = None) -> Parser:
    """A parser with the options that every trainer has: those of Run except --epochs, and --seed.

    `trainer` names the default run folder. `prog` is the program that messages name, by default the script.
    An option that a script adds takes the place of one here with the same name. @FILE stands for the options
    in a file.
    """
    parser = Parser(
        prog=prog,
        description=description,
        epilog="@FILE reads options from a file, as if they were written here",
        conflict_handler="resolve",
        fromfile_prefix_chars="@",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=1,
        metavar="N",
        help="seed of the initial weights and of the order of the data (default: %(default)s)",
    )
    add = parser.add_argument_group("run folder, checkpoints and logs").add_argument
    add(
        "--out",
        type=Path,
        metavar="FOLDER",
        help=f"run folder (default: runs/{trainer}/<job id>, or the folder given to --resume)",
    )
    add(
        "--resume",
        type=Path,
        metavar="RUN",
        help="resume from the last intact checkpoint of this run folder; "
        "auto: of --out, or start if it has none",
    )
    add("--force", action="store_true", help="resume although options differ that change the result")
    add(
        "--checkpoint-every",
        type=interval,
        default="10min",
        metavar="INTERVAL",
        help="save within an epoch after so many steps (500), or so much time (30s, 10min, 1h) "
        "(default: %(default)s)",
    )
    add(
        "--keep-checkpoints",
        type=positive(int),
        default=3,
        metavar="N",
        help="keep the newest N checkpoints and the one with the best score (default: %(default)s)",
    )
    add(
        "--on-nan",
        choices=["stop", "skip"],
        default="stop",
        help="when a gradient is not finite: stop, or skip the step, at most 10 in a row "
        "(default: %(default)s)",
    )
    add(
        "--wandb",
        action="store_true",
        help="log to Weights & Biases too, into an offline run without a key or a network",
    )
    add("--profile", action="store_true", help="profile some steps: write a trace and a page of text")
    add(
        "--watchdog",
        type=seconds,
        default=60,
        metavar="SECONDS",
        help="end the job when a rank does not answer, or no step finishes, for this time; 0: never "
        "(default: %(default)g)",
    )
    return parser


def add_device(parser: "argparse.ArgumentParser | argparse._ArgumentGroup") -> None:
    """Add --device, as choose_device() takes it."""
    parser.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="auto: a GPU if there is one (default: %(default)s)",
    )


def add_precision(parser: "argparse.ArgumentParser | argparse._ArgumentGroup", default: str) -> None:
    """Add --precision and --tf32: see precision.py."""
    parser.add_argument(
        "--precision",
        choices=["auto", "fp32", "bf16", "fp16"],
        default=default,
        help="fp32; bf16 or fp16: autocast with fp32 weights, and for fp16 a gradient scaler; auto: on a GPU "
        "bf16, or fp16 if it does not compute in bf16, and fp32 on a CPU (default: %(default)s)",
    )
    parser.add_argument(
        "--tf32",
        choices=["on", "off"],
        help="compute fp32 matrix products and convolutions in TF32 on a GPU that can: faster, with 10 bits "
        "instead of 23 (default: PyTorch's, for convolutions only)",
    )


def add_kernels(parser: "argparse.ArgumentParser | argparse._ArgumentGroup") -> None:
    """Add --compile and --deterministic: see kernels.py."""
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile the kernels of training steps with torch.compile, at the first step; "
        "last digits differ; needs g++",
    )
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="fail at an operation that could give other bits in another run; on a CPU no operation does",
    )


def seconds(text: str) -> float:
    """An argparse type: a finite number of seconds, or 0."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return value


def interval(text: str) -> str:
    """An argparse type: a text that Interval.parse() accepts. config.json holds the text."""
    try:
        Interval.parse(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of steps (500) or a time (30s, 10min, 1h)"
        ) from None
    return text


def fraction(text: str) -> float:
    """An argparse type."""
    value = float(text)
    if not 0 <= value <= 1:  # also refuses NaN
        raise argparse.ArgumentTypeError(f"{text} is not a fraction: give a number from 0 to 1")
    return value


fraction.__name__ = "float"  # argparse prints it: "invalid float value"


def positive(kind: type) -> Any:
    """An argparse type: a finite number of this kind (int or float) above zero."""

    def parse(text: str) -> Any:
        value = kind(text)
        if not value > 0:  # also refuses NaN, which compares false with every number
            raise argparse.ArgumentTypeError(f"{text} is not above zero")
        if value == float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not finite")
        return value

    parse.__name__ = kind.__name__  # argparse prints it: "invalid int value"
    return parse
