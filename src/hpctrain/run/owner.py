"""One job writes in a run folder: its owner, which owner.json names.

The owner updates the time stamp of owner.json every BEAT seconds. Another job that wants the folder watches
the time stamp for five beats. If it changes, the other job is refused. If it does not, the owner is dead, and
the other job becomes the owner. A restart of the same job becomes the owner at once. Ranks may live on after
Slurm has given up their node: before they write again, they read the name of the new owner, and end.

This works without locks, which many parallel file systems lack, and without equal clocks on the nodes.
"""

import hashlib
import json
import os
import platform
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpctrain.distributed.entry import on_failure
from hpctrain.distributed.world import job_id, restart_count
from hpctrain.errors import HpctrainError
from hpctrain.files import atomic
from hpctrain.files.plain import read_object
from hpctrain.files.trust import is_of_others
from hpctrain.text import say

BEAT = 2.0  # s


class Owner:
    """Ownership of a run folder by one rank, from acquire() to release(); the others check() its `id`."""

    def __init__(self, folder: Path, own_id: str = "") -> None:
        self._path = folder / "owner.json"
        self.id = own_id or os.urandom(8).hex()
        self._own = {"job": job_id(), "restart": restart_count(), "host": platform.node(), "pid": os.getpid()}
        self._own |= {"space": _process_space(), "launch": launch_id(), "id": self.id}
        self._released = threading.Event()
        self._acquired = False
        # When owner.json was there last: the configurations, and what the first one said. The folder of
        # this run is known by that, as others cannot read it.
        self._configs: set[Path] = set()
        self._first = b""

    def acquire(self) -> None:
        """Become the owner. Raises HpctrainError, which names the job that is the owner, and OSError."""
        text = json.dumps(self._own) + "\n"
        try:
            # of two jobs that begin at the same time, one fails
            with self._path.open("x", encoding="utf-8") as file:
                try:
                    file.write(text)
                    file.flush()
                except OSError:
                    # A full disk: the next start must not find an owner that never wrote.
                    self._path.unlink(missing_ok=True)
                    raise
        except FileExistsError:
            earlier = self._read()
            if earlier is not None and not self._is_dead(earlier):
                line = (
                    f"hpctrain: {_name(earlier)} wrote in {self._path.parent}: watching whether it still does"
                )
                say(line)  # another user may have written the file
                self._watch()
            atomic.write_text(self._path, text)
        self._acquired = True
        on_failure.append(self.release)
        threading.Thread(target=self._beat, daemon=True).start()

    def check(self) -> None:
        """Raise HpctrainError if another job owns the folder by now. Ignores errors of the file system."""
        with suppress(OSError):
            if self._path.parent.exists() and is_of_others(self._path.parent.stat()):
                raise self._exchanged()
            now = self._read()
            if not now and self._configs:
                now = self._take_back()
            if now is None or now.get("id") != self._own["id"]:
                new = f"{_name(now)} continues this run" if now else f"somebody has removed {self._path}"
                raise HpctrainError(f"{self._path.parent}: {new}, so this one ends and writes nothing more")
            self._configs = self._list_configs() or self._configs  # the file system may be gone by now
            self._first = self._read_first()

    def _list_configs(self) -> set[Path]:
        return {*self._path.parent.glob("config*.json")}

    def _read_first(self) -> bytes:
        return self._path.with_name("config.json").read_bytes()

    def _take_back(self) -> dict[str, Any] | None:
        """The owner of a folder whose owner.json is lost or damaged: this one, unless there is another start.

        That would have a config.N.json.

        A folder without its configurations is the place of a file system that is gone: waits for it. Raises
        HpctrainError if it does not come back, or if another folder is in the place of this run's: somebody
        who can write beside it may have exchanged them, to read the weights or have another run overwritten.
        """
        folder, retry = self._path.parent, atomic.Retry()
        problem = f"{folder}: the files of this run are gone: is its file system mounted?"
        while not (configs := self._list_configs()):
            retry.wait(HpctrainError(f"{problem} Start again with --resume when it is"), problem)
        if self._read_first() != self._first:
            raise self._exchanged()
        if configs == self._configs and not self._read():
            if self._acquired:
                self._path.unlink(missing_ok=True)
                with suppress(FileExistsError), self._path.open("x", encoding="utf-8") as file:
                    file.write(json.dumps(self._own) + "\n")
                say(f"hpctrain: {self._path} was removed or damaged: made again")
            else:
                return self._own  # rank 0 makes it again
        return self._read()

    def release(self) -> None:
        """Leave the folder to the next job."""
        self._released.set()
        with suppress(OSError):
            if (self._read() or {}).get("id") == self._own["id"]:
                self._path.unlink()

    def _read(self) -> dict[str, Any] | None:
        """The content of owner.json; None if there is none, empty if it makes no sense."""
        try:
            return read_object(self._path)
        except FileNotFoundError:
            return None
        except ValueError:
            return {}

    def _is_dead(self, earlier: dict[str, Any]) -> bool:
        """Whether no other live process can be the earlier owner.

        It may be another start of this job, an ended process of this machine, or (notebook) this process.
        """
        if earlier.get("job") == self._own["job"] and earlier.get("restart") != self._own["restart"]:
            return True
        pid = earlier.get("pid")
        return earlier.get("space") == self._own["space"] and (
            pid == os.getpid() or not Path(f"/proc/{pid}").exists()
        )

    def _watch(self) -> None:
        """Return when the file has not changed for five beats. Raises HpctrainError if it does."""

        def stamp() -> tuple[int, int]:
            # NFS asks the server for the time stamp when a file is opened
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
            return status.st_mtime_ns, status.st_ino

        with suppress(FileNotFoundError):  # it was released
            first = stamp()
            for _ in range(10):
                time.sleep(BEAT / 2)
                if stamp() != first:
                    raise self._refusal(self._read() or {})

    def _refusal(self, owner: dict[str, Any]) -> HpctrainError:
        return HpctrainError(
            f"{self._path.parent}: {_name(owner)} writes in this run folder: "
            "wait for its end or cancel it, or give another --out"
        )

    def _exchanged(self) -> HpctrainError:
        return HpctrainError(
            f"{self._path.parent}: another folder is in the place of this run's, so this run ends and writes "
            "nothing more"
        )

    def _beat(self) -> None:
        while not self._released.wait(BEAT):
            with suppress(OSError):
                if (self._read() or {}).get("id") == self._own["id"]:
                    os.utime(self._path)


def launch_id() -> str:
    """What the starts of ranks by one launch script have in common, as those that torchrun starts again."""
    return hashlib.sha256(os.environ.get("HPCTRAIN_JOB_SECRET", "").encode()).hexdigest()[:16]


def _name(owner: dict[str, Any]) -> str:
    return f"job {owner.get('job', '?')} on {owner.get('host', '?')} (process {owner.get('pid', '?')})"


def _process_space() -> str:
    """The boot of the machine and the namespace of processes: process ids are comparable if it is equal."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return os.urandom(8).hex()
