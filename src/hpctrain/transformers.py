"""Run folder, verified checkpoints and requeue for a Trainer of transformers: see docs/guides/scripts.md.

transformers writes checkpoint-N into its output_dir, file by file, and resumes from the one with the highest
number, even if the job was killed while it wrote that one. Here a checkpoint counts when it has SHA256SUMS,
which is written last.
"""

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments, set_seed
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hpctrain.checkpoints.saver import Decisions
from hpctrain.distributed.control import report_saved, report_stopped, report_training, stop_requested
from hpctrain.distributed.entry import print_errors_in_one_line
from hpctrain.distributed.rendezvous import all_or_none, broadcast
from hpctrain.distributed.world import detect
from hpctrain.errors import EndEarly, HpctrainError, UsageError, explain_os_error
from hpctrain.files import atomic, digests
from hpctrain.run.charts import plot
from hpctrain.run.config import add_resumption, write_config, write_json
from hpctrain.run.metrics import Metrics
from hpctrain.run.owner import Owner
from hpctrain.run.reader import read_metrics, read_record
from hpctrain.text import absolute, as_given, first_line, say
from hpctrain.training.batches import count_examples

# In a checkpoint: the number of examples, and the states of callbacks that are no ExportableState.
CALLBACKS = "callbacks.json"
# Values of TrainingArguments that do not let a run resume, or not as if nothing had happened.
REFUSED = {
    # transformers removes the earlier checkpoint before the new one is verified
    ("save_total_limit", 1): "leaves no checkpoint when the job is killed while it saves: give 2 or more",
    ("save_only_model", True): "leaves out what a resume needs beside the weights: leave it out",
    ("ignore_data_skip", True): "lets a resume begin its epoch again, with other weights: leave it out",
}


class RunFolder(TrainerCallback):
    """A callback that makes the output_dir of a Trainer a run folder, with metrics, requeue and result.

        folder = RunFolder(arguments)
        trainer = Trainer(model, arguments, callbacks=[folder], ...)
        trainer.train(resume_from_checkpoint=folder.checkpoint)

    `checkpoint` is the newest intact checkpoint, None in a new run. When the launch script asks for the end
    of the job, all ranks save at the same step, and EndEarly ends them. `is_finished` says that the training
    had its result before this start: then train() loads the checkpoint, and neither trains nor writes.
    Creating a RunFolder is a collective call. Raises HpctrainError.
    """

    def __init__(self, arguments: TrainingArguments) -> None:
        print_errors_in_one_line()
        self._world = detect()
        if self._world.size != arguments.world_size:
            raise UsageError(
                f"transformers trains alone on each of the {self._world.size} ranks: "
                "give TrainingArguments(use_cpu=True) on nodes without GPUs, and start the script with a "
                "launch script or with torchrun"
            )
        for option, problem in REFUSED.items():
            if getattr(arguments, option[0]) == option[1]:
                raise UsageError("{}={} {}".format(*option, problem))
        assert arguments.output_dir  # has a default
        self.folder, self._arguments = absolute(arguments.output_dir), arguments
        arguments.output_dir = str(self.folder)
        arguments.restore_callback_states_from_checkpoint = True  # such as that of EarlyStoppingCallback
        self._decisions, self._stopping, self._must_save = Decisions(self._world), False, False
        self._callbacks: list[TrainerCallback] = []  # of the Trainer
        self._examples: int | None = None  # of the training set
        self._last: dict[str, float] = {}
        self._seconds = 0.0
        self._asked = arguments.num_train_epochs, arguments.max_steps
        found = None
        with all_or_none(self._world):
            if self._world.rank == 0:
                found = self._open()
        checkpoint, self.is_finished, self._has_ended, has_length = broadcast(self._world, found)
        self.checkpoint = checkpoint and str(absolute(checkpoint))
        self._started = time.monotonic()
        if self.is_finished:
            self._print(f"{self.folder} has its result already: nothing to do")
            if not has_length:  # train() would train a step
                raise EndEarly(0)
        if self._has_ended:  # train() trains no step
            arguments.num_train_epochs, arguments.max_steps = 0, -1

    def _open(self) -> tuple[str | None, bool, bool, bool]:
        """Own the folder, on rank 0, unless the training is finished.

        Returns the checkpoint to resume from, whether the training is finished, whether the checkpoint is of
        its last step, and whether the data set has a length.
        """
        arguments, new = self._arguments, not (self.folder / "config.json").exists()
        if new and any(self.folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*")):
            raise UsageError(
                f"{self.folder} holds checkpoints of a training without RunFolder: give another output_dir"
            )
        try:
            done = read_record(self.folder / "result.json")
            epochs, max_steps = self._asked
            if done and done["epochs"] >= epochs and done["max_steps"] >= max_steps:
                checkpoint = self._newest_whole()
                if not checkpoint:
                    raise UsageError(
                        f"{self.folder} has its result, but no checkpoint that the script could go on with: "
                        "give another output_dir"
                    )
                state = _read_state(checkpoint)
                if state["global_step"] == done["steps"]:
                    has_length = state["num_train_epochs"] < sys.maxsize
                    return as_given(str(checkpoint)), True, True, has_length
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._owner = Owner(self.folder)
            self._owner.acquire()
            checkpoint = self._newest_whole()
            state = _read_state(checkpoint) if checkpoint else {"global_step": 0}
            has_ended = bool(checkpoint) and not done and _has_ended(state, epochs, max_steps)
            self._metrics = Metrics(self.folder, check=self._owner.check)
            step = state["global_step"]
            self._metrics.rewind(step)
            lines = read_metrics(self.folder)
            self._seconds = lines[-1].get("seconds", 0.0) if lines else 0.0
        except (OSError, ValueError, KeyError) as error:
            raise HpctrainError(
                f"{self.folder}: cannot be used as a run folder ({first_line(error)}): "
                "give another output_dir"
            ) from error
        options = arguments.to_sanitized_dict() | {"output_dir": as_given(str(self.folder))}
        self._config = write_config(self.folder, self._world, "transformers", options, arguments.device)
        if checkpoint:
            add_resumption(self._config, checkpoint, step)
            self._print(f"resuming from {checkpoint}")
        return as_given(str(checkpoint)) if checkpoint else None, False, has_ended, True

    def _newest_whole(self) -> Path | None:
        """The checkpoint with the highest number whose files match SHA256SUMS. Prints why it skips others."""
        paths = [
            path
            for path in self.folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
            if path.name.rpartition("-")[2].isdecimal()
        ]
        for path in sorted(paths, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True):
            try:
                if not (path / digests.NAME).exists():
                    raise HpctrainError(f"{path} is not complete")
                digests.check_digests(path)
                return path
            except HpctrainError as error:
                self._print(f"skipping a checkpoint: {error}")
        return None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """Raise UsageError if the Trainer has not loaded the checkpoint."""
        if self.checkpoint and not state.global_step:
            raise UsageError(
                f"{self.folder} has checkpoints: call Trainer.train(resume_from_checkpoint=folder.checkpoint)"
            )
        for logs in state.log_history:  # before a resume
            self._last |= _read_logs(logs)
        handler = sys._getframe(1).f_locals.get("self")  # a callback is not told of the others
        self._callbacks = getattr(handler, "callbacks", [])
        self._examples = count_examples(objects["train_dataloader"])
        path = Path(self.checkpoint or "", CALLBACKS)
        saved = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if saved:
            self._callbacks.append(_Restore(saved["states"], self._callbacks))
        if saved and saved["examples"] != self._examples:
            before = saved["examples"]
            self._print(f"the data have {self._examples} examples, and had {before} before the resume")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """Save, if the job has to end. After the last step of an epoch, what follows the epoch comes first.

        A resume from a checkpoint of that step would leave out its evaluation, and on_epoch_end().
        """
        report_training()
        if self._decisions.is_due():
            self._decide()
        if state.epoch % 1:
            if self._stopping and state.global_step < state.max_steps:
                control.should_log = control.should_save = True
        elif control.should_save:
            control.should_save, self._must_save = False, True

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """Save, if it is due, or if the job has to end and work is left."""
        self._decide()
        control.should_save |= self._must_save
        self._must_save = False
        if self._stopping and state.global_step < state.max_steps:
            control.should_log = control.should_save = True

    def _decide(self) -> None:
        # only the ranks on one node know
        self._stopping = any(stop for (stop,) in self._decisions.gather(stop_requested()))

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """Verify the checkpoint that all ranks have written. End every rank if the job has to end."""
        path = self.folder / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        with all_or_none(self._world):  # every rank has written its random numbers
            pass
        with all_or_none(self._world):
            if self._world.rank == 0:
                self._owner.check()
                with explain_os_error(f"{path}: cannot be written", "free some space there"):
                    saved = {"examples": self._examples, "states": _read_states(self._callbacks)}
                    atomic.write_text(path / CALLBACKS, json.dumps(saved) + "\n")
                    for part in path.rglob("*"):
                        atomic.sync(part)
                    digests.write_digests(path)
        report_saved(None)
        if self._stopping and state.global_step < state.max_steps:
            self._print(f"ending early, as the job has to: saved {path}")
            report_stopped()
            self._leave()
            raise EndEarly(0)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """Write a line of metrics. The summary at the end goes into the result."""
        is_summary = "train_runtime" in objects["logs"]
        if self._world.rank != 0 or self.is_finished or (is_summary and self._has_ended):
            return
        self._owner.check()
        values = _read_logs(objects["logs"])
        self._last |= values
        if is_summary:
            return
        seconds = round(self._seconds + time.monotonic() - self._started, 3)
        place = {"epoch": math.ceil(state.epoch or 0), "step": state.global_step, "seconds": seconds}
        self._metrics.add(place, values)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """Write result.json and curves.png."""
        args.num_train_epochs, args.max_steps = self._asked
        set_seed(args.seed)  # as in Run: for what follows in the script
        if self._world.rank != 0 or self.is_finished:
            return
        self._owner.check()
        evaluated = {
            name: value for name, value in self._last.items() if name.startswith(("eval_", "train_loss"))
        }
        result: dict[str, Any] = {
            **evaluated,
            "epochs": args.num_train_epochs,
            "max_steps": args.max_steps,
            "steps": state.global_step,
        }
        if state.best_model_checkpoint:
            score = {f"eval_{str(args.metric_for_best_model).removeprefix('eval_')}": state.best_metric}
            place = {"step": state.best_global_step, **score}
            result["best"] = place | {"checkpoint": Path(state.best_model_checkpoint).name}
        result["seconds"] = round(self._seconds + time.monotonic() - self._started, 3)
        write_json(
            self.folder / "result.json", result | {"weights_sha256": digests.weights_sha256(objects["model"])}
        )
        self._leave()
        plot(self.folder)
        self._print(f"metrics, checkpoints, result.json and curves.png are in {self.folder}")

    def _leave(self) -> None:
        if self._world.rank == 0:
            self._metrics.close()
            self._owner.release()

    def _print(self, text: str) -> None:
        if self._world.rank == 0:
            say(text)


class _Restore(TrainerCallback):
    """The last callback of a Trainer that resumes: gives the others what they had when it was saved.

    In the middle of an epoch, their on_epoch_begin() had been called before that.
    """

    def __init__(self, states: list[tuple[str, dict[str, Any]]], callbacks: list[TrainerCallback]) -> None:
        self._states, self._callbacks, self._is_due = states, callbacks, True

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """Restore them at the beginning of an epoch."""
        if not (state.epoch or 0) % 1:
            self.on_epoch_begin(args, state, control)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """Restore them within an epoch."""
        if not self._is_due:
            return
        self._is_due = False
        for callback, (name, values) in zip(_list_others(self._callbacks), self._states, strict=False):
            if type(callback).__name__ == name:
                vars(callback).update(values)


def _list_others(callbacks: list[TrainerCallback]) -> list[TrainerCallback]:
    """The callbacks of the script that transformers does not save itself."""
    return [
        each
        for each in callbacks
        if not isinstance(each, ExportableState | RunFolder | _Restore)
        and not type(each).__module__.startswith("transformers.")
    ]


def _read_states(callbacks: list[TrainerCallback]) -> list[tuple[str, dict[str, Any]]]:
    """The class and the plain values of each callback of the script."""
    return [
        (type(each).__name__, {name: value for name, value in vars(each).items() if _is_plain(value)})
        for each in _list_others(callbacks)
    ]


def _is_plain(value: Any) -> bool:
    """Whether JSON can hold a value."""
    try:
        return json.loads(json.dumps(value, allow_nan=False)) == value
    except (TypeError, ValueError, RecursionError):
        return False


def _read_state(checkpoint: Path) -> dict[str, Any]:
    """The TrainerState in a checkpoint, which matches its SHA256SUMS."""
    return json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))


def _has_ended(state: dict[str, Any], epochs: float, max_steps: int) -> bool:
    """Whether the training that this state is of has ended, and was to have as many epochs and steps as now.

    transformers forgets that a callback had ended it, and would train another step.
    """
    control = state.get("stateful_callbacks", {}).get("TrainerControl", {}).get("args", {})
    same = (
        state["max_steps"] == max_steps if max_steps > 0 else state["num_train_epochs"] == math.ceil(epochs)
    )
    return same and bool(control.get("should_training_stop")) and state["num_train_epochs"] < sys.maxsize


def _read_logs(logs: dict[str, Any]) -> dict[str, float]:
    """The numbers that transformers logs, under the names of metrics.jsonl."""
    names = {"loss": "train_loss"}
    values = {
        names.get(name, name): float(value) for name, value in logs.items() if isinstance(value, int | float)
    }
    return {
        name: value
        for name, value in values.items()
        if math.isfinite(value) and name not in ("epoch", "step")
    }
