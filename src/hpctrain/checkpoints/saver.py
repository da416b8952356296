"""When a run saves a checkpoint, and how: a copy in memory at the step, written to disk in the background.

All ranks save at the same step, on which they agree every few seconds. In between no rank waits for another.
"""

import copy
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from hpctrain.checkpoints import checkpoint, parts
from hpctrain.checkpoints.interval import Interval
from hpctrain.distributed.control import report_saved, stop_requested
from hpctrain.distributed.rendezvous import gather
from hpctrain.distributed.world import World
from hpctrain.errors import DivergedError, HpctrainError
from hpctrain.files.atomic import Retry
from hpctrain.text import reason

PERIOD = 2.0  # s, about, between decisions of the ranks
MAX_STEPS = 500  # between decisions, in case the steps become slower


class Decisions:
    """When the ranks decide: about every PERIOD seconds, and at most MAX_STEPS steps apart."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._since, self._until = 0, 1
        self._decided = time.monotonic()

    def is_due(self) -> bool:
        """Whether the ranks decide after this step, the same on all of them. Call it once a step."""
        self._since += 1
        return self._since >= self._until

    def gather(self, *values: Any) -> list[list[Any]]:
        """The values of every rank, in rank order. A collective call, which sets when to decide again."""
        now = time.monotonic()
        fitting = int(PERIOD * self._since / max(now - self._decided, 1e-6))
        until = min(max(fitting, 1), 2 * self._until, MAX_STEPS)
        answers = gather(self._world, [until, *values])
        self._since, self._until, self._decided = 0, answers[0][0], now
        return [values for _, *values in answers]


class Checkpointer:
    """Saves the checkpoints of a run folder.

    `keep`: how many of the newest checkpoints to keep, beside the best one. `check` is called before a
    checkpoint gets its final name; it raises HpctrainError if this job may no longer write. `resume_with`:
    see report_saved(). If `in_parts` is set, every rank saves its own part; otherwise rank 0 saves all.
    """

    def __init__(
        self,
        world: World,
        folder: Path,
        every: Interval,
        keep: int,
        check: Callable[[], None],
        resume_with: Path | None = None,
    ) -> None:
        self.in_parts = False
        self.entry: str | None = None  # what a resume needs beside the model
        self.buffers: set[str] = set()  # of the model: they may have values that are not finite
        self.stop = False  # the launch script has asked for the end, on every rank
        self._world = world
        self._folder = folder
        self._every = every
        self._keep = keep
        self._check = check
        self._resume_with = resume_with
        self._last: tuple[Path, Path] | None = None  # the last checkpoint written, and the best one then
        self._decisions = Decisions(world)
        self._saved = time.monotonic()
        self._copy: Any = None
        self._writer: threading.Thread | None = None
        self._error: HpctrainError | None = None
        self._written = False
        self._copied = threading.Event()
        self._copied.set()
        self._hook = register_optimizer_step_pre_hook(self._wait_for_copy)

    def is_due(self, step: int, last: bool) -> bool:
        """Whether all ranks save after `step` steps of the run. A collective call, once a step.

        After the `last` step of an epoch only if the job has to stop: an epoch's checkpoint follows.
        """
        due = bool(self._every.steps) and step % self._every.steps == 0
        if self._decisions.is_due() or last:
            due |= self._decide()
        return self.stop if last else due

    def decide_to_stop(self) -> bool:
        """Whether the launch script has asked for the end by now. A collective call."""
        self._decide()
        return self.stop

    def _decide(self) -> bool:
        """Whether a checkpoint is due: for its interval, or because the job has to stop. Sets `stop`."""
        # An error of the earlier checkpoint makes the next one due: save_in_background() raises it.
        late = (
            self._every.seconds > 0 and time.monotonic() - self._saved >= self._every.seconds
        ) or self._error is not None
        answers = self._decisions.gather(stop_requested(), late, self._written)
        self.stop = any(stop for stop, *_ in answers)  # only the ranks on one node know
        savers = answers if self.in_parts else answers[:1]
        if all(written for _, _, written in savers):
            report_saved(self._resume_with)
        return self.stop or any(late for _, late, _ in savers)

    def save_in_background(self, path: Path, state: dict[str, Any], best: Path) -> None:
        """Copy `state`, and start to write it; on one rank, or on each if `in_parts`.

        Waits for the earlier checkpoint first. `best` is the checkpoint of the best evaluation, which is
        kept. Tensors outside of state["model"] must not change before the next optimizer.step().

        Raises HpctrainError if the earlier checkpoint could not be written, and what check_resumable() and
        `check` raise.
        """
        self.wait()
        self._check()
        if self._copy is None and not self.in_parts:
            checkpoint.check_resumable(state, self.entry)
        # A forward pass may change the model: batch normalization has statistics. The state of the optimizer
        # changes in optimizer.step() only, which waits for the thread that copies it.
        model = state.get("model", {})
        self._copy, pairs = plan_copy({"model": model, **state}, self._copy)
        of_model = len({_memory(tensor) for tensor in tensors_of(model)})
        copy_tensors(pairs[:of_model])
        self._saved = time.monotonic()
        self._copied.clear()
        # Not a daemon thread: when an error ends the program, entry.py waits for the checkpoint.
        arguments = (path, self._copy, pairs[of_model:], best)
        writer = threading.Thread(target=self._write, args=arguments, name="checkpoint")
        writer.start()  # fails at a limit of threads
        self._writer = writer

    def clear(self, path: Path) -> None:
        """On rank 0, remove a folder at the path of a checkpoint: this run may have files for other ranks."""
        with suppress(OSError, HpctrainError):  # writing will raise the same error
            if self._world.rank == 0 and (self.in_parts or path.is_dir()):
                self._check()  # another job may own the folder by now
                checkpoint.remove(path)

    def _wait_for_copy(self, *_: Any) -> None:
        self._copied.wait()

    def wait(self) -> None:
        """Wait until the last checkpoint is written. Raises HpctrainError if it could not be."""
        if self._writer:
            self._writer.join()
        error, self._error = self._error, None
        if error:
            raise error

    def link_best(self) -> None:
        """Let best.pt be the best checkpoint, after wait() on all ranks."""
        if self.in_parts and self._last and self._world.rank == 0:
            path, best = self._last
            checkpoint.link_best(path.parent, best)

    def close(self) -> None:
        """Wait until the last checkpoint is written or has failed, and free its copy. None follows."""
        if self._writer:
            self._writer.join()
        self._hook.remove()
        self._copy = None

    def _write(
        self, path: Path, state: dict[str, Any], pairs: list[tuple[Tensor, Tensor]], best: Path
    ) -> None:
        try:
            try:
                copy_tensors(pairs)
            finally:
                self._copied.set()
            del pairs  # the sources
            # After its loss, the last step may have made weights that are not finite: keep the earlier one.
            weights = [value for name, value in state["model"].items() if name not in self.buffers]
            if not all(weight.isfinite().all() for weight in tensors_of(weights)):
                raise DivergedError(
                    f"the weights to be saved in {path} are not finite: training diverged, use a smaller --lr"
                )
            if self.in_parts:
                # The last checkpoint is complete on every rank. The new one may stay incomplete.
                if self._last:
                    complete, earlier_best = self._last
                    self._remove_old(complete, path, earlier_best, best)
                self._save_or_retry(parts.path_of_rank(path, self._world.rank, self._world.size), state)
            else:
                self._save_or_retry(path, state)
                self._remove_old(path, path, best)
                checkpoint.link_best(path.parent, best)
            self._written, self._last = True, (path, best)
        except HpctrainError as error:
            self._error = error
        except OSError as error:
            self._error = HpctrainError(
                f"{path.parent}: an old checkpoint cannot be removed ({error.strerror}): check the folder"
            )
        except Exception as error:  # of any kind: without checkpoints the run must not go on
            why = f"{type(error).__name__}: {reason(error)}"
            self._error = HpctrainError(f"{path}: cannot be written ({why})")

    def _remove_old(self, complete: Path, current: Path, *best: Path) -> None:
        """Remove all checkpoints but the newest, the last `complete`, the `current`, and those in `best`."""
        if self._world.rank != 0:
            return
        others = [
            path for path in checkpoint.list_newest_first(self._folder) if path != current or path == complete
        ]
        kept = {*others[: self._keep], complete, current, *best}
        for old in others:
            if old not in kept:
                checkpoint.remove(old)

    def _save_or_retry(self, path: Path, state: dict[str, Any]) -> None:
        retry = Retry()
        while True:
            try:
                return checkpoint.save(path, state, self._check)
            except HpctrainError as error:
                if not isinstance(error.__cause__, OSError | RuntimeError):
                    raise
                retry.wait(error, str(error))


def plan_copy(value: Any, earlier: Any = None) -> tuple[Any, list[tuple[Tensor, Tensor]]]:
    """A copy of nested dictionaries, lists and tensors in host memory, and its tensors as (target, source).

    The targets have no values yet. Targets of an `earlier` copy are used again where shape and strides are
    the same: copying is several times as fast when the kernel need not provide new pages. Tensors that share
    memory share it in the copy as well, so torch.save() writes it once.
    """
    targets: dict[tuple, Tensor] = {}
    used: set[int] = set()
    pairs: list[tuple[Tensor, Tensor]] = []

    def plan_tensor(tensor: Tensor, target: Any) -> Tensor:
        key = _memory(tensor)
        if key not in targets:
            fits = isinstance(target, Tensor) and (target.shape, target.dtype) == (tensor.shape, tensor.dtype)
            # A fused optimizer expects its state in the memory order of the weights (channels last).
            if not fits or id(target) in used or target.stride() != tensor.stride():
                target = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            used.add(id(target))
            targets[key] = target
            pairs.append((target, tensor.detach()))
        return targets[key]

    def plan(value: Any, earlier: Any) -> Any:
        if isinstance(value, Tensor):
            return plan_tensor(value, earlier)
        if isinstance(value, dict):
            copied = copy.copy(value)  # keeps the type, and the versions of modules in a state_dict()
            before = earlier if isinstance(earlier, dict) else {}
            for name in value:
                copied[name] = plan(value[name], before.get(name))
            return copied
        if isinstance(value, list | tuple):
            olds = earlier if isinstance(earlier, list | tuple) else ()
            return type(value)([plan(part, old) for part, old in zip_longest(value, olds[: len(value)])])
        return copy.deepcopy(value)

    return plan(value, earlier), pairs


def tensors_of(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> tuple:
    """A key that is equal for tensors of the same values in the same memory."""
    return (
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
    )


def copy_tensors(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy each source to its target; the pairs are (target, source)."""
    for target, source in pairs:
        target.copy_(source)
