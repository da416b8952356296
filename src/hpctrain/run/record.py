"""The run folder: the configuration of a run, its metrics, its checkpoints and its result.

docs/reference/runs.md lists its files. A run never overwrites an earlier one: it refuses a folder that holds
a run, unless it resumes that run. A new folder is for its user alone, and has no secrets (see redaction.py).
"""

import argparse
import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.amp import GradScaler
from tqdm import tqdm

from hpctrain.checkpoints import checkpoint
from hpctrain.checkpoints.interval import Interval
from hpctrain.checkpoints.position import Position
from hpctrain.checkpoints.saver import Checkpointer
from hpctrain.distributed.control import report_saved, report_stopped, report_training
from hpctrain.distributed.rendezvous import all_or_none, broadcast, gather
from hpctrain.distributed.watchdog import Watchdog
from hpctrain.distributed.world import World, restart_count
from hpctrain.errors import EndEarly, UsageError
from hpctrain.files.digests import weights_sha256
from hpctrain.files.redaction import hide_secrets
from hpctrain.run.best import Best
from hpctrain.run.charts import try_to_plot
from hpctrain.run.config import (
    add_image_digest,
    add_resumption,
    count_devices,
    describe_changes,
    write_config,
    write_json,
)
from hpctrain.run.flops import utilization
from hpctrain.run.means import Means, mean_over_ranks
from hpctrain.run.metrics import Metrics, format_seconds, plain_numbers
from hpctrain.run.nonfinite import NonFinite
from hpctrain.run.options import RunOptions, describe_differences
from hpctrain.run.owner import Owner
from hpctrain.run.prepare import (
    Result,
    find_earlier_checkpoint,
    prepare_folder,
    read_result,
    withdraw,
    withdraw_if_refused,
)
from hpctrain.run.profile import NO_PROFILE, Profile
from hpctrain.run.rank_log import open_log, write_line
from hpctrain.run.speed import StepTimes, T, gather_speed, gpu_percent, peak_memory
from hpctrain.text import absolute, as_given, counted, one_line

# Metrics for metrics.jsonl and not for the log: they change little.
NOT_PRINTED = {"peak_memory_mb", "gpu_percent"}


class Record:
    """An open run folder. Rank 0 writes metrics, checkpoints and progress; every rank writes its own log.

    It knows no loop: hpctrain.Run has one, and calls this; so do the callbacks for other people's Trainers.
    `epoch` is the number of finished epochs. A caller may set `best.patience`, and end the training when
    `best.has_stalled`. With `in_parts`, each rank saves its part of the model. The order of calls:

        resume()                                  once
        start_epoch()                             in each epoch
            time_data()                           around its batches
            check_gradients()                     before each optimizer step
            step(), and save() if must_save()     after it; between them
            start_evaluation(), metrics(), end_evaluation()    around an evaluation within the epoch
        end_epoch()
        metrics() and save()                      after the evaluation
        finish()                                  once
    """

    def __init__(
        self, world: World, trainer: str, options: RunOptions | argparse.Namespace, device: torch.device
    ) -> None:
        """Create the folder, or open it again to resume (collective). HpctrainError names the folder.

        `options` may also be the namespace that trainer_parser() has parsed.
        """
        if isinstance(options, argparse.Namespace):
            options = RunOptions.from_args(vars(options))
        self.world = world
        found: list[Any] = []
        with all_or_none(world):
            if world.rank == 0:
                own_folder, newest, owner = prepare_folder(trainer, options)
                of_source = newest is not None and newest.parent.parent != own_folder
                found = [as_given(str(own_folder)), newest and newest.name, of_source, owner.id]
        # Paths are those of this rank, which may have another name for the same file system.
        folder, name, of_source, owner_id = broadcast(world, found)
        is_known = options.out or options.source
        self.folder = options.choose_folder(trainer) if is_known else absolute(folder)
        place = options.source if of_source and options.source else self.folder
        self.resume_from = place / "checkpoints" / name if name else None
        self._owner = owner if world.rank == 0 else Owner(self.folder, owner_id)
        with all_or_none(world):
            self._log = open_log(self.folder / "logs" / f"rank-{world.rank:04d}.log", world)
        self.log(
            f"rank {world.rank} of {world.size} on {platform.node()}, {device}, pid {os.getpid()}, "
            f"torch {torch.__version__}"
        )
        with all_or_none(world):
            if world.rank == 0:
                self._config = write_config(self.folder, world, trainer, options.list_all(), device)
                self._owner.check()  # others may have exchanged the folder since it was made
                self.print(f"run folder {folder}, {world.extent} ({world.launcher}), {device.type}")
                self._metrics = Metrics(self.folder, options.wandb, self._owner.check)
        self._watchdog = Watchdog(world, options.watchdog, self._log)
        self._options, self.device = options, device
        profile = None
        if options.profile and world.rank == 0:
            profile = Profile(self.folder / "profile", trainer, world, device)
        self.times = StepTimes(profile)
        self._nonfinite = NonFinite(world, options.on_nan == "skip")
        self.can_skip = True  # whether on_nan="skip" is for this run
        self.checks_values = True  # whether a value that is not finite ends the run, or is left out
        # With --out and --resume auto, the same command resumes.
        self._resume_with = None if options.out and options.is_auto else self.folder
        every = Interval.parse(str(options.checkpoint_every))
        self._checkpointer = Checkpointer(
            world, self.folder, every, options.keep_checkpoints, self._owner.check, self._resume_with
        )
        self._bar: tqdm | None = None
        self.epoch, self.best, self.in_parts = 0, Best(), False
        self.is_finished = False  # whether it had its result before this start, which writes nothing then
        self.epochs = options.epochs
        self._flops: float | None = None
        self._only_check = self._state_is_checked = False  # see must_save()
        self._resumed: Position | None = None  # until limit_epochs()
        # Epoch and step of the best evaluation before a resume; its checkpoint may be in another folder.
        self._earlier_best: tuple[tuple[int, int], Path] | None = None
        # The position within the next epoch, and the means since the last line of metrics.
        self._step = self._steps = self._examples = 0
        self._means = Means()
        # Where the steps that examples_per_s counts begin. After a resume the means are of more steps.
        self._since, self._since_step = time.perf_counter(), 0
        self._started = time.monotonic()

    def resume(
        self,
        device: torch.device,
        epochs: int | None,
        model: torch.nn.Module,
        *entries: str,
        fixed: bool = False,
    ) -> dict[str, Any] | None:
        """The state to resume from, on every rank, or None if the run is new. A collective call.

        The state has the weights of `model`, and one of the entries ("optimizer" without any): see
        checkpoint.find_fitting(). States that are saved have the first one. A state with all epochs, or of a
        run that has stalled, is from a run that died before it wrote result.json: the caller finishes it
        without training. Metrics that were written after the checkpoint are removed. A script that does not
        know `epochs` yet calls limit_epochs() when it does.

        If the run has all of its epochs and its result already, `is_finished` says so: from then on nothing
        is written, and the caller does not train. Raises UsageError instead where nobody has asked for a
        resume by itself. Raises HpctrainError if no checkpoint fits, or, unless --force is given, if options
        differ that change the weights.
        """
        entries = entries or ("optimizer",)
        self._nonfinite.model = model = checkpoint.unwrap(model)
        self._checkpointer.in_parts, self._checkpointer.entry = self.in_parts, entries[0]
        self._checkpointer.buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        if self.resume_from is None:
            self.epochs = epochs
            if self.world.rank == 0:
                self._metrics.rewind(0, 0)
            return None
        with self._withdraw_if_refused():
            state = self._load(device, model, entries)
            position = self._resumed = Position.from_entries(state)
            self.epoch, self._step, self.best.evaluations = position.epoch, position.step, position.best
            folders = [self.folder, self.resume_from.parent.parent]
            path = find_earlier_checkpoint(folders, self.best.epoch, self.best.step)
            self._earlier_best = (self.best.epoch, self.best.step), path
            if epochs is not None:
                self._note_if_finished(epochs)
            self._compare_options(self._options.list_weighty(), position.options, free=("epochs",))
        self._steps = position.steps
        self._nonfinite.skipped, self._nonfinite.overflows = position.skipped, position.overflows
        as_many = len(position.means) == self.world.size
        self._means.load(position.means[self.world.rank] if as_many else mean_over_ranks(position.means))
        self._started = time.monotonic() - position.seconds
        if epochs is not None:
            self.limit_epochs(epochs, fixed=fixed)
        return state

    @property
    def best_checkpoint(self) -> Path:
        """The checkpoint of the best evaluation, whether it is written by now or not."""
        place = self.best.epoch, self.best.step
        if self._earlier_best and self._earlier_best[0] == place:
            return self._earlier_best[1]
        return checkpoint.path_of(self.folder, *place)

    def limit_epochs(self, epochs: int, *, fixed: bool = False) -> None:
        """Train to this number of epochs. Sets `is_finished`, or raises UsageError, as resume() does.

        `fixed`: a resumed run keeps its number, unless --force is given, as its learning rate depends on it.
        """
        self.epochs = epochs
        position, self._resumed = self._resumed, None
        if position is None:
            return
        with self._withdraw_if_refused():
            self._note_if_finished(epochs)
            if fixed and "epochs" in position.options:
                self._compare_options({"epochs": str(epochs)}, {"epochs": position.options["epochs"]})
        if self.is_finished:
            self._withdraw()
            return
        # Only now, as a run that is refused keeps what it has.
        assert self.resume_from
        if self.world.rank == 0:
            own = self.resume_from.parent.parent.resolve() == self.folder.resolve()
            self._metrics.rewind(self.global_step, position.lines if own else 0)
            if text := describe_changes(self._config):
                self.print(f"changed since the last start: {text}")
            add_resumption(self._config, self.resume_from, self.global_step)
        self.print(f"resuming after {self._place} of {self.resume_from}")

    def _compare_options(
        self, own: dict[str, str], saved: dict[str, str], free: tuple[str, ...] = ()
    ) -> None:
        """Raise UsageError for other options than those of the checkpoint; with --force print them."""
        if text := describe_differences(own, saved, free):
            if not self._options.force:
                raise UsageError(
                    f"{self.resume_from} was saved with other options: {text}: "
                    "give those of that run, or --force to go on with these"
                )
            self.print(f"--force: continuing with {text}")

    def _withdraw_if_refused(self) -> AbstractContextManager[None]:
        return withdraw_if_refused(self._owner, self._config if self.world.rank == 0 else None)

    def _withdraw(self) -> None:
        """Leave a finished run as it was, without this start."""
        withdraw(self._owner, self._config if self.world.rank == 0 else None)
        self.close()

    def _load(self, device: torch.device, model: torch.nn.Module, entries: tuple[str, ...]) -> dict[str, Any]:
        """The state of the newest checkpoint that fits, which becomes `resume_from`. A collective call."""
        assert self.resume_from
        name = ""
        with all_or_none(self.world):
            if self.world.rank == 0:
                compare = partial(describe_differences, self._options.list_weighty(), free=("epochs",))
                name = checkpoint.find_fitting(self.resume_from, model, *entries, compare=compare).name
        self.resume_from = self.resume_from.with_name(broadcast(self.world, name))
        with all_or_none(self.world):
            return checkpoint.load(self.resume_from, device, lazily=self.in_parts)

    def _note_if_finished(self, epochs: int) -> None:
        """Set `is_finished` if the run to resume has no epoch left, unless it lacks its result alone.

        Its script may have other runs, or work after this one, and Slurm may requeue a job that has
        completed. Raises UsageError if nobody has asked for a resume by itself.
        """
        assert self.resume_from
        # as rank 0 sees it: a file system may show a new file later on other nodes
        result = Result(*broadcast(self.world, read_result(self.resume_from.parent.parent)))
        has_result = self.epoch <= result.epochs
        # of as many epochs as now, which its loop has ended by itself
        has_ended = self.epoch == result.epochs and epochs <= result.of_epochs
        if self.epoch < epochs and not (self.best.has_stalled or has_ended):
            return
        if not has_result and self.epoch <= epochs:
            return
        done = f"{self.folder} has {counted(self.epoch, 'epoch')} already"
        if has_result and (restart_count() > 0 or self._options.is_auto):
            if not self.is_finished:
                self.print(f"{done}: nothing to do")
            self.is_finished = True
            return
        larger = "larger --epochs" if self.epoch >= epochs else "larger --patience, with --force,"
        raise UsageError(f"{done}: give a {larger} to continue")

    @property
    def _place(self) -> str:
        return f"epoch {self.epoch}" + (f" and {self._step} steps" if self._step else "")

    def count_flops(self, count: Callable[[], float | None]) -> None:
        """On a GPU, add FLOP/s to the speed in result.json. `count` (slow) returns those of an example."""
        if self.world.rank == 0 and self.device.type == "cuda":
            self._flops = count()

    def check_steps(self, steps: int) -> None:
        """Raise UsageError if the run was resumed within an epoch that had another number of steps."""
        if self._step and steps != self._steps:
            raise UsageError(
                f"{self.resume_from} is of a run with {self._steps} steps in an epoch, and this one has "
                f"{steps}: give the --data and the options of that run"
            )

    def start_epoch(
        self, epoch: int, steps: int, examples: int, examples_of: Callable[[int], Tensor] | None = None
    ) -> int:
        """Begin an epoch of this many steps, with this many examples each.

        Returns how many steps are done already: 0, unless the run was resumed within this epoch.
        `examples_of` maps a step of the epoch to the numbers of this rank's examples, for errors. Shows a
        progress bar if stderr is a terminal. Raises UsageError as check_steps() does.
        """
        self.check_steps(steps)
        self._steps, self._examples = steps, examples
        self._since, self._since_step = time.perf_counter(), self._step
        self._nonfinite.begin_epoch(self.epoch * steps, examples_of)
        self.times.start()
        if self.world.rank == 0 and sys.stderr.isatty():
            self._bar = tqdm(total=steps, initial=self._step, desc=f"epoch {epoch}", unit="step", leave=False)
        return self._step

    def time_data(self, batches: Iterable[T]) -> Iterator[T]:
        """These batches, one by one. The time to wait for them becomes data_share in result.json."""
        return self.times.time_data(batches)

    def check_gradients(self, scaler: GradScaler | None = None, loss: Tensor | None = None) -> None:
        """With --on-nan skip: remove gradients that are not finite, so that the optimizer does nothing.

        Call it on the gradients of all ranks. Raises HpctrainError after too many such steps in a row.

        With the `scaler` of fp16, call it after scaler.unscale_(), with the loss of this rank; and step()
        after scaler.update(). Steps that the scaler skips while the loss is finite are no matter of --on-nan:
        metrics and result.json have their number.
        """
        report_training()
        if not self._nonfinite.check_gradients(scaler, loss):
            self.print(
                f"step {self.global_step + 1} is skipped: its gradients are not finite "
                f"({self._nonfinite.skipped} so far)"
            )

    def step(self, loss: Tensor | None, **values: float) -> None:
        """Count an optimizer step, with the mean loss of this rank's examples, None if none had a loss.

        The first step starts the watchdog. Five times an epoch, the call is collective and writes a line of
        metrics: the loss and each of `values`, as means over the ranks and the steps since the last line, the
        speed, the peak memory of the rank that needs most, and the mean use of GPUs. Raises HpctrainError if
        one of these means is not finite.
        """
        self._nonfinite.end_step()
        if not self._nonfinite.is_skipping:
            losses = {} if loss is None else {"train_loss": self._nonfinite.add(self._step, loss)}
            self._means.add(losses | values)
        self._step += 1
        if page := self.times.step(left=self._steps - self._step):
            self.print(f"profile: {page}")
        self._watchdog.step()
        if self._bar:
            self._bar.update()
        if self._step % -(-self._steps // 5):
            return
        answer = [self._means.list_all(), peak_memory(self.device), gpu_percent(self.device)]
        of_ranks, memory, use = zip(*gather(self.world, answer), strict=True)
        if means := mean_over_ranks(of_ranks):
            values = {name: mean for name, (mean, _) in means.items()} | self._nonfinite.describe_scale()
            now = time.perf_counter()
            values["examples_per_s"] = (self._step - self._since_step) * self._examples / (now - self._since)
            values["peak_memory_mb"] = round(max(memory), 1)
            if None not in use:
                values["gpu_percent"] = sum(use) / len(use)
            self.metrics(**values)
            self._since, self._since_step = now, self._step
            self._means.clear()
            self._nonfinite.clear()

    @property
    def global_step(self) -> int:
        """The optimizer steps since the start of training; all epochs have the same number of them."""
        return self.epoch * self._steps + self._step

    def start_evaluation(self) -> None:
        """Pause the watchdog, and the clock of the steps, for an evaluation within an epoch."""
        self._watchdog.pause()
        self._since -= time.perf_counter()

    def end_evaluation(self, score: float | tuple[float, ...] | None = None) -> bool:
        """Count the evaluation if its score is known.

        Returns whether to save() next: it is the best, or the run has stalled.
        """
        self._since += time.perf_counter()
        self.times.start()
        return score is not None and self.count_evaluation(score)

    def count_evaluation(self, score: float | tuple[float, ...]) -> bool:
        """Count an evaluation within the epoch; returns whether to save() next, as end_evaluation() does."""
        self._only_check = False
        return self.best.add(self.epoch + 1, self._step, score) or self.best.has_stalled

    @property
    def step_of_epoch(self) -> int:
        """The optimizer steps since the start of the epoch."""
        return self._step

    @property
    def is_last_step(self) -> bool:
        """Whether no step of the epoch is left."""
        return self._step >= self._steps

    def must_save(self, is_best: bool = False) -> bool:
        """Whether to call save() after this step. A collective call, once after each step.

        `is_best`: save in any case, after an evaluation. After the first step, save() only checks that a run
        could be resumed from the state.
        """
        due = self._checkpointer.is_due(self.global_step, last=self.is_last_step) or is_best
        self._only_check = not (due or self._state_is_checked or self.in_parts)
        self._state_is_checked = True
        return due or self._only_check

    def save(self, state: dict[str, Any], score: float | tuple[float, ...] | None = None) -> None:
        """Save a checkpoint, written in the background. A collective call. Raises HpctrainError.

        After an epoch, `score` is that of its evaluation; the highest is the best. If the launch script has
        asked for the job's end and epochs are left, EndEarly ends every rank after this checkpoint.
        """
        self._watchdog.pause()
        if self._only_check:
            self._only_check = False
            with all_or_none(self.world):
                if self.world.rank == 0:
                    checkpoint.check_resumable(state, self._checkpointer.entry)
            self.times.start()
            return
        path = checkpoint.path_of(self.folder, self.epoch + (self._step > 0), self._step)
        self._checkpointer.clear(path)  # no rank writes before gather()
        if score is not None:
            self.best.add(self.epoch, 0, score)
        means = gather(self.world, self._means.list_all())
        # weights that are not finite must not become the newest checkpoint
        self._check_finite(**{name: mean for name, (mean, _) in mean_over_ranks(means).items()})
        self.wait()  # all ranks complete the earlier checkpoint before the next one
        with all_or_none(self.world):
            if self.world.rank == 0 or self.in_parts:
                position = Position(
                    epoch=self.epoch,
                    step=self._step,
                    steps=self._steps,
                    best=self.best.evaluations,
                    means=means,
                    skipped=self._nonfinite.skipped,
                    overflows=self._nonfinite.overflows,
                    lines=self._metrics.lines if self.world.rank == 0 else 0,
                    seconds=time.monotonic() - self._started,
                    options=self._options.list_weighty() | {"epochs": str(self.epochs)},
                )
                state = checkpoint.with_plain_names(state, self._nonfinite.model) | position.to_entries()
                self._checkpointer.save_in_background(path, state, self.best_checkpoint)
        known = self.world.rank == 0 and add_image_digest(self._config)
        if known and (text := describe_changes(self._config, ["image_digest"])):
            self.print(f"changed since the last start: {text}")
        if (self.epochs is not None and self.epoch >= self.epochs) or self.best.has_stalled:
            return
        if score is not None and self._options.prune and self._options.prune(self.world):
            self.wait()
            self._leave()
        # Within an epoch, must_save() has asked the ranks.
        must_end = self._checkpointer.stop if self._step else self._checkpointer.decide_to_stop()
        if must_end:
            self._end_early()
        self.times.start()

    def _end_early(self) -> None:
        """End every rank when its checkpoint is written: the script asked for the end (collective)."""
        self.wait()
        self.print(f"ending early, as the job has to: saved after {self._place} in {self.folder}")
        report_saved(self._resume_with)
        report_stopped()
        self._leave()

    def describe_saved(self) -> str:
        """What is saved when the run is interrupted, and what continues it."""
        newest = checkpoint.list_newest_first(self.folder)[:1]
        again = f"--resume {'' if newest else 'auto --out '}{shlex.quote(str(self.folder))}"
        if self._resume_with is None:
            again = "the same command"
        what = f"continues from {newest[0]}" if newest else "begins again, as no checkpoint is saved yet"
        return as_given(f"in epoch {self.epoch + 1}: {again} {what}")

    def wait(self) -> None:
        """Wait until the last checkpoint is written. A collective call. Raises HpctrainError."""
        with all_or_none(self.world):
            self._checkpointer.wait()
        self._checkpointer.link_best()

    def _leave(self) -> NoReturn:
        self.close()
        raise EndEarly(0)

    def close(self) -> None:
        """End what runs in the background, and leave the folder to the next job. Not collective."""
        self._watchdog.stop()
        self._checkpointer.close()
        if self._bar:
            self._bar.close()
        if self.world.rank == 0:
            self._metrics.close()
            self._owner.release()

    def metrics(self, **values: float) -> None:
        """Write and print a line of metrics for the present epoch and step.

        Every rank passes the same values over all ranks. Raises HpctrainError if one is not finite.
        """
        self._watchdog.pause()  # a file system may stall
        values = plain_numbers(values)
        self._check_finite(**values)
        values = {name: value for name, value in values.items() if math.isfinite(value)}
        if self.world.rank != 0 or self.is_finished:
            return
        epoch, step = self.epoch + (self._step > 0), self.global_step
        self._owner.check()
        seconds = round(time.monotonic() - self._started, 3)
        self._metrics.add({"epoch": epoch, "step": step, "seconds": seconds}, values)
        text = "  ".join(f"{name} {value:.4g}" for name, value in values.items() if name not in NOT_PRINTED)
        if self.epochs is not None and (speed := values.get("examples_per_s")):
            left = (self.epochs * self._steps - step) * self._examples / speed
            text += f"  {format_seconds(left)} left"
        if self._bar:
            self._bar.set_postfix_str(text)
        else:
            self.print(f"epoch {epoch} step {step}  {text}")

    def _check_finite(self, **values: float) -> None:
        """End every rank if a value, the same on all, is not finite (HpctrainError on rank 0)."""
        if not self.checks_values:
            return
        place = f"epoch {self.epoch + (self._step > 0)}, step {self.global_step}"
        self._nonfinite.check(values, place, self.can_skip, self.folder)

    def end_epoch(self) -> None:
        """All steps of the epoch are done."""
        self._watchdog.pause()
        self.epoch, self._step, self._only_check = self.epoch + 1, 0, False
        self._means.clear()
        if self._bar:
            self._bar.close()
            self._bar = None

    def finish(self, model: torch.nn.Module, **values: float) -> None:
        """Write result.json and curves.png, and print where they are (collective). Raises HpctrainError.

        If the launch script has computed the image's digest by now, config.json gets it. A finished run has
        all that already.
        """
        if self.is_finished:
            return
        self._watchdog.stop()
        self.wait()
        self.log(f"peak memory of this rank: {peak_memory(self.device):.1f} MB")
        tokens, most = gather_speed(self.world, self.device, self.times)
        if self.world.rank != 0:
            return
        self._owner.check()
        speed = self.times.figures(self._examples, *tokens)
        if self._flops and "examples_per_s" in speed:
            name = torch.cuda.get_device_name(self.device)
            precision = self._options.others.get("precision", "fp32")
            devices = count_devices(self.world, self._options.others, self.device)
            flops_per_s = speed["examples_per_s"] * self._flops / devices
            speed |= utilization(flops_per_s, name, precision)
        speed |= most
        values = plain_numbers(values)
        steps = {"skipped_steps": self._nonfinite.skipped, "overflow_steps": self._nonfinite.overflows}
        skipped = {name: number for name, number in steps.items() if number}
        seconds = round(time.monotonic() - self._started, 3)
        digest = weights_sha256(checkpoint.unwrap(model))
        result: dict[str, Any] = values | skipped | {"epochs": self.epoch, "seconds": seconds}
        if self.epochs is not None and self.epoch < self.epochs and not self.best.has_stalled:
            result["of_epochs"] = self.epochs  # its loop has ended by itself
        if self.best.epoch:
            result["best"] = self._describe_best(values)
        result |= {"weights_sha256": digest, "speed": speed}
        add_image_digest(self._config)
        self._metrics.close()
        try_to_plot(self.folder)
        write_json(self.folder / "result.json", result)  # last: a run with a result has nothing left to do
        scores = [f"{name} {value:.4f}" for name, value in values.items()] or ["done"]
        self.print("  ".join([*scores, f"in {seconds:.1f} s"]))
        self.print("  ".join(f"{name} {value:.4g}" for name, value in speed.items()))
        if self._options.profile and not (self.folder / "profile").exists():
            self.print(NO_PROFILE)
        self.print(f"weights {digest[:16]}, metrics, checkpoints and curves.png are in {self.folder}")
        self._owner.release()

    def _describe_best(self, scores: dict[str, float]) -> dict[str, Any]:
        """Where the best score was, as metrics.jsonl counts, and its checkpoint."""
        epoch, step, path = self.best.epoch, self.best.step, self.best_checkpoint
        place = {"epoch": epoch, "step": (epoch - (step > 0)) * self._steps + step}
        is_own = path.is_relative_to(self.folder)
        name = str(path.relative_to(self.folder)) if is_own else as_given(str(path))
        return place | self.best.describe(scores) | {"checkpoint": name}

    def print(self, text: str) -> None:
        """Print a line on rank 0 above the progress bar, and log it on all; control characters escaped."""
        self.log(text)
        if self.world.rank == 0:
            tqdm.write(hide_secrets(one_line(text)), file=sys.stdout)
            sys.stdout.flush()

    def log(self, text: str) -> None:
        """Write a line to the log of this rank."""
        write_line(self._log, one_line(text))
