"""What a run saves and resumes: the objects that a script names in run.track()."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from hpctrain.checkpoints import checkpoint, parts
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.text import first_line
from hpctrain.training.precision import Scaler, load_scaler
from hpctrain.training.strategies.strategy import Strategy


class Tracked:
    """The named objects of a run. Raises UsageError for what could not be saved or resumed.

    `model` is the one module among them, or an nn.ModuleDict of several by their names, without wrappers.
    `given` is what the loop was given, and a resume compares. `scaler` is that of the run. `say` prints a
    line.
    """

    def __init__(
        self, objects: dict[str, Any], strategy: Strategy, scaler: Scaler, say: Callable[[str], None]
    ) -> None:
        for name, each in objects.items():
            _check_object(name, each, is_sharded=strategy.in_parts)
        models = {
            name: checkpoint.unwrap(each) for name, each in objects.items() if isinstance(each, nn.Module)
        }
        if not models:
            raise UsageError("run.track() got no model: name it, too, as in run.track(model=model, ...)")
        self.model = next(iter(models.values())) if len(models) == 1 else nn.ModuleDict(models)
        self.others = {name: each for name, each in objects.items() if name not in models}
        self.optimizers = [each for each in objects.values() if isinstance(each, Optimizer)]
        self.has_scaler = any(
            each.is_enabled() for each in objects.values() if isinstance(each, torch.amp.GradScaler)
        )
        self.given: dict[str, Any] = {}
        self._strategy, self._scaler, self._say = strategy, scaler, say
        self._path: Path | None = None  # of the checkpoint
        # Options of an optimizer that are not those of the checkpoint: name of the optimizer, option, value.
        self._differing: dict[Optimizer, list[tuple[str, str, float]]] = {}
        self._known = {*self.optimizers}  # and those that after_step() has looked at

    def state(self) -> dict[str, Any]:
        """The entries of a checkpoint: of this rank, or of all."""
        tracked = {}
        for name, each in self.others.items():
            state = each.state_dict()
            if not isinstance(each, Optimizer):
                # only that of an optimizer stays as it is until optimizer.step(): see save_in_background()
                state = tree_map_only(Tensor, torch.clone, state)
            tracked[name] = state
        if self._scaler.is_enabled():
            tracked["scaler"] = tree_map_only(Tensor, torch.clone, self._scaler.state_dict())
        state = {"model": self.model.state_dict(), "tracked": tracked, "given": self.given}
        return self._strategy.state(state)

    def load(self, state: dict[str, Any], path: Path) -> None:
        """Load the entries of a checkpoint. Raises HpctrainError, naming the file, if they do not fit."""
        self._path = path
        saved = state.get("tracked", state)  # of a trainer that had a loop of its own, see ENTRIES
        saved = saved if isinstance(saved, dict) else {}
        if "tracked" in state and saved.keys() - {"scaler"} != self.others.keys() - {"scaler"}:
            raise HpctrainError(
                f"{path} has the states of {join(saved)}, and run.track() got "
                f"{join(self.others)} beside the model: track the same objects under the same names"
            )
        self._strategy.load(self.model, state["model"])
        for name, each in self.others.items():
            if isinstance(each, Optimizer):
                checkpoint.load_optimizer(each, saved.get(name), path, partial(self._strategy.load, each))
                continue
            try:
                each.load_state_dict(saved[name])
            except Exception as error:  # of a user's class, or because of what somebody has put there
                raise HpctrainError(
                    f"{path}: the state of {name} does not fit ({first_line(error)[:200]}): "
                    "track the objects of that run, or give another run folder"
                ) from error
        load_scaler(self._scaler, saved.get("scaler"), path)
        if isinstance(given := state.get("given"), dict):
            self.given = given

    def compare_options(self) -> None:
        """Note which options of the optimizers are not those of the checkpoint, for before_step()."""
        for name, each in self.others.items():
            for option, value in each.defaults.items() if isinstance(each, Optimizer) else ():
                if isinstance(value, (int, float)):
                    before = self.given.setdefault(f"{option} of {name}", value)
                    if before != value:
                        self._differing.setdefault(each, []).append((name, option, value))

    def before_step(self, optimizer: Optimizer) -> None:
        """Say, once, which options stay those of the checkpoint: the script has not set them itself."""
        for name, option, value in self._differing.pop(optimizer, []):
            before = self.given[f"{option} of {name}"]
            if any(group.get(option) == before for group in optimizer.param_groups):
                self._say(
                    f"hpctrain: warning: {option} of {name} stays {before}, as in {self._path}: "
                    f"for {value} start a new run, with another out"
                )

    def after_step(self, optimizer: Optimizer) -> None:
        """Say, once, that an optimizer is not tracked. One within a tracked one has parameters of it."""
        if optimizer in self._known:
            return
        self._known.add(optimizer)
        own = parameters_of(optimizer)
        tracked = [parameters_of(each) for each in self.others.values() if hasattr(each, "param_groups")]
        if own & {*self.model.parameters()} and not own & set().union(*tracked):
            self._say(
                f"hpctrain: warning: this {type(optimizer).__name__} starts anew when the run resumes: "
                "name it in run.track(), as optimizer=optimizer"
            )


def parameters_of(optimizer: Any) -> set[nn.Parameter]:
    """The weights that an optimizer updates."""
    return {value for group in optimizer.param_groups for value in group["params"]}


def join(names: Any) -> str:
    """Names for a message."""
    return ", ".join(map(str, names)) or "nothing"


def _check_object(name: str, each: Any, *, is_sharded: bool) -> None:
    """Raise UsageError if a run could not be resumed with this object."""
    kind = type(each).__name__
    if not all(callable(getattr(each, method, None)) for method in ("state_dict", "load_state_dict")):
        raise UsageError(
            f"run.track({name}=...): a {kind} has no state_dict() and load_state_dict(), by which it would "
            "be saved and resumed: give it both, or leave it out if it has no state"
        )
    state = each.state_dict()
    if isinstance(each, nn.Module) and not all(
        is_sharded if hasattr(value, "device_mesh") else parts.has_memory(value)
        for value in state.values()
        if isinstance(value, Tensor)
    ):
        raise UsageError(
            f"run.track({name}=...): this {kind} has weights that are sharded or have no values: let "
            "run.prepare() shard it"
        )
    if not is_sharded:
        checkpoint.check_loadable(state, f"the state of {name} in run.track()")
