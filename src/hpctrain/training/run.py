"""hpctrain.Run: the training loop of the bundled trainers, and of your own scripts (guides/own-script.md)."""

import atexit
import math
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hpctrain.checkpoints import checkpoint
from hpctrain.distributed.device import choose_device
from hpctrain.distributed.rendezvous import all_or_none, gather, meet, process_group
from hpctrain.distributed.world import detect
from hpctrain.errors import UsageError
from hpctrain.hooks.clean_exit import wait_for_threads
from hpctrain.run.best import Best
from hpctrain.run.options import RunOptions
from hpctrain.run.record import Record
from hpctrain.training.batches import (
    EpochPlan,
    Loads,
    Part,
    evaluation_batches,
    load_parts,
    seed_everything,
    seed_step,
)
from hpctrain.training.precision import Scaler, make_autocast, set_precision
from hpctrain.training.strategies.ddp import broadcast_buffers
from hpctrain.training.strategies.strategy import Strategy, make_strategy
from hpctrain.training.tracked import Tracked, join, parameters_of

# Options of DataLoader that decide which examples a batch has, as batches() does.
ORDER = {"shuffle", "sampler", "batch_sampler", "drop_last", "generator"}
# Where a loop is: what may be called next.
OUTSIDE, IN_EPOCH, IN_BATCH, AFTER_STEP, AFTER_BATCHES, STALLED = range(6)
# The entries of a checkpoint beside the model, of which a resume needs one. The second is of trainers that
# had a loop of their own: they saved each object as an entry.
ENTRIES = ("tracked", "optimizer")


class Run:
    """A run of a training loop, which saves, resumes and counts by itself:

        with hpctrain.Run("resnet", out="runs/mine", resume="auto") as run:
            model = run.prepare(make_model())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            run.track(model=model, optimizer=optimizer)
            for epoch in run.epochs(3):
                for images, labels in run.batches(dataset, 64, num_workers=2):
                    loss = cross_entropy(model(images), labels)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    run.step(loss)
                run.score(accuracy=evaluate(model))

    The first argument is the name of the run, the others are options: those of RunOptions, such as `out`,
    `resume` and `checkpoint_every`; `seed` (1), `device` ("auto") and `precision` ("fp32"); and your own,
    such as a learning rate, with which the run has to be resumed. So `**vars(args)` passes a command line,
    and `**cfg` one of Hydra.

    What a loop calls: prepare, track, epochs, batches, step, and as it needs them autocast, backward, update,
    is_due, evaluation_batches, evaluation, score, load_best, gather, count_tokens, count_flops, print, log.
    What it reads: folder, resume_from, device, world, precision, epoch (finished epochs), global_step,
    scores (for result.json), and best: `best.patience` ends the run, `best.by` and `best.lowest` say which
    score decides.

    Every method is a collective call. An error in their use ends all ranks with one line.
    """

    def __init__(self, name: str, /, **options: Any) -> None:
        """Join the other ranks, unless they have joined, and create the run folder or open it again.

        Raises HpctrainError.
        """
        self.world = detect()
        self.precision = "fp32"
        with ExitStack() as stack:
            self.device = choose_device(self.world, options.setdefault("device", "auto"))
            if not dist.is_initialized():
                stack.enter_context(process_group(self.world, self.device))
                if self.world.size > 1:
                    atexit.register(wait_for_threads)  # of Gloo, which could abort the process as it ends
            if "precision" in options:
                tf32 = options.get("tf32")
                self.precision = set_precision(options["precision"], tf32, self.world, self.device)
                options["precision"] = self.precision
            own = RunOptions.from_args({"seed": 1, **options})
            if not isinstance(seed := own.others["seed"], int):
                raise UsageError(f"seed={seed!r}: give a number, or leave seed out")
            self._record = Record(self.world, name, own, self.device)
            stack.callback(self._record.close)
            self._stack = stack.pop_all()
        self.scores: dict[str, float] = {}
        self._options, self._seed = own, own.others["seed"]
        self._is_open = self._has_optimized = self._is_best = self._is_updating = False
        self._at = OUTSIDE
        self._strategy: Strategy | None = None  # until prepare() or track()
        self._scaler = Scaler(self.precision, self.device)
        self._prepared: set[nn.Parameter] = set()
        self._no_sync: list[Callable[[], AbstractContextManager[None]]] = []  # of prepared models
        self._tracked: Tracked | None = None
        self._score: tuple[float, ...] | None = None  # of the epoch
        self._accumulate, self._part = 1, 0  # parts in a step, and the number of the present one
        self._loss = self._backward_loss = torch.zeros((), device=self.device)  # of the parts so far
        self._repeated = 0  # batches at the end of an evaluation that do not count
        self._ended_of: int | None = None  # those of the loop that a resumed run has left by `break`
        seed_everything(self._seed)

    def __enter__(self) -> "Run":
        self._is_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """Write the result. After an error or an interrupt, the last checkpoint is there to go on from."""
        if isinstance(error, KeyboardInterrupt):
            with _without_interrupts():
                self._stack.__exit__(kind, error, traceback)
            error.args = (self._record.describe_saved(),)  # for entry.py, or a notebook
            return False
        if kind is not None:
            return self._stack.__exit__(kind, error, traceback)
        with self._stack:
            if self._tracked and not self.is_finished:
                self._leave_epoch(has_ended=True)
                self._record.finish(self.gather(self._tracked.model), **self.scores)
        # what follows in the script draws the same numbers after a run that was finished before
        seed_everything(self._seed)
        return None

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self._record.folder

    @property
    def resume_from(self) -> Path | None:
        """The checkpoint that the run resumes from; None if it is new."""
        return self._record.resume_from

    @property
    def is_finished(self) -> bool:
        """Whether the run had its result before this start, from epochs() on: then nothing is written."""
        return self._record.is_finished

    @property
    def epoch(self) -> int:
        """The number of finished epochs."""
        return self._record.epoch

    @property
    def global_step(self) -> int:
        """The optimizer steps since the start of training."""
        return self._record.global_step

    @property
    def best(self) -> Best:
        """The best evaluation so far, and what it is chosen by."""
        return self._record.best

    def print(self, text: str) -> None:
        """Print a line on rank 0 above the progress bar, and log it on all; control characters escaped."""
        self._record.print(text)

    def log(self, text: str) -> None:
        """Write a line to the log of this rank."""
        self._record.log(text)

    def count_tokens(self, real: int, padded: int) -> None:
        """Count tokens of the present step on this rank, without and with padding, for result.json."""
        self._record.times.count_tokens(real, padded)

    def count_flops(self, count: Callable[[], float | None]) -> None:
        """On a GPU, add FLOP/s to the speed in result.json. `count` (slow) returns those of an example."""
        self._record.count_flops(count)

    # --- before training ---

    def prepare(self, model: nn.Module, *, strategy: str = "ddp", **options: Any) -> nn.Module:
        """The model on this rank's device, shared with the other ranks.

        `strategy`: "ddp" copies it to all ranks (DistributedDataParallel, with its options), "fsdp" gives
        each a part (FSDP2, with the options of shard() in strategies/fsdp.py). All models of a run have the
        same. Raises UsageError for a name without a file in strategies/.
        """
        shared = self._choose_strategy(strategy)
        with self.autocast():  # of an example
            parallel = shared.wrap(model, **options)
        if self.world.size > 1:
            self._prepared |= {*parallel.parameters()}
        if isinstance(parallel, DistributedDataParallel):
            self._no_sync.append(parallel.no_sync)
        return parallel

    def _choose_strategy(self, name: str) -> Strategy:
        """The strategy of the run, which its first model decides on."""
        if self._strategy is None:
            self._strategy = make_strategy(name, self.world, self.device, self.precision)
            self._record.in_parts = self._strategy.in_parts
            self._scaler = Scaler(self.precision, self.device, sharded=self._strategy.in_parts)
        return self._strategy

    def track(self, **objects: Any) -> None:
        """Name every object that has a state: they are saved from now on, and resumed now if the run is.

        These are models, optimizers, schedulers, scalers, and your own objects with state_dict() and
        load_state_dict(). The modules among them are the weights that load_weights() reads: the one module,
        or an nn.ModuleDict of several by their names. Raises UsageError for what cannot be resumed.
        """
        if not self._is_open:
            raise UsageError(
                "open the run with `with hpctrain.Run(...) as run:`, which also writes the result"
            )
        if self._tracked:
            raise UsageError("run.track() is called a second time: name all objects in one call")
        tracked = Tracked(objects, self._choose_strategy("ddp"), self._scaler, self.print)
        if self._options.on_nan == "skip" and len(tracked.optimizers) > 1:
            raise UsageError('on_nan="skip" is for one optimizer, and run.track() got several: leave it out')
        if self._options.on_nan == "skip" and tracked.has_scaler:
            raise UsageError(
                'on_nan="skip" is not for a GradScaler, which skips steps whose gradients are not finite by '
                'itself: leave on_nan out, or leave the scaler to the run, with precision="fp16"'
            )
        self._record.can_skip = len(tracked.optimizers) == 1 and not tracked.has_scaler
        for each in tracked.optimizers:
            if self.world.size > 1 and not parameters_of(each) <= self._prepared:
                raise UsageError(
                    "run.track(): an optimizer has parameters that each rank would train alone: "
                    "model = run.prepare(model) lets the ranks train together"
                )
            each.register_step_pre_hook(self._before_optimizer_step)
        # an optimizer that is not tracked has no hook, and a scaler may skip the first steps
        has_scaler = tracked.has_scaler or self._scaler.is_enabled()
        self._has_optimized = not tracked.optimizers or has_scaler

        self._tracked = tracked
        # to the CPU: load_state_dict() copies to where the values belong
        if state := self._record.resume(torch.device("cpu"), None, tracked.model, *ENTRIES):
            assert self.resume_from
            with all_or_none(self.world):
                tracked.load(state, self.resume_from)
            if isinstance(scores := state.get("scores"), dict):
                self.scores = scores
            self._ended_of = state.get("ended_of")
        tracked.compare_options()
        hook = register_optimizer_step_post_hook(lambda each, *_: tracked.after_step(each))
        self._stack.callback(hook.remove)

    def _before_optimizer_step(self, optimizer: Optimizer, *_: object) -> None:
        self._has_optimized = True
        if not (self._is_updating or self._is_last_part):
            raise UsageError(
                "optimizer.step() came before the last part of a batch: with accumulate, call "
                "run.backward(loss) and run.update(optimizer)"
            )
        assert self._tracked
        self._tracked.before_step(optimizer)
        if not self._is_updating:
            self._record.check_gradients()

    # --- in training ---

    def epochs(self, number: int, *, fixed: bool = False) -> Iterator[int]:
        """The epochs that are left of this number, counted from 1. Saves what is tracked after each.

        None are left for a run that has its result, also if its loop ended by `break`: the script goes on
        behind the loop, with what is tracked as it was at the end.
        `fixed`: a resumed run has to have the same number, as its learning rate depends on it. Fewer epochs
        than it has done already are refused in any case (UsageError).
        """
        if not self._tracked:
            raise UsageError(
                "run.epochs() needs something to save: call run.track(model=model, ...) before it"
            )
        self._record.limit_epochs(number, fixed=fixed)
        has_ended = self.is_finished or self._ended_of == number
        while self.epoch < number and not (self.best.has_stalled or has_ended):
            seed_everything(hash((self._seed, self.epoch + 1)))
            self._at = IN_EPOCH
            yield self.epoch + 1
            self._leave_epoch()

    def _leave_epoch(self, *, has_ended: bool = False) -> None:
        """End and save the epoch whose loop has ended; `has_ended`: by `break`, and no other follows."""
        if self._at == IN_EPOCH:
            raise UsageError("this epoch had no steps: call run.batches() in each epoch of run.epochs()")
        if self._at in (IN_BATCH, AFTER_STEP):
            meet(self.world)  # others may go on in this epoch; the watchdog sees it
            self._record.end_epoch()
        at, self._at, score, self._score = self._at, OUTSIDE, self._score, None
        self._accumulate, self._part = 1, 0
        if at not in (OUTSIDE, STALLED):
            ended_of = {"ended_of": self._record.epochs} if has_ended else {}
            self._record.save(self._make_state() | ended_of, score)

    def batches(
        self,
        dataset: Dataset | Loads,
        batch_size: int,
        *,
        steps: int | None = None,
        accumulate: int = 1,
        order: Callable[[int], Tensor] | None = None,
        **options: Any,
    ) -> Iterator[Any]:
        """This rank's part of each batch of an epoch, on its device: those that are left after a resume.

        `batch_size` is the global one: the ranks share each batch. `options` are options of DataLoader, such
        as num_workers and collate_fn. The order, and random numbers of the data and the model, depend on the
        seed, the epoch and the batch alone. An epoch is a pass over the data, or has this many `steps`.

        `accumulate`: to save memory, each batch comes in so many parts; backward() then adds up the gradients
        of the mean over the parts, and update() and step() act after the last one.

        `order` maps an epoch to the examples of its steps, int64 [steps, ranks * accumulate, examples]. A
        data set with a method load_batches(), see Loads in batches.py, does so instead of a DataLoader.
        """
        if self._at != IN_EPOCH:
            raise UsageError("call run.batches() once in each epoch: for epoch in run.epochs(...)")
        assert self._tracked and self._strategy  # as run.epochs() has begun an epoch
        examples = _count_examples("run.batches()", dataset, options)
        epoch, done = self.epoch + 1, self._record.step_of_epoch
        world, given = self._strategy.data_world, self._tracked.given
        plan = EpochPlan(
            examples, batch_size, self._seed, epoch, world,
            steps=steps, accumulate=accumulate, order=order and order(epoch),
        )  # fmt: skip
        self._record.check_steps(plan.steps)
        for name, now, what in (
            ("batch_size", batch_size, "in a batch"),
            ("examples", examples, "in the data"),
        ):
            if (before := given.get(name, now)) != now:
                text = f"run.batches(): {now} examples {what}, and {before} in the epoch before"
                if done and not self._options.force:  # the rest of the epoch would be of another order
                    raise UsageError(f"{text}: give those of that run, or force=True to go on with these")
                self.print(text)
            given[name] = now
        if isinstance(dataset, Loads):
            loaded = dataset.load_batches(plan.parts(done), self.device)
        else:
            options.setdefault("pin_memory", self.device.type == "cuda")
            loaded = load_parts(dataset, plan.parts(done), self._seed, **options)
        self._record.start_epoch(epoch, plan.steps, batch_size, plan.examples_of)
        self._accumulate = accumulate
        for number, batch in enumerate(self._record.time_data(loaded), done * accumulate):
            self._part = number % accumulate
            batch = self._to_device(batch)
            seed_step(self._seed, epoch, number, self.world)
            self._at = IN_BATCH
            with self._without_average():
                yield batch
            if self._at != AFTER_STEP:
                raise UsageError(
                    f"run.step() was not called after step {self.global_step + 1}: call run.step(loss) once "
                    "for each batch of run.batches()"
                )
            if not self._is_last_part:
                continue
            # Here, and not in step(): what follows it in the loop belongs to the step, too.
            if self._record.must_save(self._is_best):
                self._is_best = False
                self._record.save(self._make_state())
                if self.best.has_stalled:
                    self._at = STALLED
                    return
        self._record.end_epoch()
        self._at = AFTER_BATCHES

    @property
    def _is_last_part(self) -> bool:
        return self._part == self._accumulate - 1

    @contextmanager
    def _without_average(self) -> Iterator[None]:
        """Leave the averaging of gradients to the last part of a step, where the strategy can."""
        with ExitStack() as stack:
            for no_sync in self._no_sync if not self._is_last_part else ():
                stack.enter_context(no_sync())
            yield

    def autocast(self) -> AbstractContextManager[None]:
        """The context of a forward pass in the precision of the run. It does nothing in fp32."""
        return make_autocast(self.precision, self.device)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss: scaled in fp16, and divided by the number of parts."""
        if self._accumulate > 1:
            loss = loss / self._accumulate
        self._backward_loss = self._backward_loss + loss.detach() if self._part else loss.detach()
        self._scaler.scale(loss).backward()

    def update(self, optimizer: Optimizer, *, clip: float | None = None) -> None:
        """Update the weights after the last part of a batch, and remove the gradients.

        Until then it does nothing. The gradients are means over the ranks, `clip` is the largest norm of all
        of them. In fp16, and with on_nan="skip", a step whose gradients are not finite is left out.
        """
        if not self._is_last_part:
            return
        assert self._strategy and self._tracked
        with self._strategy.average(optimizer):
            self._scaler.unscale_(optimizer)
            self._record.check_gradients(self._scaler, self._backward_loss)
            if clip is not None:
                nn.utils.clip_grad_norm_(self._tracked.model.parameters(), clip)
            self._is_updating = True
            self._scaler.step(optimizer)
            self._is_updating = False
        self._scaler.update()
        optimizer.zero_grad()

    def step(self, loss: Tensor, **values: Any) -> None:
        """Count a step, after the optimizer's, with the loss of this rank's examples, and log it.

        Five times an epoch, metrics.jsonl gets a line with the loss and each of `values`, such as
        learning_rate=...: means over the ranks and the steps since the last line. Of a batch in parts, the
        loss is the mean over them, and the values are those of the last one. Raises HpctrainError if one of
        these means is not finite.
        """
        if self._at != IN_BATCH:
            raise UsageError(
                "call run.step(loss) once for each batch of run.batches(), after optimizer.step()"
            )
        if self._is_last_part and not self._has_optimized:
            raise UsageError(
                "run.step() came before the first optimizer.step(): call it after that, once for each "
                "batch; to accumulate gradients, give run.batches() the number of parts, as accumulate=4"
            )
        if self._accumulate > 1:
            loss = torch.as_tensor(loss).detach() / self._accumulate
            loss = self._loss = self._loss + loss if self._part else loss
        if self._is_last_part:
            self._record.step(loss, **values)
        self._at = AFTER_STEP

    def is_due(self, steps: int | None) -> bool:
        """Whether to evaluate after this run.step(): after every so many steps, but for the last of an epoch.

        Without a number, never.
        """
        is_step = self._at == AFTER_STEP and self._is_last_part and not self._record.is_last_step
        return bool(steps) and is_step and self.global_step % int(steps or 1) == 0

    # --- evaluation ---

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """A block that evaluates, which is no part of a step. All ranks have the buffers of rank 0 in it."""
        meet(self.world)
        if self._tracked:
            broadcast_buffers(self._tracked.model, self.world)
        self._record.start_evaluation()
        try:
            yield
        finally:
            self._record.end_evaluation()

    def evaluation_batches(self, dataset: Dataset | Loads, batch_size: int, **options: Any) -> Iterator[Any]:
        """The examples of this rank for an evaluation, on its device, at most `batch_size` at a time.

        Each example belongs to one rank, and a rank may have none. `options` are options of DataLoader. A
        sharded model needs as many batches on each rank, so some get a batch again: see score().
        """
        examples = _count_examples("run.evaluation_batches()", dataset, options)
        own = [*evaluation_batches(examples, batch_size, self.world)]
        self._repeated = 0
        if self._record.in_parts:
            most = math.ceil(math.ceil(examples / self.world.size) / batch_size)
            self._repeated = most - len(own)
            own += [torch.tensor([0])] * self._repeated
        plan = (Part(number, 0, index, index) for number, index in enumerate(own))
        if isinstance(dataset, Loads):
            loader: Iterable[Any] = dataset.load_batches(plan, self.device)
        else:
            loader = DataLoader(
                dataset,
                batch_sampler=[index.tolist() for index in own],
                generator=torch.Generator(),  # otherwise it draws from the random numbers of the model
                **options,
            )
        with self.evaluation():
            for batch in loader:
                yield self._to_device(batch)

    def score(self, **values: Any) -> bool:
        """Write the scores of an evaluation: after the batches of an epoch, after run.step(), or at the end.

        Each is a number, a tensor with a value per example, or a list of these tensors, one for each batch of
        evaluation_batches(): the mean over all of them on all ranks counts. With a sharded model, give the
        list: what does not count is left out of it.

        While the run trains, the checkpoint of the best score is kept, as checkpoints/best.pt: the first
        score or `best.by`, of which the highest is the best, or the lowest if its name ends in "loss". The
        first other loss breaks ties. result.json has the last scores, and the best one.

        Returns whether this evaluation is the best so far.
        """
        if self._at in (IN_EPOCH, IN_BATCH) or (self._at == AFTER_STEP and not self._is_last_part):
            raise UsageError(
                "call run.score() after the batches of an epoch, or after run.step() in the loop, "
                "if run.is_due(steps)"
            )
        if self._at == STALLED:  # within the epoch, with these weights
            return False
        own = {name: self._sum_up(value) for name, value in values.items()}
        sums = gather(self.world, [*own.values()], of=", ".join(own))
        for name, of_ranks in zip(own, zip(*sums, strict=True), strict=True):
            total, number = map(sum, zip(*of_ranks, strict=True))
            # the mean of equal values is that value, without a rounding error
            same = number and len({*map(tuple, of_ranks)}) == 1 and of_ranks[0][1] == 1
            values[name] = of_ranks[0][0] if same else total / number if number else float("nan")
        self._record.metrics(**values)
        self.scores |= values
        if self._at == AFTER_BATCHES:
            self._score = self.best.choose(values)
            return self.best.add(self.epoch, 0, self._score)
        if self._at == AFTER_STEP:
            self._is_best |= self._record.count_evaluation(self.best.choose(values))
            return self.best.since == 0
        return False

    def _sum_up(self, value: Any) -> list[float]:
        """The sum and the number of the values of this rank."""
        if isinstance(value, list):
            value = value[: len(value) - self._repeated]
            value = torch.cat([each.flatten() for each in value]) if value else torch.empty(0)
        each = torch.as_tensor(value, dtype=torch.float64)
        return [each.sum().item(), each.numel()]

    def load_best(self) -> bool:
        """Load the weights of the best evaluation into the tracked model, unless it is the last one.

        Returns whether it has. Raises HpctrainError, naming the checkpoint, if it is damaged.
        """
        if self.best.since == 0:
            return False
        assert self._strategy and self._tracked
        path = self._record.best_checkpoint
        self._record.wait()
        with all_or_none(self.world):
            if self.world.rank == 0:
                checkpoint.check_intact(path)
            state = checkpoint.load(path, torch.device("cpu"), lazily=self._record.in_parts)
        self._strategy.load(self._tracked.model, state["model"])
        self.print(f"{self.best.place} has the best {self.best.by or 'score'}: using its weights")
        return True

    def gather(self, model: nn.Module) -> nn.Module:
        """The tracked model, or one of them, as it was before prepare(), with all weights on rank 0."""
        assert self._strategy and self._tracked
        if self._record.in_parts:
            meet(self.world)
        if isinstance(model, nn.ModuleDict) and model is self._tracked.model:
            return nn.ModuleDict({name: self._strategy.gather(each) for name, each in model.items()})
        return self._strategy.gather(checkpoint.unwrap(model))

    def _to_device(self, batch: Any) -> Any:
        if hasattr(batch, "to") and not isinstance(batch, Tensor):  # such as a BatchEncoding
            return batch.to(self.device)
        return tree_map_only(Tensor, lambda each: each.to(self.device, non_blocking=True), batch)

    def _make_state(self) -> dict[str, Any]:
        assert self._tracked
        return self._tracked.state() | {"scores": self.scores}


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Ignore SIGINT, which a launcher sends as well as the terminal."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _count_examples(caller: str, dataset: Any, options: dict[str, Any]) -> int:
    """The examples of a data set. UsageError if it has none by number, or for options that choose some."""
    is_stream = isinstance(dataset, IterableDataset)
    can_load = hasattr(dataset, "__getitem__") or isinstance(dataset, Loads)
    if is_stream or not (hasattr(dataset, "__len__") and can_load):
        raise UsageError(
            f"{caller} cannot resume within a {type(dataset).__name__}, which has no examples by number: "
            "give it a data set with __len__() and __getitem__(), and the options of its DataLoader"
        )
    if own := ORDER & options.keys():
        what = "the order of the examples, and its seed"
        raise UsageError(f"{caller} decides on {what}: leave out {join(sorted(own))}")
    return len(dataset)
