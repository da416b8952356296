"""What other users and files of any content cannot do: docs/reference/security.md has the list."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from slurm_cluster import REPOSITORY

from hpctrain.commands.add import failed_import
from hpctrain.distributed.python import SAFE_PYTHON
from tests.helpers import BARE_PYTHON, free_port
from tests.tools import warm_start

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
    port = free_port()
    started = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), *command],
            cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={
                **os.environ, "TORCHELASTIC_RUN_ID": "1", "RANK": str(rank), "WORLD_SIZE": str(len(codes)),
                "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(len(codes)), "GROUP_RANK": "0",
                "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": port,
                "TORCH_CPP_LOG_LEVEL": "ERROR", "HPCTRAIN_CACHE": str(cwd), **env,
            },
        )
        for rank, code in enumerate(codes)
    ]  # fmt: skip
    try:
        done = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, *streams) for process, streams in zip(started, done, strict=True)]


RANK = """
import os, sys, torch
import torch.distributed as dist
from hpctrain.distributed import rendezvous
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
    return RANK.replace("BODY", body)


# ---- what ranks send each other ----


@pytest.mark.slow
def test_values_go_round(tmp_path):
    """Of different lengths, with NaN and with bytes of a file name that is not UTF-8."""
    body = (
        'print(rendezvous.gather(world, {"rank": world.rank, "long": "é\\udc80" * 99 * world.rank}) == '
        '[{"rank": r, "long": "é\\udc80" * 99 * r} for r in range(2)], '
        'rendezvous.broadcast(world, ["path", None, world.rank], 1), rendezvous.gather(world, float("nan")))'
    )
    done = start_ranks(tmp_path, rank(body), rank(body))
    assert done == [(0, "True ['path', None, 1] [nan, nan]\n", "")] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("rendezvous.gather(world, 1)", "dist.all_gather_object([None] * 2, Evil())"),
        ("rendezvous.broadcast(world, 1, 1)", "dist.broadcast_object_list([Evil()], 1)"),
    ],
)
def test_a_pickle_of_another_rank_is_not_executed(tmp_path, ours, theirs):
    """torch.distributed's functions for objects send a length and bytes, as ours do."""
    ours, theirs = rank(ours), EVIL + rank(f"print(end=''); {theirs}")
    (status, out, error), _ = start_ranks(tmp_path, ours, theirs)
    assert not (tmp_path / "executed").exists()
    assert (status, error) == (0, "") and out.startswith(
        "rank 1 sent something other than JSON, which is not read: "
    ), out


@pytest.mark.slow
@pytest.mark.parametrize("length", ["2**50", "-1"])
def test_a_length_of_another_rank_is_checked_before_memory_is_allocated(tmp_path, length):
    theirs = (
        f"dist.all_gather([torch.zeros(1, dtype=torch.int64) for _ in range(2)], torch.tensor([{length}]))"
    )
    (status, out, error), _ = start_ranks(tmp_path, rank("rendezvous.gather(world, 1)"), rank(theirs))
    assert (status, error) == (0, "") and out.startswith(f"rank 1 sent a value of {eval(length)} bytes: "), (
        out
    )


@pytest.mark.slow
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


@pytest.mark.parametrize("task", ["classify", "ner", "qa", "generate"])
def test_predictions_keep_their_bits(task):
    import numpy

    from hpctrain.nlp.training.lightning_module import pack_predictions, unpack_predictions

    random = numpy.random.default_rng(1)
    make = {
        "classify": lambda: random.random(3).astype(numpy.float32),
        "ner": lambda: random.integers(0, 9, random.integers(0, 5)).astype(numpy.int16),
        "qa": lambda: random.normal(size=(random.integers(0, 3), 3)).astype(numpy.float32),
        "generate": lambda: random.normal(size=2),
    }[task]
    numbered = [(i, make()) for i in range(50)]
    for (i, one), (j, other) in zip(
        numbered, unpack_predictions(json.loads(json.dumps(pack_predictions(numbered)))), strict=True
    ):
        assert (
            i == j
            and one.dtype == other.dtype
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
        )


# ---- who is a rank of the job ----

SECRET = "0123456789abcdef" * 2
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


@pytest.mark.slow
def test_a_stranger_does_not_become_a_rank(tmp_path):
    """It writes to the store before the real rank 1 and while that joins, and learns no prefix."""
    say = rank("print(rendezvous.gather(world, world.rank))")
    two = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "HPCTRAIN_JOB_SECRET": SECRET}
    first, second, stranger = start_ranks(tmp_path, say, LATE + say, STRANGER, **two)
    assert second == (0, "[0, 1]\n", "") and first[:2] == (0, "[0, 1]\n")
    text = "something that is not a rank of this job answered as rank 1 at localhost:"
    assert first[2].startswith(f"hpctrain: warning: {text}") and first[2].endswith(", and was ignored\n"), (
        first[2]
    )
    assert first[2].count("\n") == 1 and stranger[1] == ""  # it ends with its connection, or after a minute


@pytest.mark.slow
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


def test_the_launch_scripts_make_a_secret_and_print_none(tmp_path):
    for name, text in (("apptainer", "#!/bin/sh\necho apptainer version 0\n"), ("image", "")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    env = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "HPCTRAIN_IMAGE": str(tmp_path / "image"),
    }
    env |= {
        "HF_TOKEN": "hf_abcdefgh",
        "Hf_Api_Key": "shhh",
        "DATABASE_URL": "postgres://me:shhh@host/",
        "HPCTRAIN_JOB_SECRET": SECRET,
        "NCCL_IB_PKEY": "0",
    }
    script = [REPOSITORY / "launch/apptainer_ddp.sh", "--dry-run", "train_ddp"]
    done = subprocess.run(script, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and not any(
        text in done.stdout for text in ("hf_abcdefgh", "shhh", SECRET)
    ), done.stderr
    # The shell that the commands are pasted into has the user's own variables.
    names = ("HF_TOKEN", "Hf_Api_Key", "DATABASE_URL", "HPCTRAIN_JOB_SECRET", "NCCL_IB_PKEY=0\n")
    assert not any(f"export {name}" in done.stdout for name in names)
    assert "\nexport MASTER_PORT=" in done.stdout

    code = f"set -euo pipefail; source {REPOSITORY}/launch/lib/main.sh; "
    code += "make_local_job; forwarded_names; printenv HPCTRAIN_JOB_SECRET"
    env = {name: value for name, value in env.items() if name != "HPCTRAIN_JOB_SECRET"}
    secrets = []
    for _ in range(2):
        *names, secret = subprocess.run(
            ["bash", "-c", code], env=env, capture_output=True, text=True
        ).stdout.split()
        assert "HPCTRAIN_JOB_SECRET" in names and len(secret) == 32 and int(secret, 16)
        secrets.append(secret)
    assert secrets[0] != secrets[1]


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


@pytest.mark.slow
def test_a_pickle_at_the_rendezvous_of_torchrun_is_not_executed(tmp_path):
    """torchrun waits for its second node meanwhile."""
    port, env = free_port(), os.environ | {"HPCTRAIN_JOB_SECRET": SECRET, "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        REPOSITORY / "launch/lib/torchrun.py",
        "--nnodes=2",
        "--nproc-per-node=1",
        "--rdzv-id=17",
    ]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--no-python", "sleep", "60"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=tmp_path, env=env, text=True, **streams) as torchrun:
        try:
            code = [sys.executable, "-c", PICKLER, port]
            stranger = subprocess.run(code, cwd=tmp_path, capture_output=True, text=True, timeout=100)
            output, _ = torchrun.communicate(timeout=100)
        finally:
            torchrun.kill()
    assert stranger.stdout == "has written\n", stranger.stderr
    assert not (tmp_path / "executed").exists()
    assert (
        torchrun.returncode == 1
        and "something that is not a torchrun of this job wrote to its rendezvous" in output
    ), output


@pytest.mark.slow
def test_torchruns_of_a_job_agree_with_a_secret(tmp_path):
    port = free_port()
    command = [
        sys.executable,
        REPOSITORY / "launch/lib/torchrun.py",
        "--nnodes=2",
        "--nproc-per-node=1",
        "--rdzv-id=17",
    ]
    command += [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=localhost:{port}",
        "--no-python",
        "sh",
        "-c",
        "echo rank $RANK",
    ]
    env = os.environ | {"HPCTRAIN_JOB_SECRET": SECRET, "OMP_NUM_THREADS": "1"}
    env |= {"TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()
    nodes = [
        subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    try:
        assert sorted(node.communicate(timeout=100)[0] for node in nodes) == ["rank 0\n", "rank 1\n"]
    finally:
        for node in nodes:
            node.kill()
    assert [*(tmp_path / "tmp").iterdir()] == []
    command = [
        sys.executable,
        REPOSITORY / "launch/lib/torchrun.py",
        "--standalone",
        "--no-python",
        "sh",
        "-c",
        "echo; sleep 60",
    ]
    with subprocess.Popen(
        command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as torchrun:
        torchrun.stdout.readline()
        assert [*(tmp_path / "tmp").iterdir()] != []
        torchrun.terminate()
    assert torchrun.returncode != 0 and [*(tmp_path / "tmp").iterdir()] == []


@pytest.mark.slow
def test_unsigned_heartbeats_and_ends_are_ignored(tmp_path):
    """Who lists the keys of the store knows the prefix. The second rank would end at once, without a word."""
    watch = """
import time
from hpctrain.distributed.watchdog import Watchdog
dog = Watchdog(world, 6, sys.stderr)
store = rendezvous.connect_again()
if world.rank == 0:
    for key, text in {"end": "end", "heartbeat of 0": "5", "heartbeat of 1": "[]"}.items():
        store.set(key, text)
""".strip()
    work = "for _ in range(40): dog.step(); time.sleep(0.1)\ndog.stop(); print('done')"
    code = rank("\n".join(watch.splitlines() + work.splitlines()).replace("\n", "\n        "))
    done = start_ranks(tmp_path, code, code, HPCTRAIN_JOB_SECRET=SECRET)
    assert done == [(0, "done\n", "")] * 2


@pytest.mark.slow
def test_a_lost_rank_is_noticed_although_its_old_heartbeats_are_written_again(tmp_path):
    """Whoever reads two of its signed heartbeats in the store can write them in turns."""
    watch = """
import time
from hpctrain.distributed.watchdog import Watchdog
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
""".strip()
    code = rank(watch.replace("\n", "\n        "))
    (status, out, error), _ = start_ranks(tmp_path, code, code, HPCTRAIN_JOB_SECRET=SECRET)
    assert status == 1 and out == "" and "rank 1 on" in error and "has not answered for" in error, error


# ---- files and links of another user ----

BY_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make files for another user")


@pytest.fixture
def theirs(tmp_path):
    """Give a file, a link, or a folder to another user; returns it."""

    def give(path):
        for each in [path, *path.rglob("*")]:
            os.chown(each, 1234, 1234, follow_symlinks=False)
        return path

    (tmp_path / "mine").write_text("mine")
    yield give
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_folder_that_somebody_else_removes_between_two_looks_is_not_taken(tmp_path):
    """They held /tmp/hpctrain-UID while mkdir failed, removed it before the next look, and made it again."""
    (tmp_path / "mkdir").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "mkdir").chmod(0o755)
    code = f"source {REPOSITORY}/launch/lib/main.sh; PATH={tmp_path}:$PATH; make_own {tmp_path}/own"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (1, "")
    (tmp_path / "own").mkdir()
    assert subprocess.run(["bash", "-c", code], timeout=100).returncode == 0
    (tmp_path / "own").rename(tmp_path / "other")
    (tmp_path / "own").symlink_to(tmp_path / "other")
    assert subprocess.run(["bash", "-c", code], timeout=100).returncode == 1


def test_a_script_for_mpi_imports_no_mpi4py_of_the_current_folder(tmp_path):
    """As `python -m mpi4py SCRIPT` does. A module that is named by -m may be there, as for `python -m`."""
    for folder in ("shared/mpi4py", "own"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "shared/mpi4py/__init__.py").write_text("print('of somebody else')\n")
    (tmp_path / "own/beside.py").write_text("print('beside the script')\n")
    (tmp_path / "own/mine.py").write_text("import beside, sys; print(sys.argv[1:])\n")
    start = [sys.executable, REPOSITORY / "launch/lib/mpi4py_main.py"]
    for words, cwd in (([tmp_path / "own/mine.py"], "shared"), (["-m", "mine"], "own")):
        done = subprocess.run(
            [*start, *words, "-m", "b c"], cwd=tmp_path / cwd, capture_output=True, text=True, timeout=100
        )
        assert done.stdout == "beside the script\n['-m', 'b c']\n", done


@BY_ROOT
@pytest.mark.parametrize("is_link", [False, True])
def test_a_folder_of_somebody_else_does_not_stop_a_job(tmp_path, monkeypatch, theirs, is_link):
    """Its name, on a node where the launch script has none, can be seen on the node where it has one."""
    from hpctrain.distributed import control

    folder = tmp_path / "control"
    folder.mkdir(mode=0o777)
    (folder / "stop").touch()
    (folder / "saved").symlink_to(tmp_path / "mine")
    if is_link:
        folder.rename(tmp_path / "folder")
        folder.symlink_to(tmp_path / "folder")
        os.chown(folder, 1234, 1234, follow_symlinks=False)
    else:
        theirs(folder)
    monkeypatch.setenv("HPCTRAIN_CONTROL", str(folder))
    assert not control.stop_requested()
    control.report_saved(None)
    control.report_failed()
    env = os.environ | {"SLURM_JOB_ID": "17", "HPCTRAIN_CACHE": str(tmp_path)}
    subprocess.run(
        [REPOSITORY / "launch/lib/task.sh", "none", "--", "true"], env=env, check=True, timeout=100
    )
    assert sorted(path.name for path in folder.iterdir()) == ["saved", "stop"]


@BY_ROOT
def test_no_container_is_entered_that_somebody_else_names(tmp_path, theirs):
    """The folder has everything that the tasks of this node expect, before the first of them has made it."""
    folder = tmp_path / "container"
    (folder / "tasks").mkdir(parents=True)
    (folder / "name").write_text("theirs\n")
    os.mkfifo(folder / "alive")
    theirs(folder)
    code = f"""
        set -euo pipefail
        source {REPOSITORY}/launch/lib/trust.sh
        source {REPOSITORY}/launch/lib/launcher.sh
        source {REPOSITORY}/launch/lib/node_container.sh
        ALIVE='' WORDS=(apptainer exec x.sif -- true)
        enter_node_container
        echo "${{WORDS[*]}}$ALIVE"
    """
    env = os.environ | {"HPCTRAIN_NODE_CONTAINER": str(folder), "RANK": "1"}
    done = subprocess.run(["bash", "-c", code], env=env, capture_output=True, text=True, timeout=100)
    assert done.stdout == "apptainer exec x.sif -- true\n", done.stderr


@BY_ROOT
def test_a_name_of_apptainer_that_somebody_else_has_taken():
    """The ranks of the node start without a common container, and at once."""
    # Both shells are one process.
    code = f"""
        touch "$shm"$$
        exec setpriv --reuid=1234 --regid=1234 --clear-groups bash -c '
            set -euo pipefail
            source {REPOSITORY}/launch/lib/trust.sh
            source {REPOSITORY}/launch/lib/launcher.sh
            source {REPOSITORY}/launch/lib/node_container.sh
            WORDS=(sleep exec x.sif -- true)
            enter_node_container
            echo "$SECONDS ${{WORDS[*]}} $shm$$"
            leave_node_container'
    """
    # not in the folders of pytest, which are for its user alone
    folder = f"/tmp/hpctrain-container-0-{os.urandom(8).hex()}"
    env = os.environ | {"HPCTRAIN_NODE_CONTAINER": folder, "RANK": "0", "shm": "/dev/shm/sharens_instance_"}
    done = subprocess.run(["bash", "-c", code], cwd="/", env=env, capture_output=True, text=True, timeout=100)
    seconds, *words, taken = done.stdout.split() or pytest.fail(done.stderr)
    Path(taken).unlink()
    assert (
        int(seconds) < 30 and words == ["sleep", "exec", "x.sif", "--", "true"] and not Path(folder).exists()
    )
    assert re.fullmatch(
        r"hpctrain: on .* each rank mounts the image: .*Operation not permitted\n", done.stderr
    ), done.stderr


@pytest.mark.parametrize("replaced_by", [None, "a file", "a link", "a pipe"])
def test_no_variables_are_read_from_a_file_of_somebody_else(tmp_path, replaced_by):
    """Who can write the submit folder can replace the folder whose name horovodrun shows in ps.

    A new file would be for those as well whom a default ACL of the submit folder names.
    """
    lib = REPOSITORY / "launch/lib"
    code = f"set -euo pipefail; source {lib}/main.sh; source {lib}/launchers/horovodrun.sh; JOB=7"
    code += "; trap() { :; }; hide_environment; echo $HPCTRAIN_ENVIRONMENT"
    own = os.environ | {"HF_TOKEN": "from the file"}
    made = subprocess.run(
        ["bash", "-c", code], cwd=tmp_path, env=own, capture_output=True, text=True, check=True
    )
    secrets = Path(made.stdout.strip())
    assert secrets.stat().st_mode & 0o777 == 0o700 and secrets.parent == tmp_path
    file = secrets / "variables"
    # what somebody else wrote, and this user copied
    (tmp_path / "mine").write_text(f"touch {tmp_path}/executed\n")
    if replaced_by:
        secrets.rename(tmp_path / "moved")
        secrets.mkdir()
    if replaced_by == "a file":
        shutil.copy(tmp_path / "mine", file)
    elif replaced_by == "a link":
        file.symlink_to(tmp_path / "mine")
    elif replaced_by == "a pipe":
        os.mkfifo(file)
        (tmp_path / "timeout").write_text('#!/bin/sh\nexec /usr/bin/timeout 0.5 "$2" "$3" "$4" "$5"\n')
        (tmp_path / "timeout").chmod(0o755)
    env = {
        "HPCTRAIN_ENVIRONMENT": str(secrets),
        "HPCTRAIN_COMMAND": "-- printenv HF_TOKEN ",
        "MASTER_PORT": "1",
    }
    env |= {
        "HPCTRAIN_HOST_PATH": os.environ["PATH"],
        "HPCTRAIN_WORLD_SIZE": "1",
        "HPCTRAIN_TASKS_PER_NODE": "1",
    }
    env |= {f"HOROVOD_{name}": "0" for name in ("RANK", "LOCAL_RANK", "CROSS_RANK")}
    env |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HPCTRAIN_JOB": "7"}
    command = [REPOSITORY / "launch/lib/task.sh", "horovodrun"]
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=100)
    assert not (tmp_path / "executed").exists()
    if not replaced_by:
        assert (done.returncode, done.stdout) == (0, "from the file\n"), done.stderr
    else:
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (127, "", 1), done.stderr
        assert f"{secrets} is not what this job wrote: submit from a folder of your own" in done.stderr


@BY_ROOT
@pytest.mark.parametrize("name", ["checkpoints", "logs", "tensorboard"])
def test_no_folder_of_a_run_is_a_link_of_somebody_else(tmp_path, theirs, name):
    """With a link to another run's checkpoints, those would be overwritten, and the oldest removed."""
    from hpctrain.checkpoints import checkpoint
    from hpctrain.errors import HpctrainError
    from hpctrain.run.prepare import prepare_folder
    from hpctrain.run.options import RunOptions

    for folder in ("run", "other"):
        (tmp_path / folder).mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "other")
    # a link of your own is kept
    prepare_folder("train_ddp", RunOptions(out=tmp_path / "run"))[2].release()
    theirs(tmp_path / "run" / name)
    with pytest.raises(HpctrainError, match=r"run: cannot be written .a link that another user made"):
        prepare_folder("train_ddp", RunOptions(out=tmp_path / "run"))
    # made later
    with pytest.raises(HpctrainError, match=r"could not be written .*a link that another user made"):
        checkpoint.save(tmp_path / "run" / name / "epoch-0001.pt", {})


@BY_ROOT
def test_a_sweep_and_a_download_that_another_user_foresaw_are_refused(tmp_path, monkeypatch, theirs):
    """The best trial was theirs, and theirs the weights, of which nothing was downloaded."""
    from hpctrain.commands.sweep import sweep
    from hpctrain.distributed.world import ALONE
    from hpctrain.errors import HpctrainError
    from hpctrain.nlp.models import hub

    monkeypatch.chdir(tmp_path)
    text = "command: train_single\nmetric: test_accuracy\ndirection: maximize\ntrials: 1\n"
    Path("search.yaml").write_text(text + "parameters:\n  lr: {values: [0.1]}\n")
    Path("runs/search/trial-000").mkdir(parents=True)
    theirs(Path("runs/search"))
    with pytest.raises(HpctrainError, match="runs/search: a folder that another user made: give --out"):
        sweep.main(ALONE, ["search.yaml"])
    # one of their own trials in a folder that is meant
    Path("runs/search/trial-000/parameters.json").write_text('{"lr": 0.1, "data": "theirs"}')
    with pytest.raises(
        HpctrainError, match=r"trial-000/parameters\.json is of another sweep: give the --out"
    ):
        sweep.main(ALONE, ["search.yaml", "--out", "runs/search", "--show"])
    monkeypatch.setattr(hub.HfApi, "model_info", lambda *_, **__: SimpleNamespace(sha="c0"))
    unfinished = Path(".kcbert.c0.partial")
    unfinished.mkdir()
    theirs(unfinished)
    with pytest.raises(HpctrainError, match=r"\.partial: a folder that another user made: fetch into"):
        hub.fetch_model("beomi/kcbert-base", Path("kcbert"))
    assert not Path("kcbert").exists()


@BY_ROOT
@pytest.mark.parametrize("made", ["folder", "link", "parent"])
def test_a_run_folder_that_another_user_foresaw_is_refused(tmp_path, monkeypatch, made):
    """Job numbers can be foreseen: a link there led the files of a run over others of the user's own."""
    from hpctrain.commands import bench
    from hpctrain.errors import HpctrainError
    from hpctrain.run.prepare import prepare_folder
    from hpctrain.run.options import RunOptions
    from hpctrain.servers.tunnel import Tunnel

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "48")
    (tmp_path / "precious").mkdir()
    theirs = Path("runs/train" if made == "parent" else "runs/train/48")
    theirs.parent.mkdir(parents=True)
    if made == "folder":
        theirs.mkdir()
    else:
        theirs.symlink_to(tmp_path / "precious")
    os.chown(theirs, 12345, -1, follow_symlinks=False)
    with pytest.raises(HpctrainError, match="that another user made"):
        prepare_folder("train", RunOptions())
    with pytest.raises(HpctrainError, match="that another user made"), Tunnel("train"):
        pass
    Path("runs/train").rename("runs/bench")
    with pytest.raises(HpctrainError, match="that another user made"):
        bench.prepare(Path("runs/bench/48"), foreseen=True)
    assert not list((tmp_path / "precious").iterdir())


@BY_ROOT
@pytest.mark.parametrize("name", [".probe", "metrics.jsonl", "logs/rank-0.log", "token"])
def test_links_in_a_run_folder_that_others_can_write(tmp_path, theirs, name):
    """Their names can be predicted."""
    from hpctrain.files import atomic
    from hpctrain.servers import tunnel

    (tmp_path / "logs").mkdir()
    link = tmp_path / (f".probe.{os.getpid()}" if name == ".probe" else name)
    link.symlink_to(tmp_path / "mine")
    theirs(link)
    if name == "token":
        with tunnel.Tunnel("serve", tmp_path) as opened:
            assert link.read_text() == opened.token + "\n" and not link.is_symlink()
    elif name == ".probe":
        from hpctrain.errors import HpctrainError
        from hpctrain.run.prepare import prepare_folder
        from hpctrain.run.options import RunOptions

        with pytest.raises(HpctrainError, match=r"cannot be written \(File exists\)"):
            prepare_folder("train_ddp", RunOptions(out=tmp_path))
    else:
        with pytest.raises(PermissionError, match="a link that another user made"):
            atomic.open_to_append(link)


# ---- another user of the cluster ----

HOME = "/home/alice/hpctrain"
# train_ddp, in which rank 1 joins when bob has written to the store, and no rank goes on after an epoch until
# bob is done.
ATTACKED = """
import os, sys, time
from pathlib import Path
import hpctrain
from hpctrain.vision import train_ddp
start = train_ddp.Run.start_epoch
def wait(self, epoch, *rest):
    if epoch == 2:
        print("waits for bob", flush=True)
        while not all(hpctrain.gather(self.world, Path("attacked").exists())):
            time.sleep(0.1)
    return start(self, epoch, *rest)
train_ddp.Run.start_epoch = wait
while os.environ["RANK"] == "1" and not Path("/project/stranger has written").exists():
    time.sleep(0.1)
hpctrain.main(lambda world: train_ddp.main(world, sys.argv[1:]))
"""
GARBAGE = """
import os, pickle, socket, struct, sys
from contextlib import suppress
class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/executed",)
payloads = [bytes(65536), os.urandom(65536), b"GET / HTTP/1.1\\r\\n\\r\\n", pickle.dumps(Evil()), b""]
# the greeting of a TCPStore, and a key of this length
payloads.append(struct.pack("<BIBQ", 0, 0x3C85F7CE, 1, 2**60))
connections = []  # all of them stay open until the end
for target in sys.argv[1:]:
    host, port = target.split(":")
    for payload in payloads:
        connections.append(socket.create_connection((host, int(port)), timeout=10))
        with suppress(OSError):  # closed by the job
            connections[-1].sendall(payload)
print(len(connections))
"""


def listening(cluster, node, number):
    """Where the processes of a job listen on a node, as HOST:PORT, and the secret of the job."""
    mine = f"grep -slzx SLURM_JOB_ID={number} /proc/[0-9]*/environ | cut -d/ -f3"
    secret = f"cat $({mine} | sed 's,.*,/proc/&/environ,') | tr '\\0' '\\n'"
    secret += " | sed -n 's/^HPCTRAIN_JOB_SECRET=//p' | sort -u"
    script = f"ss -Htlnp; echo; {mine}; pgrep -f 'slurmstepd: .{number}[.]'; echo; {secret}"
    sockets, processes, secret = cluster.exec(node, "bash", "-c", script).stdout.split("\n\n")
    mine = {f"pid={process}," for process in processes.split()}
    found = [
        line.split()[3].rpartition(":") for line in sockets.splitlines() if any(text in line for text in mine)
    ]
    return {
        f"{node if host in ('*', '0.0.0.0', '[::]') else host}:{port}" for host, _, port in found
    }, secret.strip()


@pytest.mark.slow
def test_another_user_of_the_cluster_changes_nothing_in_a_running_job(cluster, tmp_path):
    """bob joins, sends garbage, looks for the secret, and writes into folders.

    He is on the login node and on a node of the job.
    """
    home = cluster.host_path(HOME)
    (home / "attacked.py").write_text(ATTACKED)
    command = [
        "launch/apptainer_ddp.sh",
        "attacked.py",
        f"--data={HOME}/digits",
        "--epochs=2",
        "--out=runs/attacked",
    ]
    number = cluster.submit("--hold", "--nodelist=n1,n2", *command, cwd=HOME, env={"OMP_NUM_THREADS": "1"})
    address = {"MASTER_ADDR": "n1", "MASTER_PORT": str(20000 + number * 8 % 12000)}
    with ThreadPoolExecutor() as pool:

        def bob(host, *words, **env):
            return cluster.exec(host, *words, user="bob", env=env, cwd="/project", check=False).stdout

        def attack():
            (first, secret), (second, _) = (listening(cluster, node, number) for node in ("n1", "n2"))
            ports = sorted(first | second)
            assert (
                f"n1:{address['MASTER_PORT']}" in ports
                and len(ports) > 4
                and re.fullmatch("[0-9a-f]{32}", secret)
            ), ports
            sent = pool.map(lambda host: bob(host, BARE_PYTHON, "-c", GARBAGE, *ports), ("login", "n2"))
            read = f"cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline {HOME}/slurm-{number}.out; "
            read += "ls -l /proc/[0-9]*/fd; ps -eo args"
            folders = f"/tmp/hpctrain-control.* /tmp/hpctrain-container-* {HOME}/runs/attacked"
            change = "touch $folder/stop; ln -s /etc/passwd $folder/saved; rm -r $folder"
            write = f"shopt -s nullglob; for folder in {folders}; do echo $folder; {change}; done"
            for node in ("n1", "n2"):
                found = bob(node, "bash", "-c", read)
                assert "attacked.py" in found and secret not in found
                found = bob(node, "bash", "-c", f"({write}) 2>&1")
                assert ("hpctrain-control" in found) == (node == "n1") and "hpctrain-container" in found, (
                    found
                )
                assert found.count("denied") + found.count("not permitted") >= 6, found
            assert list(sent) == [f"{6 * len(ports)}\n"] * 2

        def look(line):
            if "waits for bob" in line and not (home / "attacked").exists():
                try:
                    attack()
                finally:
                    (home / "attacked").touch()

        joined = pool.map(lambda host: bob(host, BARE_PYTHON, "-c", STRANGER, **address), ("login", "n2"))
        ranks = warm_start.torchrun_ranks(
            4, ["train_ddp", f"--data={home}/digits", *command[3:4], "--out=whole"], dict(os.environ)
        )
        whole = pool.submit(warm_start.run, ranks, tmp_path)
        cluster.exec("login", "scontrol", "release", str(number))
        ended = cluster.wait(number, on_line=look)
        output = (home / f"slurm-{number}.out").read_text()
        assert ended.state == "COMPLETED" and (home / "attacked").exists(), output
        assert "something that is not a rank of this job answered as rank 1" in output and list(joined) == [
            "",
            "",
        ], output
        assert whole.result().returncode == 0
    results = [
        json.loads((folder / "result.json").read_text())
        for folder in (tmp_path / "whole", home / "runs/attacked")
    ]
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]
    executed = [
        cluster.exec(node, "ls", "/tmp/executed", check=False).returncode for node in ("login", "n1", "n2")
    ]
    assert executed == [2, 2, 2]


@pytest.mark.slow
def test_no_image_is_entered_that_another_user_can_write(cluster):
    """bob reads the name of the copy of --broadcast in ps, and makes it on both nodes before sbcast does.

    sbcast waits for him.
    """
    home, planted = cluster.host_path(HOME), cluster.host_path("/project/alice/planted")
    wrapper = cluster.host_path("/project/alice/bin") / "sbcast"
    wrapper.parent.mkdir()
    wrapper.write_text(
        '#!/bin/sh\nuntil [ -e /project/alice/planted ]; do sleep 0.1; done\nexec /usr/bin/sbcast "$@"\n'
    )
    wrapper.chmod(0o755)
    (home / "mine").write_text("mine")
    env = {"PATH": "/project/alice/bin:/usr/local/bin:/usr/bin:/bin"}
    options = ["--nodelist=n1,n2", "--ntasks-per-node=1"]
    number = cluster.submit(*options, "launch/apptainer_ddp.sh", "--broadcast", "check", cwd=HOME, env=env)

    def bob(node, script, *words):
        return cluster.exec(node, "bash", "-c", script, "bob", *words, user="bob").stdout

    look = f"ps -eo args | grep -oP '(?<= )/tmp/hpctrain-{number}-[0-9a-f]+[.]sif'"
    name = bob("n1", f"until {look}; do sleep 0.1; done").split()[0]
    bob("n1", 'ln -s "$1" "$2"', f"{HOME}/mine", name)
    bob("n2", 'touch "$1" && chmod 666 "$1"', name)
    planted.touch()
    ended = cluster.wait(number)
    output = (home / f"slurm-{number}.out").read_text()
    left = [cluster.exec(node, "stat", "-c", "%U %F", name).stdout for node in ("n1", "n2")]
    for node in ("n1", "n2"):
        cluster.exec(node, "rm", name)
    assert (
        left == ["bob symbolic link\n", "bob regular empty file\n"] and (home / "mine").read_text() == "mine"
    ), output
    assert ended.state == "COMPLETED" and "check passed: 2 ranks" in output, output
    assert "hpctrain: warning: sbcast could not copy" in output and output.count(f"{name} --") == 1, output


@pytest.mark.slow
def test_a_job_trains_although_another_user_has_its_folders_in_tmp(cluster):
    """On one node bob has a folder that everybody may write, on the other a link to a folder of alice's."""
    nodes, own = ("n1", "n2"), "/tmp/hpctrain-" + cluster.exec("login", "id", "-u", "alice").stdout.strip()
    for node, script in zip(
        nodes, ("umask 0; mkdir -p $0/cache/digests", "ln -s /project/alice/mine $0"), strict=True
    ):
        cluster.exec(node, "bash", "-c", "rm -rf $0*", own)
        cluster.exec(node, "bash", "-c", script, own, user="bob")
    cluster.exec("login", "mkdir", "/project/alice/mine", user="alice")
    command = ["launch/apptainer_ddp.sh", "train_ddp", "--data=digits", "--epochs=1", "--out=runs/taken"]
    number = cluster.submit("--nodelist=n1,n2", "--ntasks-per-node=1", *command, cwd=HOME)
    ended = cluster.wait(number)
    output = (cluster.host_path(HOME) / f"slurm-{number}.out").read_text()
    found = [
        cluster.exec(node, "bash", "-c", "find -L $0 -type f; stat -c '%U %a' $0.*; true", own).stdout
        for node in nodes
    ]
    for node in nodes:
        cluster.exec(node, "bash", "-c", "rm -rf $0*", own)
    assert (
        ended.state == "COMPLETED"
        and output.count(f"{own} belongs to somebody else: caches are in {own}.") == 2
    ), output
    assert found == ["alice 700\n"] * 2, found


OTHER_CONMON = """
umask 0
mkdir -p $0/config/containers
printf '#!/bin/sh\\ntouch %s/executed\\n' $0 >$0/conmon
chmod +x $0/conmon
printf '[engine]\\nconmon_path = ["%s/conmon"]\\n' $0 >$0/config/containers/containers.conf
"""


@pytest.mark.slow
def test_podman_hpc_takes_no_configuration_of_another_user(cluster, podman_image):
    """podman runs the conmon that its configuration names, and podman-hpc makes that below /tmp/UID_hpc."""
    folder = f"/tmp/{cluster.exec('login', 'id', '-u', 'alice').stdout.strip()}_hpc"
    nodes = ("n1", "n2")
    for taken in nodes:
        cluster.wait_until_settled()
        for node in nodes:
            cluster.exec(node, "rm", "-rf", folder)
        cluster.exec(taken, "bash", "-c", OTHER_CONMON, folder, user="bob")
        command = ["--nodelist=n1,n2", "--ntasks-per-node=1", "launch/podman_hpc_ddp.sh", "check"]
        number = cluster.submit(*command, cwd=HOME, env=podman_image)
        ended = cluster.wait(number)
        output = (cluster.host_path(HOME) / f"slurm-{number}.out").read_text()
        executed = cluster.exec(taken, "test", "-e", f"{folder}/executed", check=False).returncode == 0
        cluster.exec(taken, "rm", "-rf", folder)
        assert ended.state == "FAILED" and not executed, output
        assert (
            f"{folder} on {taken}, which podman-hpc uses, belongs to somebody else or cannot be made: "
            in output
        ), output


@BY_ROOT
def test_the_name_of_an_environment_is_no_folder_of_somebody_else(tmp_path, theirs):
    """HPCTRAIN_PYTHON_ENV=torch may be an environment of conda, but bin/activate of ./torch was run."""
    activate = tmp_path / "torch/bin/activate"
    activate.parent.mkdir(parents=True)
    activate.write_text("touch executed; exit 7\n")
    env = os.environ | {"HPCTRAIN_RUNTIME": "none", "HPCTRAIN_TASKS": "1", "HPCTRAIN_PYTHON_ENV": "torch"}
    command = [REPOSITORY / "launch/local.sh", "check"]

    def launch():
        return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=100)

    assert launch().returncode == 7 and (tmp_path / "executed").exists()  # one of your own
    (tmp_path / "executed").unlink()
    theirs(tmp_path / "torch")
    done = launch()
    message = "HPCTRAIN_PYTHON_ENV=torch is not a venv (give that of somebody else by its path), "
    assert f"{message}and there is no conda" in done.stderr, done
    assert not (tmp_path / "executed").exists()


# ---- data ----


@BY_ROOT
def test_a_link_of_somebody_else_to_a_file_of_yours_is_not_read(tmp_path, theirs):
    """The error about its first line quoted a token in the log of the job, which others may read."""
    from hpctrain.errors import HpctrainError
    from hpctrain.files.plain import open_plain

    (tmp_path / "token").write_text("hf_secret")
    (tmp_path / "link").symlink_to("token")
    with open_plain(tmp_path / "link") as file:
        assert file.read() == b"hf_secret"
    theirs(tmp_path / "link")
    with pytest.raises(
        HpctrainError, match=r"link: a link that another user made leads to a file of yours, .*token"
    ):
        open_plain(tmp_path / "link")
    os.chown(tmp_path / "token", 1234, 1234)
    with open_plain(tmp_path / "link") as file:
        assert file.read() == b"hf_secret"


@BY_ROOT
def test_a_link_of_somebody_else_to_a_folder_of_yours_is_not_read(tmp_path):
    from hpctrain.errors import HpctrainError
    from hpctrain.nlp.data.splits import find_split_files

    for name in ("private/train.txt", "data/test/a.txt"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("secret")
    (tmp_path / "data/train").symlink_to("../private")
    assert sorted(find_split_files(tmp_path / "data")) == ["test", "train"]
    os.chown(tmp_path / "data/train", 1234, 1234, follow_symlinks=False)
    with pytest.raises(HpctrainError, match=r"train\.txt: a link that another user made leads to"):
        find_split_files(tmp_path / "data")
    os.chown(tmp_path / "private/train.txt", 1234, 1234)
    assert sorted(find_split_files(tmp_path / "data")) == ["test", "train"]


# ---- models ----


def hpctrain(cwd, *words, stdin="", **env):
    folders = {"HPCTRAIN_CACHE": str(cwd / "cache"), "MPLCONFIGDIR": str(cwd), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-m", "hpctrain", *map(str, words)],
        cwd=cwd, input=stdin, capture_output=True, text=True, timeout=300, env=os.environ | folders | env,
    )  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a small model of nlp.classify."""
    from hpctrain.nlp.data import formats
    from hpctrain.nlp.data.splits import load_splits
    from hpctrain.nlp.models.scratch import create_model
    from hpctrain.nlp.tasks import classify

    folder = tmp_path_factory.mktemp("model") / "model"
    texts = [document.text for document in load_splits(classify.TASK, None)["train"]]
    config = folder.with_name("config.json")
    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 600,
    }
    config.write_text(json.dumps({"model_type": "bert"} | shape))
    create_model(folder, str(config), "bert", texts, seed=1, max_length=128)
    ours = {"task": "classify", "labels": ["0", "1"], "max_length": 128, "stride": 0, "settings": {}}
    (folder / "config.json").write_text(
        json.dumps(json.loads((folder / "config.json").read_text()) | {"hpctrain": ours})
    )
    (folder / "SHA256SUMS").unlink()  # a folder from elsewhere
    return folder


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no option -P")
def test_modules_in_a_folder_of_others_are_not_imported(tmp_path, monkeypatch):
    for name in ("torch", "yaml", "optuna", "numpy", "uv"):
        (tmp_path / f"{name}.py").write_text("open('canary', 'w')")
    (tmp_path / "search.yaml").write_text(
        "{command: train_single --epochs 1, metric: test_accuracy, direction: maximize, trials: 1,"
        " parameters: {seed: {values: [1]}}}"
    )
    done = subprocess.run(
        [*SAFE_PYTHON, "-m", "hpctrain", "sweep", "search.yaml", "--out", "sweep"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env=os.environ | {"MPLCONFIGDIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    monkeypatch.chdir(tmp_path)
    (tmp_path / "added").mkdir()
    assert failed_import(tmp_path / "added") is None
    assert not (tmp_path / "canary").exists()


@pytest.fixture
def copy(model, tmp_path):
    return Path(shutil.copytree(model, tmp_path / "copy"))


COMMANDS = [("predict", "copy", "text"), ("nlp.classify", "--model", "copy", "--epochs", "0", "--out", "run")]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_code_of_a_model_is_not_run_and_nobody_is_asked(copy, tmp_path, command):
    """Not where the folder has a tokenizer of its own either."""
    config = json.loads((copy / "config.json").read_text())
    evil = {"AutoConfig": "evil.EvilConfig", "AutoModelForSequenceClassification": "evil.EvilModel"}
    config |= {"model_type": "evil", "auto_map": evil}
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    done = hpctrain(tmp_path, *command, stdin="y\n" * 9)
    assert not (tmp_path / "executed").exists() and "[y/N]" not in done.stdout
    message = "hpctrain: error: copy: its model needs Python code of its own (auto_map in config.json), "
    message += "and code of models is not run: "
    assert done.returncode == 1 and done.stderr.startswith(message) and done.stderr.count("\n") == 1, (
        done.stderr
    )


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_pickle_of_a_model_is_not_executed(copy, tmp_path, command):
    import torch

    (copy / "model.safetensors").unlink()
    names = {}
    exec(EVIL, names)
    names["Evil"].__reduce__ = lambda _: (open, (str(tmp_path / "executed"), "w"))
    torch.save({"evil": names["Evil"]()}, copy / "pytorch_model.bin")
    done = hpctrain(tmp_path, *command)
    assert not (tmp_path / "executed").exists()
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(
        "hpctrain: error: copy/pytorch_model.bin: holds other objects than weights"
    ), done.stderr
    assert "convert the weights to safetensors" in done.stderr


def test_json_that_is_nested_too_deeply_is_one_line(tmp_path):
    from hpctrain.errors import HpctrainError
    from hpctrain.nlp import predict
    from hpctrain.nlp.data import formats
    from hpctrain.nlp.models.model_folder import read_json_object
    from hpctrain.nlp.tasks import pair, qa

    path = tmp_path / "train.json"
    path.write_text("[" * 200_000 + "]" * 200_000)
    for read in (
        pair.TASK.read,
        qa.TASK.read,
        read_json_object,
        lambda path: formats.read_json(path, list, "a list"),
    ):
        with pytest.raises(HpctrainError, match=r"train\.json: .*") as error:
            read(path)
        assert "\n" not in str(error.value)
    (tmp_path / "config.json").write_text('{"a":' * 200_000 + "1" + "}" * 200_000)
    with pytest.raises(HpctrainError, match="not a model fine-tuned by hpctrain"):
        predict.find_task(tmp_path)


# ---- secrets and permissions ----


@pytest.mark.slow
def test_a_run_holds_no_secret_and_is_for_its_user_alone(tmp_path):
    """With a umask that lets others read.

    The token is where a user would put it by mistake: in names of folders.
    """
    token = "hf_abcdefghijklmnop"
    (tmp_path / "there").mkdir(mode=0o755)
    for out in (f"new/{token}", "there"):
        code = (
            "import os, sys; os.umask(0o022); command = [sys.executable, '-m', 'hpctrain', *sys.argv[1:]]; "
        )
        code += "os.execv(sys.executable, command)"
        words = ["nlp.ner", "--epochs", "1", "--limit", "40", "--out", out]
        env = {
            "HF_TOKEN": token,
            "HPCTRAIN_JOB_SECRET": SECRET,
            "HPCTRAIN_IMAGE": "docker://me:pass@host/image",
            "HPCTRAIN_CACHE": str(tmp_path / "caches/cache"),
        }
        done = subprocess.run(
            [sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True,
            env=os.environ | env | {"MPLCONFIGDIR": str(tmp_path)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found = [done.stdout + done.stderr]
        for path in (tmp_path / out).rglob("*"):
            if path.is_file():
                found.append(path.read_bytes().decode("latin-1"))
        assert not any(text in content for content in found for text in (token, SECRET, "me:pass"))
    modes = {
        name: (tmp_path / name).stat().st_mode & 0o777 for name in (f"new/{token}", "there", "caches/cache")
    }
    assert modes == {f"new/{token}": 0o700, "there": 0o755, "caches/cache": 0o700}
