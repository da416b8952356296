"""What bob, another user of the cluster, cannot do to alice's jobs (docs/reference/security.md)."""

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.distributed.test_strangers import STRANGER
from tests.helpers import BARE_PYTHON
from tests.launch.helpers import (
    FEW,
    HERE,
    HOME,
    LAUNCHERS,
    NO_CONTAINER,
    ONE_EACH,
    SCRIPT,
    assert_ended,
    folder,
    job,
    wait,
    wait_and_act,
)
from tests.tools import warm_start

NODES = ("n1", "n2")

# train_ddp, in which rank 1 joins when bob has written to the store, and no rank goes on after an epoch until
# bob is done.
ATTACKED = """
import os, sys, time
from pathlib import Path
import hpctrain
from hpctrain.vision import recipe, train
learning_rate = recipe.learning_rate
def main(world):
    def wait(args, epochs, step, steps):
        if step == steps:  # the first of the second epoch
            print("waits for bob", flush=True)
            while not all(hpctrain.gather(world, Path("attacked").exists())):
                time.sleep(0.1)
        return learning_rate(args, epochs, step, steps)
    recipe.learning_rate = wait
    train.main(world, sys.argv[1:])
while os.environ.get("RANK") == "1" and not Path("/project/stranger has written").exists():
    time.sleep(0.1)
hpctrain.main(main)
"""
GARBAGE = """
import os, pickle, socket, struct, sys
from contextlib import suppress
class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/executed",)
payloads = [bytes(65536), os.urandom(65536), b"GET / HTTP/1.1\\r\\n\\r\\n", pickle.dumps(Evil()), b""]
# the greeting of a TCPStore, and a key of this length
payloads.append(struct.pack("<BIBQ", 0, 0x3C85F7CE, 1, 2**60))
connections = []  # all of them stay open until the end
for target in sys.argv[1:]:
    host, port = target.split(":")
    for payload in payloads:
        connections.append(socket.create_connection((host, int(port)), timeout=10))
        with suppress(OSError):  # closed by the job
            connections[-1].sendall(payload)
print(len(connections))
"""


def listening(cluster, node, number):
    """Where the processes of a job listen on a node, as HOST:PORT, and the secret of the job."""
    mine = f"grep -slzx SLURM_JOB_ID={number} /proc/[0-9]*/environ | cut -d/ -f3"
    secret = f"cat $({mine} | sed 's,.*,/proc/&/environ,') | tr '\\0' '\\n'"
    secret += " | sed -n 's/^HPCTRAIN_JOB_SECRET=//p' | sort -u"
    script = f"ss -Htlnp; echo; {mine}; pgrep -f 'slurmstepd: .{number}[.]'; echo; {secret}"
    sockets, processes, secret = cluster.exec(node, "bash", "-c", script).stdout.split("\n\n")
    mine = {f"pid={process}," for process in processes.split()}
    lines = [line for line in sockets.splitlines() if any(text in line for text in mine)]
    found = [line.split()[3].rpartition(":") for line in lines]
    everywhere = ("*", "0.0.0.0", "[::]")
    return {f"{node if host in everywhere else host}:{port}" for host, _, port in found}, secret.strip()


@pytest.mark.main_road
def test_another_user_of_the_cluster_changes_nothing_in_a_running_job(cluster, tmp_path):
    """bob joins, sends garbage, looks for the secret, and writes into folders.

    He is on the login node and on a node of the job.
    """
    folder(cluster, "attacked.py").write_text(ATTACKED)
    options = [f"--data={HOME}/digits", "--epochs=2", "--out=runs/attacked"]
    command = [SCRIPT, "attacked.py", *options]
    number = cluster.submit("--hold", HERE, *command, cwd=HOME, env={"OMP_NUM_THREADS": "1"})
    address = {"MASTER_ADDR": "n1", "MASTER_PORT": str(20000 + number * 8 % 12000)}

    def bob(host, *words, **env):
        return cluster.exec(host, *words, user="bob", env=env, cwd="/project", check=False).stdout

    def attack():
        (first, secret), (second, _) = (listening(cluster, node, number) for node in NODES)
        ports = sorted(first | second)
        assert f"n1:{address['MASTER_PORT']}" in ports and len(ports) > 4, ports
        assert re.fullmatch("[0-9a-f]{32}", secret)
        sent = pool.map(lambda host: bob(host, BARE_PYTHON, "-c", GARBAGE, *ports), ("login", "n2"))
        read = f"cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline {HOME}/slurm-{number}.out; "
        read += "ls -l /proc/[0-9]*/fd; ps -eo args"
        folders = f"/tmp/hpctrain-control.* /tmp/hpctrain-container-* {HOME}/runs/attacked"
        change = "touch $folder/stop; ln -s /etc/passwd $folder/saved; rm -r $folder"
        write = f"shopt -s nullglob; for folder in {folders}; do echo $folder; {change}; done"
        for node in NODES:
            found = bob(node, "bash", "-c", read)
            assert "attacked.py" in found and secret not in found
            found = bob(node, "bash", "-c", f"({write}) 2>&1")
            assert ("hpctrain-control" in found) == (node == "n1") and "hpctrain-container" in found, found
            assert found.count("denied") + found.count("not permitted") >= 6, found
        assert list(sent) == [f"{6 * len(ports)}\n"] * 2

    def attack_and_go_on():
        try:
            attack()
        finally:
            folder(cluster, "attacked").touch()

    with ThreadPoolExecutor() as pool:
        joined = pool.map(lambda host: bob(host, BARE_PYTHON, "-c", STRANGER, **address), ("login", "n2"))
        whole = ["train_ddp", f"--data={folder(cluster, 'digits')}", "--epochs=2", "--out=whole"]
        ranks = warm_start.torchrun_ranks(4, whole, dict(os.environ))
        whole = pool.submit(warm_start.run, ranks, tmp_path)
        cluster.exec("login", "scontrol", "release", str(number))
        done = wait_and_act(cluster, number, "waits for bob", attack_and_go_on)
        output = assert_ended(done, "COMPLETED", "is not a rank of this job answered as rank 1")
        assert list(joined) == ["", ""], output
        assert whole.result().returncode == 0
    results = [path / "result.json" for path in (tmp_path / "whole", folder(cluster, "runs/attacked"))]
    assert len({json.loads(path.read_text())["weights_sha256"] for path in results}) == 1
    for node in ("login", *NODES):
        assert cluster.exec(node, "ls", "/tmp/executed", check=False).returncode == 2


@pytest.mark.main_road
def test_no_image_is_entered_that_another_user_can_write(cluster):
    """bob reads the name of the copy of --broadcast in ps, and makes it on both nodes before sbcast does.

    sbcast waits for him.
    """
    planted = cluster.host_path("/project/alice/planted")
    wrapper = cluster.host_path("/project/alice/bin") / "sbcast"
    wrapper.parent.mkdir()
    wait_for_bob = "until [ -e /project/alice/planted ]; do sleep 0.1; done"
    wrapper.write_text(f'#!/bin/sh\n{wait_for_bob}\nexec /usr/bin/sbcast "$@"\n')
    wrapper.chmod(0o755)
    folder(cluster, "mine").write_text("mine")
    env = {"PATH": "/project/alice/bin:/usr/local/bin:/usr/bin:/bin"}
    number = cluster.submit(*ONE_EACH, SCRIPT, "--broadcast", "check", cwd=HOME, env=env)

    def bob(node, script, *words):
        return cluster.exec(node, "bash", "-c", script, "bob", *words, user="bob").stdout

    look = f"ps -eo args | grep -oP '(?<= )/tmp/hpctrain-{number}-[0-9a-f]+[.]sif'"
    name = bob("n1", f"until {look}; do sleep 0.1; done").split()[0]
    bob("n1", 'ln -s "$1" "$2"', f"{HOME}/mine", name)
    bob("n2", 'touch "$1" && chmod 666 "$1"', name)
    planted.touch()
    output = assert_ended(wait(cluster, number), "COMPLETED", "check passed: 2 ranks", "warning: sbcast")
    assert output.count(f"{name} --") == 1, output
    left = [cluster.exec(node, "stat", "-c", "%U %F", name).stdout for node in NODES]
    for node in NODES:
        cluster.exec(node, "rm", name)
    assert left == ["bob symbolic link\n", "bob regular empty file\n"], output
    assert folder(cluster, "mine").read_text() == "mine"


def test_a_job_trains_although_another_user_has_its_folders_in_tmp(cluster):
    """On one node bob has a folder that everybody may write, on the other a link to a folder of alice's."""
    own = "/tmp/hpctrain-" + cluster.exec("login", "id", "-u", "alice").stdout.strip()
    tricks = ("umask 0; mkdir -p $0/cache/digests", "ln -s /project/alice/mine $0")
    cluster.exec("login", "mkdir", "/project/alice/mine", user="alice")
    try:
        for node, trick in zip(NODES, tricks, strict=True):
            cluster.exec(node, "bash", "-c", "rm -rf $0*", own)
            cluster.exec(node, "bash", "-c", trick, own, user="bob")
        command = ["train_ddp", FEW, "--epochs=1", "--out=runs/taken"]
        output = assert_ended(job(cluster, *command, options=ONE_EACH), "COMPLETED")
        look = "find -L $0 -type f; stat -c '%U %a' $0.*; true"
        found = [cluster.exec(node, "bash", "-c", look, own).stdout for node in NODES]
    finally:
        for node in NODES:
            cluster.exec(node, "bash", "-c", "rm -rf $0*", own)
    assert len(re.findall(rf"warning: .*{own} .* {own}\.", output)) == 2, output
    assert found == ["alice 700\n"] * 2, found


def test_no_job_goes_on_from_the_checkpoint_of_another_user(cluster):
    """bob has put a run of his in the place of the run folder while the job was pending."""
    words = ["train_ddp", f"--data={HOME}/digits", "--epochs=2", "--out=runs/theirs", "--resume=auto"]
    number = cluster.submit("--hold", *ONE_EACH, SCRIPT, *words, cwd=HOME, env=NO_CONTAINER)
    assert_ended(job(cluster, *words, options=ONE_EACH, env=NO_CONTAINER), "COMPLETED")
    runs = f"{HOME}/runs/theirs"
    cluster.exec("login", "rm", f"{runs}/result.json")
    cluster.exec("login", "sh", "-c", f"chown -R bob {runs} && chmod -R 777 {runs}")
    cluster.exec("login", "scontrol", "release", str(number))
    assert_ended(wait(cluster, number), "FAILED", "runs/theirs: a folder that another user made")
    assert not folder(cluster, "runs/theirs/result.json").exists()


OTHER_CONMON = """
umask 0
mkdir -p $0/config/containers
printf '#!/bin/sh\\ntouch %s/executed\\n' $0 >$0/conmon
chmod +x $0/conmon
printf '[engine]\\nconmon_path = ["%s/conmon"]\\n' $0 >$0/config/containers/containers.conf
"""


@pytest.mark.parametrize("taken", NODES)
def test_podman_hpc_takes_no_configuration_of_another_user(cluster, podman_image, taken):
    """podman runs the conmon that its configuration names, and podman-hpc makes that below /tmp/UID_hpc."""
    place = f"/tmp/{cluster.exec('login', 'id', '-u', 'alice').stdout.strip()}_hpc"
    for node in NODES:
        cluster.exec(node, "rm", "-rf", place)
    cluster.exec(taken, "bash", "-c", OTHER_CONMON, place, user="bob")
    done = job(cluster, "check", options=ONE_EACH, script="launch/podman_hpc_ddp.sh", env=podman_image)
    executed = cluster.exec(taken, "test", "-e", f"{place}/executed", check=False).returncode == 0
    cluster.exec(taken, "rm", "-rf", place)
    assert_ended(done, "FAILED", f"{place} on {taken}, ")
    assert not executed


@pytest.mark.parametrize("runtime", ["apptainer", "none"])
def test_no_rank_runs_kernels_of_a_folder_that_others_can_make(cluster, runtime):
    """By default torch.compile runs what is in /tmp/torchinductor_USER."""
    cluster.exec("n1", "rm", "-rf", "/tmp/torchinductor_alice")
    folder(cluster, "kernels.py").write_text(
        "import os, torch._dynamo.package\n"  # what makes the folder
        "from torch._inductor.runtime.cache_dir_utils import cache_dir\n"
        "print('kernels in', cache_dir(), os.listdir('/tmp'), flush=True)\n"
    )
    options, env = ("--nodes=1", "--nodelist=n1"), NO_CONTAINER | {"HPCTRAIN_RUNTIME": runtime}
    output = assert_ended(job(cluster, "kernels.py", options=options, env=env), "COMPLETED")
    user = cluster.exec("n1", "id", "-u", "alice").stdout.strip()
    assert output.count(f"kernels in /tmp/hpctrain-{user}/inductor ") == 2, output
    assert "torchinductor_alice" not in output
    assert cluster.exec("n1", "stat", "-c", "%U %a", f"/tmp/hpctrain-{user}").stdout == "alice 700\n"


def test_a_port_that_is_in_use(cluster):
    """By something of another user, on the port that would be the job's own."""
    command = [*ONE_EACH, "--hold", SCRIPT, "train_ddp", FEW, "--epochs", "1"]
    number = cluster.submit(*command, cwd=HOME, env=NO_CONTAINER)
    port = 20000 + number * 8 % 12000
    listen = f"import socket, time\nwith socket.create_server(('', {port})): time.sleep(600)"
    listener = cluster.start("n1", BARE_PYTHON, "-c", listen, user="bob")
    try:
        listens = f"until grep -q ':{port:04X} .* 0A' /proc/net/tcp*; do sleep 0.1; done"
        cluster.exec("n1", "sh", "-c", listens, timeout=300)
        cluster.exec("login", "scontrol", "release", str(number))
        done = wait(cluster, number)
    finally:
        listener.terminate()
        listener.wait()
    assert_ended(done, "COMPLETED", f"port {port} of n1 is in use", f" {port + 1}\n")


@pytest.mark.main_road
def test_no_secret_is_on_a_command_line(cluster):
    """horovodrun writes its environment on the command lines of ssh; each rank still gets it."""
    show = "print('got', os.environ['HF_TOKEN'] == 'hf_' + 'secret', flush=True)\ntime.sleep(10)\n"
    folder(cluster, "show_token.py").write_text(f"import os, time\n{show}")
    command = [HERE, *LAUNCHERS["horovodrun"], "show_token.py"]
    number = cluster.submit(*command, cwd=HOME, env={"HF_TOKEN": "hf_secret"})
    shown = []

    def look():
        shown.extend(cluster.exec(node, "ps", "-eo", "args", user="bob").stdout for node in NODES)

    output = assert_ended(wait_and_act(cluster, number, "got", look), "COMPLETED")
    shown = "".join(shown)
    assert output.count("got True") == 4, output
    assert "ssh" in shown and "HPCTRAIN_COMMAND=" in shown, shown
    assert "hf_secret" not in shown and "HPCTRAIN_JOB_SECRET=" not in shown
    assert not list(folder(cluster, "").glob(".hpctrain-*"))
