"""The test cluster itself: what tests and the demo take for granted about it."""

import os
import subprocess
import time
from pathlib import Path

import pytest
from slurm_cluster import CLUSTER_SH, Cluster, missing

HERE = Path(__file__).resolve().parent
pytestmark = pytest.mark.slow
needs_cluster = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture(scope="module")
def cluster():
    with Cluster(nodes=2, gpus=2) as cluster:
        yield cluster


def cluster_sh(*args, state, cwd=None, **env):
    return subprocess.run(
        [CLUSTER_SH, *args],
        env={**os.environ, "CLUSTER": str(state), **env},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def processes(state):
    """The processes on the host that have to do with this state folder: its machines, and what runs in them."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(state).encode() in (process / "mountinfo").read_bytes() + (process / "cmdline").read_bytes():
                found.append(process.name)
        except OSError:  # it ended meanwhile, or is a zombie
            continue
    return found


def wait_until(true, timeout=120):
    deadline = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.2)


def node_states(cluster):
    shown = cluster.exec("login", "sinfo", "--noheader", "--Node", "--format=%N %T").stdout
    return dict(line.split() for line in shown.splitlines())


@needs_cluster
def test_all_nodes_are_idle(cluster):
    assert node_states(cluster) == {"n1": "idle", "n2": "idle"}


@needs_cluster
def test_srun_places_ranks_on_two_hosts(cluster):
    done = cluster.exec("login", "srun", "-N2", "--ntasks-per-node=2", "hostname", user="alice")
    assert sorted(done.stdout.split()) == ["n1", "n1", "n2", "n2"]


@needs_cluster
@pytest.mark.parametrize(
    "launcher",
    [["srun", "--mpi=pmix"], ["salloc", "--quiet", "mpirun"], ["mpirun", "--host", "n1:2,n2:2"]],
    ids=["srun-pmix", "salloc-mpirun", "mpirun-over-ssh"],
)
def test_mpi_makes_one_world(cluster, launcher):
    if "mpirun" not in launcher[:1]:
        launcher = [launcher[0], "-N2", "--ntasks-per-node=2", *launcher[1:]]
    program = "from mpi4py.MPI import COMM_WORLD as w; print('sum', w.allreduce(w.rank))"
    done = cluster.exec("login", *launcher, "python3", "-c", program, user="alice", timeout=60)
    assert done.stdout.splitlines() == ["sum 6"] * 4


@needs_cluster
def test_gpus_are_given_out(cluster):
    done = cluster.exec(
        "login",
        "srun",
        "-N2",
        "--ntasks-per-node=2",
        "--gpus-per-task=1",
        "printenv",
        "CUDA_VISIBLE_DEVICES",
        user="bob",
    )
    assert sorted(done.stdout.split()) == ["0", "0", "1", "1"]


@needs_cluster
def test_tmp_is_private_and_home_is_shared(cluster):
    cluster.exec("n1", "touch", "/tmp/private", "/home/alice/shared", user="alice")
    assert cluster.exec("n2", "ls", "/tmp").stdout == ""
    assert cluster.exec("n2", "ls", "/home/alice").stdout.split() == ["shared"]
    assert cluster.host_path("/home/alice/shared").exists()


@needs_cluster
def test_exec_is_transparent(cluster):
    done = cluster.exec(
        "login", "sh", "-c", 'cat; printf "%s\n" "$0" "$A" "$(pwd)" "$(id -un)"; exit 3', "a 'b' $c",
        user="alice", env={"A": "1  2"}, cwd="/project", input="in\n", check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["in", "a 'b' $c", "1  2", "/project", "alice"]
    assert done.returncode == 3
    assert not cluster.exec("login", "env").stdout.count("MACHINE_")


@needs_cluster
def test_machines_reach_each_other_and_nothing_else(cluster):
    assert cluster.exec("n1", "ssh", "n2", "hostname", user="alice").stdout == "n2\n"
    assert cluster.exec("n1", "ip", "route").stdout.split()[0] == "10.78.0.0/24"
    assert len(cluster.exec("n1", "ip", "route").stdout.splitlines()) == 1


@needs_cluster
def test_users_may_run_containers(cluster):
    cluster.exec("n1", "unshare", "--map-root-user", "--mount", "true", user="alice")
    cluster.exec("n1", "sh", "-c", "exec 3<>/dev/fuse", user="alice")
    assert "alice" in cluster.exec("n1", "cat", "/etc/subuid").stdout


@needs_cluster
def test_submit_and_wait(cluster):
    lines = []
    job = cluster.wait(
        cluster.submit("-N2", script="#!/bin/sh\necho first\nsrun hostname\nexit 4\n"), timeout=60, on_line=lines.append
    )
    assert (job.state, job.exit_code, job.nodes) == ("FAILED", 4, ("n1", "n2"))
    assert lines[0] == "first"
    assert sorted(lines[1:]) == ["n1", "n2"]


@needs_cluster
def test_a_crashed_node_is_down_and_comes_back():
    with Cluster(nodes=3) as cluster:
        # the batch script runs on the first node of the job, and that one survives
        job = cluster.submit("-N2", "--requeue", script='#!/bin/sh\n[ -n "$SLURM_RESTART_COUNT" ] || srun sleep 1000\n')
        wait_until(
            lambda: (
                node_states(cluster) == {"n1": "allocated", "n2": "allocated", "n3": "idle"}
                or node_states(cluster) == {"n1": "mixed", "n2": "mixed", "n3": "idle"}
            )
        )
        cluster.crash("n2")
        wait_until(lambda: node_states(cluster)["n2"] == "down*")
        assert cluster.command("exec", "n2", "true", check=False).returncode != 0
        assert cluster.wait(job).nodes == ("n1", "n3")

        cluster.boot("n2")
        wait_until(lambda: node_states(cluster)["n2"] == "idle")
        assert cluster.exec("login", "srun", "--nodelist=n2", "hostname", user="alice").stdout == "n2\n"


@needs_cluster
def test_a_cable_can_be_pulled(cluster):
    ping = ["ping", "-c1", "-W1", "n2"]
    cluster.link("n2", up=False)
    assert cluster.exec("n1", *ping, check=False).returncode != 0
    cluster.link("n2", up=True)
    wait_until(lambda: cluster.exec("n1", *ping, check=False).returncode == 0)


@needs_cluster
def test_two_clusters_side_by_side(cluster):
    with Cluster(nodes=1) as other:
        assert processes(other.state)
        assert list(node_states(other)) == ["n1"]
        assert len(node_states(cluster)) == 2
        other.exec("n1", "touch", "/project/other")
        assert cluster.exec("n1", "ls", "/project").stdout == ""
    assert not processes(other.state)
    assert node_states(cluster)


@needs_cluster
def test_down_leaves_nothing(tmp_path):
    links = sorted(Path("/sys/class/net").iterdir())
    with Cluster(nodes=2, state=tmp_path / "state") as cluster:
        cluster.submit("-N2", script="#!/bin/sh\nsetsid sleep 1000 &\nsrun sleep 1000\n")
        wait_until(lambda: "idle" not in node_states(cluster).values())
    assert not processes(cluster.state)
    assert sorted(Path("/sys/class/net").iterdir()) == links
    assert sorted(path.name for path in cluster.state.iterdir()) == ["home", "lock", "log", "project"]
    assert cluster_sh("down", "--purge", state=cluster.state).returncode == 0
    assert not cluster.state.exists()


@needs_cluster
@pytest.mark.parametrize("seconds", [0.05, 0.2, 0.4, 0.6])
def test_down_after_up_was_killed(tmp_path, seconds):
    up = subprocess.Popen([CLUSTER_SH, "up"], env={**os.environ, "CLUSTER": str(tmp_path / "state")})
    time.sleep(seconds)
    up.kill()
    up.wait()
    assert cluster_sh("down", "--purge", state=tmp_path / "state").returncode == 0
    assert not processes(tmp_path)


@needs_cluster
def test_the_cluster_ends_with_its_owner(tmp_path):
    owner = subprocess.Popen(["sleep", "100"])
    assert cluster_sh("up", "1", state=tmp_path / "state", CLUSTER_OWNER_PID=str(owner.pid)).returncode == 0
    assert processes(tmp_path)
    owner.kill()  # and not waited for: a zombie owns nothing
    wait_until(lambda: not processes(tmp_path), timeout=10)
    owner.wait()
    cluster_sh("down", "--purge", state=tmp_path / "state")


@needs_cluster
def test_up_twice(tmp_path):
    with Cluster(nodes=1, state=tmp_path / "state") as cluster:
        assert cluster.command("up", "1").stderr.count("already up") == 1
        refused = cluster.command("up", "2", check=False)
        assert refused.returncode != 0
        assert refused.stderr.count("\n") == 1
        assert "other settings" in refused.stderr


@needs_cluster
def test_run_is_one_command_in_the_current_folder(tmp_path):
    folder, extra = tmp_path / "a b", tmp_path / "extra"
    folder.mkdir()
    extra.mkdir()
    os.chown(folder, 1000, 1000)
    script = 'pwd; id -un; echo "$A" >file; ls /data; apptainer version >/dev/null; exit 5'
    done = cluster_sh(
        "run", "-u", "alice", "-e", "A=1  2", "-b", f"{extra}:/data", "--", "sh", "-c", script,
        state=tmp_path / "state", cwd=folder,
    )  # fmt: skip
    assert (done.stdout, done.stderr, done.returncode) == (f"{folder}\nalice\n", "", 5)
    assert (folder / "file").read_text() == "1  2\n"
    assert (folder / "file").stat().st_uid == 1000
    assert not list((tmp_path / "state/run").iterdir())
    assert not processes(tmp_path)


@needs_cluster
def test_run_dies_with_its_caller(tmp_path):
    env = {**os.environ, "CLUSTER": str(tmp_path)}
    run = subprocess.Popen([CLUSTER_SH, "run", "--", "sleep", "1000"], env=env, cwd=tmp_path)
    wait_until(lambda: processes(tmp_path / "run"))
    run.kill()
    run.wait()
    wait_until(lambda: not processes(tmp_path / "run"), timeout=5)
    assert cluster_sh("down", "--purge", state=tmp_path).returncode == 0
    assert not tmp_path.exists()


@pytest.mark.parametrize("script", ["cluster.sh", "machine.sh", "rootfs.sh"])
def test_help(script):
    done = subprocess.run([HERE / "cluster" / script, "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("usage: ")
    assert done.stderr == ""


@pytest.mark.parametrize(
    "words",
    [
        "cluster.sh",
        "cluster.sh fly",
        "cluster.sh up many",
        "cluster.sh up 0",
        "cluster.sh up 2 3",
        "cluster.sh down --now",
        "cluster.sh status",
        "cluster.sh exec login",
        "cluster.sh exec -e A login true",
        "cluster.sh exec login true",
        "cluster.sh crash",
        "cluster.sh crash n1",
        "cluster.sh link n1 sideways",
        "cluster.sh run",
        "cluster.sh run true",
        "cluster.sh run -x 1 -- true",
        "cluster.sh run -u nobody-here -- true",
        "cluster.sh run -b /nowhere -- true",
        "machine.sh",
        "machine.sh fly",
        "rootfs.sh",
        "rootfs.sh a b",
        "rootfs.sh --now",
    ],
)
def test_bad_usage_is_refused_in_words(words, tmp_path):
    script, *args = words.split()
    env = {**os.environ, "CLUSTER": str(tmp_path / "state")}
    done = subprocess.run([HERE / "cluster" / script, *args], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr.startswith(script + ": ")
    assert done.stderr.count("\n") == 1
