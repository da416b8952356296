"""The test cluster itself: the properties that the demo and the other tests rely on."""

import functools
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from slurm_cluster import BUILD, CLUSTER_SH, REPOSITORY, Cluster, bare_binds, missing, project_files

from tests.helpers import BARE_PYTHON, run_command
from tests.launch.helpers import HERE, STANDIN_PATH, wait_until

pytestmark = pytest.mark.slow
needs_cluster = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture(scope="module")
def cluster():
    with Cluster(nodes=2, gpus=2) as cluster:
        yield cluster


def cluster_sh(*args, state, script=CLUSTER_SH, **options):
    env = os.environ | {"CLUSTER": str(state)} | options.pop("env", {})
    streams = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    return subprocess.run([script, *args], env=env, **streams, **options)


def processes(state):
    """The host's process numbers of the nodes of a state folder, and of the processes in them."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is a zombie
            text = (process / "mountinfo").read_bytes() + (process / "cmdline").read_bytes()
            found += [process.name] * (str(state).encode() in text)
    return found


def node_states(cluster):
    shown = cluster.exec("login", "sinfo", "--noheader", "--Node", "--format=%N %T").stdout
    return dict(line.split() for line in shown.splitlines())


def test_files_are_found_without_git(monkeypatch):
    """In a tarball, or where git refuses the folder of another user."""
    with_git = sorted(project_files())
    monkeypatch.setenv("PATH", "/nowhere")
    assert sorted(project_files()) == with_git


@needs_cluster
def test_binds_may_have_spaces(tmp_path):
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b/c d").write_text("there")
    with Cluster(nodes=1, binds={tmp_path / "a b": "/project/e f"}) as cluster:
        assert cluster.exec("n1", "cat", "/project/e f/c d").stdout == "there"


@needs_cluster
def test_srun_places_ranks_on_two_hosts(cluster):
    assert node_states(cluster) == {"n1": "idle", "n2": "idle"}
    done = cluster.exec("login", "srun", "-N2", "--ntasks-per-node=2", "hostname", user="alice")
    assert sorted(done.stdout.split()) == ["n1", "n1", "n2", "n2"]


# one write
RANK_SUM = "from mpi4py.MPI import COMM_WORLD as w; print(f'sum {w.allreduce(w.rank)}\\n', end='')"


@needs_cluster
@pytest.mark.parametrize(
    "launcher",
    [["srun", "--mpi=pmix"], ["salloc", "--quiet", "mpirun"], ["mpirun", "--host", "n1:2,n2:2"]],
    ids=["srun-pmix", "salloc-mpirun", "mpirun-over-ssh"],
)
def test_mpi_makes_one_world(cluster, launcher):
    if "mpirun" not in launcher[:1]:
        launcher = [launcher[0], "-N2", "--ntasks-per-node=2", *launcher[1:]]
    done = cluster.exec("login", *launcher, "python3", "-c", RANK_SUM, user="alice", timeout=300)
    assert done.stdout.splitlines() == ["sum 6"] * 4


@needs_cluster
def test_gpus_are_given_out(cluster):
    srun = ["srun", "-N2", "--ntasks-per-node=2", "--gpus-per-task=1"]
    done = cluster.exec("login", *srun, "printenv", "CUDA_VISIBLE_DEVICES", user="bob")
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
    (route,) = cluster.exec("n1", "ip", "route").stdout.splitlines()
    assert route.split()[0] == "10.78.0.0/24"


@needs_cluster
def test_users_may_run_containers(cluster):
    cluster.exec("n1", "unshare", "--map-root-user", "--mount", "true", user="alice")
    cluster.exec("n1", "sh", "-c", "exec 3<>/dev/fuse", user="alice")
    assert "alice" in cluster.exec("n1", "cat", "/etc/subuid").stdout


@needs_cluster
def test_a_job_has_the_limit_of_core_files_of_its_user(cluster):
    """As at a site; slurmd raises its own limit, so a killed program would leave its memory in the folder."""
    done = cluster.exec("login", "bash", "-c", "ulimit -Sc 0; srun bash -c 'ulimit -Sc'", user="alice")
    assert done.stdout == "0\n"


@needs_cluster
def test_wait_returns_how_and_where_a_job_ended(cluster):
    lines = []
    number = cluster.submit("-N2", script="#!/bin/sh\necho first\nsrun hostname\nexit 4\n")
    job = cluster.wait(number, on_line=lines.append)
    assert (job.state, job.exit_code, job.nodes) == ("FAILED", 4, ("n1", "n2"))
    assert lines[0] == "first" and sorted(lines[1:]) == ["n1", "n2"]


# One container per node, whose processes are the ranks. They see each other, the node's network and /tmp, and
# PMIx.
SHARED_RUN = [
    "podman-hpc", "shared-run", "--label=hpctrain.test", "--userns=keep-id", "--network=host", "--ipc=host",
    "--volume=/tmp:/tmp", "--volume=/home/alice:/home/alice", "--workdir=/home/alice",
    "-e", "SLURM_*", "-e", "PMIX_*", "hpctrain:cpu",
]  # fmt: skip
SRUN = ["srun", HERE, "--ntasks-per-node=2", "--mpi=pmix", "--kill-on-bad-exit=1"]


@pytest.fixture
def podman_hpc(site, podman_image):
    """A function that runs a command as alice on the login node, where podman-hpc has the image."""
    return functools.partial(site.exec, "login", user="alice", env=podman_image, timeout=300)


def containers_left(cluster):
    """The number of container processes and of podman's containers on both nodes."""
    ps = "pgrep --count --exact conmon; podman-hpc ps --all --quiet | wc --lines"
    as_alice = {"user": "alice", "env": {"SCRATCH": "/project/alice"}}
    shown = [cluster.exec(node, "sh", "-c", ps, **as_alice).stdout for node in ("n1", "n2")]
    return sum(int(word) for words in shown for word in words.split())


@needs_cluster
def test_podman_hpc_makes_one_world_of_two_nodes(site, podman_hpc):
    write = "import os; open(f'rank{w.rank}', 'w'); assert os.getuid() == 1000"
    done = podman_hpc(*SRUN, *SHARED_RUN, "python", "-c", f"{RANK_SUM}; {write}")
    assert done.stdout.splitlines() == ["sum 6"] * 4
    assert [site.host_path(f"/home/alice/rank{rank}").stat().st_uid for rank in range(4)] == [1000] * 4
    wait_until(lambda: containers_left(site) == 0)


@needs_cluster
def test_containers_outlive_a_failed_step_until_they_are_removed(site, podman_hpc):
    """Slurm kills podman's clients, but not their containers, so launch/podman_hpc_ddp.sh removes them."""
    fail = 'if [ "$SLURM_PROCID" = 3 ]; then sleep 1; exit 7; fi; sleep 1000'
    assert podman_hpc(*SRUN, *SHARED_RUN, "sh", "-c", fail, check=False).returncode != 0
    assert containers_left(site) > 0
    podman_hpc("srun", HERE, "podman-hpc", "rm", "--force", "--time=0", "--filter=label=hpctrain.test")
    wait_until(lambda: containers_left(site) == 0)


@needs_cluster
def test_a_job_of_qsub_is_as_one_of_openpbs(site):
    script = """#!/bin/bash
#PBS -N hello
#PBS -l place=scatter
#PBS -j oe
pwd; env | grep -c ^SLURM; echo "$A $B $PBS_ENVIRONMENT $NCPUS $OMP_NUM_THREADS"; umask
echo "$0 $PBS_NODEFILE $TMPDIR"; uniq -c "$PBS_NODEFILE"
module load pytorch && type -p hpctrain
cd "$PBS_O_WORKDIR" && pwd
qstat -f $PBS_JOBID | grep -c 'Resource_List.select = 2:ncpus=2:mpiprocs=2$'
ssh n2 "test -d $TMPDIR; echo \\$?"
pbs_tmrsh n2 sh -c "test -d \\$TMPDIR; echo \\$? \\$TMPDIR"
"""
    site.exec("login", "sh", "-c", "cat >/project/alice/job.sh", user="alice", input=script)
    options = ["-l", "select=2:ncpus=2:mpiprocs=2", "-l", "walltime=00:10:00", "-v", "A=1,B"]
    job = site.wait(site.qsub(*options, "job.sh", cwd="/project/alice", env={"B": "2", "C": "3"}))
    log = site.host_path(f"/project/alice/hello.o{job.id}")
    assert [line.strip() for line in log.read_text().splitlines()] == [
        "/home/alice", "0", "1 2 PBS_BATCH 2 2", "0077",
        f"/var/spool/pbs/mom_priv/jobs/{job.id}.login.SC /var/spool/pbs/aux/{job.id}.login "
        f"/var/tmp/pbs.{job.id}.login",
        "2 n1", "2 n2", "/opt/hpctrain/bin/hpctrain", "/project/alice", "1",
        "1", f"0 /var/tmp/pbs.{job.id}.login",
    ]  # fmt: skip
    assert log.stat().st_mode & 0o777 == 0o600


@needs_cluster
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("-l mem=1gb job.sh", '"-lresource=" cannot be used with "select" or "place", resource is: mem'),
        ("-l nodes=2:ppn=2 job.sh", "Cannot be used with select or place: nodes"),
        ("-v UNKNOWN job.sh", "cannot send environment with the job"),
        ("job.sh argument", "usage: qsub"),
        ("none.sh", "No such file"),
    ],
)
def test_what_openpbs_refuses(site, options, said):
    site.exec("login", "sh", "-c", "echo '#PBS -l select=2' >job.sh", user="alice")
    done = site.exec("login", "qsub", *options.split(), user="alice", check=False)
    assert done.returncode and said in done.stderr and not done.stdout


@needs_cluster
def test_module_works_in_jobs_of_a_login_shell(site):
    script = "#!/bin/bash\nmodule load pytorch && type -p hpctrain\n"
    submit = 'echo "$0" | sbatch --parsable --output=/project/alice/module.out'
    done = site.exec("login", "bash", "-lc", submit, script, user="alice")
    assert site.wait(int(done.stdout)).state == "COMPLETED"
    assert site.host_path("/project/alice/module.out").read_text() == "/opt/hpctrain/bin/hpctrain\n"


HOROVOD = "import horovod.torch as hvd; hvd.init(); print(hvd.mpi_built(), hvd.mpi_enabled(), hvd.size())"


@needs_cluster
@pytest.mark.parametrize(
    ("hosts", "program", "lines"),
    [
        ("n1:2,n2:2", RANK_SUM, ["sum 6"] * 4),
        # One process only: between nodes over Open MPI 5, hvd.init() sometimes hung. The trainers use Gloo.
        ("n1:1", HOROVOD, ["True True 1"]),
    ],
)
def test_the_bare_environment_runs_on_the_nodes_own_mpi(site, hosts, program, lines):
    mpirun = ["mpirun", "--host", hosts, BARE_PYTHON, "-c", program]
    assert site.exec("n1", *mpirun, user="alice", timeout=300).stdout.splitlines() == lines


@needs_cluster
def test_the_bare_environment_is_extracted_once(sif):
    python = next(source for source, target in bare_binds(sif).items() if target == "/usr/bin/python3.11")
    made = python.stat().st_ctime_ns
    bare_binds(sif)
    assert python.stat().st_ctime_ns == made


def shifter(cluster, *words, program="shifter"):
    env = {"PATH": STANDIN_PATH, "SHIFTER_SIF": "/project/hpctrain-cpu.sif"}
    env |= {"SHIFTER_RECORD": "/project/alice/record"}
    return cluster.exec("n1", program, *words, user="alice", cwd="/project/alice", env=env, check=False)


@needs_cluster
def test_the_stand_in_of_shifter_runs_the_image_and_records_the_command(site):
    words = ["--image=hpctrain:cpu", "-m", "gpu,nccl-plugin", "-V", "/tmp:/mnt", "--env=A=1  2", "sh", "-c"]
    done = shifter(site, *words, 'echo "$A"; type hpctrain; exit 3')
    said = "1  2\nhpctrain is /opt/hpctrain/bin/hpctrain\n"
    assert (done.stdout, done.returncode) == (said, 3), done.stderr
    record = site.host_path("/project/alice/record").read_text()
    assert "'--image=hpctrain:cpu' '-m' 'gpu,nccl-plugin'" in record
    assert shifter(site, "lookup", "hpctrain:cpu", program="shifterimg").returncode == 0
    assert shifter(site, "lookup", "nothing:cpu", program="shifterimg").returncode == 1
    environment = ["env", "LD_LIBRARY_PATH=/host", "TMPDIR=/host", "PYTHONNOUSERSITE=mine", "PYTHONPATH=/src"]
    show = "env; ls /var/shifterConfig.json"
    done = shifter(site, *environment[1:], "shifter", "--image=a", "sh", "-c", show, program="env")
    assert "/host" not in done.stdout and "mine" not in done.stdout, done
    assert ":/opt/udiImage/bin\n" in done.stdout and "PYTHONPATH=/src\n" in done.stdout, done
    assert "/var/shifterConfig.json" in done.stdout
    assert shifter(site, "--image=a", "--module=nothing", "true").returncode == 1
    for refused in (["--nv", "--image=a", "true"], ["true"], ["--image=a"]):
        assert shifter(site, *refused).returncode == 2


@needs_cluster
def test_root_can_change_etc_and_home_on_one_node(site):
    """As tests of `hpctrain check` do: another /etc/hosts, and a home folder on a full disk."""
    change = "cp /etc/hosts /tmp/hosts && echo 127.0.1.1 n1 >>/tmp/hosts"
    site.exec("n2", "sh", "-c", f"{change} && mount --bind /tmp/hosts /etc/hosts")
    assert "127.0.1.1 n1" in site.exec("n2", "cat", "/etc/hosts").stdout
    assert "127.0.1.1 n1" not in site.exec("n1", "cat", "/etc/hosts").stdout
    site.exec("n2", "umount", "/etc/hosts")
    site.exec("n2", "mount", "-t", "tmpfs", "-o", "size=64k,uid=1000,mode=700", "tmpfs", "/home/bob")
    done = site.exec("n2", "dd", "if=/dev/zero", "of=/home/bob/file", "bs=100k", "count=1", check=False)
    assert "No space left on device" in done.stderr
    site.exec("n2", "umount", "/home/bob")


@needs_cluster
def test_a_crashed_node_is_down_and_comes_back():
    with Cluster(nodes=3) as cluster:
        # The batch script runs on the first node of the job, which stays up. It starts no step: an srun that
        # has not reached n2 yet would fail at once, and the job would end before Slurm marks the node as
        # down.
        script = '#!/bin/sh\n[ -n "$SLURM_RESTART_COUNT" ] || exec sleep 1000\n'
        job = cluster.submit("-N2", "--requeue", script=script)
        busy = [[state, state, "idle"] for state in ("allocated", "mixed")]
        wait_until(lambda: [*node_states(cluster).values()] in busy)
        cluster.crash("n2")
        wait_until(lambda: node_states(cluster)["n2"] == "down*")
        with pytest.raises(TimeoutError, match=r"neither idle nor computing(.|\n)*n2 .* down"):
            cluster.wait_until_settled(seconds=0)
        assert cluster.command("exec", "n2", "true", check=False).returncode != 0
        assert cluster.wait(job).nodes == ("n1", "n3")

        cluster.boot("n2")
        wait_until(lambda: node_states(cluster)["n2"] == "idle")
        cluster.wait_until_settled()
        assert cluster.exec("login", "srun", "--nodelist=n2", "hostname", user="alice").stdout == "n2\n"


@needs_cluster
def test_the_network_of_a_node_can_be_disconnected(cluster):
    ping = ["ping", "-c1", "-W1", "n2"]
    cluster.link("n2", up=False)
    assert cluster.exec("n1", *ping, check=False).returncode != 0
    cluster.link("n2", up=True)
    wait_until(lambda: cluster.exec("n1", *ping, check=False).returncode == 0)


@needs_cluster
def test_others_reach_a_node_at_once_when_it_is_switched_on_again(cluster):
    """As a real one, it has the address that they remember. With another one it took up to 50 seconds."""
    # Where slurmd does not listen yet, the node refuses: it has been reached. Otherwise this would be a
    # timeout, or no route.
    code = "import socket\ntry: socket.create_connection(('n2', 6818), 3)\n"
    connect = ["python3", "-c", f"{code}except ConnectionRefusedError: pass"]
    for again in (True, False):
        cluster.exec("n1", *connect)
        if again:
            cluster.crash("n2")
            cluster.boot("n2")
    wait_until(lambda: node_states(cluster)["n2"] == "idle")


@needs_cluster
def test_two_clusters_run_side_by_side(cluster):
    with Cluster(nodes=1) as other:
        assert processes(other.state)
        assert list(node_states(other)) == ["n1"]
        assert len(node_states(cluster)) == 2
        other.exec("n1", "touch", "/project/other")
        assert cluster.exec("n1", "ls", "/project").stdout == ""
    assert not processes(other.state)
    assert node_states(cluster)


@needs_cluster
def test_a_clone_for_its_owner_alone_below_a_path_with_a_space(tmp_path):
    """With umask 077, Slurm could not read its configuration, and alice not the project."""
    clone = tmp_path / "a b/hpctrain"
    shutil.copytree(REPOSITORY / "cluster", clone / "cluster")
    shutil.copy(REPOSITORY / ".gitignore", clone)
    subprocess.run(["chmod", "-R", "go=", tmp_path / "a b"], check=True)
    program = """
from slurm_cluster import Cluster
with Cluster(nodes=1) as cluster:
    cluster.install("alice")
    print(cluster.exec("login", "srun", "ls", "hpctrain/cluster/demo.py", user="alice").stdout)
"""
    done = run_command(
        [sys.executable, "-c", program], cwd=clone / "cluster", umask=0o077,
        env=os.environ | {"CLUSTER_ROOTFS": os.environ.get("CLUSTER_ROOTFS", f"{BUILD / 'rootfs'}")}
    )  # fmt: skip
    assert done.stdout.strip() == "hpctrain/cluster/demo.py", done.stderr


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
def test_down_stops_what_a_killed_up_has_started(tmp_path, seconds):
    up = subprocess.Popen([CLUSTER_SH, "up"], env={**os.environ, "CLUSTER": str(tmp_path / "state")})
    time.sleep(seconds)
    up.kill()
    up.wait()
    assert cluster_sh("down", "--purge", state=tmp_path / "state").returncode == 0
    assert not processes(tmp_path)


@needs_cluster
def test_the_cluster_ends_with_its_owner(tmp_path):
    owner = subprocess.Popen(["sleep", "100"])
    env = {"CLUSTER_OWNER_PID": str(owner.pid)}
    assert cluster_sh("up", "1", state=tmp_path / "state", env=env).returncode == 0
    assert processes(tmp_path)
    owner.kill()  # without wait(): a zombie counts as ended
    wait_until(lambda: not processes(tmp_path))
    owner.wait()
    cluster_sh("down", "--purge", state=tmp_path / "state")


@needs_cluster
def test_up_changes_nothing_of_a_running_cluster(tmp_path):
    with Cluster(nodes=1, state=tmp_path / "state") as cluster:
        assert cluster.command("up", "1").stderr.count("already up") == 1
        refused = cluster.command("up", "2", check=False)
        assert refused.returncode != 0 and refused.stderr.count("\n") == 1
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
    wait_until(lambda: not processes(tmp_path / "run"))
    assert cluster_sh("down", "--purge", state=tmp_path).returncode == 0
    assert not tmp_path.exists()


@pytest.mark.parametrize("script", ["cluster.sh", "machine.sh", "build_rootfs.sh", "extract_environment.sh"])
def test_help_names_the_script(script):
    done = run_command([REPOSITORY / "cluster" / script, "--help"])
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("usage: ")


WRONG = {
    "cluster.sh": """
        fly, up many, up 0, up 2 3, down --now, status, exec login, exec -e A login true, exec login true,
        crash, crash n1, link n1 sideways, run, run true, run -x 1 -- true, run -u nobody-here -- true,
        run -b /nowhere -- true""",
    "machine.sh": "fly",
    "build_rootfs.sh": "a b, --now",
    "extract_environment.sh": "--now, nothing.sif bare",
}


@pytest.mark.parametrize(
    ("script", "words"),
    [(script, line.strip()) for script in WRONG for line in f", {WRONG[script]}".split(",")],
)
def test_bad_usage_is_one_line(script, words, tmp_path):
    path = REPOSITORY / "cluster" / script
    done = cluster_sh(*words.split(), state=tmp_path / "state", script=path, cwd=tmp_path)
    assert done.returncode != 0 and done.stdout == ""
    assert done.stderr.startswith(script + ": ") and done.stderr.count("\n") == 1
