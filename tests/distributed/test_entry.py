"""How the process of a rank ends: its exit status, and what it prints."""

import os
import re
import subprocess
import sys

import pytest

from tests.helpers import run_command
from tests.launch.helpers import BY_ROOT


def python(code, **env):
    return run_command([sys.executable, "-c", code], env=os.environ | env)


@pytest.mark.parametrize(
    ("code", "status", "stderr"),
    [
        (
            "raise hpctrain.HpctrainError('no data: give --data')",
            1,
            "hpctrain: error: no data: give --data\n",
        ),
        ("raise hpctrain.UsageError('no such option')", 2, "hpctrain: error: no such option\n"),
        (
            "hpctrain.trainer_parser('mine', '').parse_args(['--nonsense'])",
            2,
            "hpctrain: error: .*--nonsense",
        ),
        ("hpctrain.detect; raise ValueError('boom')", 1, "Traceback (.*\n)+ValueError: boom\n"),
        ("hpctrain.main(lambda world: print(world.size))", 0, ""),
        ("hpctrain.main(lambda world: sys.exit('stop'))", 1, "stop\n"),
        (
            "def read(_): raise PermissionError(13, 'Permission denied', '/home/bob')\nhpctrain.main(read)",
            1,
            "hpctrain: error: /home/bob: Permission denied",
        ),
        ("hpctrain.main(lambda world: sys.exit(75))", 75, ""),
        (
            "def interrupt(_): raise KeyboardInterrupt\nhpctrain.main(interrupt)",
            130,
            "hpctrain: interrupted\n",
        ),
        (
            "hpctrain.detect; raise KeyboardInterrupt('in epoch 2')",
            130,
            "hpctrain: interrupted in epoch 2\n",
        ),
        ("from hpctrain.errors import EndEarly\ndef end(_): raise EndEarly\nhpctrain.main(end)", 0, ""),
        (
            "os.dup2(os.open('/dev/full', os.O_WRONLY), 1); hpctrain.main(lambda world: print('x'))",
            1,
            "hpctrain: error: .*No space left on device",
        ),
        (
            "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (9, 9))\n"
            "hpctrain.main(lambda world: [open('/dev/null') for _ in range(9)])",
            1,
            "hpctrain: error: .* 9: .*ulimit -n",
        ),
        (
            "hpctrain.main(lambda world: os.read(os.pipe2(os.O_NONBLOCK)[0], 1))",
            1,
            "Traceback (.*\n)+Blocking",
        ),
        # the name of a file that the locale lacks
        ("hpctrain.main(lambda _: 'a\\udceab'.encode())", 1, "hpctrain: error: .*LC_ALL="),
        ("hpctrain.main(lambda world: 1 / 0)", 1, "Traceback (.*\n)+ZeroDivisionError"),
    ],
)
def test_the_end_of_a_script(tmp_path, code, status, stderr):
    done = python(f"import os, sys, hpctrain\n{code}", HPCTRAIN_CONTROL=str(tmp_path))
    assert done.returncode == status and re.match(stderr, done.stderr) and (stderr or not done.stderr), (
        done.stderr
    )
    assert (tmp_path / "failed").exists() == (stderr.startswith("hpctrain: error") or stderr == "stop\n")


@BY_ROOT  # which has no such limit itself
@pytest.mark.parametrize(
    "start",
    [
        "threading.Thread(target=print).start()",
        pytest.param("subprocess.run('true')", marks=pytest.mark.slow),
        pytest.param("fork.start()", marks=pytest.mark.slow),
    ],
)
def test_a_limit_of_processes_is_one_line(start):
    """As after `ulimit -u` in ~/.bashrc, which sbatch passes on."""
    code = f"""
import hpctrain, multiprocessing, os, resource, subprocess, threading
fork = multiprocessing.get_context("fork").Process(target=print)
hpctrain.main(lambda world: {start})"""
    user = ["setpriv", "--reuid=2000000003", "--regid=2000000003", "--clear-groups"]
    command = ["bash", "-c", 'ulimit -u 1; exec "$@"', "bash", sys.executable, "-c", code]
    done = run_command([*user, *command])
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert re.match("hpctrain: error: .* 1: .*ulimit -u", done.stderr), done.stderr


def test_an_error_of_usage_is_printed_by_rank_0_alone():
    env = {
        "TORCHELASTIC_RUN_ID": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
    }
    done = python("import hpctrain; raise hpctrain.UsageError('x')", **env, RANK="1", LOCAL_RANK="1")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_broken_pipe_ends_without_a_message():
    code = "import hpctrain; hpctrain.main(lambda world: print('x'))"
    done = run_command(
        ["bash", "-c", '"$0" -c "$1" | true; echo ${PIPESTATUS[0]}', sys.executable, code]
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("141\n", "")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_a_device_and_no_file_gets_its_number(tmp_path, closed):
    """As some daemons start their jobs."""
    code = (
        "import hpctrain, os, sys\n"
        "def run(_):\n"
        "    print('out', flush=True); print('error', file=sys.stderr, flush=True); sys.stdin.read(0)\n"
        "    with open(sys.argv[1], 'w') as file: file.write(str(file.fileno()))\n"
        "hpctrain.main(run)"
    )
    command = f'"$0" -c "$1" "$2" {closed}'
    done = subprocess.run(["bash", "-c", command, sys.executable, code, tmp_path / "file"], timeout=300)
    assert done.returncode == 0 and int((tmp_path / "file").read_text()) > 2


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_text_that_the_terminal_lacks_is_escaped(encoding):
    code = "import hpctrain, sys\nhpctrain.main(lambda _: print('긍정 \U0001f600', file=sys.stdout))"
    done = python(code, PYTHONIOENCODING=encoding)
    assert done.returncode == 0 and r"\U0001f600" in done.stdout and not done.stderr


def test_a_current_folder_that_is_gone_is_one_line(tmp_path):
    """Without it, a library of torch ends the process, with another cause."""
    command = 'mkdir gone && cd gone && rmdir ../gone && "$0" -m hpctrain train_ddp'
    done = run_command(["bash", "-c", command, sys.executable], cwd=tmp_path)
    assert done.returncode == 2 and re.fullmatch("hpctrain: error: .*\n", done.stderr)


def test_python_without_docstrings_is_refused_where_transformers_is_needed():
    done = run_command([sys.executable, "-OO", "-m", "hpctrain", "nlp.classify"])
    assert done.returncode == 2 and re.fullmatch(r"hpctrain: error: .*unset PYTHONOPTIMIZE.*\n", done.stderr)


@pytest.mark.slow
def test_an_operation_without_a_deterministic_implementation_is_one_line():
    """torch 2.13 raises RuntimeError, whose text names the operation and use_deterministic_algorithms()."""
    code = (
        "import hpctrain, torch\n"
        "torch.use_deterministic_algorithms(True)\n"
        "hpctrain.main(lambda _: torch.zeros(2).put_(torch.tensor([0, 0]), torch.ones(2)))"
    )
    done = python(code)
    assert done.returncode == 1 and re.fullmatch("hpctrain: error: --deterministic.*put_.*\n", done.stderr)


def test_the_advice_of_cublas_stays():
    """It names a variable. A script of a user may have no --deterministic to leave out."""
    advice = "you must set an environment variable CUBLAS_WORKSPACE_CONFIG"
    text = "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or "
    text += f"`at::Context::setDeterministicAlgorithms(true)`, but this is not deterministic: {advice}"
    done = python(f"import hpctrain\ndef fail(_): raise RuntimeError({text!r})\nhpctrain.main(fail)")
    assert done.returncode == 1 and done.stderr.endswith(f"{advice}\n"), done.stderr
