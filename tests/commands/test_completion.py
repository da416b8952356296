"""Shell completion completes in a real bash, and every command and option has its help and its page."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from slurm_cluster import REPOSITORY

from hpctrain.cli import COMMANDS, GROUPS
from hpctrain.commands import completion
from hpctrain.errors import HpctrainError
from tests.helpers import run_command

HPCTRAIN = [sys.executable, "-m", "hpctrain"]


@pytest.fixture(scope="module")
def parsers():
    return completion.command_parsers()


@pytest.fixture(scope="module")
def prefix(parsers, tmp_path_factory):
    """A folder with the files that the build of the image writes."""
    folder = tmp_path_factory.mktemp("prefix")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(completion, "command_parsers", lambda: parsers)
        completion.write_files(folder)
    return folder


def complete(prefix, *words):
    """What bash offers for the last of these words, after it has loaded the completion script."""
    script = """
        source "$1"
        [[ $(complete -p hpctrain) == *"-F "* ]] || exit 1
        function=$(complete -p hpctrain | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
        COMP_WORDS=("${@:2}") COMP_CWORD=$(($# - 2))
        "$function" 2>/dev/null
        printf '%s\\n' "${COMPREPLY[@]}"
    """
    command = ["bash", "--norc", "-c", script, "-", prefix / completion.FILES["bash"], "hpctrain", *words]
    done = run_command(command, cwd=prefix)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.slow
def test_bash(prefix):
    assert complete(prefix, "train_d") == {"train_ddp"}
    assert complete(prefix, "") == set(COMMANDS)
    assert complete(prefix, "train_ddp", "--ep") == {"--epochs"}
    assert complete(prefix, "train_ddp", "--model", "res") == {"resnet50"}
    assert complete(prefix, "nlp.pair", "--max-l") == {"--max-length"}
    assert complete(prefix, "train_ddp", "--out", "sha") == {"share"}
    assert complete(prefix, "completion", "") == {"bash", "zsh"}
    assert complete(prefix, "train_ddp", "--nonsense") == set()


def test_zsh(prefix):
    text = (prefix / completion.FILES["zsh"]).read_text()
    assert text.startswith("#compdef hpctrain\n")
    for name in COMMANDS:
        assert f"\n    {name}:" in text
    if shutil.which("zsh"):
        subprocess.run(["zsh", "-n", prefix / completion.FILES["zsh"]], check=True)


def test_every_command_has_a_group_and_a_line_that_stands_alone(parsers):
    assert (
        {group for _, group, _ in COMMANDS.values()}
        == set(GROUPS)
        == {"train", "fine-tune", "use", "inspect"}
    )
    done = run_command([*HPCTRAIN, "--help"], check=True)
    for name, (_, group, text) in COMMANDS.items():
        assert re.search(rf"^  {re.escape(name)} +{re.escape(text)}$", done.stdout, re.M)
        assert done.stdout.index(GROUPS[group]) < done.stdout.index(f"\n  {name} ")
        assert not re.match("the |to |and |or ", text) and len(text.split()) >= 4
    for name, parser in parsers.items():
        name = "train_ddp" if name == "train_single" else name  # another name of it
        assert parser.prog == f"hpctrain {name}" and parser.description
        assert [action.dest for action in parser._actions if not action.help] == []


def test_every_command_and_every_option_stands_in_a_page(parsers):
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]
    text = "\n".join(page.read_text() for page in pages)
    assert [
        name for name in COMMANDS if not re.search(rf"(hpctrain |`|launch/\S+ ){re.escape(name)}\b", text)
    ] == []
    options = {
        option
        for parser in parsers.values()
        for action in parser._actions
        for option in action.option_strings
    }
    assert [
        option for option in sorted(options - {"-h", "--help"}) if not re.search(rf"{option}(?![\w-])", text)
    ] == []


@pytest.mark.slow
def test_the_files_depend_on_nothing_but_the_sources(prefix, parsers, tmp_path):
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "COLUMNS": "40",
        "PYTHONHASHSEED": "7",
        "LANG": "C",
    }
    done = run_command([*HPCTRAIN, "completion", "--write", tmp_path], env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / name) for name in completion.FILES.values()]
    for name in completion.FILES.values():
        assert (tmp_path / name).read_bytes() == (prefix / name).read_bytes()


def test_a_prepared_file_is_printed(prefix, monkeypatch, capsys):
    """As in the image, where the build has written it: no command is imported."""
    monkeypatch.setattr(sys, "prefix", str(prefix))
    monkeypatch.setattr(completion, "command_parsers", lambda: pytest.fail("made anew"))
    for shell in ("bash", "zsh"):
        completion.main(None, [shell])
        assert capsys.readouterr().out == (prefix / completion.FILES[shell]).read_text()


def test_completion_is_printed_without_a_prepared_file(prefix, monkeypatch, capsys, parsers):
    monkeypatch.setattr(sys, "prefix", str(prefix / "nothing"))
    monkeypatch.setattr(completion, "command_parsers", lambda: parsers)
    completion.main(None, ["bash"])
    assert capsys.readouterr().out == (prefix / completion.FILES["bash"]).read_text()


def test_a_shell_inside_a_job_gets_its_completion(prefix):
    """Shells load it at their start, also where other commands need srun: in salloc with 4 tasks."""
    env = {**os.environ, "SLURM_JOB_ID": "17", "SLURM_NTASKS": "4"}
    code = f"""
import sys; sys.prefix = {str(prefix)!r}
import hpctrain.__main__
hpctrain.__main__.main()
"""
    done = run_command([sys.executable, "-c", code, "completion", "bash"], env=env)
    assert done.returncode == 0 and done.stdout == (prefix / completion.FILES["bash"]).read_text(), (
        done.stderr
    )


@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        ([], 2, "completion takes bash, zsh or --write PREFIX"),
        (["bash", "--write", "here"], 2, "completion takes bash, zsh or --write PREFIX"),
        (["fish"], 2, "invalid choice: 'fish'"),
    ],
)
def test_bad_input_is_one_line(args, status, message):
    done = run_command([*HPCTRAIN, "completion", *args])
    assert done.returncode == status and done.stderr.count("\n") == 1 and message in done.stderr


def test_a_prefix_that_cannot_be_written_is_named(monkeypatch, parsers):
    monkeypatch.setattr(completion, "command_parsers", lambda: parsers)
    with pytest.raises(HpctrainError, match=r"/proc/nothing/share.*: cannot be written .*--write ~/.local"):
        completion.write_files(Path("/proc/nothing"))
