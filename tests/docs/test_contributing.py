"""CONTRIBUTING.md, followed for real: in a copy of the project, a toy of each kind, made of the files that
the page lists, runs.

Each toy touches files of the table under its heading and no other; a row that begins with "If" may be left
out, and so may tests and documents, which a toy does not need in order to run.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from slurm_cluster import REPOSITORY, project_files

from tests.helpers import run_command

PAGE = (REPOSITORY / "CONTRIBUTING.md").read_text()
# heading -> the files to touch, in the order of the page
LISTED = {
    heading: re.findall(r"^\| `([^`]+)` \|", table, re.M)
    for heading, table in re.findall(r"^### (Add an? .*)\n\n((?:\|.*\n)+)", PAGE, re.M)
}
PYTHON = "/usr/bin/python3.11" if Path("/usr/bin/python3.11").exists() else "python3.11"  # as in the Makefile
EXTRAS = ("tests/", "docs/", "README.md", ".github/")


def run(*command, cwd, check=True, timeout=300, **env):
    """Run a command with the project of `cwd` and the environment of this one."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "HPCTRAIN_"))
    }
    path = f"{Path(sys.executable).parent}:{environment['PATH']}"
    environment |= {"PATH": path, "PYTHONPATH": f"{cwd}/src", **env}
    done = run_command(command, cwd=cwd, env=environment, timeout=timeout)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def project(tmp_path):
    """A copy of the project, under git, which shows what a toy touched."""
    folder = tmp_path / "hpctrain"
    for name in project_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / name, folder / name)
    git = [
        "git",
        "-c",
        "user.name=test",
        "-c",
        "user.email=test@example.org",
        "-c",
        "init.defaultBranch=main",
    ]
    for words in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message=copy"]):
        subprocess.run([*git, *words], cwd=folder, check=True)
    return folder


def add(project, heading, name, edits):
    """Make the edits of files: a text, a function of the old text, or None if a command writes the file.

    The edit of a folder is the texts of its files.
    """
    listed = [path.replace("NAME", name) for path in LISTED[heading]]
    assert set(edits) <= set(listed), f"{heading} does not list {set(edits) - set(listed)}"
    optional = {
        path.replace("NAME", name)
        for path, what in re.findall(r"^\| `([^`]+)` \| (.*) \|$", PAGE, re.M)
        if what.startswith("If ")
    }
    for path in listed:
        assert path in edits or path in optional or path.startswith(EXTRAS), (
            f"{heading} lists {path}, which the toy did without"
        )
    files = {path: edit for path, edit in edits.items() if edit is not None and not isinstance(edit, dict)}
    for folder, contents in edits.items():
        if isinstance(contents, dict):
            files |= {f"{folder}{file}": text for file, text in contents.items()}
    for path, edit in files.items():
        file = project / path
        text = edit(file.read_text()) if callable(edit) else textwrap.dedent(edit).lstrip()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        if text.startswith("#!"):
            file.chmod(0o755)


def touched(project):
    """The files that differ from the copy."""
    status = run_command(["git", "status", "--porcelain", "--untracked-files=all"], cwd=project, check=True)
    return {line[3:] for line in status.stdout.splitlines()}


def insert(before, new):
    """An edit: `new` in front of the one place that reads `before`."""

    def edit(text):
        assert text.count(before) == 1, before
        return text.replace(before, textwrap.dedent(new).lstrip("\n") + before)

    return edit


def test_the_page_lists_every_kind():
    kinds = ["a trainer", "a strategy", "an NLP task", "a launcher", "a runtime", "a site", "a package"]
    kinds.append("an image flavor")
    assert list(LISTED) == [f"Add {kind}" for kind in kinds]
    for heading, files in LISTED.items():
        for path in files:
            assert "NAME" in path or (REPOSITORY / path).exists(), f"{heading}: {path} is not there"


# ---- what runs without a cluster ----

TRAINER = '''
    """Fit a line to its points: the smallest trainer."""

    import torch

    from hpctrain.distributed.world import World
    from hpctrain.parser import Parser
    from hpctrain.training.run import Run
    from hpctrain.vision import recipe

    POINTS = torch.linspace(-1, 1, 16).unsqueeze(1)


    def parser() -> Parser:
        """The options."""
        return recipe.vision_parser("train_toy", "Fit a line.")


    def main(world: World, arguments: list[str]) -> None:
        """Train."""
        args = recipe.parse(parser(), arguments, recipe.ImageOptions())
        with Run("train_toy", **vars(args)) as run:
            model = run.prepare(torch.nn.Linear(1, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
            run.track(model=model, optimizer=optimizer)
            for _ in run.epochs(args.epochs):
                for points in run.batches(POINTS, 16):
                    loss = (model(points) - 2 * points).square().mean()
                    run.backward(loss)
                    run.update(optimizer)
                    run.step(loss)
                run.score(test_loss=loss)
'''


@pytest.mark.slow
def test_add_a_trainer(project):
    row = '    "train_toy": ("hpctrain.vision.train_toy", "train", "fit a line"),\n'
    edits = {
        "src/hpctrain/vision/train_toy.py": TRAINER,
        "src/hpctrain/cli.py": lambda text: text.replace("COMMANDS = {\n", "COMMANDS = {\n" + row),
        "launch/lib/commands.txt": lambda text: "train_toy\n" + text,
    }
    add(project, "Add a trainer", "toy", edits)
    python = [sys.executable, "-m", "hpctrain"]
    assert "train_toy        fit a line" in run(*python, "--help", cwd=project)
    options = ["train_toy", "--epochs", "20", "--out"]
    alone = run(*python, *options, "runs/alone", cwd=project)
    together = run(
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "-m",
        "hpctrain",
        *options,
        "runs/two",
        cwd=project,
    )
    assert "1 rank on 1 node (" in alone and "2 ranks on 1 node (" in together
    for name in ("alone", "two"):
        result = json.loads((project / f"runs/{name}/result.json").read_text())
        assert result["test_loss"] < 0.05 and (project / f"runs/{name}/curves.png").exists()
    assert touched(project) == set(edits)


STRATEGY = '''
    """Each rank has the whole model, and averages its gradients one by one after the backward pass."""

    from collections.abc import Iterator
    from contextlib import contextmanager

    import torch
    import torch.distributed as dist

    from hpctrain.training.strategies.strategy import Strategy


    class Toy(Strategy):
        """The smallest strategy."""

        @contextmanager
        def average(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
            """All gradients of the optimizer."""
            for group in optimizer.param_groups:
                for weight in group["params"]:
                    dist.all_reduce(weight.grad)
                    weight.grad /= self.world.size
            yield


    STRATEGY = Toy
'''


@pytest.mark.slow
def test_add_a_strategy(project):
    """Two ranks have the weights of DDP, bit for bit."""
    edits = {"src/hpctrain/training/strategies/toy.py": STRATEGY}
    add(project, "Add a strategy", "toy", edits)
    found = []
    for name in ("toy", "ddp"):
        script = textwrap.dedent(TRAINER).replace("Linear(1, 1))", f"Linear(1, 1), strategy={name!r})")
        script += f'\nmain(None, ["--epochs", "3", "--out", "{project}/runs/{name}"])\n'
        (project.parent / f"{name}.py").write_text(script)
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
        run(*launch, project.parent / f"{name}.py", cwd=project)
        found.append(json.loads((project / f"runs/{name}/result.json").read_text())["weights_sha256"])
    assert found[0] == found[1]
    assert touched(project) == set(edits)


TASK = '''
    """Classify the lines of a file, "label: text" each."""

    from pathlib import Path

    from hpctrain.errors import HpctrainError
    from hpctrain.nlp.tasks.classify import Classify, Document


    class Toy(Classify):
        """Lines with a label in front."""

        name = "toy"
        title = "Classification of lines"
        formats = "label: text"
        fields = ()

        def read(
            self,
            path: Path,
            skipped: list[HpctrainError] | None = None,
            columns: dict[str, str] | None = None,
        ) -> list[Document]:
            """Read a file of lines."""
            lines = [line.split(": ", 1) for line in path.read_text(encoding="utf-8").splitlines()]
            return [
                Document(str(number), text, label, location=f"{path}, line {number}")
                for number, (label, text) in enumerate(lines, 1)
            ]


    TASK = Toy()
'''


@pytest.mark.slow
def test_add_an_nlp_task(project):
    lines = [
        f"{label}: {text} {i}\n"
        for i in range(20)
        for label, text in (("good", "I liked it"), ("bad", "what a bore"))
    ]
    row = '    "nlp.toy": ("hpctrain.nlp.tasks.toy", "fine-tune", "classify lines"),\n'
    edits = {
        "src/hpctrain/nlp/tasks/toy.py": TASK,
        "src/hpctrain/cli.py": lambda text: text.replace('    "predict": ', row + '    "predict": '),
        "launch/lib/commands.txt": lambda text: text.replace("predict\n", "nlp.toy\npredict\n"),
        "src/hpctrain/nlp/samples/toy/": {"train.txt": "".join(lines), "test.txt": "".join(lines[:8])},
    }
    add(project, "Add an NLP task", "toy", edits)
    python = [sys.executable, "-m", "hpctrain"]
    cache = {"HPCTRAIN_CACHE": str(project / "build/cache")}
    run(*python, "nlp.toy", "--epochs", "6", "--out", "runs/toy", cwd=project, **cache)
    assert json.loads((project / "runs/toy/result.json").read_text())["test_accuracy"] == 1
    answers = run(*python, "predict", "runs/toy", "I liked it", "what a bore", cwd=project, **cache)
    assert re.findall('"label": "(.*?)"', answers) == ["good", "bad"]
    assert touched(project) == {
        "src/hpctrain/nlp/tasks/toy.py", "src/hpctrain/cli.py", "launch/lib/commands.txt",
        "src/hpctrain/nlp/samples/toy/train.txt", "src/hpctrain/nlp/samples/toy/test.txt",
    }  # fmt: skip


SITE = """
    # The toy's own cluster.

    # 2026-11, a test: the name of the machine
    SITE_DETECT=HOST=toy-login*

    # 2026-11, a test
    SBATCH_PARTITION=playground
    HPCTRAIN_BIND=$SCRATCH /toys
"""


@pytest.mark.slow
def test_add_a_site(project):
    edits = {"launch/sites/toy.env": SITE}
    add(project, "Add a site", "toy", edits)
    show = "source launch/site.sh toy && env && launch/apptainer_ddp.sh --dry-run train_ddp"
    shown = run("bash", "-c", show, cwd=project, SCRATCH="/scratch/me", HPCTRAIN_RUNTIME="none")
    lines = shown.splitlines()
    assert {"SBATCH_PARTITION=playground", "HPCTRAIN_BIND=/scratch/me /toys", "HPCTRAIN_FLAVOR=cpu"} <= set(
        lines
    )
    assert "hpctrain: site toy, job 0," in shown
    own = run("bash", "-c", show, cwd=project, SBATCH_PARTITION="mine", SCRATCH="/s", HPCTRAIN_RUNTIME="none")
    assert "SBATCH_PARTITION=mine" in own.splitlines()
    # the rules for site files hold for it as well
    run(
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/launch/test_sites.py",
        "-k",
        "toy",
        cwd=project,
    )
    assert touched(project) == set(edits)


# ---- on the cluster ----

LAUNCHER = """
    # A toy.
    # shellcheck shell=bash
    launch_with_toy() {
        LAUNCHER_TEXT='toy, over srun'
        LAUNCH=(srun --nodes="$NODES" --ntasks-per-node="$TASKS" bash -c
            'export TOY_RANK=$SLURM_PROCID TOY_LOCAL=$SLURM_LOCALID TOY_NODE=$SLURM_NODEID; exec "$@"' -
            "$TASK" toy)
    }

    task_toy() {
        set_ranks TOY_RANK TOY_LOCAL TOY_NODE
        export_torchrun_env
    }
"""
RUNTIME = """
    # A toy.
    # shellcheck shell=bash
    toy_command() {
        HPCTRAIN_IMAGE=toy:1 RUNTIME_VERSION=1
        CONTAINER=(env PATH="/opt/hpctrain/bin:$PATH" PYTHONPATH="$ROOT/src" A_TOY="yes")
    }
"""


def test_add_a_launcher_and_a_runtime(project, cluster):
    """Both at once, because a job costs ten seconds: a check of four ranks on two nodes."""
    launcher = {
        "launch/lib/launchers/toy.sh": LAUNCHER,
        "launch/apptainer_toy.sh": (REPOSITORY / "launch/apptainer_ddp.sh")
        .read_text()
        .replace("apptainer_ddp.sh", "apptainer_toy.sh")
        .replace("use_launcher srun", "use_launcher toy"),
    }
    add(project, "Add a launcher", "toy", launcher)
    runtime = {"launch/lib/runtimes/toy.sh": RUNTIME}
    add(project, "Add a runtime", "toy", runtime)
    home = cluster.host_path("/home/alice/toy")
    shutil.copytree(project, home, ignore=shutil.ignore_patterns(".git"))
    cluster.exec("login", "chown", "-R", "alice:", "toy", user="root", cwd="/home/alice")
    job = cluster.submit(
        "launch/apptainer_toy.sh", "check", cwd="/home/alice/toy", env={"HPCTRAIN_RUNTIME": "toy"}
    )
    ended = cluster.wait(job)
    output = (home / f"slurm-{job}.out").read_text()
    assert ended.state == "COMPLETED" and "check passed: 4 ranks on 2 hosts" in output, output
    assert (
        "launcher toy, over srun" in output
        and "runtime toy (1), image toy:1" in output
        and "A_TOY=yes" in output
    )
    assert touched(project) == {*launcher, *runtime}


# ---- in an image ----


@pytest.mark.slow
def test_add_a_package_and_an_image_flavor(project, tmp_path):
    """Both at once: the image's install step makes the flavor's environment, with the package.

    It installs torch and the two new packages only. The others are in the lock of the image, and installing
    them takes a minute.
    """
    (project / ".venv").mkdir()
    (project / ".venv/bin").symlink_to(REPOSITORY / ".venv/bin")
    package = {
        "pyproject.toml": insert('"mpi4py', '"einops>=0.8", '),
        **{f"containers/locks/{flavor}.lock": None for flavor in ("cpu", "cu130", "cu128")},
    }
    add(project, "Add a package", "einops", package)
    run("containers/lock.sh", cwd=project)
    assert touched(project) == set(package)
    for path in package:
        assert "einops" in (project / path).read_text()

    cpu = (REPOSITORY / "containers/locks/cpu.in").read_text()
    flavor = {"containers/locks/toy.in": "# A toy.\n" + cpu + "toolz>=1\n", "containers/locks/toy.lock": None}
    add(project, "Add an image flavor", "toy", flavor)
    run("containers/lock.sh", "--flavor", "toy", cwd=project)
    assert touched(project) == {*package, *flavor}
    assert "(see --help)" not in run(
        "bash", "-c", "source containers/build_functions.sh; image_name toy openmpi", cwd=project
    )
    lock = (project / "containers/locks/toy.lock").read_text()
    pins = re.findall(r"^((\S+?)==.+\n(?: .+\n)+)", lock, re.M)
    needs = [
        "filelock",
        "fsspec",
        "jinja2",
        "markupsafe",
        "mpmath",
        "networkx",
        "numpy",
        "setuptools",
        "sympy",
        "typing-extensions",
    ]
    part = [pin for pin, name in pins if name in {"einops", "toolz", "torch", *needs}]
    (project / "containers/locks/toy.lock").write_text("".join(part))
    run("containers/install/python.sh", tmp_path / "toy", "toy", cwd=project, timeout=600, PYTHON=PYTHON)
    show = "import einops, toolz, torch; print(einops.__version__, toolz.__version__, torch.__version__)"
    versions = run(tmp_path / "toy/bin/python", "-c", show, cwd=tmp_path).split()
    assert versions == [re.search(rf"^{name}==(\S+)", lock, re.M)[1] for name in ("einops", "toolz", "torch")]
