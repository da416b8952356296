"""The interface of a fine-tuning task.

A new task is one file like tasks/classify.py, with a subclass of Task and its instance TASK, and one row in
COMMANDS of hpctrain/cli.py. The command is `nlp.<name>`, and the task's sample data, if it has any, are in
samples/<name>/.
"""

import argparse
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

import torch
from numpy import ndarray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hpctrain.errors import HpctrainError
from hpctrain.nlp.batches.features import Features, check_tokens
from hpctrain.nlp.batches.sampling import evaluation_batches_by_length
from hpctrain.nlp.batches.text_batch import TextBatch

if TYPE_CHECKING:
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

SAMPLES = Path(__file__).parent / "samples"
IGNORED = -100  # the label that the loss of every model of transformers ignores


@dataclass(frozen=True, slots=True)
class Example:
    """One example of a data set; each task has its own kind.

    `location` is where it was read, such as "ratings_train.txt, line 17". It is no part of the content, which
    repr() gives and the cache of tokenized texts depends on.
    """

    location: str = field(default="", kw_only=True, repr=False)


AnyExample = TypeVar("AnyExample", bound=Example)


class Logits(Protocol):
    """The output of a model, whose tensors transformers declares as optional."""

    loss: Tensor
    logits: Tensor


class Task(ABC, Generic[AnyExample]):
    """A fine-tuning task. Training, evaluation and `hpctrain predict` call the same methods."""

    name: ClassVar[str]  # the command is nlp.<name>
    title: ClassVar[str]  # for --help and the model card
    formats: ClassVar[str]  # what --data reads, for --help
    # the fields of an example in a table, for --columns; () for a task without this option
    fields: ClassVar[tuple[str, ...]] = ()
    other_fields: ClassVar[tuple[tuple[str, ...], ...]] = ()  # sets of fields that a table may have instead
    problem: ClassVar[str] = ""  # the kind of labels, see --problem; "" for one class
    problem_type: ClassVar[str] = "single_label_classification"  # what transformers calls `problem`
    # whether each feature has one label, in its values: with --class-weights, --problem
    one_label: ClassVar[bool] = False
    # whether a row may have several features; the first label of each is IGNORED: with --pack
    can_pack: ClassVar[bool] = False
    model: "ClassVar[type[_BaseAutoModelClass]]"  # AutoModelFor... of transformers
    pipeline_tag: ClassVar[str]  # the task's name on the Hugging Face hub
    kind: ClassVar[str] = "bert"  # the architecture that --from-scratch creates: bert or gpt2
    inputs: ClassVar[tuple[str, ...]] = ("text",)  # the texts that `hpctrain predict` takes for one example
    # such texts, to click on the page of `hpctrain serve`
    examples: ClassVar[tuple[tuple[str, ...], ...]] = ()
    max_length: ClassVar[int] = 128  # default of --max-length
    stride: ClassVar[int] = 0  # default of --stride; 0 for a task without this option
    # padding value of token columns; 0 if missing, input_ids take the tokenizer's
    padding: ClassVar[Mapping[str, int]] = {}
    extra: ClassVar[tuple[str, ...]] = ()  # columns of the features that are not inputs of the model
    # at most how many times as many examples are evaluated at once as trained: no layer keeps its activations
    evaluation_factor: ClassVar[int] = 8
    cut_text: ClassVar[str] = ""  # what is truncated, for the log, if not the whole example
    # why no prediction can be right for the `lost` examples of the features, for the log
    lost_text: ClassVar[str] = ""
    # what the model card says if the model has a pipeline tokenizer, instead of card_text
    pipeline_text: ClassVar[str] = ""
    # how the model card says to use the model, if other models of transformers are used in another way
    card_text: ClassVar[str] = ""
    groups: ClassVar[str] = ""  # plural of what group() returns, for error messages
    selection_metric: ClassVar[str]  # the validation metric that selects the best epoch: see choose_metric()
    higher_is_better: ClassVar[bool] = True

    @property
    def samples(self) -> Path | None:
        """The folder of the sample data; None for a task without sample data."""
        folder = SAMPLES / self.name
        return folder if folder.is_dir() else None

    def for_problem(self, problem: str | None) -> "Task[AnyExample]":
        """The task for a kind of labels; a task without --problem returns itself."""
        return self

    # --- examples ---

    @abstractmethod
    def read(
        self, path: Path, skipped: list[HpctrainError] | None = None, columns: dict[str, str] | None = None
    ) -> list[AnyExample]:
        """Read the examples of one file, in one of the published formats; data/formats.py has helpers.

        With `columns` the file is a table (data/tables.py) and has each field in the column of this name. A
        task without `fields` never gets them.

        Raises HpctrainError that names the file and the line. With a list `skipped`, an error in a single
        example goes there and the example is left out; an error in the file as a whole is always raised.
        """

    @abstractmethod
    def make_example(self, texts: Sequence[str], **settings: bool) -> AnyExample:
        """Make an example without labels from the `inputs` that a user gives, and from collect_settings()."""

    @abstractmethod
    def get_texts(self, example: AnyExample) -> tuple[str, ...]:
        """The texts of an example; a tokenizer from scratch is trained on them."""

    def has_answer(self, example: AnyExample) -> bool:
        """Whether the data say what is to be predicted. Test sets of GLUE have -1 or nothing in its place."""
        return True

    def group(self, example: AnyExample) -> Hashable | None:
        """The key of examples that --validation-split keeps in one part; None for an example by itself."""
        return None

    def collect_labels(self, examples: Sequence[AnyExample]) -> list[str]:
        """The label names in the training examples, in a fixed order; empty if the task has no labels."""
        return []

    def list_classes(self, labels: list[str]) -> list[str]:
        """What an answer can name, from collect_labels()."""
        return labels

    def explain_labels(self, examples: Sequence[AnyExample]) -> dict[str, str]:
        """What labels mean that do not say it themselves, if the data set is known."""
        return {}

    def collect_settings(self, examples: Sequence[AnyExample]) -> dict[str, bool]:
        """Properties of the training data: keyword arguments of make_example(), saved in config.json."""
        return {}

    # --- training and evaluation ---

    @abstractmethod
    def tokenize(
        self,
        tokenizer: PreTrainedTokenizerFast,
        examples: Sequence[AnyExample],
        labels: list[str],
        max_length: int,
        stride: int,
    ) -> Features:
        """Make the features of the examples; a label that is not in `labels` becomes IGNORED."""

    def explain_lost(self, tokenizer: PreTrainedTokenizerFast, example: AnyExample) -> HpctrainError | None:
        """Why one of the `lost` examples of the features was left out; None for `lost_text`."""
        return None

    def compute_loss(self, output: Any, batch: TextBatch) -> Tensor:
        """The mean loss over the labels of a batch; override it if the model's own loss includes padding."""
        return output.loss

    @abstractmethod
    def predict(self, output: Any, batch: TextBatch) -> Tensor:
        """One prediction for each feature of a batch, [b, ...], on the device of the model.

        Keep them small: those of a whole set stay there until its end, and ranks exchange them. Read no value
        here, which would wait for a GPU in each batch.
        """

    def trim(self, prediction: ndarray) -> ndarray:
        """A row of predict() without what only makes the rows of a batch equally long."""
        return prediction

    def fetch_predictions(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[int, ndarray]]:
        """The number and the prediction of each feature, from the index and the predictions of batches."""
        for index, predictions in batches:
            yield from zip(index.tolist(), map(self.trim, predictions.cpu().numpy()), strict=True)

    @abstractmethod
    def make_answers(
        self,
        examples: Sequence[AnyExample],
        features: Features,
        predictions: Sequence[Any],
        labels: list[str],
    ) -> list[dict[str, Any]]:
        """Combine the predictions for all features into one answer (of hpctrain predict) per example."""

    @abstractmethod
    def score(self, examples: Sequence[AnyExample], answers: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Metrics of the whole set with `selection_metric`. A slash makes a detail, such as "f1/PS"."""

    def choose_metric(self, examples: Sequence[AnyExample]) -> str:
        """The validation metric that selects the best epoch, for these validation examples."""
        return self.selection_metric

    # --- using the model ---

    def prepare_tokenizer(self, tokenizer: PreTrainedTokenizerFast, max_length: int) -> None:
        """Change the tokenizer before it is saved: in transformers, it is to give the input of training."""
        tokenizer.model_max_length, tokenizer.truncation_side = max_length, "right"
        # save_pretrained() writes those of the class otherwise: see fit_together()
        tokenizer.init_kwargs["model_input_names"] = tokenizer.model_input_names

    def make_pipeline_tokenizer(self, tokenizer: PreTrainedTokenizerFast, settings: dict[str, bool]) -> str:
        """The tokenizer.json with which a pipeline of transformers gives the scores of the run.

        "" if the model's own tokenizer does, or if no tokenizer can. `settings`: see collect_settings().
        """
        return ""

    def generate_samples(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, examples: Sequence[AnyExample]
    ) -> list[str]:
        """A few outputs of the model for its card, if the scores alone do not show the quality."""
        return []

    @torch.inference_mode()
    def answer(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        rows: Sequence[tuple[str, ...]],
        config: dict[str, Any],
        args: argparse.Namespace,
        first: int,
    ) -> tuple[list[dict[str, Any]], int]:
        """Answer `rows` of `inputs` for `hpctrain predict`.

        Returns the answers and how many texts were truncated. `config` is the "hpctrain" part of the model's
        config.json, `args` are the options of predict, and `first` is the number of the first row in the
        whole input, counted from 0.
        """
        labels = config["labels"]
        examples = [self.make_example(row, **config["settings"]) for row in rows]
        features = self.tokenize(tokenizer, examples, labels, config["max_length"], config["stride"])
        check_tokens(model.name_or_path, model, features.last_token)
        padding = {**self.padding, "input_ids": tokenizer.pad_token_id}
        batches: list[tuple[Tensor, Tensor]] = []
        for index in evaluation_batches_by_length(features.lengths, args.batch_size):
            batch = features.batch(index, padding).to(model.device)
            output = model(**batch.model_inputs(without={"labels", *self.extra}))
            batches.append((index, self.predict(output, batch)))
        numbered = dict(self.fetch_predictions(batches))
        predictions = [numbered[i] for i in range(len(features.lengths))]
        return self.make_answers(examples, features, predictions, labels), len(features.cut)
