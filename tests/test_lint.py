"""Files follow one style, imports point down, and every script has --help and refuses invalid options."""

import ast
import graphlib
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from slurm_cluster import REPOSITORY, project_files

from tests.helpers import run_command

pytestmark = pytest.mark.main_road

TEXTS = {name: (REPOSITORY / name).read_text(errors="replace") for name in project_files()}
SHELL = sorted(
    name
    for name, text in TEXTS.items()
    if text.startswith("#!/bin/bash") or re.search("^# shellcheck shell=bash$", text, re.M)
)
SCRIPTS = [name for name in SHELL if TEXTS[name].startswith("#!") and name != ".ci/run"]
# Those that users submit.
LAUNCH_SCRIPTS = [name for name in SCRIPTS if re.fullmatch(r"launch/(?!site)\w+\.sh", name)]
TOOLS = Path(sys.executable).parent

# Files whose words are not ours: pins, data, a license, patches. This file holds the words that it looks for.
FOREIGN = re.compile(
    r"LICENSE|.*\.lock|containers/locks/.*\.debian|containers/patches/.*"
    r"|src/hpctrain/nlp/samples/.+/.*|.*\.png"
)
OURS = {
    name: text for name, text in TEXTS.items() if not FOREIGN.fullmatch(name) and name != "tests/test_lint.py"
}
MARKDOWN = {name: text for name, text in OURS.items() if name.endswith(".md")}
SOURCES = {
    name.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", "."): ast.parse(text)
    for name, text in TEXTS.items()
    if name.startswith("src/hpctrain/") and name.endswith(".py")
}

# Phrases that puzzled readers; in any case of letters, also over the end of a line.
PHRASES = ["(let|lets|letting) go of", "as it comes", "astray", "mend(s|ed|ing)?"]
# British forms, each with what to write. A word in capitals is a name, such as Slurm's state CANCELLED.
BRITISH = {
    r"\w*(behavi|col|endeav|fav|flav|harb|hon|lab|neighb|rum|vap)our\w*": "-or",
    r"\w*(author|categor|central|character|container|custom|emphas|final|general"
    r"|initial|local|maxim|memor|minim|modular|normal"
    r"|optim|organ|parallel|penal|prior|quant|random|real|recogn|serial|special|stabil|standard"
    r"|summar|synchron|token|util|vector"
    r"|virtual|visual)is(e|es|ed|er|ers|ing|able|ation|ations)": "-ize",
    r"(analy|cataly|paraly)s(e|ed|er|ers|ing)": "-yze",
    r"\w*(cent|fib|lit|kilomet|millimet|calib|theat)re(s|d)?": "-er",
    r"(licence|defence|offence|pretence)s?": "-se",
    r"\w*(cancel|label|model|travel|signal|tunnel|level|channel|fuel|total|marshal|dial|equal|initial)"
    r"l(ed|er|ers|ing)": "one l",
    r"(catalogue|programme|artefact|manoeuvre|sceptic|judgement|storey|tyre)s?": "the American word",
    r"whilst|amongst|learnt|spelt|burnt|leapt|ageing|fulfil|enrol|instalment|skilful|grey|cheque|focussed"
    r"|per cent": "the American word",
}


def run(*command, cwd=REPOSITORY):
    return run_command(command, cwd=cwd, stdin=subprocess.DEVNULL)


def place(name, text, match):
    return f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {' '.join(match[0].split())}"


def test_ruff():
    """Among its rules: 110 columns, and the complexity of a function."""
    for arguments in (["check"], ["format", "--check"]):
        done = run(TOOLS / "ruff", *arguments, ".")
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_mypy():
    done = run(sys.executable, "-m", "mypy")
    assert done.returncode == 0, done.stdout + done.stderr


def test_shell_scripts_have_110_columns():
    sh = [name for name, text in TEXTS.items() if text.startswith("#!/bin/sh")]
    assert "cluster/slurm/epilog" in sh
    wide = [
        f"{name}:{number}: {len(line)} characters"
        for name in [*SHELL, *sh]
        for number, line in enumerate(TEXTS[name].splitlines(), 1)
        if len(line) > 110
    ]
    assert not wide, "\n".join(wide)


def test_functions_of_the_launch_scripts_return_a_number():
    """In a trap, `return` without one returns the status of what ran before the trap."""
    bare = [
        f"{name}:{number}"
        for name in SHELL
        if name.startswith("launch/lib/")
        for number, line in enumerate(TEXTS[name].splitlines(), 1)
        if re.match(r"[^#]*\breturn *($|;|#|\})", line)
    ]
    assert not bare, bare


@pytest.mark.slow  # half a minute of processor time
def test_shellcheck():
    assert "launch/apptainer_ddp.sh" in SHELL and "launch/lib/main.sh" in SHELL and len(LAUNCH_SCRIPTS) == 12
    done = run(TOOLS / "shellcheck", "--external-sources", *SHELL)
    assert done.returncode == 0, done.stdout


def load_shell(name):
    """The names of a script of launch/, and of all files that it sources, or may source by their folder."""
    names, rest = set(), [name]
    while rest:
        if (own := rest.pop()) in names:
            continue
        names.add(own)
        rest += re.findall(r"^ *# shellcheck source=(launch/\S+)$", TEXTS[own], re.M)
        rest += ["launch/lib/main.sh"] * ('\nsource "$_main"\n' in TEXTS[own])
        for folder in re.findall(r'^ *source "\$ROOT/(launch/lib/\w+/)\$', TEXTS[own], re.M):
            rest += [other for other in SHELL if other.startswith(folder)]
    return names


def defined_twice(texts):
    """The functions that several of these files define, or one of them more than once."""
    texts = [re.sub(r"<<'(\w+)'$(.|\n)*?^\1$", "", text, flags=re.M) for text in texts]  # what they write
    pattern = r"^\s*(?:function\s+)?([\w-]+)\s*\(\)|^\s*function\s+([\w-]+)"
    names = Counter("".join(found) for text in texts for found in re.findall(pattern, text, re.M))
    return sorted(name for name, number in names.items() if number > 1)


def test_no_shell_function_is_defined_twice():
    """The last definition would win, where it is sourced: a check that it lacks is lost in silence."""
    scripts = [name for name in SHELL if name.startswith("launch/") and TEXTS[name].startswith("#!")]
    assert len(scripts) >= 15 and load_shell("launch/lib/task.sh") > {
        "launch/lib/trust.sh", "launch/lib/node_container.sh", "launch/lib/launchers/srun.sh"
    }  # fmt: skip
    assert load_shell("launch/jupyter.sh") > {"launch/lib/main.sh", "launch/lib/runtimes/none.sh"}
    found = {name: defined_twice(TEXTS[part] for part in load_shell(name)) for name in scripts}
    assert not {name: names for name, names in found.items() if names}


@pytest.mark.parametrize("again", ["is_own() {", "    is_own () {", "function is_own {", "is_own() [[ 1 ]]"])
def test_a_shell_function_that_is_defined_twice_is_found(again):
    text = "is_own() {\n    [[ -O $1 ]]\n}\n"
    assert defined_twice([text, f"{again}\n}}\n"]) == ["is_own"] == defined_twice([text + again])
    assert not defined_twice([text, f"cat <<'END'\n{again}\n}}\nEND\nis_owner() {{\n}}\n# is_own() {{"])


def test_actionlint():
    """With shellcheck over the commands in them; without pyflakes, as there is no Python."""
    workflows = [name for name in TEXTS if name.startswith(".github/workflows/")]
    assert len(workflows) >= 2
    done = run(TOOLS / "actionlint", f"-shellcheck={TOOLS / 'shellcheck'}", "-pyflakes=", *workflows)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in workflows:
        for action in re.findall(r"uses: (\S+)", TEXTS[name]):
            assert action.startswith("./") or re.search("@[0-9a-f]{40}$", action), (
                f"{name}: {action} is not pinned"
            )


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_and_invalid_options(script, tmp_path):
    """From any folder.

    The help of scripts that users submit has a usage line; an unknown option is an error in one line.
    """
    done = run(REPOSITORY / script, "--help", cwd=tmp_path)
    assert done.returncode == 0 and Path(script).name in done.stdout and not done.stderr
    if script in LAUNCH_SCRIPTS:
        assert re.match(r"[A-Z](.|\n)*usage: (sbatch|qsub|launch/(local|scaling).sh) ", done.stdout)
    done = run(REPOSITORY / script, "--nonsense", cwd=tmp_path)
    assert done.returncode != 0 and done.stderr.strip()
    if script in LAUNCH_SCRIPTS:
        assert done.returncode == 2 and done.stderr.count("\n") == 1


# ---- words ----


def test_phrases_that_puzzled_readers():
    # the beginning of a comment's next line may stand between two words
    gap = r"[\s#]+"
    pattern = re.compile("|".join(rf"(?<!\w){phrase.replace(' ', gap)}(?!\w)" for phrase in PHRASES), re.I)
    found = [
        place(name, text, match)
        for name, text in OURS.items()
        if name != "CHANGELOG.md"
        for match in pattern.finditer(text)
    ]
    assert not found, "\n".join(found)


@cache
def american(word):
    """What to write instead of a word in small letters, or None."""
    return next((write for form, write in BRITISH.items() if re.fullmatch(form, word)), None)


def british(text):
    """The British forms in a text, each as a match and what to write."""
    for match in re.finditer("per cent|[A-Za-z]+", text, re.I):
        if not match[0].isupper() and (write := american(match[0].lower())):
            yield match, write


def test_american_spelling():
    found = [
        f"{place(name, text, match)} ({write})"
        for name, text in OURS.items()
        for match, write in british(text)
    ]
    assert not found, "\n".join(found)


def test_british_forms_are_found():
    words = "flavours tokenise unlabelled Cancelled licence analysed initialised centre"
    assert {match[0] for match, _ in british(f"{words} re-initialised")} == set(words.split())
    assert not [*british("CANCELLED hours analyses parallelism license characteristic promise our emphasis")]


# ---- documents ----


def test_the_changelog_is_one_page():
    assert len(TEXTS["CHANGELOG.md"].splitlines()) <= 60


def test_width_of_documents():
    """120 characters, but for tables, code and the targets of links."""
    found = []
    for name, text in MARKDOWN.items():
        fenced = False
        for number, line in enumerate(text.splitlines(), 1):
            if line.lstrip().startswith("```"):
                fenced = not fenced
            elif not fenced and not line.startswith(("|", "    ")):
                shown = re.sub(r"\]\([^)]*\)", "]", line)
                if len(shown) > 120:
                    found.append(f"{name}:{number}: {len(shown)} characters")
    assert not found, "\n".join(found)


def test_links_of_documents():
    """Each leads to a file of the repository, and its anchor to a heading there."""
    found = []
    for name, text in MARKDOWN.items():
        prose = re.sub(r"^```.*?^```|^    .*?$|`[^`\n]*`", "", text, flags=re.M | re.S)
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", prose):
            path = (REPOSITORY / name).parent / target if target else REPOSITORY / name
            if not path.exists():
                found.append(f"{name}: {target} does not exist")
            elif anchor:
                headings = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
                slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
                if anchor not in slugs:
                    found.append(f"{name}: {target}#{anchor} has no heading")
    assert not found, "\n".join(found)


def test_the_index_lists_every_page():
    pages = {name.removeprefix("docs/") for name in MARKDOWN if name.startswith("docs/")} - {"README.md"}
    listed = re.findall(r"\]\(((?:guides|reference)/[^)#]*\.md)\)", TEXTS["docs/README.md"])
    assert sorted(pages) == sorted(listed)


# ---- code ----


def imports(module, tree):
    """The modules of hpctrain that a module imports: also in functions, for type checkers, and as strings.

    The tables of cli.py and of the package itself name modules above them on purpose.
    """
    package = (
        module if any(other.startswith(f"{module}.") for other in SOURCES) else module.rpartition(".")[0]
    )
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{origin}.{alias.name}"
                found.add(name if name in SOURCES else origin)
        elif isinstance(node, ast.Constant) and module not in ("hpctrain.cli", "hpctrain"):
            found |= {node.value} - {"hpctrain"}  # a program of that name, too
    return found & SOURCES.keys() - {module}


# Each folder or file of src/hpctrain, and its level: CONTRIBUTING.md has the list, from the top down.
_LEVELS = re.search(r"^Imports point down this list.*\n\n((?:    .*\n)+)", TEXTS["CONTRIBUTING.md"], re.M)[
    1
].split("\n")[-2::-1]
LEVELS = {name.strip(): level for level, names in enumerate(_LEVELS) for name in names.split(",")}


def room(module):
    """The folder or file of src/hpctrain that a module is or is in; "" for the package itself."""
    return module.removeprefix("hpctrain").lstrip(".").partition(".")[0]


def upward_imports(graph):
    """The imports that do not point down, each as "A imports B".

    The package itself may be imported everywhere.
    """
    return [
        f"{module} imports {other}"
        for module, others in graph.items()
        for other in others
        if room(module) not in ("", "__main__") and room(other) not in ("", room(module))
        if LEVELS[room(other)] >= LEVELS[room(module)]
    ]


def test_imports_point_down():
    """No imports in circles, either."""
    graph = {module: imports(module, tree) for module, tree in SOURCES.items()}
    assert {room(module) for module in graph} == {*LEVELS, "", "__main__"} and len(_LEVELS) <= 10
    assert graph["hpctrain.vision.train"] >= {"hpctrain.training.run", "hpctrain.vision.recipe"}
    assert not upward_imports(graph)
    try:
        list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("hpctrain.files.atomic", "from hpctrain.run.record import Record"),
        ("hpctrain.run.speed", "def f():\n    import hpctrain.nlp.task"),
        ("hpctrain.vision.data", "from hpctrain.nlp import task"),
        ("hpctrain.parser", "if TYPE_CHECKING:\n    from hpctrain.cli import Command"),
        ("hpctrain.parser", "import_module('hpctrain.cli')"),
        ("hpctrain.commands.runs", "from hpctrain.servers.tunnel import Tunnel"),
    ],
)
def test_an_upward_import_is_found(module, line):
    assert upward_imports({module: imports(module, ast.parse(line))})


# Where Lightning may be imported, and where an epoch may begin and end.
ADAPTER = r"hpctrain\.lightning(\.\w+)?"
MAY_IMPORT_LIGHTNING = re.compile(rf"{ADAPTER}|hpctrain\.vision\.train_lightning")
MAY_LOOP = re.compile(rf"{ADAPTER}|hpctrain\.(transformers|training\.run)")
LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics"}


def imports_of_lightning(tree):
    """The lines that import Lightning: also in functions, and by import_module()."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module]
        elif isinstance(node, ast.Call) and re.search("import", ast.unparse(node.func)):
            names = [each.value for each in node.args if isinstance(each, ast.Constant)]
        yield from (node.lineno for name in names if str(name).partition(".")[0] in LIGHTNING)


def loops_over_epochs(tree):
    """The lines that begin or end an epoch, or loop over epochs by other means than run.epochs()."""
    for node in ast.walk(tree):
        called = node.func.attr if isinstance(node, ast.Call) and hasattr(node.func, "attr") else ""
        if called in ("start_epoch", "end_epoch"):
            yield node.lineno
        # what a loop asks for the next round
        over = {ast.For: "iter", ast.comprehension: "iter", ast.While: "test"}.get(type(node))
        if over and (looped := getattr(node, over)):
            is_call = isinstance(looped, ast.Call)
            counts = not is_call or ast.unparse(looped.func) in ("range", "count", "itertools.count")
            names = {getattr(each, "id", getattr(each, "attr", "")) for each in ast.walk(looped)}
            if counts and any("epoch" in name for name in names):
                yield looped.lineno


def test_one_loop_trains_everything():
    """hpctrain.Run. Lightning is for its own trainer, and for Trainers of users."""
    found = [
        f"{module}, line {line}"
        for module, tree in SOURCES.items()
        for lines, may in ((imports_of_lightning, MAY_IMPORT_LIGHTNING), (loops_over_epochs, MAY_LOOP))
        for line in lines(tree)
        if not may.fullmatch(module)
    ]
    assert not found, "\n".join(found)
    assert [*imports_of_lightning(SOURCES["hpctrain.vision.train_lightning"])]
    assert [*loops_over_epochs(SOURCES["hpctrain.training.run"])]


@pytest.mark.parametrize(
    ("lines", "find"),
    [
        ("def f():\n    from lightning.pytorch import Trainer", imports_of_lightning),
        ("import torchmetrics", imports_of_lightning),
        ("import_module('lightning.pytorch')", imports_of_lightning),
        ("for epoch in range(run.epoch + 1, args.epochs + 1): pass", loops_over_epochs),
        ("while run.epoch < last: pass", loops_over_epochs),
        ("[train(n) for n in range(epochs)]", loops_over_epochs),
        ("record.start_epoch(1, 5, 8)", loops_over_epochs),
    ],
)
def test_another_loop_is_found(lines, find):
    assert [*find(ast.parse(lines))]
    assert not [*find(ast.parse("for epoch in run.epochs(3, fixed=True): pass"))]


@cache
def defined(module):
    """The names of a module: what it defines and imports, its submodules, and what `hpctrain` looks up."""
    names = {name.rpartition(".")[2] for name in SOURCES if name.rpartition(".")[0] == module}
    for node in ast.walk(SOURCES[module]):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and module == "hpctrain":
            names.add(node.value)
    return names


def test_what_is_imported_from_hpctrain_exists():
    """Also by benchmarks and examples, and in programs that tests and documents hold as text."""
    seen = 0
    for name, text in TEXTS.items():
        if not name.endswith((".py", ".md", ".sh")):
            continue
        for module, words in re.findall(r"^ *from (hpctrain[\w.]*) import (\([^)]*\)|[^\n;]*)", text, re.M):
            assert module in SOURCES, f"{name}: there is no {module}"
            for word in re.findall(r"(\w+)(?: as \w+)?", words.split("#")[0]):
                assert word in defined(module), f"{name}: {module} has no {word}"
                seen += 1
    assert seen > 300


def test_files_trust_alone_asks_who_made_a_file():
    asking = re.compile(r"\b(st_[ug]id|O_NOFOLLOW|O_EXCL|lstat|owner\(\))")
    found = [name for name, text in TEXTS.items() if name.startswith("src/") and asking.search(text)]
    assert found == ["src/hpctrain/files/trust.py"]


# ---- the rest ----


def test_no_path_of_this_machine():
    here = str(REPOSITORY.parent) + "/"
    if len(REPOSITORY.parts) < 3:
        here = str(REPOSITORY) + "/build/"
    for name, text in TEXTS.items():
        assert here not in text, f"{name} holds {here}"


def test_versions_agree():
    version = re.search(r'^version = "(.*)"', TEXTS["pyproject.toml"], re.M)[1]
    assert f"## {version}" in TEXTS["CHANGELOG.md"]


def test_a_step_that_mounts_a_stage_is_repeated_when_the_stage_changes():
    """buildah 1.28 compares the lines of a step, not what it mounts: an image had packages of an old lock."""
    for stage in re.split(r"^FROM ", TEXTS["containers/Dockerfile"], flags=re.M)[1:]:
        for mount in re.finditer(r"--mount=type=bind,from=(environment|complete|package)\b", stage):
            copies = re.findall(rf"^COPY --from={mount[1]} (\S+)", stage[: mount.start()], re.M)
            assert set(copies) & {"/content.sha256", "/opt/hpctrain/wheels.tsv"}, mount[0]


def test_recipes_and_workflows_start_from_the_same_debian():
    base = re.search("ARG BASE_IMAGE=(.*@sha256:[0-9a-f]{64})", TEXTS["containers/Dockerfile"])[1]
    # Apptainer reads the arguments of each stage
    assert TEXTS["apptainer/hpctrain.def"].count(f"from={base}\n") == 2
    workflows = [name for name in TEXTS if name.startswith(".github/workflows/")]
    images = [image for name in workflows for image in re.findall(r"^ +image: (.*)", TEXTS[name], re.M)]
    assert len(images) == 2 and {f"docker.io/library/{image}" for image in images} == {base}
