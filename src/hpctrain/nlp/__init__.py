"""Fine-tuning of language models on published data sets, or on the samples of this package."""

import sys

from hpctrain.errors import UsageError

if sys.flags.optimize > 1:
    raise UsageError("transformers reads docstrings, which Python leaves out: unset PYTHONOPTIMIZE (-OO)")
