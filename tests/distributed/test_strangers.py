"""What a process that is no rank of the job, or one that sends other things than ours, cannot do to it.

docs/reference/security.md has the list.
"""

import os
import subprocess
import sys
import textwrap

import pytest
from slurm_cluster import REPOSITORY

from tests.helpers import free_port, run_command

pytestmark = pytest.mark.slow
SECRET = "0123456789abcdef" * 2
# Unpickled, it creates the file `executed`; every test of pickles looks for that file.
EVIL = """
class Evil:
    def __reduce__(self):
        return open, ("executed", "w")
"""


def start_ranks(cwd, *codes, command=(), **env):
    """Run a process for each piece of code, with the variables of torchrun.

    Returns (status, stdout, stderr) of each.
    """
    size = str(len(codes))
    world = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": "0"}
    world |= {"GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    world |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "HPCTRAIN_CACHE": str(cwd), **env}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = []
    for rank, code in enumerate(codes):
        words = [sys.executable, "-c", textwrap.dedent(code), *command]
        env = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | world
        started.append(subprocess.Popen(words, cwd=cwd, env=env, text=True, **pipes))
    try:
        done = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, *streams) for process, streams in zip(started, done, strict=True)]


RANK = """
import os, sys, time, torch
import torch.distributed as dist
from hpctrain.distributed import rendezvous
from hpctrain.distributed.watchdog import Watchdog
from hpctrain.errors import HpctrainError
from hpctrain.distributed.world import detect
world = detect()
with rendezvous.process_group(world, torch.device("cpu")):
    try:
        BODY
    except HpctrainError as error:
        print(error)
sys.stdout.flush()
os._exit(0)
"""


def rank(body):
    return RANK.replace("BODY", body.strip().replace("\n", "\n        "))


# ---- what ranks send each other ----


def test_values_go_round(tmp_path):
    """Of different lengths, with NaN and with bytes of a file name that is not UTF-8."""
    body = (
        'print(rendezvous.gather(world, {"rank": world.rank, "long": "é\\udc80" * 99 * world.rank}) == '
        '[{"rank": r, "long": "é\\udc80" * 99 * r} for r in range(2)], '
        'rendezvous.broadcast(world, ["path", None, world.rank], 1), rendezvous.gather(world, float("nan")))'
    )
    done = start_ranks(tmp_path, rank(body), rank(body))
    assert done == [(0, "True ['path', None, 1] [nan, nan]\n", "")] * 2


# A rank that sends a pickle where ours send JSON, and one that announces a value of this length.
PICKLE = (
    "rendezvous._encode = lambda _: torch.frombuffer(bytearray(pickle.dumps(Evil())), dtype=torch.uint8); "
)
OF_LENGTH = """
of_ranks = [torch.zeros(2, dtype=torch.int64) for _ in range(2)]
dist.all_gather(of_ranks, torch.tensor([zlib.crc32(b"gather()"), {}]))
"""


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        pytest.param(
            "gather(world, 1)",
            PICKLE + "rendezvous.gather(world, 1)",
            "JSON",
            marks=pytest.mark.main_road,
        ),
        ("broadcast(world, 1, 1)", PICKLE + "rendezvous.broadcast(world, 1, 1)", "JSON"),
        # A length is checked before memory is allocated.
        ("gather(world, 1)", OF_LENGTH.format(2**50), f"{2**50} bytes"),
        ("gather(world, 1)", OF_LENGTH.format(-1), "-1 bytes"),
    ],
    ids=["gather", "broadcast", "long", "negative"],
)
def test_a_pickle_of_another_rank_is_not_executed(tmp_path, ours, theirs, said):
    theirs = EVIL + rank(f"print(end=''); import pickle, zlib\n{theirs.strip()}")
    (status, out, error), _ = start_ranks(tmp_path, rank(f"rendezvous.{ours}"), theirs)
    assert not (tmp_path / "executed").exists()
    assert (status, error) == (0, "") and out.startswith("rank 1 sent ") and said in out, out


@pytest.mark.parametrize("trainer", ["train_ddp", "train_lightning", "nlp.ner"])
def test_no_trainer_unpickles_what_a_rank_sends(tmp_path, trainer):
    """All of torch.distributed's functions for objects unpickle in one place."""
    code = """
        import sys
        from torch.distributed import distributed_c10d
        from hpctrain import __main__
        def refuse(*_):
            sys.exit("a pickle")
        distributed_c10d._tensor_to_object = distributed_c10d._object_to_tensor = refuse
        __main__.main()
    """
    done = start_ranks(tmp_path, code, code, command=[trainer, "--epochs", "1", "--out", "run"])
    assert [(status, error) for status, _, error in done] == [(0, "")] * 2
    assert (tmp_path / "run/result.json").exists()


# ---- who is a rank of the job ----

# Connects to the store as anyone in the network can, before or after the ranks, and writes what a rank
# writes.
STRANGER = """
import os, sys, time
from datetime import timedelta
import torch.distributed as dist
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
store = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=60))
own_id = "11112222333344445555666677778888"
answer = f"answer to {own_id}"
for number in range(1200):
    store.set("id of 1", own_id)
    if store.check([answer]):
        print("joined as rank 1 with the prefix", store.get(answer).decode())
        break
    time.sleep(0.05)
    if number == 20:
        open("stranger has written", "w")
sys.stdout.flush()
os._exit(0)
"""
LATE = "import os, time\nwhile not os.path.exists('stranger has written'): time.sleep(0.1)\n"


@pytest.mark.main_road
def test_a_stranger_does_not_become_a_rank(tmp_path):
    """It writes to the store before the real rank 1 and while that joins, and learns no prefix."""
    say = rank("print(rendezvous.gather(world, world.rank))")
    two = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "HPCTRAIN_JOB_SECRET": SECRET}
    first, second, stranger = start_ranks(tmp_path, say, LATE + say, STRANGER, **two)
    assert second == (0, "[0, 1]\n", "") and first[:2] == (0, "[0, 1]\n")
    assert first[2].startswith("hpctrain: warning: ") and first[2].count("\n") == 1
    assert " as rank 1 at localhost:" in first[2]
    assert stranger[1] == ""  # it ends with its connection, or after a minute


@pytest.mark.main_road
def test_ranks_join_with_a_secret_and_use_a_prefix_that_it_hides(tmp_path):
    spy = """
import torch.distributed as dist
make = dist.PrefixStore
dist.PrefixStore = lambda prefix, store: print(prefix) or make(prefix, store)
"""
    say = spy + rank("rendezvous.gather(world, 1)")
    (one, first, _), (other, second, _) = start_ranks(tmp_path, say, say, HPCTRAIN_JOB_SECRET=SECRET)
    assert (one, other) == (0, 0) and first == second
    assert len(first.strip()) == 64  # a signature, and not the id that rank 0 writes to the store


def test_unsigned_heartbeats_and_ends_are_ignored(tmp_path):
    """Who lists the keys of the store knows the prefix. The second rank would end at once, without a word."""
    code = rank("""
dog = Watchdog(world, 6, sys.stderr)
store = rendezvous.connect_again()
if world.rank == 0:
    for key, text in {"end": "end", "heartbeat of 0": "5", "heartbeat of 1": "[]"}.items():
        store.set(key, text)
for _ in range(40): dog.step(); time.sleep(0.1)
dog.stop(); print('done')
""")
    done = start_ranks(tmp_path, code, code, HPCTRAIN_JOB_SECRET=SECRET)
    assert done == [(0, "done\n", "")] * 2


def test_a_lost_rank_is_noticed_although_its_old_heartbeats_are_written_again(tmp_path):
    """Whoever reads two of its signed heartbeats in the store can write them in turns."""
    code = rank("""
dog = Watchdog(world, 6, sys.stderr)
store = rendezvous.connect_again()
dog.step()
if world.rank == 1:
    old, key = [], "heartbeat of 1"
    while len(old) < 2:
        time.sleep(0.1)
        if store.check([key]) and (text := store.get(key)) not in old: old.append(text)
    dog.stop()
for number in range(200):
    time.sleep(0.1)
    if world.rank == 1: store.set(key, old[number // 10 % 2])
print("not noticed")
""")
    (status, out, error), _ = start_ranks(tmp_path, code, code, HPCTRAIN_JOB_SECRET=SECRET)
    assert (status, out) == (1, "") and "rank 1 on" in error and "has not answered for" in error, error


# ---- the rendezvous of torchrun, which launch/lib/torchrun.py signs ----

# Everybody who reaches the store of torchrun's rendezvous can list its keys.
PICKLER = (
    EVIL
    + """
import base64, os, pickle, sys, time
from datetime import timedelta
import torch.distributed as dist
store = dist.TCPStore("localhost", int(sys.argv[1]), is_master=False, timeout=timedelta(seconds=60))
while not (keys := [key for key in store.list_keys() if "torch.rendezvous." in key]):
    time.sleep(0.1)
store.set(keys[0], base64.b64encode(pickle.dumps(Evil())).decode())
print("has written", flush=True)
os._exit(0)
"""
)


def torchrun(cwd, *words, stderr=subprocess.STDOUT, **env):
    env = os.environ | {"HPCTRAIN_JOB_SECRET": SECRET, "OMP_NUM_THREADS": "1"} | env
    command = [sys.executable, REPOSITORY / "launch/lib/torchrun.py", *words]
    return subprocess.Popen(command, cwd=cwd, env=env, text=True, stdout=subprocess.PIPE, stderr=stderr)


def of_two_nodes(port):
    job = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-id=17", "--rdzv-backend=c10d"]
    return [*job, f"--rdzv-endpoint=localhost:{port}", "--no-python"]


def test_a_pickle_at_the_rendezvous_of_torchrun_is_not_executed(tmp_path):
    """torchrun waits for its second node meanwhile."""
    port = free_port()
    with torchrun(tmp_path, *of_two_nodes(port), "sleep", "60") as node:
        try:
            code = [sys.executable, "-c", PICKLER, port]
            stranger = run_command(code, cwd=tmp_path, timeout=100)
            output, _ = node.communicate(timeout=100)
        finally:
            node.kill()
    assert stranger.stdout == "has written\n", stranger.stderr
    assert not (tmp_path / "executed").exists()
    assert node.returncode == 1 and "is not a torchrun of this job" in output, output


def test_torchruns_of_a_job_agree_with_a_secret(tmp_path):
    (temporary := tmp_path / "tmp").mkdir()
    start = {"stderr": subprocess.DEVNULL, "TMPDIR": str(temporary)}
    words = [*of_two_nodes(free_port()), "sh", "-c", "echo rank $RANK"]
    nodes = [torchrun(tmp_path, *words, **start) for _ in range(2)]
    try:
        assert sorted(node.communicate(timeout=100)[0] for node in nodes) == ["rank 0\n", "rank 1\n"]
    finally:
        for node in nodes:
            node.kill()
    assert [*temporary.iterdir()] == []
    with torchrun(tmp_path, "--standalone", "--no-python", "sh", "-c", "echo; sleep 60", **start) as node:
        node.stdout.readline()
        assert [*temporary.iterdir()] != []
        node.terminate()
    assert node.returncode != 0 and [*temporary.iterdir()] == []
