"""The run folder: the configuration of a run, its metrics, its checkpoints and its result.

    runs/<trainer>/<job id>/
        config.json      every option, the versions, the image, the world (config.2.json when the run is resumed)
        metrics.jsonl    one line per log step; a resumed run continues it from the checkpoint's line
        owner.json       the job that is writing here (see owner.py)
        result.json      the last metrics, the SHA-256 of the final weights, the speed of a step and the peak memory of a rank
        curves.png       losses and scores over the steps
        checkpoints/     epoch-NNNN.pt, and epoch-NNNN-step-NNNNNN.pt within an epoch
        logs/            rank-NNNN.log, one per rank
        profile/         with --profile, what some steps spend their time on (see profile.py)
        tensorboard/

An earlier run is never overwritten: a folder that holds one is refused unless that run is resumed. A new
folder is for its user alone, and has no secrets (see redaction.py).
"""

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from tqdm import tqdm

from hpctrain.checkpoints import checkpoint
from hpctrain.checkpoints.interval import Interval
from hpctrain.checkpoints.saver import Checkpointer
from hpctrain.distributed.control import report_saved, report_stopped
from hpctrain.distributed.rendezvous import all_or_none, broadcast, gather
from hpctrain.distributed.watchdog import Watchdog
from hpctrain.distributed.world import World, restart_count
from hpctrain.errors import EndEarly, HpctrainError, UsageError
from hpctrain.files.digests import weights_sha256
from hpctrain.files.redaction import hide_secrets
from hpctrain.run.best import Best
from hpctrain.run.charts import try_to_plot
from hpctrain.run.config import (
    add_image_digest,
    add_resumption,
    compare_options,
    list_other_options,
    weighty_options,
    write_config,
    write_json,
)
from hpctrain.run.flops import utilization
from hpctrain.run.folder import AUTO, finished_epochs, prepare_folder, withdraw_if_refused
from hpctrain.run.metrics import Metrics, format_seconds, plain_numbers
from hpctrain.run.nonfinite import NonFinite
from hpctrain.run.owner import Owner
from hpctrain.run.profile import NO_PROFILE, make_profile
from hpctrain.run.rank_log import open_log, write_line
from hpctrain.run.speed import StepTimes, T, gather_most, gather_tokens, gpu_percent, peak_memory
from hpctrain.text import one_line

# Metrics that every line of metrics.jsonl has and no line of the log: they change little.
NOT_PRINTED = {"peak_memory_mb", "gpu_percent"}


class Run:
    """An open run folder. Rank 0 writes metrics, checkpoints and progress; every rank writes its own log.

    `epoch` is the number of finished epochs. A trainer may set `best.patience`, and end the training when
    `best.has_stalled`. `prune`, if set, decides on all ranks whether the run ends after an epoch. `in_parts`:
    each rank saves its part (sharding.py).

    A trainer calls, in this order,

        resume()                                  once
        start_epoch()                             in each epoch
            time_data()                           around its batches
            check_gradients()                     before each optimizer step
            step(), and save() if must_save()     after it; between them start_evaluation(), metrics(), end_evaluation()
        end_epoch()
        metrics() and save()                      after the evaluation
        finish()                                  once
    """

    prune: ClassVar[Callable[[World], bool] | None] = None  # set by `hpctrain sweep`

    def __init__(self, world: World, trainer: str, args: argparse.Namespace, device: torch.device) -> None:
        """Create the folder, or open it again to resume.

        A collective call. Raises HpctrainError, naming the folder.
        """
        self.world = world
        paths: list[str | None] = []
        with all_or_none(world):
            if world.rank == 0:
                *found, self._owner = prepare_folder(trainer, args)
                paths = [*(path and str(path) for path in found), self._owner.id]
        folder, resume_from, owner_id = broadcast(world, paths)
        self.folder, self.resume_from = Path(folder), Path(resume_from) if resume_from else None
        self._owner = self._owner if world.rank == 0 else Owner(self.folder, owner_id)
        with all_or_none(world):
            self._log = open_log(self.folder / "logs" / f"rank-{world.rank:04d}.log", world)
        self.log(
            f"rank {world.rank} of {world.size} on {platform.node()}, {device}, pid {os.getpid()}, torch {torch.__version__}"
        )
        with all_or_none(world):
            if world.rank == 0:
                self._config = write_config(self.folder, world, trainer, args, device)
                self.print(f"run folder {folder}, {world.extent} ({world.launcher}), {device.type}")
                self._metrics = Metrics(self.folder, vars(args).get("wandb", False), self._owner.check)
        self._watchdog = Watchdog(world, args.watchdog, self._log)
        self._args, self._device = args, device
        self.times = StepTimes(make_profile(args, self.folder / "profile", trainer, world, device))
        self._nonfinite = NonFinite(world, args.on_nan == "skip")
        # the same command resumes
        self._resume_with = None if args.out and args.resume == AUTO else self.folder
        every = Interval.parse(args.checkpoint_every)
        self._checkpointer = Checkpointer(
            world, self.folder, every, args.keep_checkpoints, self._owner.check, self._resume_with
        )
        self._bar: tqdm | None = None
        self.epoch, self.best, self.in_parts = 0, Best(), False
        self._flops: float | None = None
        # The position within the next epoch, and what was summed since the last line of metrics.
        self._step = self._steps = self._examples = 0
        self._loss_sum: Tensor | float = 0.0
        self._unlogged, self._since = 0, time.perf_counter()
        self._started = time.monotonic()

    def resume(
        self,
        device: torch.device,
        epochs: int,
        model: torch.nn.Module,
        entry: str = "optimizer",
        free: tuple[str, ...] = ("epochs",),
    ) -> dict[str, Any] | None:
        """The state to resume from, on every rank, or None if the run is new. A collective call.

        It has the weights of `model`, and the entry of this name: see checkpoint.find_fitting(). A state with
        all epochs, or that has stalled, is that of a run which died before it wrote result.json, and is to be
        finished without training. Metrics that were written after the checkpoint are removed.

        Raises UsageError if the run has all of its epochs and its result already, HpctrainError if no
        checkpoint fits, or if its options differ in others than the `free` ones and those that never matter,
        unless --force is given.
        """
        self._nonfinite.model = model = checkpoint.unwrap(model)
        self._checkpointer.in_parts, self._checkpointer.entry = self.in_parts, entry
        if self.resume_from is None:
            if self.world.rank == 0:
                self._metrics.rewind(0)
            return None
        with withdraw_if_refused(self._owner, self._config if self.world.rank == 0 else None):
            chosen = ""
            with all_or_none(self.world):
                if self.world.rank == 0:
                    others = partial(list_other_options, self._args, free=free)
                    chosen = str(checkpoint.find_fitting(self.resume_from, model, entry, others))
            self.resume_from = Path(broadcast(self.world, chosen))
            with all_or_none(self.world):
                state = (
                    checkpoint.open_lazily(self.resume_from)
                    if self.in_parts
                    else checkpoint.load(self.resume_from, device)
                )
            self.epoch, self._step = state["epoch"], state["step"]
            self.best.load(state["best"], self.epoch)
            if (self.epoch >= epochs or self.best.has_stalled) and self.epoch <= finished_epochs(
                self.resume_from.parent.parent
            ):
                # Slurm may requeue a job that has completed
                if restart_count() > 0 or self._args.resume == AUTO:
                    self.print(f"{self.folder} has {self.epoch} epochs already: nothing to do")
                    self._leave()
                larger = "larger --epochs" if self.epoch >= epochs else "larger --patience, with --force,"
                raise UsageError(
                    f"{self.folder} has {self.epoch} epochs already: give a {larger} to continue"
                )
            if text := compare_options(self._args, state["options"], free, self.resume_from):
                self.print(f"--force: continuing with {text}")
        self._steps, self._unlogged, self._nonfinite.skipped = (
            state["steps"],
            state["unlogged"],
            state["skipped"],
        )
        losses = state["losses"]
        # On another number of ranks each takes their mean: the line of metrics has the mean over the ranks.
        self._loss_sum = (
            losses[self.world.rank] if len(losses) == self.world.size else sum(losses) / len(losses)
        )
        self._started = time.monotonic() - state["seconds"]
        if self.world.rank == 0:
            own = self.resume_from.parent.parent.resolve() == self.folder.resolve()
            self._metrics.rewind(state["lines"] if own else 0)
            add_resumption(self._config, self.resume_from, self.global_step)
        within = f" and {self._step} steps" if self._step else ""
        self.print(f"resuming after epoch {self.epoch}{within} of {self.resume_from}")
        return state

    def count_flops(self, count: Callable[[], float | None]) -> None:
        """On a GPU, let the speed in result.json have its FLOP/s; `count` gives those of an example, and may take seconds."""
        if self.world.rank == 0 and self._device.type == "cuda":
            self._flops = count()

    def check_steps(self, steps: int) -> None:
        """Raise UsageError if the run was resumed within an epoch that had another number of steps."""
        if self._step and steps != self._steps:
            raise UsageError(
                f"{self.resume_from} is of a run with {self._steps} steps in an epoch, and this one has {steps}: "
                "give the --data and the options of that run"
            )

    def start_epoch(
        self, epoch: int, steps: int, examples: int, examples_of: Callable[[int], Tensor] | None = None
    ) -> int:
        """Begin an epoch of this many steps, with this many examples each.

        Returns how many of them are done already.

        That is 0, unless the run was resumed within this epoch. `examples_of` gives the numbers of this
        rank's examples in a step of the epoch, for errors. Shows a progress bar if stderr is a terminal.
        Raises UsageError as check_steps() does.
        """
        self.check_steps(steps)
        self._steps, self._examples, self._since = steps, examples, time.perf_counter()
        self._nonfinite.start_epoch(self.epoch * steps, examples_of)
        self.times.start()
        if self.world.rank == 0 and sys.stderr.isatty():
            self._bar = tqdm(total=steps, initial=self._step, desc=f"epoch {epoch}", unit="step", leave=False)
        return self._step

    def time_data(self, batches: Iterable[T]) -> Iterator[T]:
        """These batches, one by one; how long each is waited for becomes the data_share in result.json."""
        return self.times.time_data(batches)

    def check_gradients(self) -> None:
        """With --on-nan skip: remove gradients, by now those of all ranks, that are not finite: the optimizer
        does nothing then.

        Raises HpctrainError after too many such steps in a row.
        """
        if not self._nonfinite.check_gradients():
            self.print(
                f"step {self.global_step + 1} is skipped: its gradients are not finite ({self._nonfinite.skipped} so far)"
            )

    def step(self, loss: Tensor, **values: float) -> None:
        """Count an optimizer step, with the mean loss of this rank's examples.

        The first step starts the watchdog.

        Five times an epoch it writes a line of metrics: the mean loss over all ranks since the last line,
        `values`, the speed, the peak memory of the rank that needs most, and the mean use of GPUs. A
        collective call then. Raises HpctrainError if the mean is not finite.
        """
        if not self._nonfinite.is_skipping:
            self._unlogged += 1
            self._loss_sum = self._loss_sum + self._nonfinite.add(self._step, loss)
        self._step += 1
        if page := self.times.step(left=self._steps - self._step):
            self.print(f"profile: {page}")
        self._watchdog.step()
        if self._bar:
            self._bar.update()
        if self._step % -(-self._steps // 5) == 0 and self._unlogged:
            own = [float(self._loss_sum), peak_memory(self._device), gpu_percent(self._device)]
            losses, memory, use = zip(*gather(self.world, own), strict=True)
            now = time.perf_counter()
            values["examples_per_s"] = self._unlogged * self._examples / (now - self._since)
            values["peak_memory_mb"] = round(max(memory), 1)
            if None not in use:
                values["gpu_percent"] = sum(use) / len(use)
            self.metrics(train_loss=sum(losses) / (self._unlogged * self.world.size), **values)
            self._loss_sum, self._unlogged, self._since = 0.0, 0, now
            self._nonfinite.clear()

    @property
    def global_step(self) -> int:
        """The optimizer steps since the start of training; all epochs have the same number of them."""
        return self.epoch * self._steps + self._step

    def start_evaluation(self) -> None:
        """Pause the watchdog, and the clock of the steps, for an evaluation within an epoch."""
        self._watchdog.pause()
        self._since -= time.perf_counter()

    def end_evaluation(self, score: tuple[float, ...]) -> bool:
        """Count the evaluation.

        Returns whether save() is to follow: if it is the best one, or the run has stalled.
        """
        self._since += time.perf_counter()
        self.times.start()
        return self.best.add(self.epoch + 1, self._step, score) or self.best.has_stalled

    def must_save(self) -> bool:
        """Whether to call save() after this step. A collective call, once after each step."""
        return self._checkpointer.is_due(self.global_step, last=self._step >= self._steps)

    def save(self, state: dict[str, Any], score: float | tuple[float, ...] | None = None) -> None:
        """Save a checkpoint, written in the background. A collective call. Raises HpctrainError.

        After an epoch `score` is that of its evaluation: the highest one is the best. If the launch script
        has asked for the end of the job, and epochs are left, this checkpoint is the last, and EndEarly ends
        every rank.
        """
        self._watchdog.pause()
        path = checkpoint.path_of(self.folder, self.epoch + (self._step > 0), self._step)
        self._checkpointer.clear(path)  # no rank writes before gather()
        if score is not None:
            self.best.add(self.epoch, 0, score)
        losses = gather(self.world, float(self._loss_sum))
        # weights that are not finite must not become the newest checkpoint
        self._check_finite(train_loss=sum(losses))
        self._wait_for_checkpoint()  # it is complete, on all ranks, before the next one takes its place
        with all_or_none(self.world):
            if self.world.rank == 0 or self.in_parts:
                position = {
                    "epoch": self.epoch,
                    "step": self._step,
                    "steps": self._steps,
                    "global_step": self.global_step,
                    "best": self.best.state(),
                    "losses": losses,
                    "unlogged": self._unlogged,
                    "skipped": self._nonfinite.skipped,
                    "lines": self._metrics.lines if self.world.rank == 0 else 0,
                    "seconds": time.monotonic() - self._started,
                    "options": weighty_options(self._args),
                }
                best = checkpoint.path_of(self.folder, self.best.epoch, self.best.step)
                self._checkpointer.save(
                    path, checkpoint.with_plain_names(state, self._nonfinite.model) | position, best
                )
        if self.epoch >= self._args.epochs or self.best.has_stalled:
            return
        if score is not None and Run.prune and Run.prune(self.world):
            self._wait_for_checkpoint()
            self._leave()
        # Within an epoch must_save() has asked already.
        if self._checkpointer.stop if self._step else self._checkpointer.decide_to_stop():
            self._end_early()
        self.times.start()

    def _end_early(self) -> None:
        """End this process, when its checkpoint is written, because the launch script has asked for it.

        A collective call.
        """
        self._wait_for_checkpoint()
        within = f" and {self._step} steps" if self._step else ""
        self.print(
            f"ending early, as the job has to: saved after epoch {self.epoch}{within} in {self.folder}"
        )
        report_saved(self._resume_with)
        report_stopped()
        self._leave()

    def _wait_for_checkpoint(self) -> None:
        with all_or_none(self.world):
            self._checkpointer.wait()

    def _leave(self) -> NoReturn:
        self._watchdog.stop()
        if self.world.rank == 0:
            self._metrics.close()
            self._owner.release()
        raise EndEarly(0)

    def metrics(self, **values: float) -> None:
        """Write a line of metrics for the present epoch and step, and print it.

        Every rank passes the same values, which are over all ranks. Raises HpctrainError if one is not
        finite.
        """
        self._watchdog.pause()  # a file system may stall
        values = plain_numbers(values)
        self._check_finite(**values)
        if self.world.rank != 0:
            return
        epoch, step = self.epoch + (self._step > 0), self.global_step
        self._owner.check()
        seconds = round(time.monotonic() - self._started, 3)
        try:
            self._metrics.add({"epoch": epoch, "step": step, "seconds": seconds}, values)
        except OSError as error:
            raise HpctrainError(
                f"{self.folder}/metrics.jsonl: cannot be written ({error.strerror}): free some space"
            ) from error
        text = "  ".join(f"{name} {value:.4g}" for name, value in values.items() if name not in NOT_PRINTED)
        if speed := values.get("examples_per_s"):
            text += (
                f"  {format_seconds((self._args.epochs * self._steps - step) * self._examples / speed)} left"
            )
        if self._bar:
            self._bar.set_postfix_str(text)
        else:
            self.print(f"epoch {epoch} step {step}  {text}")

    def _check_finite(self, **values: float) -> None:
        """End every rank if a value, the same on all of them, is not finite.

        Raises HpctrainError on rank 0.
        """
        place = f"epoch {self.epoch + (self._step > 0)}, step {self.global_step}"
        self._nonfinite.check(values, place, f"earlier checkpoints are in {self.folder}")

    def end_epoch(self) -> None:
        """All steps of the epoch are done."""
        self._watchdog.pause()
        self.epoch, self._step = self.epoch + 1, 0
        self._loss_sum, self._unlogged = 0.0, 0
        if self._bar:
            self._bar.close()
            self._bar = None

    def finish(self, model: torch.nn.Module, **values: float) -> None:
        """Write result.json and curves.png, and print where they are.

        A collective call. Raises HpctrainError.

        If the launch script was still computing the image's digest when the run started, it is added to
        config.json now.
        """
        self._watchdog.stop()
        self._wait_for_checkpoint()
        self.log(f"peak memory of this rank: {peak_memory(self._device):.1f} MB")
        tokens, most = (
            gather_tokens(self.world, self.times),
            gather_most(self.world, self._device, self.times),
        )
        if self.world.rank != 0:
            return
        self._owner.check()
        speed = self.times.figures(self._examples, *tokens)
        if self._flops and "examples_per_s" in speed:
            name = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else ""
            speed |= utilization(
                speed["examples_per_s"] * self._flops / self.world.size, name, self._args.precision
            )
        speed |= most
        result = {
            **(values := plain_numbers(values)),
            **({"skipped_steps": self._nonfinite.skipped} if self._nonfinite.skipped else {}),
            "epochs": self.epoch,
            "seconds": round(time.monotonic() - self._started, 3),
            "weights_sha256": weights_sha256(checkpoint.unwrap(model)),
            "speed": speed,
        }
        add_image_digest(self._config)
        self._metrics.close()
        try_to_plot(self.folder)
        write_json(self.folder / "result.json", result)  # last: a run that has it has nothing left to do
        self.print(
            "  ".join(
                [*(f"{name} {value:.4f}" for name, value in values.items()), f"in {result['seconds']:.1f} s"]
            )
        )
        self.print("  ".join(f"{name} {value:.4g}" for name, value in speed.items()))
        if getattr(self._args, "profile", False) and not (self.folder / "profile").exists():
            self.print(NO_PROFILE)
        self.print(
            f"weights {result['weights_sha256'][:16]}, metrics, checkpoints and curves.png are in {self.folder}"
        )
        self._owner.release()

    def print(self, text: str) -> None:
        """Print a line on rank 0, above the progress bar; every rank logs it.

        A name in it may control no terminal.
        """
        self.log(text)
        if self.world.rank == 0:
            tqdm.write(hide_secrets(one_line(text)), file=sys.stdout)
            sys.stdout.flush()

    def log(self, text: str) -> None:
        """Write a line to the log of this rank."""
        write_line(self._log, one_line(text))
