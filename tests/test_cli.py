"""The command line as a whole: where packages are missing, and what all commands share."""

import sys

import pytest

import hpctrain
from hpctrain.__main__ import main, suggest
from hpctrain.cli import COMMANDS, load_command
from hpctrain.errors import UsageError
from hpctrain.parser import did_you_mean, trainer_parser
from hpctrain.run.options import RunOptions
from tests.helpers import run_command, run_hpctrain


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "package"),
    [
        ("train_lightning", "lightning_utilities"),
        ("nlp.classify", "transformers"),
        ("predict", "transformers"),
        ("serve", "transformers"),
    ],
)
def test_a_missing_package_of_the_extra_is_one_line(tmp_path, command, package):
    """After `pip install -e .` these ended in tracebacks of 20 lines."""
    hidden = "lightning", "lightning_utilities", "pytorch_lightning", "transformers"
    words = ["hpctrain", command, *(["a", "b"] if "." not in command and "_" not in command else [])]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({hidden})); sys.argv = {words}; "
        "from hpctrain.__main__ import main; main()"
    )
    done = run_command([sys.executable, "-c", code], cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert f" {package}, " in done.stderr and "'.[image]'" in done.stderr


def test_a_script_is_no_command(tmp_path):
    done = run_hpctrain("./mine.py", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "'./mine.py'" in done.stderr and "torchrun" in done.stderr


# What stands for a value in --help; N is any number that has no unit.
METAVARS = {"ARGUMENT", "FACTOR", "FIELD=COLUMN", "FILE", "FOLDER", "FRACTION", "HOST", "INTERVAL", "LAYER"}
METAVARS |= {
    "N",
    "NAME",
    "PATH",
    "PIXELS",
    "PORT",
    "PREFIX",
    "RATE",
    "RUN",
    "SECONDS",
    "SIZE",
    "TEXT",
    "TOKENS",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_kind_of_value_has_one_name(command):
    for action in load_command(command).parser()._actions:
        if action.nargs == 0 or action.choices:
            continue
        default = action.dest.upper() if action.option_strings else action.dest
        assert (action.metavar or default) in METAVARS, action.dest


def test_an_option_has_to_be_written_out():
    """`--epo` would mean another option once two begin like this."""
    with pytest.raises(UsageError, match=r"--epo 3.*--epochs"):
        load_command("train_ddp").parser().parse_args(["--epo", "3"])
    assert " plot" in did_you_mean("polt", COMMANDS)
    assert did_you_mean("--port", ["--out", "--kernel"]) == ""
    assert did_you_mean("--lora", ["--lora-rank", "--lora-from"]) == ""


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("train", "choose from train_ddp, train_lightning, train_fsdp, train_horovod, train_single"),
        ("nlp classify", "did you mean nlp.classify?"),
        ("nlp clasify --epochs 3", "did you mean nlp.classify?"),
        ("TRAIN_DDP --epochs 3", "did you mean train_ddp?"),
        ("list", "hpctrain --help lists all commands"),
    ],
)
def test_what_people_write_for_a_command(words, advice):
    name, *arguments = words.split()
    assert suggest(name, arguments) == advice


@pytest.mark.parametrize("word", ["version", "-V", "--version"])
def test_the_version(word, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hpctrain", word])
    main()
    assert capsys.readouterr().out == f"{hpctrain.__version__}\n"


def test_an_option_of_a_script_takes_the_place_of_one_of_ours(tmp_path):
    """Nearly all scripts have a --seed. A value that is of no use for a run is one line."""
    parser = trainer_parser("x", "x")
    parser.add_argument("--seed", type=int, default=42, help="mine")
    parser.add_argument_group("mine").add_argument("--out", default="mine")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args([])
    assert (args.seed, args.out) == (42, "mine")
    with pytest.raises(UsageError, match=r"resume=False: .*auto"):
        hpctrain.Run("x", **vars(args))
    with pytest.raises(UsageError, match="seed=None"):
        hpctrain.Run("x", seed=None, out=tmp_path / "x")


def test_options_from_a_file(tmp_path):
    file = tmp_path / "options.txt"
    file.write_text('--seed 7  # of the paper\n\n--out "a b"\n--keep-checkpoints=5\n')
    args = trainer_parser("x", "x").parse_args(["--seed", "3", f"@{file}", "--keep-checkpoints", "6"])
    assert (args.seed, str(args.out), args.keep_checkpoints) == (7, "a b", 6)
    with pytest.raises(UsageError, match=r"none\.txt"):
        load_command("nlp.classify").parser().parse_args(["@none.txt"])


def test_a_tilde_is_the_home(monkeypatch):
    """bash leaves it in --out=~/x. A folder named ~ appeared in the current one."""
    monkeypatch.setenv("HOME", "/home/me")
    args = trainer_parser("x", "x").parse_args(["--out=~/a=b", "--resume=x~/y"])
    assert (str(args.out), str(args.resume)) == ("/home/me/a=b", "x~/y")
    options = RunOptions(out="~/x", resume="~/y")
    assert (str(options.choose_folder("z")), str(options.source)) == ("/home/me/x", "/home/me/y")


def test_the_options_of_fine_tuning_are_grouped():
    text = load_command("nlp.classify").parser().format_help()
    _, own, *groups = text.split("\n\n")[0], *[part for part in text.split("\n\n") if ":\n" in part]
    assert len(own.splitlines()) < 10 and len(groups) == 7 and all(len(g.splitlines()) < 50 for g in groups)
    assert "image" not in text


@pytest.mark.parametrize("words", [["help", "plot"], ["plot", "--help"]])
def test_help_of_a_command(words):
    done = run_hpctrain(*words, check=True)
    assert done.stdout.startswith("usage: hpctrain plot [-h] RUN")
