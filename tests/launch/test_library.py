"""What needs no cluster in launch/lib: digests of images, options, adding a runtime and a launcher."""

import functools
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from slurm_cluster import REPOSITORY

BARE = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": "/root"}


def library(script, **env):
    """Run a script with the functions of launch/lib/main.sh."""
    command = ["bash", "-c", f"set -euo pipefail; source {REPOSITORY}/launch/lib/main.sh; {script}"]
    return subprocess.run(command, env=BARE | env, capture_output=True, text=True, timeout=300)


def put_squeue(folder, **fields):
    """A squeue in the folder that prints these fields of the only job, by the names of --Format."""
    fields = {"State": "RUNNING", "RestartCnt": 0, "PreemptTime": "N/A", "ArrayTaskID": "N/A"} | fields
    cases = "".join(f"{name}) printf '%-9s ' '{value}' ;;\n" for name, value in fields.items())
    (folder / "squeue").write_text(f"""#!/bin/sh
for word; do case $word in --Format=*) names=${{word#*=}} ;; esac; done
for name in $(echo "$names" | tr , ' '); do case ${{name%%:*}} in
{cases}esac; done; [ -z "$names" ] || echo
""")
    (folder / "squeue").chmod(0o755)


# The digest of a SIF


@pytest.fixture
def image(tmp_path):
    sif = tmp_path / "images/my image.sif"
    sif.parent.mkdir()
    sif.write_bytes(os.urandom(1 << 20))
    return sif


def digest_of(sif):
    return "sha256:" + hashlib.sha256(sif.read_bytes()).hexdigest()


def find(sif):
    """The digest from a record; "" if the job would hash the image."""
    script = f"find_digest '{sif}'; echo ${{DIGEST:-}} ${{DIGEST_PENDING:+pending}}"
    said = library(script, HPCTRAIN_CACHE=str(sif.parents[1] / "cache")).stdout.strip()
    return "" if said == "pending" else said


def hash_it(sif):
    """The output of a job that hashes the image, and the file that it names for the digest."""
    script = (
        f"find_digest '{sif}'; hash_in_background '{sif}'; echo ${{HPCTRAIN_IMAGE_DIGEST_FILE:-}}; "
        "exec sleep 300"
    )
    env = BARE | {"HPCTRAIN_CACHE": str(sif.parents[1] / "cache")}
    command = ["bash", "-c", f"set -euo pipefail; source {REPOSITORY}/launch/lib/main.sh; {script}"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as job:
        lines = [job.stdout.readline().strip() for _ in range(2)]
        said = [line for line in lines if line.startswith("hpctrain:")]
        (promised,) = set(lines) - set(said)
        # The record beside the image is written last, if it can be.
        beside = Path(f"{sif}.digest")
        record = Path(promised) if beside.is_dir() else beside
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if record.exists() and record.read_text().startswith(digest_of(sif)):
                break
            time.sleep(0.1)
        job.kill()
    return said, promised


def test_only_the_first_job_hashes(image):
    assert find(image) == ""
    said, promised = hash_it(image)
    assert said == [f"hpctrain: image {image} {digest_of(image)}"]
    assert Path(promised).read_text() == f"{digest_of(image)}\n"
    assert find(image) == digest_of(image)
    assert sorted(path.name for path in image.parent.iterdir()) == ["my image.sif", "my image.sif.digest"]


def test_where_the_folder_of_the_image_cannot_be_written_the_cache_has_the_record(image):
    (image.parent / "my image.sif.digest").mkdir()  # which nothing can replace, not even for root
    hash_it(image)
    folder = image.parents[1] / "cache/digests"
    (record,) = folder.iterdir()
    # somebody else's, in /tmp perhaps, or one that others can replace or change
    for path in (record, folder):
        assert find(image) == digest_of(image)
        os.chown(path, 12345, -1)
        assert find(image) == ""
        os.chown(path, os.geteuid(), -1)
        mode = path.stat().st_mode
        path.chmod(mode | 0o020)
        assert find(image) == ""
        path.chmod(mode)


@pytest.mark.parametrize("changed", ["cache", "cache/digests"])
def test_the_record_is_not_in_a_cache_that_others_can_change(image, changed):
    """A link that somebody made there led the record to a private file, which got its mode, too."""
    digests = image.parents[1] / "cache/digests"
    digests.mkdir(parents=True)
    (image.parents[1] / changed).chmod(0o777)
    _, promised = hash_it(image)
    assert promised.startswith(f"/tmp/hpctrain-{os.getuid()}/digests/") and not list(digests.iterdir())
    assert Path(promised).stat().st_mode & 0o777 == 0o644
    Path(promised).unlink()


def test_by_another_name_it_is_the_same_image(image):
    hash_it(image)
    link = image.parents[1] / "link.sif"
    link.symlink_to(image)
    assert find(link) == digest_of(image)


def test_a_record_counts_for_its_image_alone(image):
    hash_it(image)
    copy = image.parent / "copy.sif"
    shutil.copy(image, copy)  # another time
    shutil.copy(f"{image}.digest", f"{copy}.digest")
    assert find(copy) == ""
    content = image.read_bytes()
    time_of_change = image.stat().st_mtime_ns
    image.write_bytes(content + b"x")
    os.utime(image, ns=(time_of_change, time_of_change))
    assert find(image) == ""
    said, _ = hash_it(image)
    assert digest_of(image) in said[0] and find(image) == digest_of(image)


def test_a_record_of_somebody_else_does_not_count(image):
    """In a folder such as /tmp anybody can put one beside the image.

    Who owns the image or runs the job can be trusted.
    """
    if os.getuid() != 0:
        pytest.skip("needs root, to make files of others")
    hash_it(image)
    record = Path(f"{image}.digest")
    shutil.rmtree(image.parents[1] / "cache")
    os.chown(image, 23456, -1)
    assert find(image) == digest_of(image)
    os.chown(record, 23456, -1)
    assert find(image) == digest_of(image)
    os.chown(record, 12345, -1)
    assert find(image) == ""
    record.unlink()
    os.mkfifo(record)  # nobody writes to it
    assert find(image) == ""


@pytest.mark.slow
def test_an_image_that_is_replaced_before_it_is_hashed_is_not_taken_for_the_first(image):
    """--broadcast and a check of MPI come between, and may take minutes."""
    other, first = image.parent / "other", image.parent / "first"
    other.write_bytes(b"other")
    replace = f"mv '{image}' '{first}'; mv '{other}' '{image}'"
    script = f"find_digest '{image}'; {replace}; hash_in_background '{image}'; sleep 2"
    done = library(script, HPCTRAIN_CACHE=str(image.parents[1] / "cache"))
    assert (done.returncode, done.stdout) == (0, "")
    first.rename(image)
    assert find(image) == ""


def test_a_name_with_a_backslash(image):
    image = image.rename(image.parent / "a\\b.sif")
    said, _ = hash_it(image)
    assert said == [f"hpctrain: image {image} {digest_of(image)}"] and find(image) == digest_of(image)


@pytest.mark.parametrize("text", ["", "sha256:abc {stamp}\n", "{digest}\n", "{digest} {stamp}x\n", "\0\xff"])
def test_a_record_that_is_broken_does_not_count(image, text):
    stamp = subprocess.run(
        ["stat", "-c", "%s %.9Y", image], capture_output=True, text=True, check=True
    ).stdout.strip()
    Path(f"{image}.digest").write_text(text.format(digest=digest_of(image), stamp=stamp))
    assert find(image) == ""
    Path(f"{image}.digest").write_text(f"{digest_of(image)} {stamp}\n")
    assert find(image) == digest_of(image)


def test_nothing_is_left_when_the_job_ends_before_the_hash(image):
    """The launcher replaces the script, which then cannot clean up; the image here takes minutes to read."""
    os.truncate(image, 1 << 40)
    script = f"find_digest '{image}'; hash_in_background '{image}'; exec sleep 1"
    done = library(script, HPCTRAIN_CACHE=str(image.parents[1] / "cache"))
    assert done.returncode == 0 and done.stdout == ""  # so the pipe is closed: no process has it open
    for _ in range(100):
        left = subprocess.run(["pgrep", "-f", f"sha256sum {image}"], capture_output=True, text=True).stdout
        if not left:
            break
        time.sleep(0.1)  # it has got a signal
    assert left == "" and not list((image.parents[1] / "cache/digests").iterdir())


# The job


@pytest.fixture
def below_var():
    """A folder that is bound by its own name, because images have a /var."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def programs(tmp_path):
    """Programs of a cluster of two nodes that only say something; and the environment to find them."""
    for name, text in {
        "apptainer": "echo apptainer version 0",
        "mpirun": "echo 'mpirun (Open MPI) 5.0.7'",
        "scontrol": '[ -z "$3" ] || echo n1',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "image").mkdir()
    (tmp_path / "nodes").write_text("n1\nn1\nn2\nn2\n")
    (tmp_path / "empty").write_text("")
    return BARE | {
        "PATH": f"{tmp_path}:{BARE['PATH']}",
        "HPCTRAIN_IMAGE": str(tmp_path / "image"),
        "HPCTRAIN_ROOT": str(REPOSITORY),
    }


def dry_run(script, env, *arguments):
    command = [REPOSITORY / "launch" / script, "--dry-run", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("script", ["apptainer_ddp.sh", "apptainer_torchrun.sh"])
def test_a_mistyped_trainer_does_not_wait_for_a_job(programs, script):
    """--dry-run printed the commands for it."""
    done = dry_run(script, programs, "train_dpp", "--epochs", "1")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    message = "hpctrain: error: there is no command 'train_dpp': choose from train_ddp, train_lightning, "
    assert done.stderr.startswith(message) and done.stderr.endswith(" or plot, or give a .py file\n")
    assert dry_run(script, programs, "train_ddp").returncode == 0


@pytest.mark.parametrize("port", ["70000", "0", "http", "1$(touch made)"])
def test_a_number_that_is_no_port_is_one_line(programs, port):
    """torchrun ended in a traceback."""
    done = dry_run("apptainer_torchrun.sh", programs | {"MASTER_PORT": port}, "check")
    said = "a port is a number from 1 to 65535: unset it, or give another"
    assert (done.returncode, done.stderr) == (2, f"hpctrain: error: MASTER_PORT={port}: {said}\n")
    assert dry_run("apptainer_torchrun.sh", programs | {"MASTER_PORT": "65535"}, "check").returncode == 0


@pytest.mark.parametrize(
    "name",
    ["a b", "quote's\"", "$(touch made)", "`touch made`", "-rf", "semi;colon", "*", "back\\slash", "한글"],
)
def test_a_folder_of_any_name_is_bound_as_it_is(programs, tmp_path, below_var, name):
    folder = below_var / name
    folder.mkdir()
    done = subprocess.run(
        [REPOSITORY / "launch/apptainer_ddp.sh", "--dry-run", "check"],
        env=programs,
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    words = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {done.stdout.splitlines()[-1]}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    assert words[words.index(str(folder)) - 1] == "--bind"
    assert not list(tmp_path.rglob("made"))


@pytest.mark.parametrize("name", ["a,b", "a:b", "a\nb"])
def test_a_folder_that_no_container_can_have_is_one_line(programs, tmp_path, name):
    """To apptainer and podman, these characters separate a folder from its place in the image."""
    (tmp_path / name).mkdir()
    command = [REPOSITORY / "launch/apptainer_ddp.sh", "--dry-run", "check"]
    done = subprocess.run(command, env=programs, cwd=tmp_path / name, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "a container cannot have a folder whose name holds a comma, a colon or a line break" in done.stderr


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("BIND", "/usr:/etc", "separate folders by spaces, not by commas or colons"),
        ("BIND", "/usr,/etc", "separate folders by spaces, not by commas or colons"),
        ("BIND", "/usr:/mnt:ro", "separate folders by spaces, not by commas or colons"),
        ("PACKAGES", "/usr:/etc", "give one folder"),
    ],
)
def test_folders_in_the_way_of_apptainer_or_of_path(programs, name, value, message):
    """They were taken for one folder that does not exist, which is skipped."""
    done = dry_run("local.sh", programs | {f"HPCTRAIN_{name}": value}, "check")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done
    assert f"HPCTRAIN_{name}={value}: {message}" in done.stderr


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({}, "{}/hpctrain-cpu.sif: no such image: run make sif, or set HPCTRAIN_IMAGE to yours"),
        ({"HPCTRAIN_FLAVOR": "cu130"}, "{}/hpctrain-cu130.sif: no such image: run make sif FLAVOR=cu130, or"),
        (
            {"HPCTRAIN_FLAVOR": "cpu-mpich"},
            "{}/hpctrain-cpu-mpich.sif: no such image: run make sif MPI=mpich, or",
        ),
        (
            {"HPCTRAIN_FLAVOR": "cuda"},
            "HPCTRAIN_FLAVOR is 'cuda': choose one of cpu cpu-mpich cu128 cu128-mpich cu130 ",
        ),
        ({"HPCTRAIN_FLAVOR": "mpich"}, "HPCTRAIN_FLAVOR is 'mpich': choose one of cpu cpu-mpich"),
        (
            {"HPCTRAIN_FLAVOR": "cuda", "HPCTRAIN_RUNTIME": "shifter"},
            "HPCTRAIN_FLAVOR is 'cuda': choose one of cpu",
        ),
        (
            {"HPCTRAIN_IMAGE": "mine.sif"},
            "mine.sif: no such image: set HPCTRAIN_IMAGE to yours, or unset it for hpctrain-cpu",
        ),
    ],
)
def test_an_image_that_is_not_there(project, programs, env, message):
    shutil.copytree(REPOSITORY / "containers/locks", project / "containers/locks")
    own = {
        "HPCTRAIN_ROOT": str(project),
        "HPCTRAIN_IMAGE": "",
        "PATH": f"{programs['PATH']}:{REPOSITORY}/tests/standins",
    }
    done = dry_run("local.sh", programs | own | env, "check")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and message.format(project) in done.stderr, (
        done
    )


def test_shifter_gets_what_the_loader_takes_from_a_setuid_program(programs, tmp_path):
    """The TMPDIR of the user did not arrive."""
    (tmp_path / "shifter").symlink_to("/bin/true")
    (tmp_path / "shifterimg").write_text("#!/bin/sh\necho 0123456789abcdef\n")
    (tmp_path / "shifterimg").chmod(0o755)
    env = programs | {"HPCTRAIN_IMAGE": "hpctrain:cpu", "TMPDIR": "/scratch/a b"}
    command = shlex.split(dry_run("shifter_ddp.sh", env, "check").stdout.splitlines()[-1])
    inside = command[command.index("shifter") : command.index("python")]
    assert "--env=TMPDIR=/scratch/a b" in inside and "--env=MALLOC_TRIM_THRESHOLD_=536870912" in inside
    del env["TMPDIR"]
    assert "--env=TMPDIR" not in dry_run("shifter_ddp.sh", env, "check").stdout


def test_a_flavor_that_an_installation_does_not_have(project, programs):
    """It has no locks, only images. Where none is named, the only one is taken, or of two the default."""
    env = programs | {"HPCTRAIN_ROOT": str(project), "HPCTRAIN_IMAGE": ""}
    (project / "hpctrain-cu130-mpich.sif").touch()
    done = dry_run("local.sh", env | {"HPCTRAIN_FLAVOR": "cpu"}, "check")
    assert done.stderr.endswith("HPCTRAIN_FLAVOR is 'cpu': choose one of cu130-mpich\n"), done
    done = dry_run("local.sh", env, "check")
    assert f"image {project}/hpctrain-cu130-mpich.sif\n" in done.stdout + done.stderr, done
    (project / "hpctrain-cu128.sif").touch()
    done = dry_run("local.sh", env, "check")
    assert done.stderr.endswith("HPCTRAIN_FLAVOR is 'cpu': choose one of cu128 cu130-mpich\n"), done


def test_each_version_of_pmix_that_srun_offers(programs, tmp_path):
    """The second one of the list was refused, and the error quoted srun's words between the names."""
    offered = (
        "MPI plugin types are...\n\tnone\n\tpmix\nspecific pmix plugin versions available: pmix_v4,pmix_v5"
    )
    (tmp_path / "srun").write_text(f"#!/bin/sh\necho '{offered}'\n")
    (tmp_path / "srun").chmod(0o755)
    done = dry_run("apptainer_mpi.sh", programs, "--mpi=pmi2", "check")
    assert "choose one of these: none pmix pmix_v4 pmix_v5" in done.stderr
    assert dry_run("apptainer_mpi.sh", programs, "--mpi=pmix_v5", "check").returncode == 0


def test_a_pmi_without_slurm(programs, tmp_path):
    """The error held the shell's own: srun: command not found."""
    for name in (
        "bash",
        "sed",
        "seq",
        "dirname",
        "awk",
        "tr",
        "date",
        "id",
        "uname",
        "hostname",
        "tail",
        "env",
        "python",
        "readlink",
        "find",
        "timeout",
        "sort",
        "paste",
    ):
        (tmp_path / name).symlink_to(shutil.which(name, path=BARE["PATH"]))
    done = dry_run("apptainer_mpi.sh", programs | {"PATH": str(tmp_path)}, "--mpi=pmix", "check")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done
    assert "there is no srun on the PATH of " in done.stderr and "or use --mpi=mpirun" in done.stderr


def test_jupyter_starts_no_trainer(programs):
    done = dry_run("jupyter.sh", programs, "train_ddp")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done
    assert (
        "train_ddp: this script starts only JupyterLab (no argument), tensorboard FOLDER or serve FOLDER"
        in done.stderr
    )
    for words in ([], ["tensorboard", "runs"]):
        done = dry_run("jupyter.sh", programs, *words)
        assert (
            done.stdout.split()[-len(words) - 3 :][-3:] == ["-m", "hpctrain", *(words or ["jupyter"])][-3:]
        ), done


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        ("python -u train.py --lr 1", " train.py --lr 1"),
        ("/usr/bin/python3 -m pkg.train x", " -m pkg.train x"),
        ("torchrun --nproc-per-node 2 train.py", " train.py"),
        ("accelerate launch --config_file a.yaml train.py 'a b'", " train.py a\\ b"),
        ("fabric run train.py --devices=2", " train.py --devices=2"),
        ("mpirun -np 4 ./train", " SCRIPT.py"),
        ("python -m", " SCRIPT.py"),
        ("timm/distributed_train.sh 4 --model vit", " SCRIPT.py"),
        ("./train", " SCRIPT.py"),
        ("bash run.sh train.py --lr 1", " train.py --lr 1"),
    ],
)
def test_a_launcher_or_shell_script_as_the_program_is_one_line_of_advice(programs, words, instead):
    done = dry_run("apptainer_torchrun.sh", programs, *shlex.split(words))
    name = words.split()[0]
    message = (
        f"{name}: this script starts Python and all ranks itself: write launch/apptainer_torchrun.sh{instead}"
    )
    assert (done.returncode, done.stderr) == (2, f"hpctrain: error: {message}\n")


TORCHRUN = [sys.executable, REPOSITORY / "launch/lib/torchrun.py", "--standalone", "--no-python", "sh", "-c"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "how"), [("exit 3", "ended with status 3"), ("kill -9 $$$$", "was killed by signal 9")]
)
def test_torchrun_says_in_one_line_which_rank_failed(fault, how):
    done = subprocess.run(
        [*TORCHRUN, f"echo my error >&2; {fault}"], env=BARE, capture_output=True, text=True, timeout=300
    )
    first, *log, last = done.stderr.splitlines()
    assert (done.returncode, first) == (1, "my error") and not any("Traceback" in line for line in log), (
        done.stderr
    )
    assert re.fullmatch(
        rf"hpctrain: rank 0 was the first to fail on \S+: process \d+ {how}, see its lines above", last
    )


@pytest.mark.slow
def test_ranks_of_torchrun_meet_at_the_name_that_slurm_gives_the_node():
    """It was the full name, such as n1.localdomain, which is in /etc/hosts of that node alone."""
    command = [*TORCHRUN, "echo $MASTER_ADDR"]
    env = BARE | {"SLURMD_NODENAME": "127.0.0.1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.stdout == "127.0.0.1\n", done.stderr


@pytest.mark.slow
def test_torchrun_that_is_ended_says_so_in_one_line():
    # Ended while it starts a rank, torchrun does not end that rank, whose output is then waited for.
    script = "sleep 1; kill -TERM $PPID; exec sleep 60"
    done = subprocess.run([*TORCHRUN, script], env=BARE, capture_output=True, text=True, timeout=300)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    assert re.fullmatch(r"hpctrain: torchrun on \S+ was ended by signal 15", done.stderr.splitlines()[-1])


@pytest.mark.slow
def test_torchrun_without_the_first_node_is_one_line():
    torchrun = [
        sys.executable,
        REPOSITORY / "launch/lib/torchrun.py",
        "--nnodes=2",
        "--rdzv-id=1",
        "--rdzv-backend=c10d",
    ]
    torchrun += ["--rdzv-endpoint=localhost:1", "--rdzv-conf=is_host=0,read_timeout=1", "--no-python", "true"]
    done = subprocess.run(torchrun, env=BARE, capture_output=True, text=True, timeout=300)
    last = done.stderr.splitlines()[-1]
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    assert re.fullmatch(
        r"hpctrain: torchrun on \S+ has no connection to the first node \(.+\): see its lines", last
    )


def test_a_module_is_started_as_by_python(programs):
    done = dry_run("apptainer_ddp.sh", programs, "-m", "pkg.train", "--dry-run")
    assert shlex.split(done.stdout.splitlines()[-1])[-5:] == [
        "--",
        "python",
        "-m",
        "pkg.train",
        "--dry-run",
    ], done
    assert "PYTHONSAFEPATH" not in done.stdout
    for words, answer in (
        ("-m pkg.train", "yes"),
        ("-m hpctrain check", "no"),
        ("a.py", "yes"),
        ("-c 1", "no"),
    ):
        assert (
            library(f"WORDS=(x -- python {words}); is_users_script && echo yes || echo no").stdout
            == f"{answer}\n"
        )
    done = dry_run("apptainer_ddp.sh", programs, "-m")
    assert done.returncode == 2 and "-m: give the name of a module after it" in done.stderr


@pytest.mark.parametrize(
    ("script", "line", "status", "told"),
    [
        ("apptainer_ddp.sh", "    from mpi4py import MPI", 1, "mpi4py"),
        ("apptainer_torchrun.sh", "import horovod.torch as hvd", 143, "horovod"),
        ("apptainer_ddp.sh", "from dask_mpi import initialize", 1, "dask_mpi"),
        ("apptainer_ddp.sh", "import horovod.torch as hvd", 0, ""),
        ("apptainer_ddp.sh", "# import mpi4py", 1, ""),
    ],
)
def test_a_script_for_mpi_that_fails_under_srun_is_told_by_what_to_start_it(
    programs, tmp_path, script, line, status, told
):
    """The last words were those of Open MPI, which advise to build Slurm again."""
    (tmp_path / "srun").write_text(f"#!/bin/sh\nexit {status}\n")
    (tmp_path / "srun").chmod(0o755)
    (tmp_path / "mine.py").write_text(f"import os\n{line}\n")
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_SUBMIT_DIR": str(tmp_path)}
    command = [REPOSITORY / "launch" / script, "mine.py"]
    done = subprocess.run(
        command, env=programs | job, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    last = done.stdout.splitlines()[-1]
    hint = f"hpctrain: if MPI did not start above: mine.py imports {told}, so submit it by launch/"
    assert last.startswith(hint if told else "hpctrain: command: "), done.stdout


def test_one_of_a_kind_has_no_plural(programs):
    """The log began with "1 nodes x 1 tasks"."""
    said = dry_run("local.sh", programs | {"HPCTRAIN_TASKS": "1"}, "check").stdout
    assert re.search(r"job \d+, 1 node x 1 task x \d+ threads?, 0 GPUs per node, on localhost\n", said), said


def conclude(status, control, requeues, env, assignments="SCRIPT=x"):
    """The end of a batch script whose launcher has ended with this status."""
    source = (
        f"source {REPOSITORY}/launch/lib/main.sh; HPCTRAIN_CONTROL={control} HPCTRAIN_REQUEUES={requeues}"
    )
    shape = "NODES=2 TASKS=4 THREADS=8 GPUS=4"
    script = f"{source} {shape} {assignments}; trap clean_up EXIT; exit {status}"
    return subprocess.run(["bash", "-euc", script], env=env, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("saved", "requeues", "end"),
    [
        (True, 0, "the ranks have saved a checkpoint and stopped: requeuing the job\nrequeue 7\n"),
        (
            False,
            1,
            "request to stop, restart 1 of at most 1 (HPCTRAIN_REQUEUES): requeuing the job\nrequeue 7\n",
        ),
        (
            False,
            0,
            "exit status 75 after 0 restarts, HPCTRAIN_REQUEUES allows no more: continue with sbatch ",
        ),
    ],
)
@pytest.mark.parametrize("status", [0, 75])
def test_attempts_that_stop_and_save_nothing_are_counted(programs, tmp_path, status, saved, requeues, end):
    """The job was requeued for ever."""
    (tmp_path / "control").mkdir()
    for name in ("stop", "stopped", *(["saved"] if saved else [])):
        (tmp_path / "control" / name).touch()
    put_squeue(tmp_path)
    (tmp_path / "scontrol").write_text('#!/bin/sh\necho "$@"\n')
    env = programs | {"HPCTRAIN_CONTROL": str(tmp_path / "control"), "SLURM_JOB_ID": "7"}
    done = conclude(status, tmp_path / "control", requeues, env)
    assert done.returncode == 75 and end in done.stdout, done


@pytest.mark.parametrize("silent", [2, 99])
def test_a_slurmctld_that_does_not_answer_has_not_requeued_the_job(programs, tmp_path, silent):
    """The job was FAILED, and its log said that Slurm had requeued it."""
    for name in ("saved", "stopped"):
        (tmp_path / name).write_text("--resume runs/x\n")
    put_squeue(tmp_path)
    (tmp_path / "squeue").rename(tmp_path / "answer")
    for name, text in {
        "squeue": f'cd {tmp_path}; echo >>asked; [ $(wc -l <asked) -gt {silent} ] && exec ./answer "$@"',
        "scontrol": 'echo "$@"',
        "sleep": "",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = conclude(75, tmp_path, 1, programs | {"SLURM_JOB_ID": "7"})
    assert done.returncode == 75 and "requeuing the job\nrequeue 7\n" in done.stdout, done


def test_the_attempt_is_not_that_of_the_job_in_which_it_was_submitted(tmp_path):
    """A job that a restarted one had submitted was never requeued."""
    put_squeue(tmp_path)
    env = {"PATH": f"{tmp_path}:{BARE['PATH']}", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "3"}
    done = library("JOB=7; keep_own_slurm_variables; is_current; echo $ATTEMPT", **env)
    assert done.stdout == "0\n", done.stderr


@pytest.mark.parametrize(
    ("node", "job", "task", "gpus"),
    [
        ("gres/gpu:a100:4", "N/A", "N/A", 4),
        ("gres:gpu", "N/A", "N/A", 1),
        ("gpu:2080ti:4", "N/A", "N/A", 4),
        ("gres/gpu:3g.20gb", "N/A", "N/A", 1),
        ("gres/gpu:a100:2,gres/gpu:v100:1", "N/A", "N/A", 3),
        ("gres/gpumem:20G", "gres/gpu:a100:8", "N/A", 4),
        ("N/A", "gres/gpu:8", "N/A", 4),
        ("N/A", "N/A", "cpu=2,gres/gpu=1", 2),
        ("N/A", "N/A", "cpu=2", 0),
    ],
)
def test_a_command_of_salloc_on_the_login_node_has_gpus(node, job, task, gpus):
    """It started the image without --nv, as Slurm sets SLURM_GPUS_ON_NODE on the nodes only."""
    request = "".join(text.ljust(400) for text in (node, job, task))
    done = library(f"HOSTS=(n1 n2) TASKS=2 REQUEST='{request}'; gpus_of_request")
    assert done.stdout == f"{gpus}\n", done.stderr


@pytest.mark.parametrize(
    ("tasks", "options", "gpus"), [(4, ":", False), (1, ":", True), (4, "OPTION[spare-nodes]=1", True)]
)
def test_a_step_of_another_shape_than_the_job_asks_for_its_gpus(tasks, options, gpus):
    """With --gpus-per-task=1 all ranks of torchrun had one GPU; with --gpus=12 srun refused 2 of 3 nodes."""
    script = f"NODES=2 TASKS=4 THREADS=1 GPUS=4; declare -A OPTION; {options}"
    done = library(f'{script}; set_srun {tasks}; echo "${{LAUNCH[@]}}"')
    assert done.returncode == 0 and ("--gpus=8" in done.stdout.split()) == gpus, done


def test_a_signal_to_check_sh_reaches_the_run(tmp_path):
    """Slurm sends it once, at once where the time limit is short."""
    shutil.copytree(REPOSITORY / "launch", tmp_path / "launch")
    script = tmp_path / "launch/other.sh"
    script.write_text(f"""#!/bin/bash
[ "$1" != check ] || exec kill -USR1 $PPID
set -- --dry-run; source {tmp_path}/launch/lib/main.sh; echo "early: $EARLY_STOP"
""")
    script.chmod(0o755)
    command = [tmp_path / "launch/check.sh", "other.sh", "train_ddp"]
    done = subprocess.run(command, env=BARE, capture_output=True, text=True)
    assert done.stdout == "early: 1\n", done


@pytest.mark.parametrize(("status", "requeued"), [(233, True), (1, False), (137, False)])
def test_a_node_that_srun_does_not_reach_is_no_fault_of_the_program(programs, tmp_path, status, requeued):
    """The job was FAILED, as no checkpoint had been saved. Its ranks on the other nodes may have started."""
    put_squeue(tmp_path)
    (tmp_path / "scontrol").write_text('#!/bin/sh\necho "$@"\n')
    done = conclude(status, tmp_path, 1, programs | {"SLURM_JOB_ID": "7"})
    assert done.returncode == status and ("requeue 7\n" in done.stdout) == requeued, done
    assert (
        "does not reach, restart 1 of at most 1 (HPCTRAIN_REQUEUES): requeuing" in done.stdout
    ) == requeued, done


@pytest.mark.parametrize(("status", "restarts", "requeued"), [(137, 1, True), (137, 2, False), (1, 1, False)])
def test_a_restart_that_is_killed_before_it_has_saved_is_requeued(
    programs, tmp_path, status, restarts, requeued
):
    """A job with a checkpoint was FAILED: Slurm killed its ranks within a second of their second start."""
    put_squeue(tmp_path, RestartCnt=restarts)
    (tmp_path / "scontrol").write_text('#!/bin/sh\necho "$@"\n')
    env = programs | {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts)}
    done = conclude(status, tmp_path, 2, env)
    assert done.returncode == status and ("requeue 7\n" in done.stdout) == requeued, done
    assert (
        "while a restart began, restart 2 of at most 2 (HPCTRAIN_REQUEUES): requeuing" in done.stdout
    ) == requeued, done


@pytest.mark.parametrize(
    ("restarts", "waited", "lasted", "seconds"),
    [(9, 0, 0, 30), (9, 60, 40, 120), (9, 1800, 5, 1920), (9, 60, 60, 0), (0, 1800, 0, 30)],
)
def test_restarts_that_end_soon_wait_longer_each_time(programs, tmp_path, restarts, waited, lasted, seconds):
    """Ten of them were used up in two minutes, while /tmp was full. A job whose first restarts had been for
    other reasons, such as preemptions, then waited half an hour, as did one of sbatch --begin.
    """
    times = {"SubmitTime": "2026-11-28T07:00:00"}
    times["EligibleTime"] = f"2026-11-28T07:{waited // 60:02}:{waited % 60:02}"
    put_squeue(tmp_path, RestartCnt=restarts, **times)
    (tmp_path / "scontrol").write_text('#!/bin/sh\necho "$@"\n')
    env = programs | {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts)}
    done = conclude(233, tmp_path, 10, env, f"SECONDS={lasted}")
    assert done.returncode == 233 and "requeue 7\n" in done.stdout, done
    assert (f"to start in {seconds} s or later\n" in done.stdout) == bool(seconds), done
    assert (f"\nupdate JobId=7 StartTime=now+{seconds}seconds\n" in done.stdout) == bool(seconds), done


LOST = "hpctrain: error: rank-0000 on n1 lost the connection to another rank, which has probably died: look"


@pytest.mark.parametrize(
    ("lines", "first", "last"),
    [
        (
            ["3: step", "", "srun: error: n2: task 3: Exited with exit code 1"],
            "n2 3 Exited with exit code 1",
            "step",
        ),
        (["srun: error: n2: tasks 5-9,3: Killed"], "n2 5 Killed", ""),
        (["3: srun: error: n2: task 3: Killed"], "n1 1 Terminated", ""),  # printed by the program
        (["srun: error: Node failure on n2"], "n1 1 Terminated", ""),
        # srun told of the others first
        (
            [
                " 0: " + LOST,
                "srun: error: n1: task 0: Exited with exit code 1",
                "srun: error: n2: task 13: Killed",
            ],
            "n2 13 Killed",
            "",
        ),
        (
            [
                "0: " + LOST,
                "2: [rank2]: OSError: a: b",
                "srun: error: n1: task 0: Exited with exit code 1",
                "srun: error: n2: tasks 2-3: Killed",
            ],
            "n2 2 Exited with exit code 1",
            "OSError: a: b",
        ),
        (
            ["0: " + LOST, "srun: error: n1: task 0: Exited with exit code 1"],
            "n1 0 Exited with exit code 1",
            LOST,
        ),
        # as Horovod, MPI and mpi4py end the others
        (
            [
                "1: RuntimeError: ill",
                "0: horovod.common.exceptions.HorovodInternalError: Horovod has been shut down. This",
                "srun: error: n1: task 0: Exited with exit code 1",
            ],
            "n1 1 Exited with exit code 1",
            "RuntimeError: ill",
        ),
        (
            [
                "srun: error: n1: task 0: Killed",
                "srun: error: n2: task 2: Segmentation fault",
                "srun: error: n2: task 3: Exited with exit code 14",
            ],
            "n2 2 Segmentation fault",
            "",
        ),
        (
            [
                "3: ValueError: ünput",
                "srun: error: n1: tasks 0-2: Killed",
                "srun: error: n2: task 3: Killed",
            ],
            "n2 3 Exited with exit code 1",
            "ValueError: ünput",
        ),
    ],
)
def test_what_failed_first(programs, tmp_path, lines, first, last):
    """srun ended with the status of the ranks that it had killed after that."""
    earlier = "srun: error: n9: task 9: Exited with exit code 9\n"  # of another attempt
    lines = [*lines, "3: slurmstepd-n1: error", "srun: error: n1: task 1: Terminated"]
    log = tmp_path / "log"
    log.write_text(earlier + "\n".join(lines))
    command = f"source {REPOSITORY}/launch/lib/main.sh; LAUNCH=(srun) LOG_BEGAN={len(earlier)}; "
    command += "first_failure"
    with log.open("a") as file:
        done = subprocess.run(
            ["bash", "-euc", command], env=programs, stdout=subprocess.PIPE, stderr=file, text=True
        )
    assert done.returncode == 0 and done.stdout == f"{first}\n{last}\n", done


@pytest.mark.parametrize(("killed", "requeued"), [(True, True), (False, False)])
def test_a_launcher_that_ends_before_its_ranks_has_not_completed(programs, tmp_path, killed, requeued):
    """mpirun returned 0 after SIGKILL of its daemon on another node, and the job was COMPLETED."""
    control = tmp_path / "control"
    control.mkdir()
    (control / "saved").write_text("--resume runs/x\n")
    put_squeue(tmp_path)
    (tmp_path / "scontrol").write_text('#!/bin/sh\necho "$@"\n')
    env = programs | {"HPCTRAIN_CONTROL": str(control), "SLURM_JOB_ID": "7"}
    rank = ["bash", "-c", "kill -KILL $PPID; exit 0" if killed else "exit 0"]
    subprocess.run([REPOSITORY / "launch/lib/task.sh", "none", "--", *rank], env=env)
    done = conclude(0, control, 1, env)
    assert (done.returncode == 137) == requeued and ("requeue 7\n" in done.stdout) == requeued, done
    assert ("its ranks on " in done.stdout) == requeued


@pytest.mark.parametrize(
    ("spare", "gres", "shape"),
    [
        ("", "", "--nodes=2 --ntasks-per-node=4 --cpus-per-task=8 --gpus-per-node=4"),
        (
            "OPTION[spare-nodes]=1",
            "x",
            "--nodes=3 --ntasks-per-node=4 --no-kill --cpus-per-task=8 --gres=gpu:4",
        ),
    ],
)
def test_the_last_line_of_a_job_that_slurm_does_not_requeue_is_the_command_that_continues(
    programs, tmp_path, spare, gres, shape
):
    """As after sbatch --no-requeue, and when a spare node has taken the place of another. Slurm may also have
    requeued the job while slurmctld did not answer this node.
    """
    for name in ("saved", "stopped"):
        (tmp_path / name).write_text("--resume runs/x\n")
    put_squeue(tmp_path)
    (tmp_path / "scontrol").write_text('#!/bin/sh\n[ "$1" = show ]\n')
    env = programs | {"SLURM_JOB_ID": "7"} | ({"SBATCH_GRES": gres} if gres else {})
    done = conclude(
        0, tmp_path, 1, env, f"OPTION[spare-nodes]={spare} SCRIPT=x.sh ARGUMENTS=(train_ddp --out 'a b')"
    )
    command = f"{REPOSITORY}/launch/x.sh train_ddp --out a\\ b --resume runs/x"
    why = "Slurm does not requeue the job: unless squeue shows that it goes on"
    said = f"hpctrain: {why}, continue with sbatch {shape} {command}"
    assert done.returncode == 75 and done.stdout.splitlines()[-1] == said, done


@pytest.mark.parametrize(("work_left", "status"), [(True, 75), (False, 0)])
def test_a_launcher_that_was_ended_because_it_waited(programs, tmp_path, work_left, status):
    """After slurmstepd was killed and the job asked to stop, it was COMPLETED with work left."""
    for name in ("saved", "lonely", "ended.1", *["stopped"] * work_left):
        (tmp_path / name).write_text("--resume runs/x\n")
    put_squeue(tmp_path)
    (tmp_path / "scontrol").write_text('#!/bin/sh\necho "$@"\n')
    done = conclude(143, tmp_path, 1, programs | {"SLURM_JOB_ID": "7"})
    assert done.returncode == status and ("requeue 7\n" in done.stdout) == work_left, done


def test_preemptions_are_not_counted(programs, tmp_path):
    """Slurm requeues a preempted job itself, whatever its script does (PreemptMode=REQUEUE)."""
    (tmp_path / "control").mkdir()
    put_squeue(tmp_path, RestartCnt=5, PreemptTime="2026-11-20T12:00:00")
    (tmp_path / "scontrol").write_text('#!/bin/sh\necho "$@"\n')
    env = programs | {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "5"}
    done = conclude(143, tmp_path / "control", 1, env)
    assert done.returncode == 143 and "the job is preempted: requeuing the job\nrequeue 7\n" in done.stdout, (
        done
    )


def test_each_job_of_a_pbs_array_has_a_port(programs, tmp_path):
    """Their numbers are like 17[4], which is no number to the shell."""
    ports = set()
    for number in ("17[3].server", "17[4].server", "0178.server"):
        env = {"PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_O_WORKDIR": str(tmp_path), "PBS_JOBID": number}
        done = dry_run("pbs_ddp.sh", programs | env)
        assert done.returncode == 0 and done.stderr == "", done.stderr
        ports |= set(re.findall(r"export MASTER_PORT=(\d+)", done.stdout))
    assert len(ports) == 3


@pytest.mark.parametrize(
    ("line", "start"),
    [
        ("from mpi4py import MPI", f"python {REPOSITORY}/launch/lib/mpi4py_main.py"),
        ("try:\n    import mpi4py", "python"),
        ("import torch", "python"),
    ],
)
def test_a_script_for_mpi_in_a_pbs_job(programs, tmp_path, line, start):
    """A rank that raised waited in MPI_Finalize for the others, and they for it, until the time limit."""
    (tmp_path / "mine.py").write_text(f"{line}\n")
    env = {"PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_O_WORKDIR": str(tmp_path), "PBS_JOBID": "1"}
    done = dry_run("pbs_ddp.sh", programs | env, str(tmp_path / "mine.py"))
    assert done.stdout.rstrip().endswith(f" -- {start} {tmp_path}/mine.py"), done


QSTAT = """Job Id: 17.srv
    Job_Name = hpctrain
    job_state = R
    run_count = 3
    Account_Name = st-pi-1
    Mail_Points = abe
    Mail_Users = alice@example.org
    Resource_List.filesystems = home:eagle
    Resource_List.select = 2:ncpus=2:mpiprocs=2
    Resource_List.walltime = {}
    Variable_List = PBS_O_HOME=/home/alice,PBS_O_QUEUE=workq,HPCTRAIN_IMAGE=/a,
\t_long_name,HPCTRAIN_ROOT=/b,WORD=two, words
    group_list = st-pi
    project = _pbs_project_default
"""
MPIRUN = """#!/bin/bash
[[ $1 != --version ]] || { echo 'mpirun (Open MPI) 5.0.7' && exit; }
echo '--resume runs/x' >"$HPCTRAIN_CONTROL/saved"
[[ $WORD != fault ]] || exit 137
[[ $HPCTRAIN_PBS_RERUNS == 2 ]] || exit 1
echo trains >&2
for ((i = 0; i < 300; i++)); do
    [[ ! -e $HPCTRAIN_CONTROL/stop ]] || { sleep 2 && touch "$HPCTRAIN_CONTROL/stopped" && exit; }
    sleep 0.1
done
"""


@pytest.mark.slow
@pytest.mark.parametrize("case", ["walltime", "fault", "fault again", "qdel", "walltime unknown", "no qsub"])
def test_a_pbs_job_goes_on_in_another_one(programs, tmp_path, case):
    """With programs of PBS that only print and record; no PBS was at hand."""
    texts = {
        "mpirun": MPIRUN,
        "qsub": "#!/bin/bash\n"
        f'printf "%s\\n" "$@" "$(cat)" "$HPCTRAIN_RESTARTS" >{tmp_path}/asked\necho 18.srv\n',
    }
    limit = {"walltime": "00:00:16", "walltime unknown": "unlimited"}.get(case, "00:30:00")
    texts["qstat"] = f"#!/bin/bash\n[[ $1 == -f && $2 == 17.srv ]] && cat {tmp_path}/shown\n"
    (tmp_path / "shown").write_text(QSTAT.format(limit))
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    if case == "no qsub":
        (tmp_path / "qsub").unlink()
    env = programs | {
        "PBS_ENVIRONMENT": "PBS_BATCH",
        "PBS_JOBID": "17.srv",
        "PBS_O_WORKDIR": str(tmp_path),
        "PBS_O_QUEUE": "workq",
    }
    env |= {
        "PBS_NODEFILE": str(tmp_path / "nodes"),
        "WORD": "fault" if case.startswith("fault") or case == "no qsub" else "w",
    }
    env |= {"HPCTRAIN_RESTARTS": "10"} if case == "fault again" else {}
    script = [REPOSITORY / "launch/pbs_ddp.sh", "train_ddp", "--out", "a b"]
    with subprocess.Popen(script, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        if case in ("qdel", "walltime unknown"):
            assert job.stderr.readline() == "trains\n"
            job.terminate()
        said = job.stdout.read().splitlines()[-1]
    resumed = f"{REPOSITORY}/launch/pbs_ddp.sh train_ddp --out a\\ b --resume runs/x"
    options = ["-l", "select=2:ncpus=2:mpiprocs=2", "-l", f"walltime={limit}", "-l", "filesystems=home:eagle"]
    options += ["-N", "hpctrain", "-A", "st-pi-1", "-m", "abe", "-M", "alice@example.org"]
    options += ["-W", "group_list=st-pi", "-q", "workq"]
    if case in ("walltime", "fault"):
        reason = (
            "the ranks have saved a checkpoint and stopped"
            if case == "walltime"
            else "restart 1 of at most 10"
        )
        assert reason in said and said.endswith(": job 18.srv continues the run")
        assert (tmp_path / "asked").read_text().splitlines() == [
            "-j", "oe", "-W", "depend=afterany:17.srv", *options,
            "-v", "HPCTRAIN_RESTARTS,HPCTRAIN_IMAGE,HPCTRAIN_ROOT,WORD",
            f"exec {resumed}", "1",
        ]  # fmt: skip
    else:
        command = f"echo {shlex.quote(resumed)} | qsub {shlex.join(options)}"
        assert said.endswith(f"continue with {command}"), said
        assert ("HPCTRAIN_REQUEUES allows no more" in said) == (case == "fault again")
        assert not (tmp_path / "asked").exists()
    assert job.returncode == (137 if "WORD" in env and env["WORD"] == "fault" else 75)


def test_check_without_a_script(programs):
    done = dry_run("check.sh", programs, "train_ddp")
    assert done.returncode == 0, done.stderr
    commands = [line.split()[-1] for line in done.stdout.splitlines() if line.startswith("srun ")]
    assert commands == ["check", "train_ddp"], done.stdout


def test_check_with_the_options_before_the_script(programs):
    """It checked with the wrong launcher, and said that a script of launch/ is no Python script."""
    done = dry_run("check.sh", programs, "--mpi=pmix", "apptainer_mpi.sh", "train_ddp")
    message = "the script comes before its options: check.sh apptainer_mpi.sh --dry-run --mpi=pmix train_ddp"
    assert (done.returncode, done.stderr) == (2, f"hpctrain: error: {message}\n")


@pytest.mark.parametrize("number", ["x", "-1", "08"])
def test_an_invalid_number_of_restarts(number):
    done = library("open_control", HPCTRAIN_REQUEUES=number)
    message = f"hpctrain: error: HPCTRAIN_REQUEUES is '{number}': set it to a number of restarts"
    assert done.returncode != 0 and done.stderr.splitlines() == [message]


@pytest.mark.parametrize(
    ("script", "env", "message"),
    [
        (
            "pbs_ddp.sh",
            {"PBS_NODEFILE": "{}/empty", "PBS_O_WORKDIR": "{}", "PBS_JOBID": "1"},
            "{}/empty, the PBS_NODEFILE of this job",
        ),
        (
            "pbs_ddp.sh",
            {"PBS_NODEFILE": "{}/none", "PBS_O_WORKDIR": "{}", "PBS_JOBID": "1"},
            "{}/none, the PBS_NODEFILE of this job",
        ),
        (
            "pbs_ddp.sh",
            {
                "PBS_NODEFILE": "{}/nodes",
                "PBS_O_WORKDIR": "{}/none",
                "PBS_JOBID": "1",
                "PBS_ENVIRONMENT": "PBS_BATCH",
            },
            "{}/none, where you submitted",
        ),
        (
            "apptainer_ddp.sh",
            {"SLURM_JOB_ID": "1", "SLURM_SUBMIT_DIR": "{}"},
            "scontrol names no nodes for SLURM_JOB_NODELIST=''",
        ),
        (
            "apptainer_ddp.sh",
            {"SLURM_JOB_ID": "1", "SLURM_SUBMIT_DIR": "{}/none"},
            "{}/none, where you submitted",
        ),
        (
            "apptainer_ddp.sh",
            {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"},
            "srun started this script 4 times: "
            "submit it with sbatch launch/apptainer_ddp.sh, or run it inside salloc",
        ),
    ],
)
def test_half_of_a_job_ends_with_one_line(programs, tmp_path, script, env, message):
    done = dry_run(script, programs | {name: value.format(tmp_path) for name, value in env.items()})
    assert (
        done.returncode != 0 and message.format(tmp_path) in done.stderr and done.stderr.count("\n") == 1
    ), done.stderr


def spooled(tmp_path):
    """The copy that Slurm runs, with no other files beside it."""
    (tmp_path / "spool").mkdir(exist_ok=True)
    return shutil.copy(REPOSITORY / "launch/local.sh", tmp_path / "spool/slurm_script")


def test_a_job_submitted_from_another_folder_names_what_is_missing(programs, tmp_path):
    put_squeue(tmp_path)  # the script came from the standard input of sbatch
    wrong = {"SLURM_JOB_ID": "1", "SLURM_SUBMIT_DIR": str(tmp_path)}
    for root in ("", f"{tmp_path}/\x1b[2J\n"):
        command = [spooled(tmp_path), "--dry-run", "check"]
        env = programs | wrong | {"HPCTRAIN_ROOT": root}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        line = "hpctrain: error: submit from the hpctrain folder, or export HPCTRAIN_ROOT=FOLDER\n"
        assert (done.returncode, done.stdout, done.stderr) == (2, "", line)


@pytest.mark.parametrize("name", ["HPCTRAIN_ROOT", "SLURM_SUBMIT_DIR", "PBS_O_WORKDIR", "Command"])
def test_the_copy_that_a_scheduler_runs_finds_the_other_files(programs, tmp_path, name):
    put_squeue(tmp_path)
    if name == "HPCTRAIN_ROOT":  # slurmctld does not answer
        (tmp_path / "squeue").write_text("#!/bin/sh\nexit 1\n")
    if name == "Command":
        link = tmp_path / "ddp.sh"
        link.symlink_to(REPOSITORY / "launch/local.sh")
        # The options of the user's squeue would hide the job
        (tmp_path / "squeue").write_text(f"#!/bin/sh\nexec echo ${{SQUEUE_USERS-{link}}}\n")
    env = programs | {"HPCTRAIN_ROOT": "", "SQUEUE_USERS": "bob", name: str(REPOSITORY)}
    if name != "PBS_O_WORKDIR":
        env["SLURM_JOB_ID"] = "1"
    command = [spooled(tmp_path), "--dry-run", "check"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "launcher torchrun" in done.stdout, done.stderr


def test_a_job_whose_functions_were_updated_since_it_was_submitted(programs, tmp_path):
    """Slurm runs the script as it was: launch: command not found."""
    put_squeue(tmp_path)
    script = Path(spooled(tmp_path))
    script.write_text(script.read_text().replace("\nlaunch\n", "\nlaunch_as_before\n"))
    env = programs | {"HPCTRAIN_ROOT": str(REPOSITORY), "SLURM_JOB_ID": "1"}
    done = subprocess.run([script, "--dry-run", "check"], env=env, capture_output=True, text=True)
    said = f"there is no launch_as_before on {os.uname().nodename}"
    assert done.returncode == 127 and done.stderr.startswith(f"hpctrain: error: {said}: "), done.stderr
    assert done.stderr.count("\n") == 1 and f"if {REPOSITORY}/launch is newer than the job" in done.stderr


@pytest.mark.parametrize("name", ["SLURM_SUBMIT_DIR", "PBS_O_WORKDIR"])
def test_functions_of_somebody_else_in_the_folder_of_the_job_are_not_run(programs, tmp_path, name):
    """Whoever submitted from a shared folder ran what another user had put there as launch/lib/main.sh."""
    if os.getuid() != 0:
        pytest.skip("needs root, to make files of others")
    functions = tmp_path / "launch/lib/main.sh"
    functions.parent.mkdir(parents=True)
    functions.write_text(f"touch {tmp_path}/executed\n")
    os.chown(functions, 12345, -1)
    put_squeue(tmp_path)
    env = programs | {"HPCTRAIN_ROOT": "", "SLURM_JOB_ID": "1", name: str(tmp_path)}
    done = subprocess.run([spooled(tmp_path), "--dry-run"], env=env, capture_output=True, text=True)
    assert done.returncode == 2 and not (tmp_path / "executed").exists(), done.stdout


@pytest.mark.parametrize("case", ["null", "own copy", "link"])
def test_functions_of_somebody_else_are_not_run(programs, tmp_path, case):
    """Another user had put them where sbatch < script, or a copy of the script, was taken to belong."""
    if os.getuid() != 0:
        pytest.skip("needs root, to make files of others")
    theirs = tmp_path / "shared/launch/lib"
    theirs.mkdir(parents=True)
    work = tmp_path / "shared/sub"
    work.mkdir()
    for name in ("main.sh", "environment.sh"):
        (theirs / name).write_text(f"touch {tmp_path}/executed\n")
    copy = work / "copy.sh"
    shutil.copy(REPOSITORY / "launch/apptainer_ddp.sh", copy)
    if case == "link":  # to the real file, beside another environment.sh
        (theirs / "main.sh").unlink()
        (theirs / "main.sh").symlink_to(REPOSITORY / "launch/lib/main.sh")
    for path in (theirs.parent, theirs, *theirs.iterdir()):
        os.chown(path, 12345, -1, follow_symlinks=False)
    script = spooled(tmp_path) if case == "null" else copy
    (tmp_path / "squeue").write_text("#!/bin/sh\necho '(null)'\n")
    (tmp_path / "squeue").chmod(0o755)
    folder = theirs.parent.parent if case == "link" else work
    env = programs | {"HPCTRAIN_ROOT": "", "SLURM_JOB_ID": "1", "SLURM_SUBMIT_DIR": str(folder)}
    subprocess.run([script, "--dry-run"], env=env, cwd=work, capture_output=True, text=True)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("module", ["torch.distributed.run", "accelerate.commands.launch"])
def test_a_launcher_by_its_module_is_refused(programs, module):
    """Each task started a world of its own, with exit status 0."""
    done = dry_run(
        "apptainer_ddp.sh", programs, "-m", module, "--nproc_per_node", "2", "mine.py", "--lr", "1"
    )
    assert done.returncode == 2
    assert (
        f"-m {module}: this script starts all ranks itself: write launch/apptainer_ddp.sh mine.py --lr 1"
        in (done.stdout + done.stderr)
    )


def test_a_script_runs_by_its_name_alone_in_its_own_folder():
    """$0 has no slash then."""
    command = ["bash", "local.sh", "--help"]
    done = subprocess.run(command, cwd=REPOSITORY / "launch", env=BARE, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("Run a trainer"), done.stderr


def test_the_other_tasks_of_srun_say_nothing(programs, tmp_path):
    """The srun of each task waited for the nodes of the others, until the time limit."""
    job = {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_PROCID": "3",
    }
    done = dry_run("apptainer_ddp.sh", programs | job)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


@pytest.mark.parametrize(
    ("visible", "ranks"), [(None, 4), ("2", 1), ("1,3", 2), ("GPU-17", 1), ("0,-1,2", 1), ("", 1)]
)
def test_a_rank_for_each_gpu_that_is_visible(programs, tmp_path, visible, ranks):
    """On a shared workstation it took all of them."""
    gpus = "".join(f"echo 'GPU {number}: NVIDIA (UUID: GPU-{number})'; " for number in range(4))
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n[ $1 != --list-gpus ] || {{ {gpus} }}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    env = programs if visible is None else programs | {"CUDA_VISIBLE_DEVICES": visible}
    assert f" --nproc-per-node={ranks} " in dry_run("local.sh", env, "check").stdout


def test_what_belongs_to_the_host_does_not_enter_an_image(tmp_path):
    ours = f"{tmp_path}/src::relative"
    theirs = "/sw/lib/python3.9/site-packages:/usr/lib/python3/dist-packages:/opt/site"
    script = (
        "drop_isolation_settings; separate_host_variables; echo $PYTHONPATH; printf '%s\\n' \"${DROPPED[@]}\""
    )
    env = {"PYTHONPATH": f"{ours}:{theirs}", "PYTHONHOME": "/usr", "APPTAINER_CLEANENV": "1"}
    kept, *dropped = library(script, **env).stdout.splitlines()
    assert kept == ours
    of_python = [f"{folder} of PYTHONPATH" for folder in theirs.split(":")]
    assert dropped == ["APPTAINER_CLEANENV", "PYTHONHOME", *of_python]


def test_another_torch_in_pythonpath_is_named(tmp_path):
    for folder in ("mine/torch", "other/data/torch"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "mine/torch/__init__.py").touch()
    env = {"PYTHONPATH": f"{tmp_path}/other:{tmp_path}/mine"}
    said = library("separate_host_variables", **env).stdout
    assert said.startswith(f"hpctrain: warning: {tmp_path}/mine of PYTHONPATH hides the torch of the image: ")
    assert said.count("\n") == 1


def test_a_machine_without_lo_is_told_at_once(programs):
    """torchrun waited for itself."""
    command = ["unshare", "--map-root-user", "--net", REPOSITORY / "launch/local.sh", "--dry-run", "check"]
    done = subprocess.run(command, env=programs, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "hpctrain: error: the network interface lo of " in done.stderr


def test_an_older_bash():
    """RHEL 8 has bash 4.4, without EPOCHREALTIME."""
    script = f"unset EPOCHREALTIME; source {REPOSITORY}/launch/lib/main.sh; echo $BEGAN"
    done = subprocess.run(["bash", "-euc", script], env=BARE, capture_output=True, text=True)
    assert abs(int(done.stdout or 0) / 1000 - time.time()) < 60, done.stderr


def binds(folder, **env):
    """The folders to bind for a job in this folder."""
    show = "find_folders_to_bind; printf '%s\\n' \"${BINDS[@]}\""
    done = library(f"cd {folder}; {show}", **env)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_folders_of_the_host_have_their_names_in_the_image(tmp_path):
    """A path of the user's shell was right in the image only below a few folders, and never below a link."""
    tops = [path for path in Path("/").iterdir() if path.is_dir() and not path.name.startswith(".")]
    images = {"bin", "boot", "dev", "etc", "opt", "proc", "root", "run", "sbin", "sys", "tmp", "usr", "var"}
    expected = {
        f"{path}" if path == path.resolve() else f"{path.resolve()}:{path}"
        for path in tops
        if path.name not in images and not path.name.startswith("lib")
    }
    assert set(binds(tmp_path, HOME=str(tmp_path))) == expected


def test_folders_below_those_of_the_image(tmp_path, below_var):
    """Each by its name and by that without links. CDPATH has no part in it."""
    for name in ("here", "other/here", "target", "src", "tmp"):
        (below_var / name).mkdir(parents=True)
    (below_var / "link").symlink_to(below_var / "target")
    (below_var / "cert.pem").touch()
    env = {"CDPATH": f"{below_var}/other", "PYTHONPATH": f"src::{below_var}/none"}
    env |= {"HPCTRAIN_BIND": f"none here {below_var}/link /usr /", "SSL_CERT_FILE": f"{below_var}/cert.pem"}
    env |= {"TMPDIR": f"{below_var}/tmp", "HOME": str(tmp_path)}
    found = {path for path in binds(below_var, **env) if path.startswith("/var")}
    target = f"{below_var}/target"
    names = ["", "/here", "/src", "/tmp", "/cert.pem"]
    assert found == {*(f"{below_var}{name}" for name in names), target, f"{target}:{below_var}/link"}


@pytest.mark.parametrize("trick", ["folder", "link", "both", None])
def test_a_folder_in_tmp_that_somebody_else_made_is_not_used(trick):
    """All tasks of a job use another one, which the next job finds.

    "both": as if its name, made from the secret, were known.
    """
    if os.getuid() != 0:
        pytest.skip("needs root, to be two users")
    number = 2_000_000_000 + os.getpid()  # of a user that this machine does not have
    own = Path(f"/tmp/hpctrain-{number}")
    names = ["HPCTRAIN_CACHE", "HF_HOME", "TORCHINDUCTOR_CACHE_DIR"]
    env = BARE | {
        "HPCTRAIN_CACHE": f"{own}/cache",
        "HF_HOME": f"{own}/cache/huggingface",
        "HPCTRAIN_JOB_SECRET": "17" * 16,
    }
    user = ["setpriv", f"--reuid={number}", f"--regid={number}", "--clear-groups"]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        shutil.copytree(REPOSITORY / "launch", f"{folder}/launch")

        def task(secret):
            command = [*user, f"{folder}/launch/lib/task.sh", "none", "--", "printenv", *names]
            return subprocess.run(command, env=env | secret, capture_output=True, text=True, cwd="/")

        def folders():
            return sorted(Path("/tmp").glob(f"{own.name}*"))

        try:
            if trick == "link":
                Path(folder, "mine").mkdir()
                os.chown(f"{folder}/mine", number, number)
                own.symlink_to(f"{folder}/mine")
            elif trick:
                own.mkdir()
                own.chmod(0o777)
            (own.with_suffix(".000")).mkdir()  # not the user's either
            if trick == "both":
                hidden = hashlib.sha256(
                    f"{os.uname().nodename} {env['HPCTRAIN_JOB_SECRET']}".encode()
                ).hexdigest()[:16]
                own.with_suffix(f".{hidden}").mkdir()
            done = [task({}), task({}), task({"HPCTRAIN_JOB_SECRET": "18" * 16})]
            found = [path for path in folders() if path.lstat().st_uid == number]
            assert not trick or list(own.iterdir()) == []
            assert len(found) == (0 if trick == "both" and done[2].returncode else 1)
            modes = {path: path.stat().st_mode & 0o777 for path in found}
        finally:
            for path in folders():
                path.unlink() if path.is_symlink() else shutil.rmtree(path)
    if trick == "both":
        assert done[0].returncode == 127 and done[0].stderr.count("\n") == 1
        assert f"{own} and {own}.{hidden} belong to somebody else: set HPCTRAIN_CACHE to" in done[0].stderr
        done = done[2:]
    (used,) = modes
    assert modes[used] == 0o700 and (used == own) == (trick is None)
    for each in done:
        assert each.stdout.split() == [f"{used}/cache", f"{used}/cache/huggingface", f"{used}/inductor"], (
            each.stderr
        )
        text = f"{own} belongs to somebody else: caches are in {used} instead\n"
        warning = f"hpctrain: warning: on {os.uname().nodename} {text}"
        assert each.stderr == (warning if trick else "")


@pytest.mark.slow
def test_no_digest_is_written_into_a_folder_of_somebody_else(image):
    """A folder with the name of the user's in /tmp, in which everything is prepared."""
    if os.getuid() != 0:
        pytest.skip("needs root, to be two users")
    number = 2_000_000_000 + os.getpid()
    own = Path(f"/tmp/hpctrain-{number}")
    digests = own / "cache/digests"
    digests.mkdir(parents=True)
    for path in (own, own / "cache", digests):
        path.chmod(0o777)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        shutil.copytree(REPOSITORY / "launch", f"{folder}/launch")
        shutil.copy(image, f"{folder}/x.sif")
        script = f"source {folder}/launch/lib/main.sh; find_digest {folder}/x.sif"
        script += f"; hash_in_background {folder}/x.sif; sleep 3"
        user = ["setpriv", f"--reuid={number}", f"--regid={number}", "--clear-groups"]
        try:
            done = subprocess.run(
                [*user, "bash", "-euc", f"{script}; echo file ${{HPCTRAIN_IMAGE_DIGEST_FILE:-none}}"],
                env=BARE | {"HPCTRAIN_CACHE": f"{own}/cache"}, capture_output=True, text=True, cwd="/",
            )  # fmt: skip
            left = list(digests.iterdir())
        finally:
            shutil.rmtree(own)
    assert done.stdout.endswith(f"{digest_of(image)}\nfile none\n") and left == [], done.stdout + done.stderr


@pytest.mark.parametrize("trap", ["pass_on_term", "shield_from_term"])
def test_a_signal_after_the_end_of_the_ranks_says_nothing(trap):
    """run_as_child has returned by then, and its variables are gone."""
    functions = (
        "set -eu; source <(sed -n '/_term() {/,/^}/p' launch/lib/task.sh)\n"
        "has_control() { :; }\njob_field() { [[ $1 == State ]] && echo RUNNING || echo N/A; }\n"
    )
    script = functions + f"trap {trap} TERM; kill -TERM $$; echo on"
    done = subprocess.run(["bash", "-c", script], cwd=REPOSITORY, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "on\n", "")


def test_a_rank_that_ends_with_a_signal_is_not_waited_for(tmp_path):
    """bash 5.2 then lost it in about half of the cases, and waited for the node's container."""
    functions = [
        f"source <(sed -n '/^{name}() {{/,/^}}/p' launch/lib/{file}.sh)\n"
        for name, file in (
            ("run_as_child", "task"),
            ("status_of_child", "control"),
            ("is_alive", "control"),
        )
    ]
    script = f"""set -euo pipefail
        {"".join(functions)}
        ALIVE=''
        restore_users_variables() {{ :; }}
        on_term() {{ ASKED=1; [[ $(sleep 0.02; echo RUNNING) == x ]] || true; }}
        sleep 300 & container=$!
        ( until read -r pid <{tmp_path}/pid.$$; do sleep 0.1; done 2>/dev/null; kill -TERM $$ $pid ) &
        run_as_child on_term sh -c 'echo $$ >{tmp_path}/pid.'$$'; exec sleep 300' || echo $?
        kill $container"""
    started = [
        subprocess.Popen(["bash", "-c", script], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
        for _ in range(10)
    ]
    try:
        assert [each.communicate(timeout=60)[0] for each in started] == ["143\n"] * 10
    finally:
        for each in started:
            each.kill()


@pytest.mark.parametrize("name", ["TERM", "USR1"])
def test_the_secrets_of_horovodrun_are_gone_when_slurm_ends_the_job(tmp_path, name):
    """It may kill the script before that has cleaned up.

    Before a time limit the ranks go on, and may need them.
    """
    (tmp_path / "secrets").mkdir()
    done = library(
        f"HPCTRAIN_CONTROL={tmp_path}; request_stop {name}", HPCTRAIN_ENVIRONMENT=str(tmp_path / "secrets")
    )
    assert done.returncode == 0 and (tmp_path / "stop").exists(), done.stderr
    assert (tmp_path / "secrets").exists() == (name == "USR1")


@pytest.mark.parametrize("saved", [False, True])
def test_a_script_that_saves_nothing_for_hpctrain_is_told_before_its_time_limit(tmp_path, saved):
    """It ended at the time limit without a word, and Lightning had printed that it would be requeued."""
    if saved:
        (tmp_path / "saved").touch()
    done = library(f"HPCTRAIN_CONTROL={tmp_path}; request_stop; ask_to_stop")
    told = "hpctrain: asked to stop, and no rank has saved a checkpoint yet: without one the job ends"
    assert (done.stdout + done.stderr).count(told) == (not saved), done


@pytest.mark.parametrize("theirs", ["/mine/kernels", "", None])
def test_the_kernels_of_torch_are_in_a_folder_of_the_user(theirs):
    env = (
        BARE
        | {"HPCTRAIN_CACHE": "/scratch/cache"}
        | ({} if theirs is None else {"TORCHINDUCTOR_CACHE_DIR": theirs})
    )
    command = [REPOSITORY / "launch/lib/task.sh", "none", "--", "printenv", "TORCHINDUCTOR_CACHE_DIR"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.stdout == (theirs or f"/tmp/hpctrain-{os.getuid()}/inductor") + "\n", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shown", "folder", "ends"),
    [
        ({"PreemptTime": "2026-11-20T12:00:00"}, "control", "stop"),
        ({"State": "COMPLETING"}, "control", "stop"),
        ({}, "control", "signal"),
        ({"PreemptTime": "2026-11-20T12:00:00"}, "elsewhere", "nothing"),
    ],
)
def test_sigterm_to_a_task(programs, tmp_path, shown, folder, ends):
    """Slurm sends it to the tasks, not to their children, when it preempts a job, ends it, or when a rank has
    failed.

    In a job that it ends the batch script can start nothing that would remove the copies of --broadcast from
    the nodes.
    """
    (tmp_path / "control").mkdir()
    (tmp_path / "copy.sif").touch()
    put_squeue(tmp_path, **shown)
    env = programs | {"HPCTRAIN_CONTROL": str(tmp_path / folder), "SLURM_JOB_ID": "7"}
    env |= {"HPCTRAIN_SIF_COPY": str(tmp_path / "copy.sif")}
    rank = ["bash", "-c", "echo started; sleep 3; exit 5"]
    with subprocess.Popen(
        [REPOSITORY / "launch/lib/task.sh", "none", "--", *rank], env=env, stdout=subprocess.PIPE
    ) as task:
        task.stdout.readline()
        task.terminate()
    assert task.returncode == (-signal.SIGTERM if ends == "signal" else 5)
    assert (tmp_path / "control/stop").exists() == (ends == "stop")
    assert not (tmp_path / "copy.sif").exists()


@pytest.mark.slow
def test_what_a_rank_of_horovodrun_leaves_does_not_keep_its_connection(tmp_path):
    """sshd closes a connection when nobody has the output of its command, and horovodrun waits for that."""
    words = ["--", "bash", "-c", f"sleep 300 & echo $! >{tmp_path}/left; kill -KILL $$"]
    env = BARE | {
        "HOROVOD_RANK": "1",
        "HOROVOD_LOCAL_RANK": "1",
        "HOROVOD_CROSS_RANK": "0",
        "HPCTRAIN_WORLD_SIZE": "2",
    }
    env |= {
        "HPCTRAIN_TASKS_PER_NODE": "2",
        "MASTER_PORT": "1",
        "HPCTRAIN_HOST_PATH": BARE["PATH"],
        "HPCTRAIN_COMMAND": shlex.join(words),
    }
    done = subprocess.run(
        [REPOSITORY / "launch/lib/task.sh", "horovodrun"],
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 137 and re.search(r"rank 1 on \S+ was ended by signal 9", done.stderr), (
        done.stderr
    )
    assert not Path(f"/proc/{(tmp_path / 'left').read_text().strip()}/fd/1").exists()


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_rank_of_horovodrun_ends_with_its_connection(tmp_path):
    """After scancel, too: Slurm does not know what sshd has started on the other nodes."""
    (tmp_path / "sshd").symlink_to("/bin/bash")
    rank = f"echo $$ >{tmp_path}/rank.part; mv {tmp_path}/rank.part {tmp_path}/rank; sleep 300 & wait"
    env = BARE | {
        "HOROVOD_RANK": "1",
        "HOROVOD_LOCAL_RANK": "1",
        "HOROVOD_CROSS_RANK": "0",
        "HPCTRAIN_WORLD_SIZE": "2",
    }
    job = os.urandom(4).hex()
    env |= {"HPCTRAIN_TASKS_PER_NODE": "2", "HPCTRAIN_JOB": job, "SLURM_JOB_ID": job, "MASTER_PORT": "1"}
    env |= {"HPCTRAIN_HOST_PATH": BARE["PATH"], "HPCTRAIN_COMMAND": shlex.join(["--", "bash", "-c", rank])}
    command = [tmp_path / "sshd", "-c", f"{REPOSITORY}/launch/lib/task.sh horovodrun; true"]
    # another rank, and a job that this one has submitted
    others = [
        subprocess.Popen(["sleep", "300"], env=env | own)
        for own in ({"HOROVOD_RANK": "0"}, {"SLURM_JOB_ID": "7"})
    ]
    try:
        with subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL) as connection:
            wait_until(lambda: (tmp_path / "rank").exists())
            pid = (tmp_path / "rank").read_text().strip()
            connection.kill()
        wait_until(lambda: not Path(f"/proc/{pid}/fd/1").exists())
        assert [other.poll() for other in others] == [None, None]
    finally:
        for other in others:
            other.kill()


def test_a_container_of_podman_that_is_still_being_made_is_removed_too(tmp_path):
    """podman run ignores SIGTERM.

    Where Slurm tracks processes by their parents, it outlives the step that Slurm ends.
    """
    folder = tmp_path.resolve()
    for name, text in {
        "podman": "case $1 in --version) echo 5 ;;"
        f" run) touch {folder}/begun; sleep 1; touch {folder}/container ;; esac",
        "podman-hpc": f"case $1 in images) echo sha256:0 ;; rm) rm {folder}/container ;; esac",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    job = os.urandom(4).hex()
    env = {"PATH": f"{tmp_path}:{BARE['PATH']}", "HPCTRAIN_IMAGE": "i"}
    words = ["run", "--rm", "-d", "--label", f"hpctrain.job={job}", "--userns=keep-id", "i"]
    with subprocess.Popen([tmp_path / "podman", *words], env=BARE | env):
        wait_until(lambda: (tmp_path / "begun").exists())
        done = library(f"JOB={job} GPUS=0; use_runtime podman-hpc; remove_podman_containers 1", **env)
    assert not done.stderr and not (tmp_path / "container").exists(), done.stderr


def test_the_end_of_a_job_does_not_wait_for_a_node_that_does_not_answer(tmp_path):
    put_squeue(tmp_path, NodeList="n1")
    for name, text in {"srun": "exec sleep 300", "scontrol": "echo n1"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{BARE['PATH']}", "SLURM_JOB_ID": "7"}
    assert library("WITHIN=1; on_every_node true", **env).returncode == 124


@pytest.fixture
def shown(tmp_path):
    """What squeue prints. `scontrol requeue` and srun write into the file asked."""
    texts = {
        "scontrol": f"""
case $1:$2 in
show:hostnames) echo "$3" | tr -d 'n[]' | sed 's/[0-9]/n&/g' | tr , '\\n' ;;
requeue:7) echo requeue >>{tmp_path}/asked ;;
esac""",
        "srun": f"""
echo "${{*%% bash*}}" | head -n 1 >>{tmp_path}/asked
until [ "$1" = --quiet ]; do shift; done
shift
SLURM_PROCID=0 SLURM_NTASKS=2 "$@" &
SLURM_PROCID=1 SLURM_NTASKS=2 "$@" &
wait""",
        "sleep": f"echo sleep >>{tmp_path}/asked; [ ! -e {tmp_path}/over ] && exec /bin/sleep 0.2",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)

    def show(restarts, nodes):
        put_squeue(tmp_path, RestartCnt=restarts, NodeList=f"n[{nodes}]")
        return {"PATH": f"{tmp_path}:{BARE['PATH']}", "SLURM_JOB_ID": "7"}

    return show


@pytest.mark.parametrize(
    ("attempt", "restarts", "requeued"), [("", 0, True), ("2", 2, True), ("", 1, False), ("2", 3, False)]
)
def test_an_attempt_that_slurm_has_replaced_does_not_requeue_the_next_one(
    shown, tmp_path, attempt, restarts, requeued
):
    """Its node was cut off; Slurm started the job again on others, and then the network came back."""
    (tmp_path / "saved").touch()
    more = {"SLURM_RESTART_COUNT": attempt} if attempt else {}
    script = (
        f"HPCTRAIN_CONTROL={tmp_path} SPARE_NODES=1 NODES=2 HOSTS=(n1 n2) TASKS=1 THREADS=1 GPUS=0 SCRIPT=x"
    )
    script += "; replace_nodes || conclude 137"
    done = library(script, **shown(restarts, "1,2" if requeued else "2,3"), HPCTRAIN_REQUEUES="9", **more)
    assert done.returncode == 137 and (tmp_path / "asked").exists() == requeued, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("restarts", "nodes", "requeued"), [(0, "1,2,3", False), (0, "2,3", True), (1, "2,3", False)]
)
def test_every_other_node_watches_the_first_one(shown, tmp_path, restarts, nodes, requeued):
    """From the start, and asks for a new start of the attempt that it belongs to, not of the next one."""
    env = shown(0, "1,2,3")
    (tmp_path / "later").mkdir()
    put_squeue(tmp_path / "later", RestartCnt=restarts, NodeList=f"n[{nodes}]")
    change = f"/bin/sleep 1; mv {tmp_path}/later/squeue {tmp_path}; /bin/sleep 2; touch {tmp_path}/over; wait"
    done = library(f"SPARE_NODES=1 HOSTS=(n1 n2); guard_batch_script; {change}", **env)
    first, *rest = (tmp_path / "asked").read_text().splitlines()
    options = "--overlap --mem=0 --gres=none --export=ALL --no-kill --nodes=2 --ntasks=2 --exclude=n1 --quiet"
    assert first == options, done.stderr
    assert ("requeue" in rest) == requeued, rest


# Help and options


def help_of(script):
    return subprocess.run(
        [REPOSITORY / "launch" / script, "--help"], env=BARE, capture_output=True, text=True, check=True
    ).stdout


SCRIPTS = [
    path.name for path in (REPOSITORY / "launch").glob("*.sh") if "\nparse_options " in path.read_text()
]


@pytest.mark.parametrize("script", sorted([*SCRIPTS, "check.sh"]))
def test_help_lists_the_options_that_the_script_takes_and_no_others(programs, tmp_path, script):
    """--broadcast was in the help of every script."""
    stand_ins = {
        "apptainer": '[ "$1" = exec ] && echo 2.13.0 || echo apptainer version 0',
        "srun": "echo MPI plugin types are... none pmi2 pmix",
        "podman-hpc": "echo sha256:abc",
        "podman": "echo podman version 0",
        "shifter": "",
        "shifterimg": "echo abc",
        "python": "echo Python 3",
    }
    for name, text in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "image.sif").touch()
    given = {"--mpi=HOW": "--mpi=pmix", "--launcher=HOW": "--launcher=mpirun"}
    listed = [option for option in re.findall(r"^  (--\S+)", help_of(script), re.M) if option != "--help"]
    words = [given.get(option, option.replace("=N", "=1")) for option in listed]
    done = dry_run(
        script,
        programs | {"HPCTRAIN_IMAGE": str(tmp_path / "image.sif"), "HPCTRAIN_CACHE": str(tmp_path)},
        *words,
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    others = [option for option in all_options() if option not in [*listed, "--help"]]
    name = script.replace("check", "apptainer_ddp")
    taken = f'for i in {" ".join(others)}; do (parse_options {name} "$i" 2>/dev/null) && echo "$i"; done'
    assert library(f"{taken}; true").stdout == ""


@functools.cache
def all_options():
    return re.findall(r"^--.*", library('printf "%s\\n" "${OPTIONS[@]}"').stdout, re.M)


def test_help_lists_the_settings_of_the_script():
    """Those of local.sh lacked HPCTRAIN_TASKS, and had what only sbatch reads."""
    local, ddp = (
        set(re.findall(r"^  ([A-Z_]+)", help_of(script), re.M)) for script in ("local.sh", "apptainer_ddp.sh")
    )
    assert local - ddp == {"HPCTRAIN_TASKS"} and ddp - local == {
        "HPCTRAIN_REQUEUES",
        "HPCTRAIN_NODE_TIMEOUT",
        "SBATCH_",
    }
    assert "sbatch" not in help_of("local.sh").lower()
    assert [script for script in ("local.sh", "pbs_ddp.sh") if "--broadcast" in help_of(script)] == []


# What the launch scripts set for themselves and their ranks.
OF_THE_JOB = {
    *(
        "BEFORE",
        "COMMAND",
        "CONTAINER_ON",
        "CONTAINER_VARIABLES",
        "CONTROL",
        "EARLY_STOP",
        "END_TASK",
        "GPU_OPTION",
        "HOST_PATH",
        "IMAGE_DIGEST",
    ),
    *("IMAGE_DIGEST_FILE", "JOB", "JOB_SECRET", "MPI_LIBRARY", "NODE_CONTAINER", "NODE_TASK", "NODE_TASKS"),
    *("ENVIRONMENT", "OWN_TASK", "PBS_RERUNS", "RESTARTS", "SIF_COPY", "TASKS_PER_NODE", "WORLD_SIZE"),
}


def test_the_documents_have_every_option_and_every_variable():
    """A variable that a launch script reads is one of the job, or it is a setting, in --help and in docs/."""
    pages = "".join(path.read_text() for path in (REPOSITORY / "docs").rglob("*.md"))
    scripts = "".join(
        path.read_text()
        for path in (REPOSITORY / "launch").rglob("*.sh")
        if path.parent.name != "modulefiles"
    )
    read = set(re.findall(r"\bHPCTRAIN_[A-Z_]*[A-Z]\b", scripts)) - {
        f"HPCTRAIN_{name}" for name in OF_THE_JOB
    }
    settings = set(re.findall(r"^HPCTRAIN_\w+$", library('printf "%s\\n" "${SETTINGS[@]}"').stdout, re.M))
    assert read == settings | {"HPCTRAIN_ROOT"}
    assert [name for name in [*sorted(read), *all_options()] if not re.search(rf"`{name}\b", pages)] == []


@pytest.mark.parametrize(
    ("script", "option", "message"),
    [
        ("apptainer_mpi.sh", "--mpi", "--mpi: write --mpi=HOW"),
        ("apptainer_mpi.sh", "--mpi=", "--mpi=: write --mpi=HOW"),
        ("apptainer_torchrun.sh", "--max-restarts=x", "--max-restarts=x: write --max-restarts=N"),
        ("apptainer_ddp.sh", "--spare-nodes=08", "--spare-nodes=08: write --spare-nodes=N"),
        ("apptainer_ddp.sh", "--dry-run=yes", "--dry-run=yes: --dry-run takes no value"),
        ("apptainer_ddp.sh", "--max-restarts=1", "this script has no option --max-restarts; --help lists"),
        ("check.sh", "lib", "launch/lib: no such script"),
        ("apptainer_ddp.sh", "--epochs", "unknown option --epochs: a trainer's options come after its name"),
    ],
)
def test_options_that_are_wrong_end_with_one_line(script, option, message):
    done = subprocess.run([REPOSITORY / "launch" / script, option], env=BARE, capture_output=True, text=True)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


# Adding a runtime and a launcher


@pytest.fixture
def project(tmp_path):
    """A copy of the project that may be changed, with a script that needs no torch."""
    for name in ("launch", "src"):
        shutil.copytree(
            REPOSITORY / name, tmp_path / "hpctrain" / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    names = ["RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TOY"]
    (tmp_path / "hpctrain/mine.py").write_text(
        "import os, sys\n"  # in one write, because the ranks have one output
        f"sys.stdout.write(' '.join([str(os.environ.get(name)) for name in {names}]) + '\\n')\n"
    )
    return tmp_path / "hpctrain"


FORK_SCRIPT = r"""#!/bin/bash
# Run a trainer on this machine, with one process per rank and nothing else.
#
# usage: launch/fork.sh [OPTION]... [TRAINER | SCRIPT.py] [ARGUMENT]...
set -euo pipefail
source "${HPCTRAIN_ROOT:-$(dirname "$0")/..}/launch/lib/main.sh"
parse_options fork.sh "$@"
make_local_job
use_runtime "${HPCTRAIN_RUNTIME:-apptainer}"
set_program
use_launcher fork
launch
"""
FORK_LAUNCHER = """
launch_with_fork() {
    LAUNCHER_TEXT='fork'
    LAUNCH=(bash -c 'for ((i = 0; i < HPCTRAIN_WORLD_SIZE; i++)); do FORK_RANK=$i "$@" & done; wait' -
        "$TASK" fork)
}
task_fork() {
    set_ranks FORK_RANK FORK_RANK
    export_torchrun_env
}
"""
TOY_RUNTIME = """
toy_box_command() {
    HPCTRAIN_IMAGE=toy:1 RUNTIME_VERSION=1
    CONTAINER=(env "TOY=a toy")
}
"""


def test_a_runtime_is_one_file_and_so_is_a_launcher(project):
    (project / "launch/lib/runtimes/toy_box.sh").write_text(TOY_RUNTIME)
    (project / "launch/lib/launchers/fork.sh").write_text(FORK_LAUNCHER)
    (project / "launch/fork.sh").write_text(FORK_SCRIPT)
    (project / "launch/fork.sh").chmod(0o755)
    env = BARE | {"HPCTRAIN_RUNTIME": "toy-box", "HPCTRAIN_TASKS": "3"}
    done = subprocess.run(
        [project / "launch/fork.sh", "mine.py"], env=env, capture_output=True, text=True, cwd=project
    )
    assert (
        done.returncode == 0
        and "runtime toy-box (1), image toy:1" in done.stdout
        and "launcher fork" in done.stdout
    ), done
    assert sorted(line for line in done.stdout.splitlines() if not line.startswith("hpctrain:")) == [
        f"{rank} {rank} 0 3 3 a toy" for rank in range(3)
    ]
    # hpctrain's own commands detect their rank as well, although world.py has no reader for this launcher
    code = "from hpctrain.distributed import world; w = world.detect()\n"
    code += "print(f'{w.rank} {w.size} {w.launcher}\\n', end='')"
    (project / "world.py").write_text(code)
    env["PYTHONPATH"] = str(project / "src")
    done = subprocess.run(
        [project / "launch/fork.sh", "world.py"], env=env, capture_output=True, text=True, cwd=project
    )
    assert sorted(line for line in done.stdout.splitlines() if not line.startswith("hpctrain:")) == [
        f"{rank} 3 torchrun" for rank in range(3)
    ]
    for name in ("docker", "", "podman_hpc", "../launchers/srun", "none toy-box", "x\ny"):
        done = library(f"GPUS=0; use_runtime {shlex.quote(name)}", HPCTRAIN_ROOT=str(project))
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done
        known = "apptainer, none, podman-hpc or shifter"
        assert f"HPCTRAIN_RUNTIME is '{name.replace(chr(10), '?')}': choose {known}" in done.stderr


# ---- shifter ----

NO_GATEWAY = "the gateway of the images does not answer, so try again later"


@pytest.mark.parametrize(
    ("gateway", "said"),
    [
        (
            "up",
            "nothing:1: shifter has no such image: "
            "shifterimg pull it, or set HPCTRAIN_IMAGE (shifterimg images lists yours)",
        ),
        ("down", f"shifterimg lookup: ERROR: failed to contact the image gateway: {NO_GATEWAY}"),
        ("slow", f"shifterimg lookup: err 28: {NO_GATEWAY}"),
    ],
)
def test_an_image_that_shifter_cannot_look_up(gateway, said):
    """A gateway that timed out ("err 28") was reported as an image that does not exist."""
    env = {
        "PATH": f"{REPOSITORY}/tests/standins:{BARE['PATH']}",
        "HPCTRAIN_IMAGE": "nothing:1",
        "SHIFTER_GATEWAY": gateway,
    }
    done = library("GPUS=0; use_runtime shifter", **env)
    assert (done.returncode, done.stderr) == (2, f"hpctrain: error: {said}\n"), done


# ---- the driver of the GPUs ----

CU128 = "take the image cu128, which needs 525 (HPCTRAIN_FLAVOR=cu128)"
NONE = "no image of hpctrain runs with it: ask your site for a newer one"
TOO_OLD = "needs NVIDIA's driver 580 or newer, and {host} has {driver}: "
DRIVERS = {
    "too old for CUDA 13": ("570.86.15", "hpctrain-cu130.sif", TOO_OLD + CU128),
    "of Perlmutter": ("580.105.08", "hpctrain-cu130.sif", ""),
    "older than CUDA 12.8": ("525.60.13", "hpctrain-cu128.sif", ""),
    "too old for both": ("470.57.02", "hpctrain-cu130-mpich.sif", TOO_OLD + NONE),
    "no answer": ("NVIDIA-SMI has failed because it couldn't communicate", "hpctrain-cu130.sif", ""),
    "an image of another name": ("470.57.02", "mine.sif", ""),
}


def start_on_gpus(folder, driver, image):
    """A dry run of local.sh on a machine with four GPUs of this driver."""
    list_gpus = "printf 'GPU %s: NVIDIA A100\n' 0 1 2 3"
    programs = {
        "nvidia-smi": f"case $1 in --list-gpus) {list_gpus} ;;"
        f' --query-gpu=driver_version) echo "{driver}" ;; esac',
        "apptainer": "echo apptainer version 1.4.5",
    }
    for name, body in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    (folder / image).touch()
    env = BARE | {
        "PATH": f"{folder}:{BARE['PATH']}",
        "HPCTRAIN_IMAGE": str(folder / image),
        "HPCTRAIN_CACHE": str(folder),
    }
    command = [REPOSITORY / "launch/local.sh", "--dry-run", "mine.py"]
    (folder / "mine.py").touch()
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("name", DRIVERS)
def test_a_driver_that_is_too_old_for_the_image(tmp_path, name):
    driver, image, said = DRIVERS[name]
    done = start_on_gpus(tmp_path, driver, image)
    if said:
        (line,) = done.stderr.splitlines()
        said = said.format(host=os.uname().nodename, driver=driver)
        assert done.returncode == 2 and line == f"hpctrain: error: {tmp_path}/{image} {said}", done
    else:
        assert done.returncode == 0 and "apptainer exec --nv" in done.stdout, done


def test_an_image_for_cpus_and_gpus(tmp_path):
    """Own scripts choose their device themselves, and would use none of the GPUs."""
    done = start_on_gpus(tmp_path, "580.105.08", "hpctrain-cpu.sif")
    assert (
        "hpctrain-cpu.sif is for CPUs, and this job has 4 GPUs per node: set HPCTRAIN_FLAVOR to cu130"
        in done.stdout
    ), done


# ---- the user's variables ----


def own_names():
    return library('echo "$OWN_NAMES"').stdout.split()


@pytest.mark.slow
def test_a_variable_of_the_user_that_the_scripts_have_as_well(tmp_path):
    """TASK=mrpc arrived as the path of task.sh."""
    (tmp_path / "show.py").write_text(
        "import json, os\nprint('got', json.dumps(dict(os.environ)), flush=True)\n"
    )
    theirs = {name: f"mine of {name}" for name in own_names()}
    env = BARE | theirs | {"HPCTRAIN_RUNTIME": "none", "HPCTRAIN_CACHE": str(tmp_path)}
    command = [REPOSITORY / "launch/local.sh", "show.py"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    (line,) = re.findall("got (.*)", done.stdout)
    assert theirs.items() <= json.loads(line).items(), done.stderr
