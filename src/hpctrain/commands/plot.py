"""hpctrain plot: the losses and scores of a run over its steps, as a picture."""

from pathlib import Path

from hpctrain.distributed.world import World
from hpctrain.errors import HpctrainError
from hpctrain.parser import Parser
from hpctrain.run.charts import plot
from hpctrain.run.reader import require_metrics
from hpctrain.text import reason, say


def parser() -> Parser:
    parser = Parser(
        prog="hpctrain plot", description="Draw the losses and scores of a run over its steps as curves.png."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder, such as runs/train_ddp/17")
    return parser


def main(world: World, arguments: list[str]) -> None:
    """Draw curves.png and print its path. Raises HpctrainError."""
    run = parser().parse_args(arguments).run
    require_metrics(run)
    try:
        say(str(plot(run)))
    except OSError as error:  # a run of another user
        raise HpctrainError(
            f"{run}/curves.png: cannot be written ({reason(error)}): use hpctrain report --out"
        ) from error
