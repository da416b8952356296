"""Go on with a text, such as a review of a film that is to be good ("긍정: ") or bad ("부정: "):

    hpctrain nlp.generate                                              a model of its own on a small sample
    hpctrain nlp.generate --data nsmc --model skt/kogpt2-base-v2

Two nodes, from the container, by Slurm:

    sbatch launch/apptainer_ddp.sh nlp.generate --data nsmc --model skt/kogpt2-base-v2
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.modeling_outputs import CausalLMOutput

from hpctrain.nlp import finetune
from hpctrain.nlp.data import Passage
from hpctrain.nlp.features import Features, encode, features
from hpctrain.nlp.task import IGNORED, Task
from hpctrain.world import World


class Generate(Task):
    """A text goes on after its prompt; the prompt itself is not learned."""

    name = "generate"
    title = "Text generation"
    model = AutoModelForCausalLM
    pipeline_tag = "text-generation"
    kind = "gpt2"
    padding: ClassVar = {"labels": IGNORED}
    score = "perplexity"
    higher_is_better = False

    def texts(self, example: Passage) -> tuple[str, ...]:
        """The prompt and the text."""
        return (example.prompt, example.text)

    def example(self, texts: Sequence[str]) -> Passage:
        """A prompt to go on with."""
        return Passage(texts[0], "")

    def tokenise(
        self, tokenizer: PreTrainedTokenizerFast, examples: Sequence[Passage], labels: list[str], max_length: int, stride: int
    ) -> Features:
        """Begin, prompt, text, end. What is longer than max_length takes several windows, and each token is predicted in one."""
        begin, end = _begin_and_end(tokenizer)
        columns: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
        units, of = [], []
        prompts, texts = (encode(tokenizer, column, None) for column in zip(*(self.texts(x) for x in examples), strict=True))
        for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            ids = [begin, *prompt.ids, *text.ids, end]
            goal = [IGNORED] * (1 + len(prompt.ids)) + [*text.ids, end]
            for start in range(0, len(ids) - 1, max_length - 1):
                # The first token of a window is there to be gone on from; the window before has predicted it.
                goals = [IGNORED, *goal[start + 1 : start + max_length]]
                if start and all(label == IGNORED for label in goals):
                    continue
                columns["input_ids"].append(ids[start : start + max_length])
                columns["labels"].append(goals)
                units.append(sum(label != IGNORED for label in goals))
                of.append(i)
        return features(columns, {"units": units}, example=of)

    def predict(self, output: CausalLMOutput, batch: dict[str, Any]) -> list[Any]:
        """The negative log likelihood of the text in each feature, and its number of tokens; padding and prompt do not count."""
        logits, goals = output.logits[:, :-1].float(), batch["labels"][:, 1:]
        losses = cross_entropy(logits.transpose(1, 2), goals, ignore_index=IGNORED, reduction="none")
        return list(torch.stack([losses.double().sum(1), (goals != IGNORED).sum(1).double()], 1).cpu().numpy())

    def answers(
        self, examples: Sequence[Passage], features: Features, predictions: Sequence[Any], labels: list[str]
    ) -> list[dict[str, Any]]:
        """How likely each text is."""
        sums = numpy.zeros((len(examples), 2))
        numpy.add.at(sums, features.example, numpy.asarray(predictions).reshape(-1, 2))
        return [{"negative_log_likelihood": float(loss), "tokens": int(tokens)} for loss, tokens in sums]

    def metric(self, examples: Sequence[Passage], answers: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Perplexity: e to the mean negative log likelihood of a token, over all tokens of all texts and their ends."""
        loss, tokens = (math.fsum(answer[name] for answer in answers) for name in ("negative_log_likelihood", "tokens"))
        return {"perplexity": math.exp(min(loss / tokens, 700))}

    def show(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, examples: Sequence[Passage]) -> list[str]:
        """Two texts for each prompt of the data, or for the first words of two texts where they have no prompts."""
        prompts = sorted({example.prompt for example in examples})
        if prompts == [""]:
            prompts = [" ".join(example.text.split()[:2]) for example in examples[:2]]
        prompts = [prompt for prompt in prompts for _ in range(2)]
        return [prompt + text for prompt, text in zip(prompts, go_on(model, tokenizer, prompts, 40, seed=1), strict=True)]


@torch.inference_mode()
def go_on(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str], max_new_tokens: int, seed: int
) -> list[str]:
    """What the model goes on with after each prompt, at most so many tokens: drawn from the likeliest 95 % (top-p), by the seed.

    Raises no error where a prompt is too long: its beginning is left out.
    """
    begin, end = _begin_and_end(tokenizer)
    places = (getattr(model.config, "max_position_embeddings", None) or 1024) - max_new_tokens
    rows = [[begin, *encoding.ids][-places:] for encoding in encode(tokenizer, list(prompts), None)]
    longest = max(map(len, rows))
    # The padding is on the left here, because generation goes on at the right.
    ids = torch.tensor([[tokenizer.pad_token_id] * (longest - len(row)) + row for row in rows], device=model.device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=model.device)
    torch.manual_seed(seed)
    said = model.eval().generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=max_new_tokens,
        do_sample=True,
        top_p=0.95,
        top_k=0,
        eos_token_id=end,
        pad_token_id=tokenizer.pad_token_id,
    )
    return [tokenizer.decode(row, skip_special_tokens=True) for row in said[:, longest:]]


def _begin_and_end(tokenizer: PreTrainedTokenizerFast) -> tuple[int, int]:
    """The tokens around a text; a tokenizer has at least one for its end (models.tokenizer_of)."""
    end = tokenizer.eos_token_id
    return (end if tokenizer.bos_token_id is None else tokenizer.bos_token_id), end


TASK = Generate()


def main(world: World, arguments: list[str]) -> None:
    """Fine-tune as the flags say."""
    finetune.run(TASK, world, arguments)
