"""The image that make sif builds: its content, and that an ordinary user can run it read-only."""

import json
import os
import re
import shutil
import subprocess

import pytest
from slurm_cluster import CLUSTER_SH, REPOSITORY

from tests.helpers import run_command, write_digits

pytestmark = pytest.mark.slow


def inside(cluster, *command, check=True, **options):
    """Run a command in the image, as alice on a node."""
    return cluster.exec(
        "n1", "apptainer", "exec", "/project/hpctrain-cpu.sif", *command, user="alice", check=check, **options
    )


@pytest.fixture(scope="module")
def digits(cluster):
    """A small data set in /project."""
    write_digits(cluster.host_path("/project/digits"))
    return "/project/digits"


@pytest.mark.main_road("make sif")
def test_the_sif_has_at_most_600_mb(sif):
    assert sif.stat().st_size <= 600e6


@pytest.mark.main_road("make sif")
def test_it_has_the_locked_versions(cluster):
    names = [
        "torch",
        "lightning",
        "transformers",
        "mpi4py",
        "scikit-learn",
        "matplotlib",
        "tensorboard",
        "torchmetrics",
    ]
    names += [
        "accelerate",
        "datasets",
        "ipykernel",
        "jupyterlab",
        "optuna",
        "pandas",
        "peft",
        "rich",
        "seqeval",
        "tqdm",
        "wandb",
    ]
    compiled = {"horovod": "0.28.1", "torchvision": "0.21.0"}
    code = (
        "import json, importlib.metadata as m\n"
        f"print(json.dumps({{n: m.version(n) for n in {names + list(compiled)}}}))"
    )
    found = json.loads(inside(cluster, "python", "-c", code).stdout)
    lock = (REPOSITORY / "containers/locks/cpu.lock").read_text()
    for name in names:
        assert f"{name}=={found[name]} " in lock
    assert found["torch"] == "2.13.0+cpu" and compiled.items() <= found.items()


@pytest.mark.main_road("make sif")
def test_torchvision_computes_without_a_warning(cluster):
    """Compiled for this torch: operators, gradients, pictures, transforms and models, without a warning."""
    code = """
import io
import torch
from PIL import Image
from torchvision import models, ops, transforms
from torchvision.io import decode_image, encode_png

boxes = torch.tensor([[0, 0, 1, 1.0], [0, 0, 1, 1.1]])
assert ops.nms(boxes, torch.tensor([0.5, 0.6]), 0.5).tolist() == [1]
image = torch.rand(1, 3, 8, 8, requires_grad=True)
ops.roi_align(image, [torch.tensor([[0, 0, 4, 4.0]])], 2).sum().backward()
assert abs(image.grad.sum().item() - 12) < 1e-4
jpeg = io.BytesIO()
Image.new("RGB", (5, 4), (255, 0, 0)).save(jpeg, "JPEG")
red = decode_image(torch.frombuffer(bytearray(jpeg.getvalue()), dtype=torch.uint8))
assert red.shape == (3, 4, 5) and red[0].min() > 250 and (decode_image(encode_png(red)) == red).all()
crop = transforms.Compose([transforms.RandomResizedCrop(32), transforms.ToTensor()])
picture = crop(Image.new("RGB", (50, 40)))
assert models.resnet18(num_classes=7).eval()(picture[None]).shape == (1, 7)
"""
    inside(cluster, "python", "-W", "error::UserWarning", "-c", code)


def test_it_lists_its_debian_packages(cluster):
    listed = [
        line.split("\t")
        for line in inside(cluster, "cat", "/usr/share/hpctrain/debian.tsv").stdout.splitlines()
    ]
    assert [name for name, *_ in listed] == sorted(name for name, *_ in listed) and len(listed) > 100
    assert all(version and architecture in ("all", "amd64") for _, version, architecture, _ in listed)
    # A package of the base has no hash if Debian has replaced it since.
    hashes = [sha256 for *_, sha256 in listed if sha256]
    assert all(re.fullmatch("[0-9a-f]{64}", sha256) for sha256 in hashes) and len(hashes) > 0.9 * len(listed)
    installed = inside(
        cluster, "dpkg-query", "--show", "--showformat", "${Package}\t${Version}\n"
    ).stdout.splitlines()
    assert sorted("\t".join(fields[:2]) for fields in listed) == sorted(installed)
    recorded = [
        line.split()[0] for line in (REPOSITORY / "containers/locks/amd64.debian").read_text().splitlines()
    ]
    assert {name for name, *_ in listed} <= set(recorded)


def test_each_package_has_the_text_of_its_license(cluster):
    code = "import importlib.metadata as m, re; print([d.name for d in m.distributions()"
    code += " if not any(re.match('licen|copy', f.name, re.I) for f in d._path.rglob('*'))])"
    assert inside(cluster, "python", "-c", code).stdout == "[]\n"


def test_horovods_rendezvous_is_empty_after_each_init(cluster):
    """Rank 0 may be done with the ranks of its local rank before rank 1 is done with those of its node.

    Before the patch the addresses of the node then stayed, and a later hvd.init() connected to them.
    """
    code = """if True:
    import http.client
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer
    server = RendezvousServer()
    port = server.start()
    server.init(get_host_assignments(parse_hosts("n1:2"), 2))
    def ask(method, path, body=None):
        connection = http.client.HTTPConnection("localhost", port)
        connection.request(method, path, body)
        return connection.getresponse().status
    for path in ("local_n1/0", "local_n1/1", "cross_0/0"):
        ask("PUT", f"/{path}", "address")
    for path in ("local_n1/0", "cross_0/0", "local_n1/1"):  # done
        ask("DELETE", f"/{path}")
    print(ask("GET", "/local_n1/0"), ask("GET", "/cross_0/0"))
    server.stop()
    """
    assert inside(cluster, "python", "-c", code).stdout == "404 404\n"


def test_horovod_unpickles_only_what_its_job_has_signed(cluster):
    """CVE-2024-10190 and CVE-2026-31234: whoever reached a port ran code as the user, or read a key."""
    code = """if True:
    import base64, http.client, os, pickle, tempfile
    from horovod.runner.common.util import secret
    from horovod.runner.elastic.rendezvous import create_rendezvous_handler
    from horovod.runner.http.http_client import put_data_into_kvstore, read_data_from_kvstore
    from horovod.runner.http.http_server import KVStoreServer, RendezvousServer

    folder = tempfile.mkdtemp()

    class Foreign:
        def __reduce__(self):
            return tempfile.mkdtemp, ("", "", folder)

    class Driver:
        def register_worker_server(self, *worker):
            print(*worker)

    def ask(method, path, body=None):
        connection = http.client.HTTPConnection("localhost", port)
        connection.request(method, path, body)
        try:
            return connection.getresponse().status
        except http.client.RemoteDisconnected:
            return "refused"

    pickled = base64.b64encode(pickle.dumps(Foreign()))
    secret.make_job_key()
    port = RendezvousServer().start(create_rendezvous_handler(Driver()))
    print(ask("PUT", "/worker_addresses/n1:0", pickled), ask("PUT", "/worker_addresses/n1:0", b""))
    put_data_into_kvstore("localhost", port, "worker_addresses", "n1:0", ("eth0", "key"))
    print(ask("GET", "/worker_addresses/n1:0"))
    port = KVStoreServer(False).start_server()
    ask("PUT", "/runfunc/func", pickled)
    try:
        read_data_from_kvstore("localhost", port, "runfunc", "func")
    except RuntimeError as error:
        print(error)
    put_data_into_kvstore("localhost", port, "runfunc", "func", 7)
    print(read_data_from_kvstore("localhost", port, "runfunc", "func"), os.listdir(folder))
    """
    assert inside(cluster, "python", "-c", code).stdout.splitlines() == [
        "refused refused",
        "n1 0 eth0 key",
        "404",
        "runfunc/func of the KVStore server is not from this job.",
        "7 []",
    ]


def test_horovod_runs_functions_and_elastic_jobs(cluster):
    """With what test_horovod_unpickles_only_what_its_job_has_signed() allows."""
    folder = cluster.host_path("/home/alice/elastic")
    folder.mkdir()
    (folder / "function.py").write_text(
        """
import horovod


def train(factor):
    import horovod.torch as hvd

    hvd.init()
    return factor * hvd.rank(), hvd.size()


if __name__ == "__main__":
    print(horovod.run(train, args=(3,), np=2, use_gloo=True))
"""
    )
    (folder / "elastic.py").write_text(
        """
import horovod.torch as hvd
import torch


@hvd.elastic.run
def train(state):
    while state.step < 3:
        state.step += int(hvd.allreduce(torch.ones(1), op=hvd.Sum)) // hvd.size()
        state.commit()


hvd.init()
train(hvd.elastic.TorchState(torch.nn.Linear(1, 1), step=0))
print("trained on", hvd.size())
"""
    )
    (folder / "hosts.sh").write_text("#!/bin/sh\necho localhost:2\n")
    (folder / "hosts.sh").chmod(0o755)
    done = inside(cluster, "python", "/home/alice/elastic/function.py")
    assert done.stdout.splitlines()[-1] == "[(0, 2), (3, 2)]"
    done = inside(
        cluster,
        *("horovodrun", "--gloo", "-np", "2", "--min-np", "2", "--network-interface", "lo"),
        *("--host-discovery-script", "/home/alice/elastic/hosts.sh"),
        *("python", "/home/alice/elastic/elastic.py"),
    )
    assert done.stdout.count("trained on 2") == 2, done.stdout


def test_a_process_with_threads_can_fork(cluster):
    """Without fork_lock.c, Debian's Python 3.11.2 hung after 99 to 721 forks (5 tries)."""
    code = """
import ctypes, os, threading, time
libc = ctypes.CDLL(None)
enter_python = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: None)

def start_native_threads():
    thread = ctypes.c_ulong()
    while True:
        libc.pthread_create(ctypes.byref(thread), None, enter_python, None)
        libc.pthread_join(thread, None)

for _ in range(2):
    threading.Thread(target=start_native_threads, daemon=True).start()
for number in range(2000):
    child = os.fork()
    if child == 0:
        os._exit(0)
    give_up = time.monotonic() + 20
    while not os.waitpid(child, os.WNOHANG)[0]:
        if time.monotonic() > give_up:
            os.kill(child, 9)
            print("hung after", number, flush=True)
            os._exit(1)
        time.sleep(0.0002)
os._exit(0)
"""
    inside(cluster, "python", "-c", code)


def test_packages_in_the_home_folder_are_ignored(cluster):
    folder = "/home/alice/.local/lib/python3.11/site-packages"
    # not as root: ~/.local stays alice's for other tests
    cluster.exec("login", "mkdir", "-p", folder, user="alice")
    leak = cluster.host_path(folder)
    (leak / "torch.py").write_text("raise SystemExit('the wrong torch')\n")
    try:
        assert inside(cluster, "python", "-c", "import torch; print(torch.__file__)").stdout.startswith(
            "/opt/hpctrain/"
        )
    finally:
        (leak / "torch.py").unlink()


def test_variables_of_the_hosts_python_are_ignored(cluster):
    """Without a launch script, which drops them as well.

    APPTAINERENV_PYTHONPATH is meant for the container.
    """
    for name, module in (("hosts", "torch"), ("mine", "mine")):
        folder = cluster.host_path(f"/home/alice/{name}")
        folder.mkdir()
        (folder / f"{module}.py").write_text(f"print('{name}')\n")
    code = ["python", "-c", "import torch, mine; print(torch.__file__)"]
    env = {
        "PYTHONPATH": "/home/alice/hosts",
        "PYTHONHOME": "/usr",
        "APPTAINERENV_PYTHONPATH": "/home/alice/mine",
    }
    assert re.fullmatch(r"mine\n/opt/hpctrain/.*\n", inside(cluster, *code, env=env).stdout)


def test_a_home_that_cannot_be_written_does_not_matter(cluster, digits):
    done = cluster.exec(
        "n1", "apptainer", "exec", "--no-home", "--home", "/nonexistent", "--bind", "/project",
        "/project/hpctrain-cpu.sif", "hpctrain", "train_ddp", "--data", digits, "--epochs", "1",
        "--out", "/tmp/no-home", user="alice", cwd="/tmp",
    )  # fmt: skip
    assert "/tmp/no-home" in done.stdout


def test_a_run_folder_that_ends_with_the_container_is_refused(cluster, digits):
    contained = ["apptainer", "exec", "--containall", "--bind", "/project", "/project/hpctrain-cpu.sif"]
    train = [*contained, "hpctrain", "train_ddp", "--data", digits, "--epochs", "1", "--out"]
    for folder in ("runs/contained", "/tmp/contained"):
        done = cluster.exec("n1", *train, folder, user="alice", check=False)
        assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
        assert f"error: {folder} " in done.stderr and "--bind" in done.stderr
    cluster.exec("login", "install", "-d", "-o", "alice", "/project/contained")
    cluster.exec("n1", *train, "/project/contained/run", user="alice")
    assert (cluster.host_path("/project/contained/run") / "result.json").exists()


def test_its_labels_and_its_default_command(cluster):
    done = cluster.exec("n1", "apptainer", "run", "/project/hpctrain-cpu.sif", user="alice", check=False)
    assert "usage: hpctrain COMMAND" in done.stdout
    labels = json.loads(
        cluster.exec("n1", "apptainer", "inspect", "--json", "/project/hpctrain-cpu.sif", user="alice").stdout
    )
    labels = labels["data"]["attributes"]["labels"]
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert re.fullmatch("[0-9a-f]{40}", labels["org.opencontainers.image.revision"])


@pytest.mark.timeout(1800)  # ten minutes on two cores that another test uses
def test_an_ordinary_user_builds_the_same_image_from_the_definition(cluster, tmp_path):
    """By Apptainer alone, from a plain Debian: with the same versions and the same environment.

    What make image has compiled from the same inputs is installed; compiling takes as long as all the rest.
    """
    subprocess.run(["make", "base"], cwd=REPOSITORY, check=True)
    wheels = run_command(
        ["bash", "-c", "source containers/build_functions.sh; wheels_folder"], cwd=REPOSITORY, check=True
    ).stdout
    clone = cluster.state / "home/alice/from-def"
    subprocess.run(["cp", "-a", cluster.state / "home/alice/hpctrain", clone], check=True)
    (clone / "build").mkdir(exist_ok=True)
    shutil.copy(REPOSITORY / "build/base-bookworm.tar", clone / "build/base-bookworm.tar")
    shutil.copytree(REPOSITORY / "build/compiled", clone / "build/compiled")
    subprocess.run(["chown", "-R", "1000:1000", clone], check=True)
    options = ["-b", wheels, "-e", f"WHEELS={wheels}"] if wheels else []
    done = run_command(
        [
            CLUSTER_SH,
            "run",
            "-u",
            "alice",
            *options,
            "--",
            "apptainer/build_sif.sh",
            "--from",
            "def",
            "--output",
            "def.sif",
        ],
        cwd=clone,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for name in ("horovod", "torchvision"):
        assert f"{name}: the wheel of an earlier build from the same inputs" in said
    # The check at the end: all packages import, Horovod has MPI and Gloo, and two ranks sum with each
    # launcher.
    assert "check: Horovod has PyTorch MPI Gloo\n" in said and "check: the image works\n" in said, said[
        -3000:
    ]
    assert int(re.search(r"check: (\d+) packages import", said)[1]) > 80
    for way in ("mpi4py, mpirun", "Horovod over MPI, mpirun", "Horovod over Gloo, horovodrun"):
        assert f"check: {way}: size 2, sum 3\n" in said
    assert "check passed: 2 ranks on 1 host (torchrun), ring and all-reduce correct" in said
    versions = [
        json.loads(
            cluster.exec(
                "n1", "apptainer", "exec", image, "cat", "/opt/hpctrain/versions.json", user="alice"
            ).stdout
        )
        for image in ("/home/alice/from-def/def.sif", "/project/hpctrain-cpu.sif")
    ]
    assert len(versions[0]) > 70
    assert versions[0] | {"revision": ""} == versions[1] | {"revision": ""}
    environment = [
        cluster.exec("n1", "apptainer", "exec", "--cleanenv", image, "env", user="alice").stdout.splitlines()
        for image in ("/home/alice/from-def/def.sif", "/project/hpctrain-cpu.sif")
    ]
    ours = [
        sorted(line for line in lines if re.match("PATH=|LANG=|PYTHON|PMIX_|UCX_|MPI4PY_", line))
        for lines in environment
    ]
    assert ours[0] == ours[1] and len(ours[0]) >= 6


@pytest.mark.main_road("make sif")
def test_make_builds_nothing_twice(sif):
    done = subprocess.run(
        ["make", "--question", "sif", "cluster", "venv"], cwd=REPOSITORY, capture_output=True
    )
    assert done.returncode == 0


@pytest.mark.parametrize("script", ["containers/build_image.sh", "apptainer/build_sif.sh"])
def test_a_build_with_invalid_options_is_one_line(script):
    for arguments in (["--flavor", "nothing"], ["--mpi", "lam"], ["--nonsense"], ["--flavor"]):
        done = run_command([REPOSITORY / script, *arguments], env={**os.environ})
        assert done.returncode != 0 and done.stderr.count("\n") == 1


def test_a_file_that_is_not_a_sif_stays_unchanged(tmp_path):
    (tmp_path / "file").write_bytes(b"no SIF" * 100)
    done = run_command(
        [REPOSITORY / "containers/sif.py", tmp_path / "file"],
        env={**os.environ, "SOURCE_DATE_EPOCH": "1"}
    )  # fmt: skip
    assert done.returncode == 1 and "is not a SIF" in done.stderr and done.stderr.count("\n") == 1
    assert (tmp_path / "file").read_bytes() == b"no SIF" * 100
