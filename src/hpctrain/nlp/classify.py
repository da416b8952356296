"""Classify texts, such as NSMC's reviews of films:

    hpctrain nlp.classify                                              a model of its own on a small sample
    hpctrain nlp.classify --data nsmc --model beomi/kcbert-base

Two nodes, from the container, by Slurm:

    sbatch launch/apptainer_ddp.sh nlp.classify --data nsmc --model beomi/kcbert-base
"""

from collections.abc import Sequence
from typing import Any

from sklearn.metrics import accuracy_score, precision_recall_fscore_support
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast
from transformers.modeling_outputs import SequenceClassifierOutput

from hpctrain.nlp import finetune
from hpctrain.nlp.data import Document
from hpctrain.nlp.features import Features, encode, features
from hpctrain.nlp.task import IGNORED, Task
from hpctrain.world import World


class Classify(Task):
    """A text has a class."""

    name = "classify"
    title = "Text classification"
    model = AutoModelForSequenceClassification
    pipeline_tag = "text-classification"
    score = "accuracy"

    def labels(self, examples: Sequence[Document]) -> list[str]:
        """The classes."""
        return sorted({example.label for example in examples})

    def texts(self, example: Document) -> tuple[str, ...]:
        """The text."""
        return (example.text,)

    def example(self, texts: Sequence[str]) -> Document:
        """A text whose class is not known."""
        return Document("", texts[0], "")

    def tokenise(
        self, tokenizer: PreTrainedTokenizerFast, examples: Sequence[Document], labels: list[str], max_length: int, stride: int
    ) -> Features:
        """A feature an example; the end of a text that is too long is cut off, or of a pair that of the longer one."""
        texts = [self.texts(example) for example in examples]
        encodings = list(encode(tokenizer, [text if len(text) > 1 else text[0] for text in texts], max_length))
        number = {label: i for i, label in enumerate(labels)}
        targets = [number.get(example.label, IGNORED) for example in examples]
        return features(
            {
                "input_ids": [encoding.ids for encoding in encodings],
                # for a text alone they are all 0, which is what a model takes when it is told nothing
                **(
                    {"token_type_ids": [e.type_ids for e in encodings]} if "token_type_ids" in tokenizer.model_input_names else {}
                ),
            },
            {"labels": targets, "units": [target != IGNORED for target in targets]},
            cut=[i for i, encoding in enumerate(encodings) if encoding.overflowing],
        )

    def predict(self, output: SequenceClassifierOutput, batch: dict[str, Any]) -> list[Any]:
        """The probability of each class."""
        return list(output.logits.float().softmax(-1).cpu().numpy())

    def answers(
        self, examples: Sequence[Document], features: Features, predictions: Sequence[Any], labels: list[str]
    ) -> list[dict[str, Any]]:
        """The most probable class, and how probable it is."""
        return [{"label": labels[p.argmax()], "probability": round(float(p.max()), 6)} for p in predictions]

    def metric(self, examples: Sequence[Document], answers: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Accuracy; precision, recall and F1, each the mean over the classes of the examples (macro)."""
        gold, said = [example.label for example in examples], [answer["label"] for answer in answers]
        # A class of the examples that training never had is counted, too: all answers are wrong there.
        precision, recall, f1, _ = precision_recall_fscore_support(
            gold, said, labels=sorted(set(gold)), average="macro", zero_division=0
        )
        return {"accuracy": accuracy_score(gold, said), "precision": precision, "recall": recall, "f1": f1}


TASK = Classify()


def main(world: World, arguments: list[str]) -> None:
    """Fine-tune as the flags say."""
    finetune.run(TASK, world, arguments)
