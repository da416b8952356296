"""Run folder, verified checkpoints and requeue for a Trainer of transformers: see docs/guides/scripts.md.

transformers writes checkpoint-N into its output_dir, file by file, and resumes from the one with the highest
number, even if the job was killed while it wrote that one. Here a checkpoint counts when it has SHA256SUMS,
which is written last.
"""

import json
import math
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hpctrain.checkpoints.saver import Decisions
from hpctrain.distributed.control import report_saved, report_stopped, stop_requested
from hpctrain.distributed.entry import print_errors_in_one_line
from hpctrain.distributed.rendezvous import all_or_none, broadcast
from hpctrain.distributed.world import detect
from hpctrain.errors import EndEarly, HpctrainError, UsageError
from hpctrain.files import atomic, digests
from hpctrain.run.charts import plot
from hpctrain.run.config import add_resumption, write_config, write_json
from hpctrain.run.metrics import Metrics
from hpctrain.run.owner import Owner
from hpctrain.text import first_line


class RunFolder(TrainerCallback):
    """A callback that makes the output_dir of a Trainer a run folder, with metrics, requeue and result.

        folder = RunFolder(arguments)
        trainer = Trainer(model, arguments, callbacks=[folder], ...)
        trainer.train(resume_from_checkpoint=folder.checkpoint)

    `checkpoint` is the newest intact checkpoint, None in a new run. When the launch script asks for the end
    of the job, all ranks save at the same step, and EndEarly ends them. Creating a RunFolder is a collective
    call. It ends every rank if the training has its result already. Raises HpctrainError.
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
        # transformers removes the earlier checkpoint before the new one is verified
        if arguments.save_total_limit == 1:
            raise UsageError(
                "save_total_limit=1 leaves no checkpoint when the job is killed while it saves: "
                "give 2 or more"
            )
        assert arguments.output_dir  # has a default
        self.folder, self._arguments = Path(arguments.output_dir), arguments
        self._decisions, self._stopping = Decisions(self._world), False
        self._last: dict[str, float] = {}
        self._seconds = 0.0
        found = None
        with all_or_none(self._world):
            if self._world.rank == 0:
                found = self._open()
        self.checkpoint, is_done = broadcast(self._world, found)
        self._started = time.monotonic()
        if is_done:
            self._print(f"{self.folder} has its result already: nothing to do")
            raise EndEarly(0)

    def _open(self) -> tuple[str | None, bool]:
        """Own the folder, on rank 0. Returns the checkpoint to resume from, and whether nothing is left."""
        arguments, new = self._arguments, not (self.folder / "config.json").exists()
        if new and any(self.folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*")):
            raise UsageError(
                f"{self.folder} holds checkpoints of a training without RunFolder: give another output_dir"
            )
        try:
            result = self.folder / "result.json"
            done = (
                json.loads(result.read_text(encoding="utf-8"))
                if result.exists()
                else {"epochs": 0, "max_steps": 0}
            )
            if done["epochs"] >= arguments.num_train_epochs and done["max_steps"] >= arguments.max_steps:
                return None, True
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._owner = Owner(self.folder)
            self._owner.acquire()
            checkpoint = self._newest_whole()
            self._metrics = Metrics(self.folder, check=self._owner.check)
            step = int(checkpoint.name.rpartition("-")[2]) if checkpoint else 0
            lines = [
                json.loads(line)
                for line in (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            ]
            # a resumed run repeats the steps of the others
            kept = [line for line in lines if line["step"] <= step]
            self._metrics.rewind(len(kept))
            self._seconds = kept[-1]["seconds"] if kept else 0.0
        except (OSError, ValueError, KeyError) as error:
            raise HpctrainError(
                f"{self.folder}: cannot be used as a run folder ({first_line(error)}): "
                "give another output_dir"
            ) from error
        options = arguments.to_sanitized_dict()
        self._config = write_config(self.folder, self._world, "transformers", options, arguments.device)
        if checkpoint:
            add_resumption(self._config, checkpoint, step)
            self._print(f"resuming from {checkpoint}")
        return str(checkpoint) if checkpoint else None, False

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

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """Save, if the job has to end. After the last step of an epoch an evaluation follows first."""
        if self._decisions.is_due():
            self._decide()
        if self._stopping and state.epoch % 1 and state.global_step < state.max_steps:
            control.should_log = control.should_save = True

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """Save, if the job has to end and work is left."""
        self._decide()
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
                try:
                    for part in path.rglob("*"):
                        atomic.sync(part)
                    digests.write_digests(path)
                except OSError as error:
                    raise HpctrainError(
                        f"{path}: cannot be written ({error.strerror}): free some space there"
                    ) from error
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
        if self._world.rank != 0:
            return
        self._owner.check()
        logs = objects["logs"]
        names = {"loss": "train_loss"}
        values = {
            names.get(name, name): float(value)
            for name, value in logs.items()
            if isinstance(value, int | float)
        }
        values = {name: value for name, value in values.items() if math.isfinite(value) and name != "epoch"}
        self._last |= values
        if "train_runtime" in logs:
            return
        seconds = round(self._seconds + time.monotonic() - self._started, 3)
        place = {"epoch": math.ceil(state.epoch or 0), "step": state.global_step, "seconds": seconds}
        self._metrics.add(place, values)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """Write result.json and curves.png."""
        if self._world.rank != 0:
            return
        self._owner.check()
        evaluated = {
            name: value for name, value in self._last.items() if name.startswith(("eval_", "train_loss"))
        }
        result = {
            **evaluated,
            "epochs": args.num_train_epochs,
            "max_steps": args.max_steps,
            "steps": state.global_step,
        }
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
            print(text, flush=True)
