"""The site files: data with sources, of which nothing is executed, and which never override the user."""

import os
import re
import shutil
from pathlib import Path

import pytest
from slurm_cluster import REPOSITORY

from tests.helpers import run_command
from tests.launch import helpers
from tests.launch.helpers import BY_ROOT, assert_refused, bash, put, start

SITES = sorted((REPOSITORY / "launch/sites").glob("*.env"))
NAMES = [path.stem for path in SITES]
SOURCE = re.compile(r"# 20\d\d-(0[1-9]|1[0-2]), \S.*")
BARE = {"PATH": os.environ["PATH"], "HOME": "/home/alice", "USER": "alice"}
# Folders and names: an empty value counts as not set.
EMPTY_IS_NOT_SET = {
    "HPCTRAIN_FLAVOR", "HPCTRAIN_RUNTIME", "HPCTRAIN_CACHE", "HF_HOME", "TORCH_HOME", "MPLCONFIGDIR",
    "SCRATCH", "XDG_CACHE_HOME", "APPTAINER_CACHEDIR", "APPTAINER_TMPDIR", "HPCTRAIN_LOGIN_HOST",
}  # fmt: skip


@pytest.fixture
def launch(tmp_path):
    """A copy of launch/ whose site files a test may change. Nothing here identifies a real site."""
    names = Path("hpctrain/src/hpctrain/files/secret_names.txt")  # without them all values are hidden
    (tmp_path / names).parent.mkdir(parents=True)
    shutil.copy(REPOSITORY.joinpath(*names.parts[1:]), tmp_path / names)
    return shutil.copytree(REPOSITORY / "launch", tmp_path / "hpctrain/launch")


def source(launch, *arguments, env=None, then="env -0", shell=("bash", "-euc")):
    """Source launch/site.sh in a shell with nothing set but `env`; how it ended, and its variables."""
    script = f'source {launch}/site.sh "$@"; {then}'
    command = [*shell, script, "-", *arguments]
    done = run_command(command, env=BARE | (env or {}), cwd=launch.parents[1])
    return done, variables(done)


def variables(done):
    return dict(entry.split("=", 1) for entry in done.stdout.split("\0") if "=" in entry)


def keys(path):
    return re.findall(r"^(\w+)=", path.read_text(), re.M)


# The files


@pytest.mark.parametrize("site_file", SITES, ids=NAMES)
def test_every_fact_has_a_source_and_a_date(site_file):
    """A comment `# YEAR-MONTH, SOURCE` is in the same paragraph as the value, before it."""
    assert keys(site_file)
    for paragraph in site_file.read_text().split("\n\n"):
        sourced = False
        for line in paragraph.splitlines():
            sourced = sourced or bool(SOURCE.fullmatch(line))
            assert line.startswith("#") or sourced, f"{site_file.name}: no source for {line}"
            assert not line.startswith("# 20") or SOURCE.fullmatch(line), (
                f"{site_file.name}: {line} is not # YEAR-MONTH, SOURCE"
            )


@pytest.mark.parametrize("site_file", SITES, ids=NAMES)
def test_keys_are_known_and_values_parse(launch, site_file):
    """Reading checks each line first, so this also shows that no file has a command or a quote in it."""
    done, env = source(launch, site_file.stem, env={"SCRATCH": "/scratch/alice"})
    assert done.returncode == 0 and done.stderr.count("\n") == 1, done.stderr
    assert set(keys(site_file)) - set(env) <= {"SITE_DETECT"}
    for key in keys(site_file):
        assert not re.search(r"[$`\"'\\]", env.get(key, "")), f"{key}={env[key]}"
    assert "SITE_DETECT" not in env


@pytest.mark.parametrize(("images", "flavor"), [([], "cpu"), (["cu130"], None), (["cu130", "cpu"], "cpu")])
def test_a_flavor_is_not_chosen_where_one_image_is_installed(launch, images, flavor):
    """Jobs and bin/hpctrain take that one. They looked for the site's flavor, and found none."""
    for name in images:
        (launch.parent / f"hpctrain-{name}.sif").touch()
    shells = [("bash", "-euc"), *[("zsh", "-ec")] * bool(shutil.which("zsh"))]
    for shell in shells:
        _, env = source(launch, "generic", shell=shell)
        assert env.get("HPCTRAIN_FLAVOR") == flavor
    _, env = source(launch, "generic", env={"HPCTRAIN_FLAVOR": "cu128"})
    assert env["HPCTRAIN_FLAVOR"] == "cu128"


def test_only_generic_is_without_a_way_to_detect_it():
    assert [path.stem for path in SITES if "SITE_DETECT" not in keys(path)] == ["generic"]


@BY_ROOT
@pytest.mark.parametrize("name", [name for name in ("bash", "zsh") if shutil.which(name)])
def test_a_folder_in_tmp_that_somebody_else_made_is_told(stranger, name):
    script = f"source {stranger.launch}/site.sh generic; stat -c '%u %a' {stranger.own}"
    stranger.own.mkdir()
    theirs = stranger.run(name, "-c", script, env=BARE)
    stranger.own.rmdir()
    own = stranger.run(name, "-c", script, env=BARE)
    assert f"warning: {stranger.own} " in theirs.stderr and "HPCTRAIN_CACHE" in theirs.stderr
    assert own.stdout == f"{stranger.number} 700\n" and "warning" not in own.stderr, own.stderr


@BY_ROOT
def test_a_cache_on_scratch_that_somebody_else_made_is_told(launch, tmp_path):
    """As where the scratch of a site is the folder of a group."""
    cache = tmp_path / "cache"
    for owner, is_told in (
        (None, False),
        (os.getuid(), False),
        (1234, True),
        ("own link", False),
        ("link", True),
    ):
        if owner == "own link":
            os.chown(cache, os.getuid(), -1)
            cache.symlink_to(cache.rename(tmp_path / "mine"))
        elif owner is not None:
            os.chown(cache, 1234 if owner == "link" else owner, -1, follow_symlinks=False)
        done, _ = source(launch, "generic", env={"SCRATCH": str(tmp_path)})
        assert (f"warning: {cache} " in done.stderr) == is_told and cache.stat().st_mode & 0o777 == 0o700, (
            done.stderr
        )


# Precedence


@pytest.mark.parametrize("site_file", SITES, ids=NAMES)
def test_what_the_user_has_set_wins(launch, site_file):
    names = {*keys(site_file), *keys(SITES[NAMES.index("generic")])} - {"SITE_DETECT"}
    chosen = dict.fromkeys(names, "mine")
    done, env = source(launch, site_file.stem, env=chosen)
    assert done.returncode == 0, done.stderr
    assert {key: env[key] for key in chosen} == chosen
    assert env["HPCTRAIN_SITE"] == site_file.stem and env["HPCTRAIN_ROOT"] == str(launch.parent)


@pytest.mark.parametrize("site_file", SITES, ids=NAMES)
def test_what_the_user_has_set_to_nothing_stays_nothing(launch, site_file):
    chosen = {key: "" for key in keys(site_file) if key != "SITE_DETECT"}
    of_site = {} if "SCRATCH" in chosen else {"SCRATCH": "/scratch/alice"}  # where the site sets it
    _, without = source(launch, site_file.stem, env=of_site)
    done, env = source(launch, site_file.stem, env=chosen | of_site)
    assert done.returncode == 0, done.stderr
    for key in chosen:
        if key in EMPTY_IS_NOT_SET:
            assert env[key] == without[key] != ""
        else:
            assert env[key] == ""


def test_a_variable_that_is_not_exported_wins_too(launch):
    done = bash(f"NCCL_NET=mine; SCRATCH=/here; source {launch}/site.sh perlmutter; env -0", BARE)
    env = variables(done)
    assert (env["NCCL_NET"], env["HPCTRAIN_CACHE"]) == ("mine", "/here/cache")


@pytest.mark.parametrize(
    "scratch", [{}, {"SCRATCH": ""}, {"SCRATCH": "/scratch/alice"}], ids=["unset", "empty", "set"]
)
def test_a_missing_key_gets_the_generic_value(launch, scratch):
    """A file of one line is a site."""
    (launch / "sites/mine.env").write_text("NCCL_SOCKET_IFNAME=eth1")
    done, env = source(launch, "mine", env=scratch)
    assert done.returncode == 0, done.stderr
    assert (env["HPCTRAIN_FLAVOR"], env["NCCL_SOCKET_IFNAME"]) == ("cpu", "eth1")
    cache = "/scratch/alice/cache" if scratch.get("SCRATCH") else f"/tmp/hpctrain-{os.getuid()}/cache"
    assert env["HPCTRAIN_CACHE"] == cache and env["HF_HOME"] == f"{cache}/huggingface"
    assert env["HPCTRAIN_BIND"] == f"/project /scratch {scratch.get('SCRATCH', '')}".rstrip()


# The format


@pytest.mark.parametrize(
    "value",
    ["$(touch x)", "`touch x`", "${HOME:-$(touch x)}", "a; touch x", "a\\", '"a b"', "$", "${HOME", "$1"],
)
def test_nothing_is_executed(launch, value):
    (launch / "sites/mine.env").write_text(f"# comment\nNCCL_NET={value}\n")
    done, env = source(launch, "mine", then="", shell=("bash", "-c"))
    assert done.returncode == 1 and "NCCL_NET" not in env
    assert_refused(done, "sites/mine.env:2: ", "NCCL_NET", status=1)
    assert not (launch.parents[1] / "x").exists()


def test_references_and_spaces(launch):
    text = "SCRATCH=/scratch/$USER\nNCCL_NET=AWS  Libfabric [*] ^x\n"
    text += "XDG_CACHE_HOME=${SCRATCH}/a$UID/${HOME}x\nHF_HOME=$NO_SUCH/x\n"
    (launch / "sites/mine.env").write_text(text)
    done, env = source(launch, "mine")
    assert done.returncode == 0, done.stderr
    assert (env["SCRATCH"], env["NCCL_NET"]) == ("/scratch/alice", "AWS  Libfabric [*] ^x")
    assert env["XDG_CACHE_HOME"] == f"/scratch/alice/a{os.getuid()}//home/alicex"
    # its line refers to what is not set, so the generic one counts
    assert env["HF_HOME"] == "/scratch/alice/cache/huggingface"


def test_windows_line_ends_and_no_last_line_end(launch):
    (launch / "sites/mine.env").write_bytes(b"# comment\r\nNCCL_NET=Socket\r\n\r\nHPCTRAIN_FLAVOR=cu130")
    done, env = source(launch, "mine")
    assert done.returncode == 0, done.stderr
    assert (env["NCCL_NET"], env["HPCTRAIN_FLAVOR"]) == ("Socket", "cu130")


@pytest.mark.parametrize(
    "line",
    [
        "NCCL_NTE", "PATH=/tmp", "HPCTRAIN_FLAVOUR=cpu", "SBATCH_ACOUNT=x", "export NCCL_NET=x",
        " NCCL_NET=x", "NCCL_X[$(touch x)]=1", "NCCL_X Y=1",
    ],
)  # fmt: skip
def test_a_line_that_is_wrong_is_named(launch, line):
    """In the shell and in a job, before any other line counts."""
    (launch / "sites/mine.env").write_text(f"NCCL_CROSS_NIC=1\n\n{line}\n")
    names = "sites/mine.env:3: ", f"'{line.partition('=')[0]}'"
    done, env = source(launch, "mine", then="env -0", shell=("bash", "-c"))
    assert all(name in done.stderr for name in names) and "NCCL_CROSS_NIC" not in env
    done = helpers.dry_run(launch / "local.sh", BARE | {"HPCTRAIN_SITE": "mine"}, cwd=launch.parents[1])
    assert_refused(done, *names)
    assert not (launch.parents[1] / "x").exists()


@pytest.mark.parametrize("name", ["nowhere", "../sites/generic", "a b"])
def test_a_site_that_does_not_exist(launch, name):
    done, env = source(launch, name, then="env -0", shell=("bash", "-c"))
    assert f"'{name}'" in done.stderr and f"choose one of {' '.join(NAMES)}, " in done.stderr
    assert "HPCTRAIN_SITE" not in env and "HPCTRAIN_FLAVOR" not in env


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help(launch, option):
    sourced, _ = source(launch, option, then='echo "${HPCTRAIN_SITE-unset}"', shell=("bash", "-euc"))
    started = start(launch / "site.sh", option, env=BARE)
    assert sourced.stdout == f"{started.stdout}unset\n"
    assert "source launch/site.sh perlmutter " in started.stdout
    assert (started.returncode, started.stderr, sourced.stderr) == (0, "", "")


def test_started_as_a_program_it_says_how_it_is_used(launch):
    done = start(launch / "site.sh", "neuron", env=BARE)
    assert_refused(done, f"source {launch}/site.sh neuron", "bash", "zsh")
    assert done.stdout == ""


# Detection of the site


@pytest.mark.parametrize(
    ("env", "name", "why"),
    [
        ({"NERSC_HOST": "perlmutter"}, "perlmutter", "NERSC_HOST=perlmutter"),
        ({"CC_CLUSTER": "trillium-gpu"}, "alliance", "CC_CLUSTER=trillium-gpu"),
        ({"SLURM_CLUSTER_NAME": "sockeye"}, "sockeye", "CLUSTER=sockeye"),
        ({"CLUSTER_NAME": "clariden"}, "alps", "CLUSTER_NAME=clariden"),
        (
            {"NERSC_HOST": "cori"},
            "generic",
            f"detected none of {' '.join(name for name in NAMES if name != 'generic')}",
        ),
    ],
)
def test_the_site_is_detected_and_printed(launch, env, name, why):
    done, found = source(launch, env=env)
    assert found["HPCTRAIN_SITE"] == name and done.stderr.startswith(f"hpctrain: site {name} ({why}): ")


def test_it_says_what_it_has_set(launch):
    """Once, and without what the user has set."""
    then = f"source {launch}/site.sh; env -0"
    done, env = source(launch, "perlmutter", env={"SCRATCH": "/s", "SBATCH_QOS": "regular"}, then=then)
    head, _, said = done.stderr.rstrip("\n").partition("perlmutter: ")
    assert head == "hpctrain: site " and "SBATCH_QOS" not in said and "NCCL_NET=AWS Libfabric" in said
    pairs = dict(pair.split("=", 1) for pair in re.split(r", (?=[A-Z])", said))
    assert len(pairs) > 10 and all(env[name] == value for name, value in pairs.items())


def test_by_slurm_and_by_the_name_of_the_machine(launch, tmp_path):
    cluster = "echo 'Configuration data'; echo 'ClusterName             = neuron'"
    for name, text, site in (
        ("scontrol", cluster, "neuron"),
        ("uname", "echo glogin02", "neuron"),
        ("uname", "echo lrdn1455.leonardo.local", "leonardo"),
        ("uname", "echo jwb0129.juwels", "juwels-booster"),
    ):
        (folder := tmp_path / name).mkdir(exist_ok=True)
        put(folder, **{name: text})
        done, env = source(launch, env={"PATH": f"{folder}:{BARE['PATH']}"})
        assert env["HPCTRAIN_SITE"] == site, done.stderr


def test_a_job_that_knows_its_cluster_does_not_ask_slurm(launch, tmp_path):
    """Each of thousands of jobs would ask the controller."""
    put(tmp_path, scontrol=f"echo asked >>{tmp_path}/asked")
    job = {"SLURM_CLUSTER_NAME": "sockeye", "PATH": f"{tmp_path}:{BARE['PATH']}"}
    done, env = source(launch, env=job)
    assert env["HPCTRAIN_SITE"] == "sockeye" and not (tmp_path / "asked").exists(), done.stderr


@pytest.mark.parametrize("entry", ["=x", "TOY-HOST=x", "TOY[*]=x", "1=x", "TOY"])
def test_a_way_to_detect_that_is_wrong_is_named(launch, entry):
    (launch / "sites/mine.env").write_text(f"NCCL_NET=x\nSITE_DETECT={entry}\n")
    done, env = source(launch, then="env -0", shell=("bash", "-c"))
    assert_refused(done, "sites/mine.env: ", "SITE_DETECT", status=done.returncode)
    assert "HPCTRAIN_SITE" not in env


def test_a_shell_has_one_site(launch):
    done, env = source(launch, env={"HPCTRAIN_SITE": "neuron"})
    assert (env["HPCTRAIN_SITE"], env["SBATCH_PARTITION"]) == ("neuron", "amd_a100nv_8"), done.stderr
    done, env = source(launch, "perlmutter", env={"HPCTRAIN_SITE": "neuron"}, shell=("bash", "-c"))
    assert " site neuron" in done.stderr and "NCCL_NET" not in env


def test_a_new_site_is_one_file(launch):
    (launch / "sites/toy.env").write_text("# 2026-11, here\nSITE_DETECT=TOY_HOST=toy*\nHPCTRAIN_BIND=/toy\n")
    _, env = source(launch, env={"TOY_HOST": "toy7"})
    assert [env[f"HPCTRAIN_{name}"] for name in ("SITE", "BIND", "FLAVOR")] == ["toy", "/toy", "cpu"]


# In a job


def dry_run(launch, tmp_path, env):
    """What apptainer_ddp.sh would do, outside of any job, with a stand-in for apptainer."""
    put(tmp_path, apptainer="echo apptainer version 0")
    (tmp_path / "image").mkdir(exist_ok=True)
    own = {"PATH": f"{tmp_path}:{BARE['PATH']}", "HPCTRAIN_IMAGE": f"{tmp_path}/image"}
    done = helpers.dry_run(launch / "apptainer_ddp.sh", BARE | own | env, cwd=tmp_path)
    return done, dict(re.findall(r"^export (\w+)=(.*)", done.stdout, re.M))


def test_a_job_reads_the_data_itself(launch, tmp_path):
    text = "SITE_DETECT=TOY_HOST=toy*\nNCCL_CROSS_NIC=1\nSBATCH_QOS=debug\nUCX_TLS=tcp\n"
    (launch / "sites/toy.env").write_text(text)
    for env in ({"TOY_HOST": "toy7"}, {"HPCTRAIN_SITE": "toy"}):
        done, exported = dry_run(launch, tmp_path, env | {"NCCL_NET": "", "UCX_TLS": "all"})
        assert done.returncode == 0 and "hpctrain: site toy, job 0" in done.stdout, done.stderr
        assert exported["NCCL_CROSS_NIC"] == "1"
        assert "UCX_TLS=all" in done.stdout and "UCX_TLS" not in exported  # as the user has it
        assert "NCCL_NET" not in exported  # NCCL takes an empty value for the name of a network
    done, exported = dry_run(launch, tmp_path, {})
    assert "hpctrain: site generic, job 0" in done.stdout and "NCCL_CROSS_NIC" not in exported


def test_a_job_does_not_pretend_to_set_what_sbatch_reads(launch):
    load = f"source {launch}/lib/site.sh; hpctrain_load_site $ROOT job perlmutter; env -0"
    done = bash(f"set -eu; ROOT={launch.parent}; {load}", BARE, check=True)
    assert "NCCL_NET=AWS Libfabric" in done.stdout.split("\0") and "SBATCH" not in done.stdout


def test_the_shell_is_left_as_it_was(launch):
    """Options, positions and functions of the user's shell. What is added begins with (_)hpctrain."""
    show = "set +o; shopt -p; declare -F; echo $#; "
    script = f"{show} echo ----; source {launch}/site.sh perlmutter; {show}"
    done = start("/bin/bash", "-c", script, "-", "a", "b", env=BARE, check=True)
    before, after = (part.split("\n") for part in done.stdout.split("----\n"))
    added = [line for line in after if line not in before]
    assert all(re.fullmatch(r"declare -f _?hpctrain_\w+", line) for line in added)
    assert [line for line in before if line not in after] == []


@pytest.mark.parametrize(
    "habit",
    [
        "CDPATH=.:/",
        'cd() { builtin cd "$@" && echo here; }',
        "shopt -s expand_aliases; alias cd=pushd",
        "set -f",
        "IFS=:",
        "set -euo pipefail; set -o noclobber",
    ],
)
def test_habits_of_a_shell(launch, habit):
    """A cd that prints, no file names from patterns, other word separators, strict options."""
    (launch / "sites/toy.env").write_text("SITE_DETECT=OTHER=x TOY_HOST=toy*\nHPCTRAIN_BIND=/toy /a*\n")
    script = f"{habit}\nbefore=$-$IFS; source launch/site.sh; source launch/site.sh"
    script += "; [[ $before == $-$IFS ]]; env -0"
    env = BARE | {"TOY_HOST": "toy7", "PWD": str(launch.parent)}
    done = bash(script, env, cwd=launch.parent)
    assert done.returncode == 0 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("hpctrain: site toy (TOY_HOST=toy7): HPCTRAIN_BIND=/toy /a*, ")
    env = [variables(done)[f"HPCTRAIN_{name}"] for name in ("ROOT", "BIND", "FLAVOR")]
    assert env == [str(launch.parent), "/toy /a*", "cpu"]


def test_another_shell_says_so(launch):
    if not shutil.which("dash"):
        pytest.skip("there is no dash")
    done = start(shutil.which("dash"), "-c", f". {launch}/site.sh; env", env=BARE)
    assert_refused(done, "launch/site.sh", "bash", "zsh", status=done.returncode)
    assert "HPCTRAIN" not in done.stdout


def test_a_user_without_a_name(launch, tmp_path):
    """In a container that does not know the user, the number is the name, and id complains."""
    put(tmp_path, id='echo 12345; [ "$1" = -u ] || { echo "id: cannot find name" >&2 && exit 1; }')
    env = {"PATH": f"{tmp_path}:{BARE['PATH']}"}
    done = bash(f"set -eu; source {launch}/site.sh neuron; echo $SCRATCH", env)
    assert done.stdout == "/scratch/12345\n" and done.stderr.startswith("hpctrain: site neuron: SBATCH_")
    assert done.stderr.count("\n") == 1
