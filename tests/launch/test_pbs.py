"""PBS: the commands of launch/lib/pbs.sh, and jobs by the qsub of the test cluster.

What a job says and submits when it ends is in tests/launch/test_requeue_decisions.py.
"""

import json
import subprocess
from pathlib import Path

import pytest
from slurm_cluster import Cluster, bare_binds

from tests.launch.helpers import (
    BARE,
    FEW,
    HOME,
    NO_CONTAINER,
    assert_ended,
    assert_refused,
    dry_run,
    folder,
    last_words,
    library,
    put,
    start,
    wait_until,
    wait_until_saved,
)

TMRSH = "launch/lib/tmrsh.sh"


# ---- without a cluster ----


def put_tmrsh(folder, text):
    put(folder, tmrsh=text)
    (folder / "tmrsh").rename(folder / "pbs_tmrsh")


@pytest.mark.parametrize(
    ("script", "per_node", "env", "by_tmrsh"),
    [
        ("pbs_ddp.sh", 2, {}, True),
        ("apptainer_torchrun.sh", 1, {}, True),
        ("pbs_ddp.sh", 2, {"PRTE_MCA_plm_ssh_agent": "ssh"}, False),
        ("pbs_ddp.sh", 2, {"OMPI_MCA_plm_rsh_agent": "ssh"}, False),
    ],
)
def test_mpirun_starts_its_daemons_by_pbs_tmrsh(programs, tmp_path, script, per_node, env, by_tmrsh):
    """By ssh, PBS does not end them with the job, and has no TMPDIR for them; and many sites close ssh."""
    put_tmrsh(tmp_path, "")
    job = {"PBS_JOBID": "1", "PBS_NODEFILE": f"{tmp_path}/nodes", "PBS_O_WORKDIR": str(tmp_path)}
    words = last_words(dry_run(script, programs | job | env))
    agents = [word.partition("=")[0] for word in words if word.endswith(TMRSH)]
    assert agents == ["PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent"] * by_tmrsh, words
    first = words.index("mpirun")
    assert words[first : first + 5] == [
        "mpirun",
        "-np",
        f"{2 * per_node}",
        "--map-by",
        f"ppr:{per_node}:node",
    ]


def test_pbs_tmrsh_gets_the_name_that_pbs_knows_and_a_shell(tmp_path):
    """The shell has no variable of qsub -V that the launch script has taken away."""
    (tmp_path / "nodes").write_text("n1.site.test\nn2.site.test\nn22.site.test\n")
    put_tmrsh(tmp_path, 'echo "$1"; shift; export OF_QSUB=1 TMPDIR=/there; "$@"')
    env = {"PATH": f"{tmp_path}:{BARE['PATH']}", "PBS_NODEFILE": f"{tmp_path}/nodes", "TMPDIR": "/here"}
    for name in ("n2", "n2.site.test"):
        done = start(
            "lib/tmrsh.sh", "-x", name, "A=1;", "echo", "'a  b' $A $TMPDIR ${OF_QSUB:-none}", env=env
        )
        assert done.stdout.splitlines() == ["n2.site.test", "a  b 1 /there none"], done
    assert_refused(start("lib/tmrsh.sh", "n2", env=env), "HOST COMMAND", "--help")


@pytest.mark.parametrize("rank_left", [False, True])
def test_a_launcher_that_waits_for_a_dead_node_is_ended(tmp_path, rank_left):
    """mpirun waited for the daemon of a node without power until the walltime. PBS calls such a node down."""
    said = 'case $1 in n2) echo "     state = state-unknown,down" ;; *) echo "     state = free" ;; esac'
    left = f"[[ ! -e {tmp_path}/left ]] || {{ rm {tmp_path}/left; exit 1; }}"
    put(tmp_path, pbsnodes=said, ssh=f'echo "$3" >>{tmp_path}/asked; {left}')
    for name in ("failed.1", *["left"] * rank_left):
        (tmp_path / name).touch()
    done = library(
        f"""HOSTS=(n1 n2 n3) JOB_HOSTS=(n1 n2 n3) JOB=17 HPCTRAIN_JOB=17
        HPCTRAIN_CONTROL={tmp_path}; sleep() {{ :; }}
        /bin/sleep 100 & watch_step $!""",
        PATH=f"{tmp_path}:{BARE['PATH']}",
        PBS_NODEFILE="nodes",
    )
    assert (tmp_path / "lonely").exists() and "no rank is left on any node" in done.stdout, done
    assert (tmp_path / "asked").read_text() == "n3\n" * (1 + rank_left)


def test_the_next_job_removes_what_a_killed_one_has_left(tmp_path):
    """qdel -W force, or ten seconds after qdel: the folders of its batch script stayed on the node."""
    folders = [Path(f"/tmp/hpctrain-control.{name}") for name in ("990017.x", "990018_3_.x", "990019_3_.x")]
    numbers = "ls /tmp | sed -n 's/^hpctrain-[a-z]*[.-]\\([0-9]*\\).*/\\1[].srv/p' | grep -v '99001[78]'"
    put(tmp_path, qselect=f"{numbers}; echo 1.srv")
    for path in folders:
        path.mkdir()
    try:
        done = library("remove_left_folders", PATH=f"{tmp_path}:{BARE['PATH']}", PBS_JOBID="1.srv")
        assert [path.exists() for path in folders] == [False, False, True], done
    finally:
        for path in folders:
            subprocess.run(["rm", "-rf", path])


# ---- on the cluster ----

PLACED = "-j oe -k oed -l select=2:ncpus={0}:mpiprocs={0} -l place=scatter -l walltime=00:10:00"
SHOW = """
import json, os, sys
names = ["TMPDIR", "WORLD_SIZE", "LINES", "QUOTE"]
seen = {name: os.environ.get(name) for name in names}
seen |= {"there": os.path.isdir(seen["TMPDIR"] or "-"), "node": os.uname().nodename}
sys.stdout.write(json.dumps(seen) + "\\n")  # in one write, because the ranks have one output
if "fault" in sys.argv and os.environ["RANK"] == "0" and "HPCTRAIN_RESTARTS" not in os.environ:
    from pathlib import Path
    Path(os.environ["HPCTRAIN_CONTROL"], "saved").write_text("--resume runs/x\\n")
    os.kill(os.getpid(), 9)
"""
IN_ENV = " ".join(f"{name}={value}" for name, value in NO_CONTAINER.items())


def by_qsub(cluster, words, tasks=1, env="", script="launch/pbs_ddp.sh", options=""):
    """How a job of qsub ended, and its log."""
    line = f"exec env {env} {HOME}/{script} {words}\n"
    number = cluster.qsub(*PLACED.format(tasks).split(), *options.split(), cwd=HOME, script=line)
    return cluster.wait(number), folder(cluster, f"STDIN.o{number}").read_text()


@pytest.mark.main_road("| `pbs_ddp.sh` |")
def test_pbs(cluster):
    """By our qsub over Slurm, with mpirun by pbs_tmrsh."""
    for env, tasks in (("", 2), (IN_ENV, 1)):
        checked = f"check passed: {2 * tasks} ranks on 2 hosts (openmpi)"
        assert_ended(by_qsub(cluster, "check", tasks, env), "COMPLETED", checked)
    train = f"train_ddp {FEW} --epochs 1 --out 'runs/by pbs'"
    assert_ended(by_qsub(cluster, train, 1), "COMPLETED")
    assert (folder(cluster, "runs/by pbs") / "result.json").exists()


def test_the_default_job_of_pbs_is_on_two_nodes(cluster):
    """Without place=scatter, PBS puts two small chunks on one."""
    number = cluster.qsub("-h", "launch/pbs_ddp.sh", cwd=HOME)
    shown = cluster.exec("login", "squeue", "--noheader", f"--jobs={number}", "--format=%D %j")
    cluster.exec("login", "qdel", f"{number}.login", user="alice")
    assert shown.stdout.split() == ["2", "hpctrain"]


def lines_of(output):
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("script", ["launch/pbs_ddp.sh", "launch/apptainer_torchrun.sh"])
@pytest.mark.parametrize("agent", ["", "PRTE_MCA_plm_ssh_agent=ssh"])
def test_ranks_on_each_node_have_a_folder_for_temporary_files(cluster, script, agent):
    """That of PBS, where PBS has started them, and otherwise none that is not there."""
    folder(cluster, "show.py").write_text(SHOW)
    output = assert_ended(by_qsub(cluster, "show.py", 2, f"{IN_ENV} {agent}", script), "COMPLETED")
    seen = lines_of(output)
    assert [sorted(rank["node"] for rank in seen), {rank["WORLD_SIZE"] for rank in seen}] == [
        ["n1", "n1", "n2", "n2"],
        {"4"},
    ], output
    for rank in seen:
        by_pbs = rank["node"] == "n1" or not agent
        assert (rank["there"], bool(rank["TMPDIR"])) == (by_pbs, by_pbs), output


def test_the_next_job_has_the_values_of_the_first_one(cluster):
    folder(cluster, "show.py").write_text(SHOW)
    env = f"""{IN_ENV} LINES=$'one\\ntwo' QUOTE="it's" """
    ended, output = by_qsub(cluster, "show.py fault", 1, env)
    assert ended.state == "FAILED" and ended.exit_code == 137, output
    assert "continues the run" in output, output
    number = int(output.rpartition(": job ")[2].partition(".")[0])
    log = folder(cluster, f"STDIN.o{number}")
    ended = cluster.wait(number)
    seen = lines_of(log.read_text())
    assert ended.state == "COMPLETED" and len(seen) == 2, log.read_text()
    assert all(rank["LINES"] == "one\ntwo" and rank["QUOTE"] == "it's" for rank in seen), log.read_text()


def test_a_pbs_job_goes_on_after_its_second_node_has_died(sif):
    """It idled until its walltime, because mpirun waits for the daemon of that node."""
    with Cluster(nodes=3, binds=bare_binds(sif)) as cluster:
        cluster.install("alice")
        command = "train_ddp --epochs 100000 --watchdog 10 --checkpoint-every 5s"
        line = f"exec env {IN_ENV} PRTE_MCA_plm_ssh_agent=ssh {HOME}/launch/pbs_ddp.sh {command}\n"
        number = cluster.qsub(*PLACED.format(1).split(), cwd=HOME, script=line)
        log = folder(cluster, f"STDIN.o{number}")
        wait_until_saved(cluster)
        cluster.crash("n2")
        wait_until(lambda: "continues the run" in log.read_text())
        following = int(log.read_text().rpartition(": job ")[2].partition(".")[0])
        after = folder(cluster, f"STDIN.o{following}")
        wait_until(lambda: after.exists() and "resuming" in after.read_text())
        assert "no rank is left on any node" in log.read_text(), log.read_text()
        cluster.exec("login", "qdel", "-W", "force", f"{following}.login", user="alice")
