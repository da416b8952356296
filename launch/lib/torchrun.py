"""torchrun with signed states of its rendezvous, for launch/lib/launchers/torchrun.sh.

The torchruns of a job agree on its nodes by a pickle in a store, whose port has no password. Whoever writes
another pickle there runs code in each of them. Here the pickle is behind its HMAC-SHA256 with
HPCTRAIN_JOB_SECRET, and one without it is not read.

This runs in any image, whose version of hpctrain may be another one. So it imports nothing of hpctrain.
"""

import hmac
import os
import pickle
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, dynamic_rendezvous

LENGTH = 32  # bytes of a signature


def sign(content: bytes) -> bytes:
    return hmac.digest(os.environ["HPCTRAIN_JOB_SECRET"].encode(), b"torchrun " + content, "sha256")


def dumps(state: object) -> bytes:
    content = pickle.dumps(state)
    return sign(content) + content


def loads(signed: bytes) -> Any:
    """The state of dumps(). Raises PickleError if its signature is wrong."""
    content = signed[LENGTH:]
    if not hmac.compare_digest(signed[:LENGTH], sign(content)):
        raise pickle.PickleError(
            "something that is not a torchrun of this job wrote to its rendezvous, which is not read"
        )
    return pickle.loads(content)


if __name__ == "__main__":
    if os.environ.get("HPCTRAIN_JOB_SECRET") and hasattr(dynamic_rendezvous, "pickle"):
        dynamic_rendezvous.pickle = SimpleNamespace(dumps=dumps, loads=loads, PickleError=pickle.PickleError)
    # Otherwise the ranks get the full name of the first node, which others cannot always resolve.
    if name := os.environ.get("SLURMD_NODENAME"):
        sys.argv.insert(1, f"--local-addr={name}")
    # By itself no torchrun knows that MASTER_ADDR is its own, if that is the address of a second network.
    if (number := os.environ.get("SLURM_NODEID")) and "--standalone" not in sys.argv:
        sys.argv.insert(1, f"--rdzv-conf=is_host={int(number == '0')}")
    # Without a folder, torchrun makes /tmp/torchelastic_* and leaves it there.
    with tempfile.TemporaryDirectory(prefix="hpctrain-torchrun.") as logs:
        sys.argv[1:1] = [f"--log-dir={logs}"]
        node = os.uname().nodename
        try:
            run.main()
        except ChildFailedError as error:  # a traceback of torchrun would hide the lines of the rank
            rank, failure = error.get_first_failure()
            how = f"ended with status {failure.exitcode}"
            if failure.exitcode < 0:
                how = f"was killed by signal {-failure.exitcode}"
            sys.exit(
                f"hpctrain: rank {rank} was the first to fail on {node}: "
                f"process {failure.pid} {how}, see its lines above"
            )
        except RendezvousConnectionError as error:  # the torchrun of the first node has ended
            why = str(error.__cause__ or error).partition("\n")[0]
            sys.exit(
                f"hpctrain: torchrun on {node} has no connection to the first node ({why}): see its lines"
            )
        except SignalException as error:  # Slurm ends the job, or the node of another rank has failed
            sys.exit(f"hpctrain: torchrun on {node} was ended by signal {int(error.sigval)}")
