"""launch/site.sh --new: a site file from the facts of a login node and a compute node."""

import re
import shutil

import pytest
from slurm_cluster import REPOSITORY, Cluster, bare_binds, missing

from tests.launch.helpers import BARE, HOME, NO_CONTAINER, assert_refused, bash, put, start, wait

# What the commands of real sites printed, shortened.
# CSC's Puhti: a test of github.com/CSCfi/ood-util
PUHTI = {
    "scontrol show partition": """\
PartitionName=small AllowGroups=ALL AllowAccounts=ALL Default=YES QoS=N/A DefaultTime=00:10:00 MaxNodes=1 \
MaxTime=3-00:00:00 MinNodes=0 Nodes=r01c[01-48] OverSubscribe=NO PreemptMode=OFF State=UP TotalNodes=654
PartitionName=gputest AllowGroups=ALL AllowAccounts=ALL Default=NO QoS=N/A DefaultTime=00:05:00 MaxNodes=2 \
MaxTime=00:15:00 MinNodes=0 Nodes=r01g01,r02g01 OverSubscribe=NO PreemptMode=OFF State=UP TotalNodes=2
PartitionName=gpu AllowGroups=ALL AllowAccounts=ALL Default=NO QoS=gputres_accrue DefaultTime=00:10:00 \
MaxNodes=20 MaxTime=3-00:00:00 MinNodes=0 Nodes=r01g[02-08] OverSubscribe=NO PreemptMode=OFF State=UP""",
    "sinfo": "small:(null)\nsmall:nvme:3600\ngputest:gpu:v100:4(S:0-1),nvme:3600\n"
    "gpu:gpu:v100:4(S:0-1),nvme:3600",
}
# KAUST's Ibex, a snapshot of July 2026: nodes of one partition have 4 or 8 GPUs
IBEX = {
    "sinfo": "gpu72:gpu:a100:4(S:0-1)\ngpu72:gpu:a100:4(S:0-3)\ngpu72:gpu:v100:8(S:0-1)",
    "scontrol show partition": "PartitionName=gpu72 AllowAccounts=ALL Default=NO MaxTime=3-00:00:00 State=UP",
}
# A cluster in containers with Slurm 25.11.4, in April 2026
LINUX = {
    "scontrol show config": """\
Configuration data as of 2026-04-21T06:06:22
AccountingStorageEnforce = none
ClusterName             = linux
JobRequeue              = 1
KillWait                = 30 sec
MpiDefault              = (null)
NamespaceType           = (null)
PreemptMode             = OFF
SLURM_VERSION           = 25.11.4
TaskPlugin              = task/affinity""",
    "scontrol show partition": "PartitionName=cpu AllowAccounts=ALL Default=YES MaxTime=UNLIMITED State=UP",
    # of Slurm with PMIx: docs.oracle.com's tutorials; the same commands of many pages
    "srun": "MPI plugin types are...\n\tnone\n\tcray_shasta\n\tpmi2\n\tpmix\n"
    "specific pmix plugin versions available: pmix_v5",
    "sinfo": "cpu:(null)",
}
# pbsnodes: docs.alcf.anl.gov/running-jobs; qstat: docs.metacentrum.cz/advanced/queues-in-meta
PBS = {
    "pbsnodes": """\
aps-edge-dev-04
     Mom = aps-edge-dev-04.mcp.alcf.anl.gov
     ntype = PBS
     state = free
     pcpus = 128
     resources_available.arch = linux
     resources_available.mem = 527831088kb
     resources_available.ncpus = 128
     resources_available.ngpus = 1
     resources_assigned.ncpus = 0
     sharing = force_exclhost
""",
    "qstat -Qf": """\
Queue: gpu_long
    queue_type = Execution
    Priority = 66
    state_count = Transit:0 Queued:14 Held:0 Waiting:0 Running:10 Exiting:0 Beg
\tun:0
    resources_max.ngpus = 99
    resources_max.walltime = 336:00:00
    resources_min.ngpus = 1
    enabled = True
    started = True
""",
    "qstat -Bf": "Server: pbs\n    default_queue = default\n    flatuid = False\n",
    "qsub": "",
}


@pytest.fixture
def new_site(tmp_path):
    """A function that runs site.sh --new where only these commands are. Returns its end and the file."""
    launch = shutil.copytree(REPOSITORY / "launch", tmp_path / "launch")
    programs = tmp_path / "bin"
    programs.mkdir()

    def run(outputs, *words, **env):
        for name in {name.split()[0] for name in outputs}:
            cases = [(words, text) for words, text in outputs.items() if words.split()[0] == name]
            shown = "".join(f"'{words}'*) cat <<'END'\n{text}\nEND\n;;\n" for words, text in cases)
            put(programs, **{name: f'case "{name} $*" in {shown} *) exit 1 ;; esac'})
        path = f"{programs}:/usr/bin:/bin"
        done = start(launch / "site.sh", "--new", *words or ["mine"], env=BARE | {"PATH": path} | env)
        file = launch / "sites/mine.env"
        return done, file.read_text() if file.exists() else ""

    return run


@pytest.mark.parametrize(
    ("outputs", "values", "comments", "tries"),
    [
        (
            PUHTI,
            [],
            ["SBATCH_PARTITION=gpu or gputest", "partition gpu: 4 GPUs per node, MaxTime=3-00:00:00",
             "The default partition is small", "MaxNodes=1"],
            ["sbatch --nodes=1 --ntasks-per-node=2 launch/apptainer_ddp.sh check"],
        ),
        (
            IBEX,
            ["SBATCH_PARTITION=gpu72"],
            ["SBATCH_GPUS_PER_NODE=8", "4 or 8 GPUs per node"],
            ["--ntasks-per-node=8"],
        ),
        (
            LINUX,
            [],
            ["SITE_DETECT=CLUSTER=linux", "TaskPlugin task/affinity", "offers none cray_shasta pmi2 pmix."],
            ["sbatch --ntasks-per-node=2 launch/apptainer_mpi.sh check"],
        ),
        (
            # slurm.conf(5): JobContainerType, AccountingStorageEnforce
            {"scontrol show config": "ClusterName = toy\nJobContainerType = job_container/tmpfs\n"
             "AccountingStorageEnforce = associations,limits,qos\nPreemptMode = REQUEUE",
             "sacctmgr": "def-a\ndef-b\ndef-a", "sinfo": "", "qstat -Qf": PBS["qstat -Qf"]},
            ["SITE_DETECT=CLUSTER=toy"],
            ["Each job has its own /tmp", "Jobs can be preempted"],
            ["export SBATCH_ACCOUNT=NAME before (yours: def-a def-b)"],
        ),
        (
            PBS,
            [],
            ["queue gpu_long resources_max.ngpus=99 resources_max.walltime=336:00:00",
             "1 x ncpus=128 ngpus=1 mem=527831088kb sharing=force_exclhost", "Without flatuid"],
            ["| qsub -V -q default -l select=2:ncpus=128:ngpus=1:mpiprocs=1 -l place=scatter -j oe -k oed"],
        ),
        (
            {"podman-hpc": "", "getent": "203.0.113.7 login1.example.org"},
            ["HPCTRAIN_RUNTIME=podman-hpc", "HPCTRAIN_LOGIN_HOST=login1.example.org"],
            [],
            ["launch/podman_hpc_ddp.sh --dry-run check"],
        ),
        ({"getent": "10.0.0.7 login1.example.org"}, [], ["HPCTRAIN_LOGIN_HOST=login1.example.org"], []),
        ({"getent": "203.0.113.7 login1.$(touch x)"}, [], ["HPCTRAIN_LOGIN_HOST=login1.$(touch"], []),
    ],
    ids=["puhti", "ibex", "slurm 25.11", "slurm.conf", "pbs", "podman-hpc", "private address", "hostile"],
)  # fmt: skip
def test_the_facts_of_real_sites(new_site, outputs, values, comments, tries):
    done, text = new_site(outputs, SSH_CONNECTION="192.0.2.1 50000 203.0.113.7 22")
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^[^#\n].*", text, re.M) == values
    commented = "\n".join(line for line in text.splitlines() if line.startswith("#"))
    assert [each for each in comments if each not in commented] == [], text
    assert [each for each in tries if each not in done.stdout] == [], done.stdout
    undecided = [each for each in comments if re.match(r"[A-Z_]+=", each)]
    paragraphs = [part for part in text.split("\n\n") if any(f"\n# {each}" in part for each in undecided)]
    assert all(re.match(r"# 20\d\d-\d\d, .* \?\n", part) for part in paragraphs) and (
        len(paragraphs) >= bool(undecided)
    )


def test_no_file_is_overwritten(new_site, tmp_path):
    (tmp_path / "launch/sites/mine.env").write_text("NCCL_NET=x")
    done, text = new_site({})
    assert_refused(done, "launch/sites/mine.env")
    assert text == "NCCL_NET=x"


@pytest.mark.parametrize("words", [[], ["-x"], ["../mine"], ["a b"], ["mine", "-A", "x"]])
def test_a_wrong_command_line_is_refused(new_site, tmp_path, words):
    before = sorted((tmp_path / "launch/sites").iterdir())
    done, _ = new_site({}, *(words or [""]))
    assert_refused(done, "--new")
    assert sorted((tmp_path / "launch/sites").iterdir()) == before


@pytest.mark.parametrize(
    ("outputs", "values", "comments"),
    [
        ({"nvidia-smi": "580.105.08, NVIDIA H200\n580.105.08, NVIDIA H200"}, ["HPCTRAIN_FLAVOR=cu130"],
         ["2 580.105.08, NVIDIA H200"]),
        ({"nvidia-smi": "535.54.03, NVIDIA A100"}, ["HPCTRAIN_FLAVOR=cu128"], []),
        ({"nvidia-smi": "470.82.01, Tesla V100"}, [], ["too old"]),
        ({"nvidia-smi": "NVIDIA-SMI has failed because it could not communicate"}, [], []),
        ({"ip": "lo UNKNOWN 127.0.0.1/8\nhsn0 UP 10.249.1.2/16", "ls": "cxi0"}, ["NCCL_SOCKET_IFNAME=hsn"],
         ["hsn0 10.249.1.2/16", "Slingshot needs a plugin"]),
        ({"ip": "ib0 UP 10.0.0.1/16", "ls": "mlx5_0"}, [], ["ib0 10.0.0.1/16", "mlx5_0"]),
    ],
)  # fmt: skip
def test_the_facts_of_a_compute_node(tmp_path, outputs, values, comments):
    for name, text in outputs.items():
        put(tmp_path, **{name: f"cat <<'END'\n{text}\nEND"})
    env = BARE | {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = bash(f"{REPOSITORY}/launch/lib/new_site.sh --facts", env)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^[^#\n].*", done.stdout, re.M) == values
    assert [each for each in comments if each not in done.stdout] == []


# ---- on the cluster: the file is written there, and a job runs with it unchanged ----

RUN = "train_ddp --epochs 1 --device cpu"


def write(cluster, name, *options, path=""):
    """Write a site file as alice, with a probe; returns its text."""
    command = f"{path} launch/site.sh --new {name} --probe {' '.join(options)}"
    done = cluster.exec("login", "bash", "-c", command, user="alice", cwd=HOME, check=False)
    assert done.returncode == 0, done.stderr
    assert f"source launch/site.sh {name}" in done.stdout
    assert not list(cluster.host_path(HOME).glob("hpctrain-probe.*"))
    text = cluster.host_path(f"{HOME}/launch/sites/{name}.env").read_text()
    for fact in ("ssh reaches the nodes of your jobs", "do not reach the internet", "eth0"):
        assert fact in text, text
    return text


def submit(cluster, name, command):
    """Submit a job from a shell with the site file; returns the number of the job."""
    script = f"source launch/site.sh {name} && {command}"
    done = cluster.exec("login", "bash", "-c", script, user="alice", cwd=HOME, env=NO_CONTAINER)
    return int(re.search(r"(\d+)(\.login)?$", done.stdout.strip())[1])


@pytest.fixture
def own_sites(site):
    """The shared cluster. The files of a test are removed after it, because other jobs would detect them."""
    yield site
    site.exec("login", "sh", "-c", "rm -f launch/sites/toy*.env", user="alice", cwd=HOME)


def test_a_job_runs_with_the_file_of_a_slurm_cluster(own_sites):
    text = write(own_sites, "toy")
    assert "\nSITE_DETECT=CLUSTER=hpctrain\n" in text and "offers none pmix cray_shasta pmi2." in text
    assert "The default partition is main" in text and "SBATCH_" not in text
    ended, log = wait(own_sites, submit(own_sites, "toy", f"sbatch --parsable launch/apptainer_ddp.sh {RUN}"))
    assert ended.state == "COMPLETED" and "hpctrain: site toy, " in log, log


def test_a_job_runs_with_the_file_of_a_pbs_cluster(own_sites):
    """The stand-in of PBS, in a shell that has no Slurm."""
    hide = "for name in sinfo scontrol srun sbatch squeue scancel; do rm -f $HOME/pbs/$name; done"
    make = (
        f"mkdir -p $HOME/pbs && cp -sf /usr/bin/* $HOME/pbs/ && cp -sf /usr/local/bin/* $HOME/pbs/ && {hide}"
    )
    own_sites.exec("login", "bash", "-c", make, user="alice")
    text = write(own_sites, "toypbs", path="PATH=$HOME/pbs")
    assert "queue workq" in text and "4 x ncpus=8 ngpus=0 mem=16384000kb" in text and "flatuid" in text
    qsub = f'echo "$PWD/launch/pbs_ddp.sh {RUN}" | qsub -V -l select=2:ncpus=2:mpiprocs=1 -l place=scatter'
    job = own_sites.wait(submit(own_sites, "toypbs", f"{qsub} -j oe -k oed"))
    log = own_sites.host_path(f"{HOME}/STDIN.o{job.id}").read_text()
    assert job.state == "COMPLETED" and "hpctrain: site toypbs, " in log, log


def test_a_job_runs_with_the_file_of_another_slurm_cluster(sif):
    """GPUs in one partition, and no default partition: without its file sbatch refuses the job."""
    if reason := missing():
        pytest.skip(reason)
    with Cluster(nodes=2, gpus=2, binds=bare_binds(sif)) as cluster:
        conf = cluster.state / "etc/slurm/slurm.conf"
        kept = [line for line in conf.read_text().splitlines() if not line.startswith("PartitionName")]
        kept.append("PartitionName=gpu Nodes=ALL MaxTime=00:20:00 MaxNodes=2 State=UP")
        conf.write_text("\n".join([*kept, ""]))
        cluster.exec("login", "scontrol", "reconfigure")
        cluster.install("alice")
        text = write(cluster, "gpus")
        assert "\nSBATCH_PARTITION=gpu\n" in text and "\nSBATCH_GPUS_PER_NODE=2\n" in text
        refused = cluster.exec("login", "sbatch", "--wrap=true", user="alice", cwd=HOME, check=False)
        assert refused.returncode and "partition" in refused.stderr
        ended, log = wait(
            cluster,
            submit(cluster, "gpus", f"sbatch --parsable --time=00:15:00 launch/apptainer_ddp.sh {RUN}"),
        )
        assert ended.state == "COMPLETED", log
