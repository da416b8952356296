"""What a task is: its file (classify.py, pair.py, ner.py, qa.py, generate.py) says how to tokenise, answer and score."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.modeling_outputs import ModelOutput

from hpctrain.nlp.features import Features

IGNORED = -100  # a label that the loss of every model of transformers leaves out


class Task(ABC):
    """One of the five fine-tunings. Training, evaluation and `hpctrain predict` go through the same methods."""

    name: ClassVar[str]
    title: ClassVar[str]  # for --help and the model card
    model: ClassVar[type]  # transformers' AutoModelFor...
    pipeline_tag: ClassVar[str]  # the hub's name of the task
    kind: ClassVar[str] = "bert"  # what --from-scratch makes: bert or gpt2
    inputs: ClassVar[tuple[str, ...]] = ("text",)  # what a user gives to `hpctrain predict`
    max_length: ClassVar[int] = 128
    stride: ClassVar[int] = 0
    padding: ClassVar[dict[str, int]] = {}  # of columns of tokens; input_ids are padded with the tokenizer's own
    extra: ClassVar[tuple[str, ...]] = ()  # columns of the features that are no inputs of the model
    score: ClassVar[str]  # the metric by which the best epoch is chosen
    higher_is_better: ClassVar[bool] = True

    def labels(self, examples: Sequence[Any]) -> list[str]:
        """The names of the labels in the training examples, in a fixed order; none where the task has none."""
        return []

    def settings(self, examples: Sequence[Any]) -> dict[str, Any]:
        """What example() has to know of the data that the model has learned from; kept in its config.json."""
        return {}

    @abstractmethod
    def texts(self, example: Any) -> tuple[str, ...]:  # noqa: ANN401 - the example type of the task
        """The texts of an example, for a tokenizer to learn from."""

    @abstractmethod
    def example(self, texts: Sequence[str], **settings: Any) -> Any:  # noqa: ANN401
        """An example out of the `inputs` that a user gives, and settings()."""

    @abstractmethod
    def tokenise(
        self, tokenizer: PreTrainedTokenizerFast, examples: Sequence[Any], labels: list[str], max_length: int, stride: int
    ) -> Features:
        """The features of the examples, with their labels; a label that is not one of `labels` is IGNORED."""

    def loss(self, output: ModelOutput, batch: dict[str, Any]) -> Tensor:
        """The mean loss over the labels of a batch: the model's own, unless that counts padding."""
        return output.loss

    @abstractmethod
    def predict(self, output: ModelOutput, batch: dict[str, Any]) -> list[Any]:
        """What the model says of each feature of a batch, as small as answers() can do with, off the device."""

    @abstractmethod
    def answers(
        self, examples: Sequence[Any], features: Features, predictions: Sequence[Any], labels: list[str]
    ) -> list[dict[str, Any]]:
        """What `hpctrain predict` prints for each example, out of the predictions for all features."""

    @abstractmethod
    def metric(self, examples: Sequence[Any], answers: Sequence[dict[str, Any]]) -> dict[str, float]:
        """The scores of the answers over the whole set, `score` among them. Names with a slash are details ("f1/PS")."""

    def show(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, examples: Sequence[Any]) -> list[str]:
        """What the model does with a few examples, for people to look at, where scores do not say it."""
        return []
