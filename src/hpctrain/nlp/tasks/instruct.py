"""Teach a language model to answer chat messages (supervised fine-tuning):

    hpctrain nlp.instruct                                              sample data, tiny model from scratch
    hpctrain nlp.instruct --data chats --model Qwen/Qwen2.5-0.5B --lora-rank 16 --max-length 1024

On two nodes, in the container, with Slurm:

    sbatch launch/apptainer_ddp.sh nlp.instruct --data chats --model Qwen/Qwen2.5-0.5B
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hpctrain.errors import HpctrainError
from hpctrain.nlp.batches.features import Features, encode_texts
from hpctrain.nlp.data import formats
from hpctrain.nlp.data.tables import read_columns
from hpctrain.nlp.models.limits import MAX_GROWTH, LimitError, limited, refuse_powers
from hpctrain.nlp.task import IGNORED, Example
from hpctrain.nlp.tasks.generate import LanguageModelTask
from hpctrain.text import first_line

MAX_TEMPLATE = 1_000_000  # characters that a chat template may add
ROLES = ("system", "user", "assistant")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
# The template of tokenizers without one, saved with the model. An answer ends with the end-of-text token.
TEMPLATE = (
    "{{ bos_token or eos_token }}{% for message in messages %}{{ '' if loop.first else '\\n' }}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] "
    "+ (eos_token if message['role'] == 'assistant' else '') }}"
    "{% endfor %}{{ '\\n<|assistant|>\\n' if add_generation_prompt else '' }}"
)


@dataclass(frozen=True, slots=True)
class Conversation(Example):
    """Messages, each with its role and its text. Nothing is learned from the first `context` of them."""

    messages: tuple[tuple[str, str], ...]
    context: int = 1


class Instruct(LanguageModelTask[Conversation]):
    """Answer a user's messages. The loss is over all answers of the assistant, not the messages."""

    name = "instruct"
    title = "Instruction tuning"
    formats = (
        "jsonl or a JSON list with messages (role, content), with conversations (from, value), "
        "with instruction, input, output, or with prompt, completion"
    )
    fields = ("messages",)
    examples = (("바나나의 색은?",), ("돌고래의 집은 어디인가?",))
    other_fields = (
        ("prompt", "completion"),
        ("instruction", "input", "output"),
        ("instruction", "context", "response"),
    )
    max_length = 512
    lost_text = "whose answers begin after --max-length, so nothing is learned from them"

    def read(
        self, path: Path, skipped: list[HpctrainError] | None = None, columns: dict[str, str] | None = None
    ) -> list[Conversation]:
        """Read JSON Lines or a JSON list of the objects that make_conversation() takes."""
        if columns:
            return read_columns(path, columns, make_conversation, skipped)
        return formats.read_objects(path, make_conversation, skipped)

    def make_example(self, texts: Sequence[str], **_: bool) -> Conversation:
        """The message of a user, to be answered."""
        return Conversation((("user", texts[0]),))

    def get_texts(self, example: Conversation) -> tuple[str, ...]:
        """The texts of all messages, and how the built-in template writes the roles."""
        return tuple(f"<|{role}|>\n{text}" for role, text in example.messages)

    def tokenize(
        self,
        tokenizer: PreTrainedTokenizerFast,
        examples: Sequence[Conversation],
        labels: list[str],
        max_length: int,
        stride: int,
    ) -> Features:
        """The truncated conversation in the chat template; labels are the assistant's tokens.

        `lost` has the examples that the template refuses, and those whose answers begin after max_length.
        """
        rendered: dict[int, tuple[str, list[tuple[int, int]]]] = {}
        refused: list[HpctrainError] = []
        columns: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
        units, example_of, cut, lost = [], [], [], []
        for i, example in enumerate(examples):
            try:
                rendered[i] = render(tokenizer, example)
            except LimitError:
                raise
            except HpctrainError as error:
                refused.append(error.with_traceback(None))
                lost.append(i)
        if not rendered:
            raise refused[0]
        encodings = encode_texts(tokenizer, [text for text, _ in rendered.values()], None, offsets=True)
        for (i, (_, answers)), encoding in zip(rendered.items(), encodings, strict=True):
            is_answer = [
                start < end and any(first <= start < last for first, last in answers)
                for start, end in encoding.offsets
            ]
            is_answer[:1] = [False]  # nothing comes before the first token to predict it from
            targets = [
                token if wanted else IGNORED for token, wanted in zip(encoding.ids, is_answer, strict=True)
            ]
            if len(targets) > max_length:
                cut.append(i)
            if not any(is_answer[:max_length]):
                lost.append(i)
                continue
            columns["input_ids"].append(encoding.ids[:max_length])
            columns["labels"].append(targets[:max_length])
            units.append(sum(is_answer[:max_length]))
            example_of.append(i)
        if not units:
            raise HpctrainError(f"no answer begins within --max-length {max_length}: give a larger one")
        return Features.from_lists(columns, {"units": units}, example=example_of, cut=cut, lost=lost)

    def explain_lost(self, tokenizer: PreTrainedTokenizerFast, example: Conversation) -> HpctrainError | None:
        """The error of the chat template for this conversation, if any."""
        try:
            render(tokenizer, example)
        except HpctrainError as error:
            return error
        return None

    def encode_prompts(self, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str]) -> list[list[int]]:
        """The tokens of each message of a user in the chat template, with the beginning of an answer."""
        texts = [_apply(tokenizer, self.make_example([prompt]).messages, answer=True) for prompt in prompts]
        return [encoding.ids for encoding in encode_texts(tokenizer, texts, None)]

    def generate_samples(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, examples: Sequence[Conversation]
    ) -> list[str]:
        """The answers to the first messages of users in four examples."""
        asked = [
            next((text for role, text in example.messages if role == "user"), "") for example in examples[:4]
        ]
        answers = self.generate_texts(model, tokenizer, asked, 40, seed=1)
        return [f"{prompt} -> {answer}" for prompt, answer in zip(asked, answers, strict=True)]

    def prepare_tokenizer(self, tokenizer: PreTrainedTokenizerFast, max_length: int) -> None:
        """Also keep the chat template of the training."""
        super().prepare_tokenizer(tokenizer, max_length)
        tokenizer.chat_template = tokenizer.chat_template or TEMPLATE


def make_conversation(location: str, item: dict[str, Any]) -> Conversation:
    """A conversation from messages (role, content), or one of the other forms in which they are published.

    These are conversations (from, value) of ShareGPT, instruction, input and output of Alpaca, instruction,
    context and response of Dolly, and prompt and completion, which are texts, or lists of messages: then only
    those of the completion are learned. Raises HpctrainError, naming the location, unless it has an answer of
    the assistant, and for what is not read and changes the answers.
    """
    expected = "an object with messages, with instruction and output, or with prompt and completion"
    expected += formats.OTHER_NAMES
    has, context = item if isinstance(item, dict) else {}, 1
    _refuse_unread(location, has, "tools", "functions", "history")
    key = next((key for key in ("messages", "conversations") if key in has), None)
    if key is None and "instruction" in has:
        asked = formats.get_field(location, item, "instruction", str, expected)
        more, answer = ("context", "response") if "response" in item else ("input", "output")
        if item.get(more):
            asked += "\n\n" + formats.get_field(location, item, more, str, expected)
        messages = [("user", asked), ("assistant", formats.get_answer(location, item, answer, str, expected))]
    elif key is None and "prompt" in has:  # with messages, it is the first of them (UltraChat)
        if has.get("label") is False:  # KTO
            raise HpctrainError(
                f"{location}: its label is false, so the completion is not to be learned: "
                "remove such examples"
            )
        kind = list if isinstance(has["prompt"], list) else str
        prompt = formats.get_field(location, item, "prompt", kind, expected)
        completion = formats.get_answer(location, item, "completion", kind, expected)
        if kind is str:
            messages = [("user", prompt), ("assistant", completion)]
        else:
            messages, context = _read_messages(location, prompt + completion), max(1, len(prompt))
    else:
        messages = _read_messages(
            location, formats.get_field(location, item, key or "messages", list, expected)
        )
    if has.get("system"):  # LLaMA-Factory
        messages.insert(0, ("system", formats.get_field(location, item, "system", str, expected)))
        context += context > 1
    if not any(role == "assistant" and text for role, text in messages[context:]):
        raise formats.UnlabeledError(
            f"{location}: it has no answer of the assistant: add it, or leave it out"
        )
    return Conversation(tuple(messages), context, location=location)


def _read_messages(location: str, items: list[Any]) -> list[tuple[str, str]]:
    """The role and the text of each message. Raises HpctrainError, naming its place."""
    messages = []
    for i, message in enumerate(items):
        place = f"{location}, message {i + 1}"
        _refuse_unread(place, message if isinstance(message, dict) else {}, "tool_calls", "function_call")
        names = ("from", "value") if isinstance(message, dict) and "from" in message else ("role", "content")
        role, text = (
            formats.get_field(place, message, name, str, "a role and its content") for name in names
        )
        role = SHAREGPT_ROLES.get(role, role)
        if role not in ROLES:
            raise formats.line_error(
                place, f"the role is {formats.excerpt(role)!r}, not one of {', '.join(ROLES)}"
            )
        # OpenAI: 0 for an answer that is not to be learned
        if role == "assistant" and message.get("weight", 1) != 1:
            raise formats.line_error(
                place, "its weight is not 1, and nlp.instruct learns all answers alike: leave it out"
            )
        messages.append((role, text))
    return messages


def _refuse_unread(location: str, item: dict[str, Any], *keys: str) -> None:
    """Raise HpctrainError for an object with one of these keys, whose value the model would not see."""
    if found := next((key for key in keys if item.get(key) not in (None, "", "[]", [], {})), None):
        raise HpctrainError(
            f"{location} has {found!r}, which nlp.instruct does not read: "
            "write them into a message, or remove them"
        )


def render(tokenizer: PreTrainedTokenizerFast, example: Conversation) -> tuple[str, list[tuple[int, int]]]:
    """A conversation in the chat template of the tokenizer, and the first and last character of its answers.

    An answer begins where the template would ask for an answer. A message of the assistant that nothing
    precedes is not an answer.

    Raises HpctrainError if the template refuses the conversation, if it writes a message in another way once
    others follow, or if it begins an answer in another way than it asks for an answer: the model would learn
    what it never has to write.
    """
    answers, before = [], ""
    for i, (role, _) in enumerate(example.messages, 1):
        text = _apply(tokenizer, example.messages[:i], location=example.location)
        if not text.startswith(before):
            raise HpctrainError(
                f"{example.location}: the chat template of the tokenizer changes messages {i - 1} and before "
                f"when message {i} follows: leave out such conversations, "
                "or change chat_template.jinja in the folder of --model"
            )
        if role == "assistant" and i > example.context:
            prompt = _apply(tokenizer, example.messages[: i - 1], answer=True, location=example.location)
            if not text.startswith(prompt):
                raise HpctrainError(
                    f"{example.location}: the chat template of the tokenizer asks for an answer by "
                    f"{prompt[len(before) :]!r} and writes message {i} another way: "
                    "change chat_template.jinja in the folder of --model"
                )
            answers.append((len(prompt), len(text)))
        before = text
    return before, answers


def _apply(
    tokenizer: PreTrainedTokenizerFast,
    messages: Sequence[tuple[str, str]],
    *,
    answer: bool = False,
    location: str = "TEXT",
) -> str:
    """The messages in the chat template, with the beginning of an answer if wanted."""
    template, given = f"{tokenizer.name_or_path}: its chat template", sum(len(text) for _, text in messages)
    try:
        refuse_powers(template, tokenizer.chat_template or TEMPLATE)
        with limited(template):
            text = tokenizer.apply_chat_template(
                [{"role": role, "content": text} for role, text in messages],
                chat_template=tokenizer.chat_template or TEMPLATE,
                tokenize=False,
                add_generation_prompt=answer,
            )
    except LimitError:
        raise
    except Exception as error:  # templates of models raise exceptions of many kinds
        raise HpctrainError(
            f"{location}: the chat template of the tokenizer refuses this conversation "
            f"({first_line(error)[:200]}): leave out such conversations, "
            "or change chat_template.jinja in the folder of --model"
        ) from error
    assert isinstance(text, str)  # because of tokenize=False
    if len(text) > MAX_TEMPLATE + MAX_GROWTH * given:
        raise LimitError(
            f"{template} makes {len(text):,} characters of a conversation of {given:,}: "
            "use another model, or correct it"
        )
    return text


TASK = Instruct()
