"""Train an image classifier in one process: train_ddp without a launcher, so the same code and the same
numbers.

hpctrain train_single
"""

from hpctrain.distributed.world import World
from hpctrain.errors import UsageError
from hpctrain.options import Parser
from hpctrain.vision import train_ddp


def parser() -> Parser:
    """The options of train_ddp."""
    parser = train_ddp.parser()
    parser.prog, parser.description = (
        "hpctrain train_single",
        "Train an image classifier in one process, without a launcher.",
    )
    return parser


def main(world: World, arguments: list[str]) -> None:
    """Train in this process. Raises UsageError if a launcher has started several."""
    if world.size > 1:
        command = world.launcher_command
        alone = "srun --ntasks=1" if command == "srun" else f"start it without {command}"
        raise UsageError(
            f"train_single trains in one process, but {command} started {world.size}: use train_ddp, or {alone}"
        )
    train_ddp.train(world, train_ddp.parse(parser(), arguments, world))
