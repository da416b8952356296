"""hpctrain add: packages on top of the image, on every rank, and those that it refuses."""

import re
import subprocess
import sys
import zipfile

import pytest
from slurm_cluster import REPOSITORY

from hpctrain.commands import add
from hpctrain.distributed.world import ALONE
from hpctrain.errors import HpctrainError, UsageError
from tests.helpers import make_wheel, run_command

HOME = "/home/alice/hpctrain"


@pytest.fixture(scope="module")
def added(site):
    """A function that runs `hpctrain add` as alice. It has added a package that contains another numpy."""
    folder = site.host_path("/project/alice")
    env = {"HPCTRAIN_PACKAGES": "/project/alice/packages"}

    def add(*arguments, check=True, env=env):
        command = ["apptainer", "exec", "--bind", "/project", "/project/hpctrain-cpu.sif", "hpctrain", "add"]
        command += arguments
        return site.exec("login", *command, user="alice", cwd="/project/alice", env=env, check=check)

    modules = {"extra/__init__.py": "name = 'extra 1'\n", "numpy.py": "raise SystemExit('the wrong numpy')\n"}
    add("--no-index", f"./{make_wheel(folder, 'extra', '1.0', modules)}")
    return add


@pytest.mark.parametrize("runtime", ["apptainer", "podman-hpc", "shifter"])
def test_packages_on_top_are_found_on_every_rank_and_hide_nothing(site, added, podman_image, runtime):
    site.host_path(f"{HOME}/uses.py").write_text(
        "import os, extra, numpy, torch\n"
        "print('rank', os.environ['RANK'], extra.name, extra.__file__, numpy.__file__)\n"
    )
    env = {"HPCTRAIN_RUNTIME": runtime, "HPCTRAIN_PACKAGES": "/project/alice/packages"}
    if runtime == "podman-hpc":
        env |= podman_image
    if runtime == "shifter":
        env |= {
            "PATH": "/opt/standins:/usr/local/bin:/usr/bin:/bin",
            "SHIFTER_SIF": "/project/hpctrain-cpu.sif",
        }
        env["APPTAINER_BIND"] = "/project"  # the real shifter mounts all file systems of the site
    job = site.submit("launch/apptainer_ddp.sh", "uses.py", cwd=HOME, env=env)
    ended = site.wait(job)
    output = site.host_path(f"{HOME}/slurm-{job}.out").read_text(errors="replace")
    found = re.findall(
        r"rank (\d) extra 1 /project/alice/packages/(python3.11-torch[^/]*)/\S* /opt/hpctrain/\S*/numpy/",
        output,
    )
    assert ended.state == "COMPLETED" and sorted(rank for rank, _ in found) == ["0", "1", "2", "3"], output


def test_packages_that_do_not_fit_the_image_are_refused(site, added):
    folder = site.host_path("/project/alice")
    before = sorted(folder.glob("packages/**/*"))
    other = make_wheel(folder, "needy", "1.0", {"needy.py": ""}, "torch<2")
    newer = make_wheel(folder, "extra", "2.0", {"extra/__init__.py": ""})
    for arguments, message in (
        (["--no-index", f"./{other}"], "the folder and the image are unchanged"),
        (["--no-index", f"./{newer}"], "the folder and the image are unchanged"),
        ([], "add takes the arguments of uv pip install"),
    ):
        done = added(*arguments, check=False)
        said = [line for line in done.stderr.splitlines() if "hpctrain: error:" in line]
        assert done.returncode != 0 and len(said) == 1 and message in said[0], done.stderr
        assert "Traceback" not in done.stderr
    for env, message in (
        ({}, "add needs a folder: export HPCTRAIN_PACKAGES=FOLDER"),
        ({"HPCTRAIN_PACKAGES": "/usr/packages"}, "set HPCTRAIN_PACKAGES to a writable folder"),
    ):
        done = added("einops", check=False, env=env)
        assert done.returncode != 0 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert sorted(folder.glob("packages/**/*")) == before


def test_packages_in_a_folder_that_no_container_can_mount_are_refused(monkeypatch, tmp_path):
    for name in ("a:b", "a,b"):
        monkeypatch.setenv("HPCTRAIN_PACKAGES", str(tmp_path / name))
        with pytest.raises(UsageError, match=f"HPCTRAIN_PACKAGES=.*/{name}"):
            add.main(ALONE, ["einops"])


@pytest.mark.slow
def test_an_index_comes_from_the_users_own_settings_alone(tmp_path, monkeypatch, capsys):
    """uv.toml and pyproject.toml of the current folder and its parents may be another user's."""
    (tmp_path / "index").mkdir()
    make_wheel(tmp_path / "index", "extra", "1.0", {"extra.py": ""})
    settings = f'no-index = true\nfind-links = ["{tmp_path}/index"]\n'
    here = tmp_path / "of another/here"
    here.mkdir(parents=True)
    (here.parent / "uv.toml").write_text(settings)
    (here / "pyproject.toml").write_text(f"[tool.uv]\n{settings}")
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setattr(add, "failed_import", lambda *_, **__: None)
    target = tmp_path / "packages"

    def install(name):
        (tmp_path / name).mkdir()
        add.install(["extra"], tmp_path / name, target)

    with pytest.raises(HpctrainError, match=r"uv .*packages"):
        install("one")
    (tmp_path / "config/uv").mkdir(parents=True)
    (tmp_path / "config/uv/uv.toml").write_text(settings)
    install("two")
    assert (add.site_packages(target) / "extra.py").exists()
    assert capsys.readouterr().out.endswith(f"hpctrain: added extra; in {target}\n")


def test_a_slow_check_of_imports_shows_its_progress(tmp_path, monkeypatch, capsys):
    program = "print('importing a', flush=True); print('noise'); print('failed a: no')"
    monkeypatch.setattr(add, "SAFE_PYTHON", [sys.executable, "-c", program])
    monkeypatch.setattr(add, "PROGRESS_EVERY", 0.0)
    assert add.failed_import(tmp_path, progress=True) == "a: no"
    assert capsys.readouterr().out.startswith("hpctrain: importing a\n")


def test_a_package_that_cannot_be_imported_or_breaks_the_image_is_refused(site, added):
    """torchaudio's wheel of PyPI needs torch with CUDA."""
    folder = site.host_path("/project/alice")
    pip = [REPOSITORY / ".venv/bin/python", "-m", "pip", "download", "--quiet", "--no-deps"]
    pip += ["--dest", folder / "wheels"]
    subprocess.run([*pip, "torchaudio==2.11.0"], check=True)
    ends = make_wheel(folder, "ends", "1.0", {"ends.py": "import os\nos._exit(3)\n"})
    breaks = make_wheel(
        folder, "breaks", "1.0", {"breaks.py": "import sys\nsys.modules['lightning'] = None\n"}
    )
    before = sorted(folder.glob("packages/**/*"))
    for arguments, message in (
        (
            ["--no-index", "--find-links", "wheels", "torchaudio"],
            "torchaudio: import torchaudio: OSError: Could not load this library",
        ),
        (
            ["--no-index", f"./{ends}"],
            "importing ends ended Python with status 3; the folder and the image are unchanged",
        ),
        (
            ["--no-index", f"./{breaks}"],
            "lightning: import lightning: ModuleNotFoundError: import of lightning halted",
        ),
    ):
        done = added(*arguments, check=False)
        said = [line for line in done.stderr.splitlines() if "hpctrain: error:" in line]
        assert done.returncode == 1 and len(said) == 1 and message in said[0], done.stderr
    assert sorted(folder.glob("packages/**/*")) == before


# What users of such images add, in versions that need a recent release of what both have.
ADDED = """\
accelerate>=1.14 albumentations boto3>=1.43 dask datasets>=5 diffusers>=0.42 einops evaluate>=0.4 fastapi
gradio>=6 h5py jupyterlab>=4 lightgbm mlflow>=3.10 monai numba>=0.60 nvidia-ml-py opencv-python-headless
optuna>=4 pandas>=2 peft>=0.20 plotly polars pyarrow>=20 ray>=2.50 s3fs>=2026 scikit-image
sentence-transformers>=5 sentencepiece spacy>=3.8 streamlit>=1.50 timm>=1 torch-geometric>=2.7 torchaudio
trl>=1 wandb>=0.30 webdataset xarray zarr>=3
"""


@pytest.mark.slow
def test_the_packages_that_people_add_fit_the_versions_of_the_image(tmp_path):
    """All of them at once, as they were in November 2026."""
    wanted, pins = tmp_path / "wanted.txt", tmp_path / "pins.txt"
    wanted.write_text("\n".join(ADDED.split()))
    lock = (REPOSITORY / "containers/locks/cpu.lock").read_text()
    # The CPU build of torch is not on PyPI, and its version fits where 2.13.0 does.
    pins.write_text("\n".join(re.findall(r"^[a-z0-9-]+==[^ +]+", lock, re.M)))
    uv = [REPOSITORY / ".venv/bin/uv", "pip", "compile", "--no-config", "--no-build", "--python-version=3.11"]
    uv += [
        "--python-platform",
        "x86_64-manylinux_2_28",
        "--exclude-newer",
        "2026-11-20",
        "--constraint",
        pins,
        wanted,
    ]
    done = run_command(uv)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (
            {"HPCTRAIN_PACKAGES": "/project/nothing"},
            "HPCTRAIN_PACKAGES=/project/nothing is not a folder on n1",
        ),
        (
            {"HPCTRAIN_PACKAGES": "/project", "HPCTRAIN_RUNTIME": "none"},
            "HPCTRAIN_PACKAGES is for images: unset it",
        ),
        (
            {"HPCTRAIN_PACKAGES": "/project/other"},
            "/project/other holds python3.11-torch1, not python3.11-torch2",
        ),
        (
            {"HPCTRAIN_PACKAGES": "/project/broken"},
            "/python3.11-torch2.13.0+cpu: broken: import broken: RuntimeError: no GPU: remove",
        ),
    ],
    ids=["no folder", "no image", "another image's", "a package that fails"],
)
def test_an_invalid_folder_of_packages_ends_the_job_with_one_line(site, env, message):
    site.host_path("/project/other/python3.11-torch1").mkdir(parents=True, exist_ok=True)
    packages = site.host_path("/project/broken/python3.11-torch2.13.0+cpu/lib/python3.11/site-packages")
    packages.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(
        packages / make_wheel(packages, "broken", "1.0", {"broken.py": "raise RuntimeError('no GPU')\n"})
    ) as archive:
        archive.extractall(packages)
    job = site.submit(
        "--nodes=1", "--ntasks-per-node=1", "launch/apptainer_ddp.sh", "check", cwd=HOME, env=env
    )
    ended = site.wait(job)
    output = site.host_path(f"{HOME}/slurm-{job}.out").read_text(errors="replace")
    assert ended.state == "FAILED" and sum(message in line for line in output.splitlines()) == 1, output
