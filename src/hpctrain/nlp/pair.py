"""Say how two sentences are related, as in KLUE-NLI and KorNLI:

    hpctrain nlp.pair                                                  a model of its own on a small sample
    hpctrain nlp.pair --data klue-nli-v1.1 --model klue/bert-base

Two nodes, from the container, by Slurm:

    sbatch launch/apptainer_ddp.sh nlp.pair --data klue-nli-v1.1 --model klue/bert-base
"""

from collections.abc import Sequence
from typing import Any

from hpctrain.nlp import finetune
from hpctrain.nlp.classify import Classify
from hpctrain.nlp.data import Pair
from hpctrain.world import World


class PairClassify(Classify):
    """Two sentences have a class; the rest is as for one text."""

    name = "pair"
    title = "Classification of sentence pairs"
    inputs = ("first", "second")

    def texts(self, example: Pair) -> tuple[str, ...]:
        """Both sentences."""
        return (example.first, example.second)

    def example(self, texts: Sequence[str]) -> Pair:
        """Two sentences of which nothing is known."""
        return Pair("", texts[0], texts[1], "")

    def metric(self, examples: Sequence[Pair], answers: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Accuracy, and F1 as the mean over the classes."""
        scores = super().metric(examples, answers)
        return {name: scores[name] for name in ("accuracy", "f1")}


TASK = PairClassify()


def main(world: World, arguments: list[str]) -> None:
    """Fine-tune as the flags say."""
    finetune.run(TASK, world, arguments)
