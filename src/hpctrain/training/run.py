"""The run of a training script of your own: see docs/guides/own-script.md."""

import atexit
from collections.abc import Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hpctrain.checkpoints import checkpoint, parts
from hpctrain.distributed.device import choose_device
from hpctrain.distributed.rendezvous import all_or_none, gather, process_group
from hpctrain.distributed.world import detect
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.hooks.clean_exit import wait_for_threads
from hpctrain.run import record
from hpctrain.run.options import RunOptions
from hpctrain.run.reader import is_loss
from hpctrain.text import first_line
from hpctrain.training.batches import (
    data_loader,
    evaluation_batches,
    seed_everything,
    seed_step,
    steps_per_epoch,
)
from hpctrain.training.buckets import broadcast_buffers, settle_buckets

# Options of DataLoader that decide which examples a batch has, as batches() does.
ORDER = {"shuffle", "sampler", "batch_sampler", "drop_last", "generator"}
# Where a loop is: what may be called next.
OUTSIDE, IN_EPOCH, IN_BATCH, AFTER_STEP, AFTER_BATCHES = range(5)


class Run(record.Record):
    """A run of your own training loop, which saves, resumes and counts by itself:

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
    `resume` and `checkpoint_every`; `seed` (1) and `device` ("auto"); and your own, such as a learning rate,
    with which the run has to be resumed. So `**vars(args)` passes a command line, and `**cfg` one of Hydra.

    Every method is a collective call. An error in their use ends all ranks with one line.
    """

    def __init__(self, name: str, /, **options: Any) -> None:
        """Join the other ranks, and create the run folder or open it again. Raises HpctrainError."""
        own = RunOptions.from_args({"seed": 1, "device": "auto", **options})
        world = detect()
        with ExitStack() as stack:
            device = choose_device(world, own.others["device"])
            stack.enter_context(process_group(world, device))
            if world.size > 1:
                atexit.register(wait_for_threads)  # of Gloo, which could abort the process as it ends
            super().__init__(world, name, own, device)
            stack.callback(self.close)
            self._stack = stack.pop_all()
        self._seed = own.others["seed"]
        self._is_open = self._has_optimized = self._is_best = False
        self._at = OUTSIDE
        self._prepared: set[nn.Parameter] = set()
        self._model: nn.Module | None = None
        self._others: dict[str, Any] = {}  # tracked objects that are no modules
        self._known: set[torch.optim.Optimizer] = set()  # those that are tracked, or were looked at
        self._scores: dict[str, float] = {}  # for result.json
        self._score: float | None = None  # of the epoch
        self._given: dict[str, Any] = {}  # what the loop gives, and a resume compares
        seed_everything(self._seed)

    def __enter__(self) -> "Run":
        self._is_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """Write the result. After an error or an interrupt, the last checkpoint is there to go on from."""
        if kind is not None:
            return self._stack.__exit__(kind, error, traceback)
        with self._stack:
            if self._model is not None:
                self._leave_epoch()
                self.finish(self._model, **self._scores)
        return None

    # --- before training ---

    def prepare(self, model: nn.Module, **options: Any) -> nn.Module:
        """The model on this rank's device; with several ranks in DistributedDataParallel, with `options`."""
        model.to(self.device)
        if self.world.size == 1 or not any(each.requires_grad for each in model.parameters()):
            return model
        parallel = DistributedDataParallel(model, **options)
        settle_buckets(parallel)
        self._prepared |= {*parallel.parameters()}
        if parallel.broadcast_buffers:
            # Ranks may evaluate different numbers of batches, where a collective call would hang.
            parallel.register_forward_pre_hook(_broadcast_in_training_only)
        return parallel

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
        if self._model is not None:
            raise UsageError("run.track() is called a second time: name all objects in one call")
        for name, each in objects.items():
            _check_object(name, each)
        models = {
            name: checkpoint.unwrap(each) for name, each in objects.items() if isinstance(each, nn.Module)
        }
        if not models:
            raise UsageError("run.track() got no model: name it, too, as in run.track(model=model, ...)")
        self._model = next(iter(models.values())) if len(models) == 1 else nn.ModuleDict(models)
        self._others = {name: each for name, each in objects.items() if name not in models}
        optimizers = [each for each in objects.values() if isinstance(each, torch.optim.Optimizer)]
        if self._options.on_nan == "skip" and len(optimizers) > 1:
            raise UsageError('on_nan="skip" is for one optimizer, and run.track() got several: leave it out')
        scalers = [each for each in objects.values() if isinstance(each, torch.amp.GradScaler)]
        has_scaler = any(each.is_enabled() for each in scalers)
        self.can_skip = len(optimizers) == 1 and not has_scaler
        if self._options.on_nan == "skip" and has_scaler:
            raise UsageError(
                'on_nan="skip" is not for a GradScaler, which skips steps whose gradients are not finite by '
                "itself: leave on_nan out, or train in bf16 without a scaler"
            )
        for each in optimizers:
            if self.world.size > 1 and not _parameters(each) <= self._prepared:
                raise UsageError(
                    "run.track(): an optimizer has parameters that each rank would train alone: "
                    "model = run.prepare(model) lets the ranks train together"
                )
            each.register_step_pre_hook(self._before_optimizer_step)
        # an optimizer that is not tracked has no hook, and a scaler may skip the first steps
        self._has_optimized = not optimizers or bool(scalers)

        # to the CPU: load_state_dict() copies to where the values belong
        state = self.resume(torch.device("cpu"), None, self._model, "tracked")
        if state:
            with all_or_none(self.world):
                self._load_state(state)
        for name, each in self._others.items():
            if isinstance(each, torch.optim.Optimizer):
                self._known.add(each)
                self._compare_options(name, each)
        self._stack.callback(register_optimizer_step_post_hook(self._after_optimizer_step).remove)

    def _compare_options(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        """Say which options of an optimizer are not those of the checkpoint, which stay."""
        for option, value in optimizer.defaults.items():
            if isinstance(value, (int, float)):
                before = self._given.setdefault(f"{option} of {name}", value)
                if before != value:
                    self.print(
                        f"hpctrain: warning: {option} of {name} stays {before}, as in {self.resume_from}: "
                        f"for {value} start a new run, with another out"
                    )

    def _after_optimizer_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Say, once, that an optimizer is not tracked. One within a tracked one has parameters of it."""
        if optimizer in self._known:
            return
        self._known.add(optimizer)
        assert self._model is not None
        own = _parameters(optimizer)
        tracked = [_parameters(each) for each in self._others.values() if hasattr(each, "param_groups")]
        if own & {*self._model.parameters()} and not own & set().union(*tracked):
            self.print(
                f"hpctrain: warning: this {type(optimizer).__name__} starts anew when the run resumes: "
                "name it in run.track(), as optimizer=optimizer"
            )

    def _before_optimizer_step(self, *_: object) -> None:
        self._has_optimized = True
        self.check_gradients()

    # --- in training ---

    def epochs(self, number: int) -> Iterator[int]:
        """The epochs that are left of this number, counted from 1. Saves what is tracked after each."""
        if self._model is None:
            raise UsageError(
                "run.epochs() needs something to save: call run.track(model=model, ...) before it"
            )
        self.limit_epochs(number)
        while self.epoch < number and not self.best.has_stalled:
            seed_everything(hash((self._seed, self.epoch + 1)))
            self._at = IN_EPOCH
            yield self.epoch + 1
            self._leave_epoch()

    def _leave_epoch(self) -> None:
        """End and save the epoch whose loop has ended, maybe by `break`."""
        if self._at == IN_EPOCH:
            raise UsageError("this epoch had no steps: call run.batches() in each epoch of run.epochs()")
        if self._at in (IN_BATCH, AFTER_STEP):
            self.end_epoch()
        if self._at != OUTSIDE:
            self._at, score, self._score = OUTSIDE, self._score, None
            self.save(self._make_state(), score)

    def batches(
        self, dataset: Dataset, batch_size: int, *, steps: int | None = None, **options: Any
    ) -> Iterator[Any]:
        """This rank's part of each batch of an epoch, on its device: those that are left after a resume.

        `batch_size` is the global one: the ranks share each batch. `options` are options of DataLoader, such
        as num_workers and collate_fn. The order, and random numbers of the data and the model, depend on the
        seed, the epoch and the batch alone. An epoch is a pass over the data, or has this many `steps`.
        """
        if self._at != IN_EPOCH:
            raise UsageError("call run.batches() once in each epoch: for epoch in run.epochs(...)")
        _check_dataset("run.batches()", dataset, options)
        steps = steps or steps_per_epoch(len(dataset), batch_size, self.world)  # type: ignore[arg-type]
        epoch, done = self.epoch + 1, self._step
        self.check_steps(steps)
        if (before := self._given.get("batch_size", batch_size)) != batch_size:
            self.print(f"run.batches(): {batch_size} examples in a batch, and {before} in the epoch before")
        self._given["batch_size"] = batch_size
        options.setdefault("pin_memory", self.device.type == "cuda")
        loader = data_loader(dataset, batch_size, self._seed, epoch, self.world, done, steps, **options)
        numbers: Any = loader.batch_sampler  # pairs of a pass and an example
        self.start_epoch(
            epoch, steps, batch_size, lambda step: torch.tensor([each for _, each in numbers[step - done]])
        )
        for step, batch in enumerate(self.time_data(loader), done):
            batch = self._to_device(batch)
            seed_step(self._seed, epoch, step, self.world)
            self._at = IN_BATCH
            yield batch
            if self._at != AFTER_STEP:
                raise UsageError(
                    f"run.step() was not called after step {self.global_step + 1}: call run.step(loss) once "
                    "for each batch of run.batches()"
                )
            # Here, and not in step(): what follows it in the loop belongs to the step, too.
            if self.must_save() or self._is_best:
                self._only_check &= not self._is_best
                self._is_best = False
                self.save(self._make_state())
        self.end_epoch()
        self._at = AFTER_BATCHES

    def step(self, loss: Tensor, **values: Any) -> None:  # type: ignore[override]  # it has a loss
        """Count a step, after the optimizer's, with the loss of this rank's examples, and log it.

        Five times an epoch, metrics.jsonl gets a line with the loss and each of `values`, such as
        learning_rate=...: means over the ranks and the steps since the last line. Raises HpctrainError if one
        of these means is not finite.
        """
        if self._at != IN_BATCH:
            raise UsageError(
                "call run.step(loss) once for each batch of run.batches(), after optimizer.step()"
            )
        if not self._has_optimized:
            raise UsageError(
                "run.step() came before the first optimizer.step(): call it after that, once for each "
                "batch; to accumulate gradients, divide the batch into parts"
            )
        super().step(loss, **values)
        self._at = AFTER_STEP

    def evaluation_batches(self, dataset: Dataset, batch_size: int, **options: Any) -> Iterator[Any]:
        """The examples of this rank for an evaluation, on its device, at most `batch_size` at a time.

        Each example belongs to one rank, and a rank may have none. `options` are options of DataLoader.
        """
        _check_dataset("run.evaluation_batches()", dataset, options)
        if self._model is not None:
            broadcast_buffers(self._model, self.world)
        batches = evaluation_batches(len(dataset), batch_size, self.world)  # type: ignore[arg-type]
        loader: DataLoader = DataLoader(
            dataset,
            batch_sampler=[batch.tolist() for batch in batches],
            generator=torch.Generator(),  # otherwise it draws from the random numbers of the model
            **options,
        )
        self.start_evaluation()
        try:
            for batch in loader:
                yield self._to_device(batch)
        finally:
            self.end_evaluation()

    def score(self, **values: Any) -> None:
        """Write the scores of an evaluation: after the batches of an epoch, after run.step(), or at the end.

        Each is a number or a tensor with a value per example: the mean over all of them on all ranks counts.
        While the run trains, the checkpoint with the highest first score is kept, or, if all names end in
        "loss", the one with the lowest first loss. result.json has the last scores.
        """
        if self._at in (IN_EPOCH, IN_BATCH):
            raise UsageError(
                "call run.score() after the batches of an epoch, or after run.step() in the loop"
            )
        own = {name: torch.as_tensor(value, dtype=torch.float64) for name, value in values.items()}
        sums = gather(self.world, [[each.sum().item(), each.numel()] for each in own.values()])
        for name, of_ranks in zip(own, zip(*sums, strict=True), strict=True):
            total, number = map(sum, zip(*of_ranks, strict=True))
            values[name] = total / number if number else float("nan")
        self.metrics(**values)
        self._scores |= values
        name = min(values, key=is_loss)
        score = -values[name] if is_loss(name) else values[name]
        if self._at == AFTER_BATCHES:
            self._score = score
        elif self._at == AFTER_STEP:
            self._is_best |= self.count_evaluation(score)

    def _to_device(self, batch: Any) -> Any:
        if hasattr(batch, "to") and not isinstance(batch, Tensor):  # such as a BatchEncoding
            return batch.to(self.device)
        return tree_map_only(Tensor, lambda each: each.to(self.device, non_blocking=True), batch)

    # --- the state ---

    def _make_state(self) -> dict[str, Any]:
        assert self._model is not None
        tracked = {}
        for name, each in self._others.items():
            state = each.state_dict()
            if not isinstance(each, torch.optim.Optimizer):
                # only that of an optimizer stays as it is until optimizer.step(): see save_in_background()
                state = tree_map_only(Tensor, torch.clone, state)
            tracked[name] = state
        return {
            "model": self._model.state_dict(),
            "tracked": tracked,
            "scores": self._scores,
            "given": self._given,
        }

    def _load_state(self, state: dict[str, Any]) -> None:
        assert self._model is not None
        saved = state["tracked"] if isinstance(state["tracked"], dict) else {}
        if saved.keys() != self._others.keys():
            raise HpctrainError(
                f"{self.resume_from} has the states of {_join(saved)}, and run.track() got "
                f"{_join(self._others)} beside the model: track the same objects under the same names"
            )
        self._model.load_state_dict(state["model"])
        for name, each in self._others.items():
            try:
                each.load_state_dict(saved[name])
            except Exception as error:  # of a user's class, or because of what somebody has put there
                raise HpctrainError(
                    f"{self.resume_from}: the state of {name} does not fit ({first_line(error)[:200]}): "
                    "track the objects of that run, or give another run folder"
                ) from error
        if isinstance(scores := state.get("scores"), dict):
            self._scores = scores
        if isinstance(given := state.get("given"), dict):
            self._given = given


def _parameters(optimizer: Any) -> set[nn.Parameter]:
    return {value for group in optimizer.param_groups for value in group["params"]}


def _join(names: Any) -> str:
    return ", ".join(map(str, names)) or "nothing"


def _check_object(name: str, each: Any) -> None:
    """Raise UsageError if a run could not be resumed with this object."""
    kind = type(each).__name__
    if not all(callable(getattr(each, method, None)) for method in ("state_dict", "load_state_dict")):
        raise UsageError(
            f"run.track({name}=...): a {kind} has no state_dict() and load_state_dict(), by which it would "
            "be saved and resumed: give it both, or leave it out if it has no state"
        )
    state = each.state_dict()
    if isinstance(each, nn.Module) and not all(
        parts.has_memory(value) and not hasattr(value, "device_mesh")
        for value in state.values()
        if isinstance(value, Tensor)
    ):
        raise UsageError(
            f"run.track({name}=...): this {kind} has weights that are sharded or have no values, and a Run "
            "saves whole models: use run.prepare()"
        )
    checkpoint.check_loadable(state, f"the state of {name} in run.track()")


def _check_dataset(caller: str, dataset: Any, options: dict[str, Any]) -> None:
    """Raise UsageError for a data set without examples by number, or for options that choose examples."""
    is_stream = isinstance(dataset, IterableDataset)
    if is_stream or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UsageError(
            f"{caller} cannot resume within a {type(dataset).__name__}, which has no examples by number: "
            "give it a data set with __len__() and __getitem__(), and the options of its DataLoader"
        )
    if own := ORDER & options.keys():
        what = "the order of the examples, and its seed"
        raise UsageError(f"{caller} decides on {what}: leave out {_join(sorted(own))}")


def _broadcast_in_training_only(parallel: nn.Module, _: object) -> None:
    parallel.broadcast_buffers = parallel.training  # type: ignore[assignment]  # an option of DDP
