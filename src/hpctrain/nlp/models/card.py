"""The model card of a fine-tuned model."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from hpctrain.files.redaction import hide_secrets
from hpctrain.nlp.task import Task


def make_card(
    title: str,
    task: Task,
    base: str,
    data: str,
    language: str | None,
    scores: Mapping[str, float],
    options: Mapping[str, Any],
    versions: Mapping[str, str],
    pipeline_tokenizer: bool = False,
    adapter: bool = False,
) -> str:
    """A model card in Markdown with YAML metadata: scores, how to use the model, and how it was trained.

    `base` is the model that was fine-tuned: a name on the hub, or that of a folder. `data` is the name of the
    data set, and `language` that of its texts in ISO 639-1, None if it is not known. `pipeline_tokenizer`:
    whether save_model() writes one; `adapter`: whether it writes an adapter of peft.
    """
    base, data, title = hide_secrets([base, data, title])
    options, versions = hide_secrets([dict(options), dict(versions)])
    is_hub_name = re.fullmatch(r"[\w.-]+/[\w.-]+", base) and not Path(base).exists()
    metadata = ModelCardData(
        language=language,
        library_name="peft" if adapter else "transformers",
        pipeline_tag=task.pipeline_tag,
        base_model=base if is_hub_name else None,
        # other data have the name of a file
        datasets=["/".join(data.split("/")[:2])] if "/" in data else None,
        model_name=title,
        eval_results=[
            EvalResult(task.pipeline_tag, Path(data).name, Path(data).name, name, float(value))
            for name, value in scores.items()
            if "/" not in name
        ],
    )
    loader = task.model.__name__
    text = task.pipeline_text if pipeline_tokenizer else task.card_text
    words = " ".join(name.upper() for name in task.inputs)
    load = f"from transformers import AutoTokenizer, {loader}\n\n"
    load += 'tokenizer = AutoTokenizer.from_pretrained("FOLDER")\n'
    if adapter:
        quoted = json.dumps(base, ensure_ascii=False)  # people copy this code, and a folder may have any name
        load = (
            f"from peft import PeftModel\n{load.replace('AutoTokenizer, ', 'AutoConfig, AutoTokenizer, ', 1)}"
        )
        load += f'model = {loader}.from_pretrained({quoted}, config=AutoConfig.from_pretrained("FOLDER"))\n'
        load += 'model = PeftModel.from_pretrained(model, "FOLDER")'
    else:
        load += f'model = {loader}.from_pretrained("FOLDER")'
    return f"""---
{metadata.to_yaml()}
---

# {title}

`{base}`, fine-tuned on `{data}` with hpctrain ({task.name}).

## Scores

| metric | value |
|---|---|
{chr(10).join(f"| {name} | {value:.4f} |" for name, value in scores.items())}

## Use

```
hpctrain predict FOLDER {words}
```
{text and f"{chr(10)}{text}{chr(10)}"}
```python
{load}
```

## Training

```json
{json.dumps({"options": options, "versions": versions}, indent=2, ensure_ascii=False, default=str)}
```
"""
