"""Save the model of a fine-tuning as a folder, with a model card."""

from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hpctrain.files.redaction import hide_secrets
from hpctrain.nlp.data import formats
from hpctrain.nlp.models.card import make_card
from hpctrain.nlp.models.lora import without_warnings
from hpctrain.nlp.models.model_folder import save_model
from hpctrain.nlp.options import FineTuneOptions
from hpctrain.nlp.task import Task
from hpctrain.run.config import versions
from hpctrain.text import one_line
from hpctrain.training.run import Run


def save_result(
    task: Task,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    args: FineTuneOptions,
    run: Run,
    scores: dict[str, float],
    test: list[Any],
) -> None:
    """Save the model folder, with a model card that has the scores of this run. On one rank."""
    model.config.use_cache = True
    pipeline_tokenizer = task.make_pipeline_tokenizer(tokenizer, model.config.hpctrain["settings"])
    options = {name: _hide_folders(value) for name, value in vars(args).items()}
    base = options["model"] if args.model else f"from scratch ({options['from_scratch']})"
    data = options["data"] if args.data else "the sample data of hpctrain"
    # for the page of `hpctrain serve`
    model.config.hpctrain["about"] = hide_secrets({"base": base, "data": data, "scores": scores})
    model.config.hpctrain["meanings"] = task.explain_labels(test)
    card = make_card(
        title=f"{task.title}: {run.folder.name}",
        task=task,
        base=base,
        data=data,
        language=formats.find_language(text for example in test for text in task.get_texts(example)),
        scores=scores,
        options=options,
        versions=versions() | {"transformers": transformers.__version__},
        pipeline_tokenizer=bool(pipeline_tokenizer),
        adapter=args.uses_lora and not args.lora_merge,
    )
    # a token may control a terminal
    samples = [one_line(text) for text in task.generate_samples(model, tokenizer, test)]
    task.prepare_tokenizer(tokenizer, args.max_length)
    if samples:
        card += "\n## Samples\n\n" + "".join(f"- {text}\n" for text in samples)
        for text in samples:
            run.print(f"sample: {text}")
    if args.lora_merge:
        model = model.merge_and_unload()  # type: ignore[operator]  # a PeftModel
    with without_warnings():  # peft looks for the model of an adapter from the working folder
        save_model(run.folder / "model", model, tokenizer, card, pipeline_tokenizer)


def _hide_folders(value: Any) -> str:
    """The value of an option for the model card, which may be published: of a path, only its last part."""
    path = Path(str(value))
    return path.absolute().name if path.exists() or path.is_absolute() else str(value)
