"""hpctrain plot: the losses and scores of a run over its steps, as a picture."""

from pathlib import Path

from hpctrain.distributed.world import World
from hpctrain.errors import explain_os_error
from hpctrain.parser import Parser
from hpctrain.run.charts import plot
from hpctrain.run.reader import require_metrics
from hpctrain.text import say


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
    with explain_os_error(f"{run}/curves.png: cannot be written", "use hpctrain report --out"):
        say(str(plot(run)))
