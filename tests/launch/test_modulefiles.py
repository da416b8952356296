"""make install: an installation for all users of a site, and its modulefiles."""

import hashlib
import os
import re
import shlex
import shutil
import subprocess

import pytest
from slurm_cluster import REPOSITORY, Cluster

from tests.helpers import run_command
from tests.launch.helpers import BY_ROOT, assert_ended, put, start, wait

INSTALL = REPOSITORY / "launch/modulefiles/install.sh"
VERSION = re.search(r'^version = "(.*)"', (REPOSITORY / "pyproject.toml").read_text(), re.M)[1]
LMOD = ["/usr/share/lmod/lmod/libexec/lmod", "bash"]  # prints shell code


def install(prefix, sif, **env):
    return run_command([INSTALL, prefix, sif], env=os.environ | env)


@pytest.fixture
def prefix(tmp_path):
    """An installation with a file that stands for the SIF."""
    prefix = tmp_path / "opt"
    prefix.mkdir()
    (tmp_path / "hpctrain-cpu.sif").write_text("the image")
    (tmp_path / "hpctrain-cpu.provenance.json").write_text("its record")
    done = install(prefix, tmp_path / "hpctrain-cpu.sif")
    assert done.returncode == 0, done.stderr
    return prefix


def test_what_is_installed(prefix):
    root = prefix / "hpctrain" / VERSION
    assert (root / "hpctrain-cpu.provenance.json").read_text() == "its record"
    assert " ".join(sorted(path.name for path in root.iterdir() if path.suffix != ".json")) == (
        "CHANGELOG.md CONTRIBUTING.md LICENSE README.md SECURITY.md benchmarks bin cluster docs examples "
        "hpctrain-cpu.sif hpctrain-cpu.sif.digest launch notebooks src tests"
    )
    script = f"HPCTRAIN_CACHE=/x; source {root}/launch/lib/main.sh; find_digest {root}/hpctrain-cpu.sif"
    script += "; echo $DIGEST"
    found = run_command(["bash", "-euc", script])
    assert found.stdout == f"sha256:{hashlib.sha256(b'the image').hexdigest()}\n", found.stderr
    assert sorted(path.name for path in (prefix / "hpctrain").iterdir()) == [VERSION]
    assert os.access(root / "bin/hpctrain", os.X_OK) and os.access(root / "launch/apptainer_ddp.sh", os.X_OK)
    assert_is_for_all(prefix)


def assert_is_for_all(prefix):
    """Everybody may read it, and nobody else write."""
    for path in [prefix, *prefix.rglob("*")]:
        assert path.is_symlink() or path.stat().st_mode & 0o066 == 0o044, path


@BY_ROOT
@pytest.mark.parametrize(
    "name", ["hpctrain", "modulefiles/hpctrain", f"hpctrain/{VERSION}", "link", "modulefiles", ""]
)
def test_nothing_is_installed_where_another_user_can_change_it(tmp_path, theirs, name):
    """Their launch script ran as every user of the module, and so would what they exchange later."""
    prefix = tmp_path / "opt"
    (made := prefix / ("hpctrain" if name == "link" else name)).mkdir(parents=True)
    if name == "link":
        made.rmdir()
        made.symlink_to(tmp_path)
    elif "hpctrain" in name:
        theirs(made)
    else:
        made.chmod(0o777)
    (sif := tmp_path / "hpctrain-cpu.sif").write_text("the image")
    for words in ([prefix, sif], [prefix]):  # make asks before it builds the image
        done = run_command([INSTALL, *words])
        assert done.returncode == 1 and done.stderr.startswith(f"install.sh: {made}: "), done
        assert done.stderr.count("\n") == 1 and not list(prefix.rglob("launch")), done
    if not name:
        made.chmod(0o1777)
        assert install(prefix, sif).returncode == 0


def test_nothing_is_installed_that_a_user_has_in_the_clone(tmp_path):
    """A token in notebooks/runs, and what a link led to, could be read by all users of the site."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", "--shared", REPOSITORY, clone], check=True)
    (clone / "notebooks/runs").mkdir()
    (clone / "notebooks/runs/token").write_text("secret")
    (tmp_path / "private").mkdir()
    (clone / "examples/data").symlink_to(tmp_path / "private")
    shutil.copy(INSTALL, clone / "launch/modulefiles")
    (tmp_path / "hpctrain-cpu.sif").write_text("the image")
    install = [clone / "launch/modulefiles/install.sh", tmp_path / "opt", tmp_path / "hpctrain-cpu.sif"]
    subprocess.run(install, check=True)
    root = tmp_path / "opt/hpctrain" / VERSION
    assert (root / "notebooks").is_dir() and not (root / "notebooks/runs").exists()
    assert (root / "examples").is_dir() and not (root / "examples/data").exists()


def test_the_pages_name_only_files_that_are_installed(prefix):
    root = prefix / "hpctrain" / VERSION
    for page in (root / "README.md", *root.glob("docs/**/*.md")):
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), (page, link)


def test_the_folders_on_path_have_only_what_users_call(prefix):
    """lib.sh and task.sh were there, too. Each command of it explains itself."""
    root = prefix / "hpctrain" / VERSION
    for modulefile in (prefix / "modulefiles/hpctrain").iterdir():
        added = re.findall(r"(?:prepend_path|prepend-path).*root[,)]? \"?(\w+)", modulefile.read_text())
        assert added == ["bin"], modulefile
    for path in [path for name in ("bin", "launch") for path in (root / name).iterdir() if not path.is_dir()]:
        head = path.read_text().partition("\nset ")[0]
        assert os.access(path, os.X_OK) and re.search("usage: |source launch/site|run a command", head), path


def test_an_installation_under_a_narrow_umask_is_for_all(tmp_path):
    (tmp_path / "hpctrain-cpu.sif").write_text("the image")
    prefix = tmp_path / "opt"
    command = f"umask 077; exec {shlex.quote(str(INSTALL))} {prefix} {tmp_path}/hpctrain-cpu.sif"
    subprocess.run(["bash", "-c", command], check=True, capture_output=True)
    assert_is_for_all(prefix)


def test_the_command_takes_the_image_that_was_named(prefix, tmp_path):
    """It took cpu-mpich for cpu, and cu128 for cu1."""
    put(tmp_path, apptainer='echo "$2"')

    def command(**env):
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin"} | env
        done = start(prefix / "hpctrain" / VERSION / "bin/hpctrain", env=env)
        return (done.stdout + done.stderr).strip()

    assert command().endswith("/hpctrain-cpu.sif")
    (tmp_path / "hpctrain-cpu-mpich.sif").write_text("another image")
    assert install(prefix, tmp_path / "hpctrain-cpu-mpich.sif").returncode == 0
    assert command().startswith("hpctrain: error: ") and command().endswith(
        "HPCTRAIN_FLAVOR to one of cpu-mpich cpu"
    )
    assert command(HPCTRAIN_FLAVOR="cpu").endswith("/hpctrain-cpu.sif")
    assert "hpctrain-cp.sif: " in command(HPCTRAIN_FLAVOR="cp")


def test_scripts_of_another_commit_are_named(prefix, tmp_path):
    (tmp_path / "hpctrain-cu130.sif").write_text("another image")
    script = prefix / "hpctrain" / VERSION / "launch/apptainer_ddp.sh"
    script.write_text("# older\n")
    done = install(prefix, tmp_path / "hpctrain-cu130.sif")
    assert done.returncode == 0 and "another commit" in done.stderr
    assert script.read_text() == "# older\n"


def test_another_flavor_is_added_and_nothing_is_replaced(prefix, tmp_path):
    (tmp_path / "hpctrain-cu130.sif").write_text("another image")
    root = prefix / "hpctrain" / VERSION
    (root / "launch/marker").touch()
    assert install(prefix, tmp_path / "hpctrain-cu130.sif", umask="077").returncode == 0
    assert (root / "hpctrain-cu130.sif").read_text() == "another image" and (root / "launch/marker").exists()
    again = install(prefix, tmp_path / "hpctrain-cpu.sif")
    assert again.returncode == 1 and f"{root} has hpctrain-cpu.sif " in again.stderr
    assert (root / "hpctrain-cpu.sif").read_text() == "the image"
    assert sorted(path.name for path in (prefix / "hpctrain").iterdir()) == [VERSION]


def test_invalid_arguments(tmp_path):
    wrong = ["relative", __file__], ["/proc/nowhere"], [tmp_path, tmp_path / "nothing.sif"], ["", __file__]
    for arguments in wrong:
        done = run_command([INSTALL, *arguments], cwd=tmp_path)
        assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lua", "tcl"])
def test_the_modulefile(prefix, kind):
    """By Lmod, which reads both kinds.

    Environment Modules, for which the second is, cannot be installed beside it.
    """
    (prefix / "modulefiles/hpctrain" / (VERSION if kind == "lua" else f"{VERSION}.lua")).unlink()
    root = prefix / "hpctrain" / VERSION
    env = {"PATH": "/usr/bin:/bin", "MODULEPATH": f"{prefix}/modulefiles"}
    env |= {"HOME": "/nonexistent", "USER": "alice"}

    def module(*words):
        done = run_command([*LMOD, *words], env=env)
        assert done.returncode == 0, done.stderr
        return done

    code = module("load", "hpctrain").stdout
    script = f'{code}\necho "$HPCTRAIN_ROOT"; echo "$PATH"; type -P hpctrain'
    show = run_command(["bash", "-c", script], env=env)
    # names such as check.sh would hide those of users
    assert show.stdout.splitlines() == [str(root), f"{root}/bin:/usr/bin:/bin", f"{root}/bin/hpctrain"], show
    said = (help_ := module("help", f"hpctrain/{VERSION}")).stdout + help_.stderr
    assert "sbatch $HPCTRAIN_ROOT/launch/apptainer_ddp.sh" in said


def test_a_user_of_the_installation_submits_from_any_folder(sif):
    """With what the modulefile sets, on the cluster; alice has nothing of hpctrain in her home."""
    with Cluster(nodes=2) as cluster:
        prefix = cluster.host_path("/project/site")
        prefix.mkdir()
        make = ["make", "install", f"PREFIX={prefix}"]
        done = run_command(make, cwd=REPOSITORY)
        assert done.returncode == 0, done.stderr
        root, mine = f"/project/site/hpctrain/{VERSION}", "/home/alice/mine"
        env = {"HPCTRAIN_ROOT": root, "PATH": f"{root}/bin:/usr/local/bin:/usr/bin:/bin"}
        cluster.exec("login", "mkdir", mine, user="alice")
        version = cluster.exec("login", "hpctrain", "--version", user="alice", cwd=mine, env=env)
        assert version.stdout == f"{VERSION}\n"
        command = [f"{root}/launch/apptainer_ddp.sh", "train_ddp", "--epochs", "1", "--out", "here"]
        number = cluster.submit(*command, cwd=mine, env=env)
        assert_ended(wait(cluster, number, mine), "COMPLETED")
        assert (cluster.host_path(mine) / "here/result.json").exists()
        env |= {"HPCTRAIN_FLAVOR": "x"}
        broken = cluster.exec("login", "hpctrain", "runs", user="alice", env=env, check=False)
        assert broken.returncode == 1 and "hpctrain-x.sif: " in broken.stderr
