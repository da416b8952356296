"""Which parameters a trial gets, and whether it goes on, by Optuna.

Optuna keeps no file: its journal can be corrupted on NFS (github.com/optuna/optuna/issues/5138).
"""

import sys
import warnings
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from hpctrain.commands.sweep.file import Sweep
from hpctrain.commands.sweep.trials import Trial
from hpctrain.errors import HpctrainError
from hpctrain.text import first_line


def suggest(sweep: Sweep, trials: list[Trial], number: int) -> dict[str, Any]:
    """The parameters of a trial. They depend on the file, its number, and the trials that have begun alone.

    TPE takes a trial without a result for a bad one (constant liar), so that trials at the same time differ.
    """
    if sweep.sampler == "grid":
        chosen = {}
        # One combination, without a list of all: a short file can describe billions.
        for name, form in reversed(sweep.parameters.items()):
            number, place = divmod(number, len(form["values"]))
            chosen[name] = form["values"][place]
        return {name: chosen[name] for name in sweep.parameters}

    optuna = _import_optuna("take sampler: grid")
    seed = (sweep.seed * 1_000_003 + number) % 2**32
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # of constant_liar
        if sweep.sampler == "tpe":
            sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        else:
            sampler = optuna.samplers.RandomSampler(seed)
    study = optuna.create_study(direction=sweep.direction, sampler=sampler)
    forms = _distributions(sweep)
    study.add_trials([_for_optuna(trial, forms) for trial in trials])
    return study.ask(forms).params


def should_prune(sweep: Sweep, trials: list[Trial], trial: Trial) -> bool:
    """Whether a trial's best score is worse than the median of the complete trials (at least five) by now."""
    optuna = _import_optuna("leave out pruner")
    study = optuna.create_study(direction=sweep.direction)
    forms = _distributions(sweep)
    study.add_trials([_for_optuna(other, forms) for other in trials])
    return optuna.pruners.MedianPruner().prune(study, _for_optuna(trial, forms))


def _import_optuna(otherwise: str) -> ModuleType:
    if find_spec("optuna") is None:
        raise HpctrainError(
            f"{sys.executable} has no optuna: use the image, pip install optuna, or {otherwise}"
        )
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _for_optuna(trial: Trial, forms: dict[str, Any]) -> Any:
    from optuna.trial import TrialState, create_trial

    state = TrialState.FAIL if trial.state == "diverged" else TrialState[trial.state.upper()]
    return create_trial(
        state=state,
        value=trial.value,
        params=trial.parameters,
        distributions=forms,
        intermediate_values=trial.scores,
    )


def _distributions(sweep: Sweep) -> dict[str, Any]:
    try:
        return {name: _distribution(form) for name, form in sweep.parameters.items()}
    except (ArithmeticError, ValueError) as error:  # such as 10^28 steps
        raise HpctrainError(
            f"parameters: Optuna refuses them ({first_line(error)}): give other ranges"
        ) from error


def _distribution(form: dict[str, Any]) -> Any:
    from optuna import distributions

    if "values" in form:
        return distributions.CategoricalDistribution(form["values"])
    whole = all(type(form[name]) is int for name in ("low", "high", "step") if name in form)
    kind = distributions.IntDistribution if whole else distributions.FloatDistribution
    return kind(**form)
