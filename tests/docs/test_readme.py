"""Every marked command in README.md and docs/ runs: `bash` here, `bash cluster` as alice on the login node.

The commands of a page share one shell, as if a reader typed the page from top to bottom. A line on several
pages runs once.
"""

import json
import re
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from slurm_cluster import REPOSITORY

from tests.helpers import run_command

pytestmark = pytest.mark.slow

PAGES = [REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/**/*.md"))]
# Lines that do not run here, and where the same is tested.
NOT_RUN = {
    "make test": "runs this test",
    "make test-fast": "a part of make test",
    "make test-all": "runs this test",
    "make reproduce": "two builds from nothing, 12 minutes",
    "apptainer key newpair": "asks for a name: tests/containers/test_record.py signs with options",
    "apptainer sign hpctrain-cpu.sif": "tests/containers/test_record.py, on a copy",
    "apptainer verify hpctrain-cpu.sif": "tests/containers/test_record.py, on a copy",
}
# What make demo submits: see look_at_demo().
DEMO = "sbatch launch/apptainer_ddp.sh"
HOME = "/home/alice/hpctrain"
AT_ONCE = 3  # jobs: more of them on two cores would only wait for each other, and might miss their rendezvous


def commands(kind):
    """The lines of each page's blocks of a kind, without those of earlier pages."""
    seen, pages = set(NOT_RUN), {}
    for page in PAGES:
        blocks = re.findall(rf"^```{kind}\n(.*?)^```", page.read_text(), re.M | re.S)
        lines = [line for block in blocks for line in block.replace("\\\n", "").splitlines() if line]
        if new := [line for line in dict.fromkeys(lines) if line not in seen]:
            pages[page.name] = new
            seen.update(new)
    return pages


HERE = commands("bash")
ON_CLUSTER = commands("bash cluster")


@pytest.mark.main_road("make venv")
def test_there_are_commands():
    here, on_cluster = ([line for lines in pages.values() for line in lines] for pages in (HERE, ON_CLUSTER))
    assert {"make demo", "make sif", "make venv", ".venv/bin/hpctrain train_ddp --epochs 2"} <= set(here)
    assert DEMO in on_cluster and "sbatch launch/check.sh" in on_cluster and len(on_cluster) > 15
    text = "".join(page.read_text() for page in PAGES)
    assert all(re.search(f"^{line}$", text, re.M) for line in ("make test", "make test-fast"))


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page,
            marks=pytest.mark.main_road("make demo", "text classification, sentence pairs, named entities")
            if page == "README.md"
            else (),
        )
        for page in HERE
    ],
)
def test_on_this_machine(page, sif, tmp_path):
    # What make has made is not made again (test_image.py looks at that); the rest writes into a folder of its
    # own.
    here, script = shlex.quote(str(REPOSITORY)), ""
    for number, line in enumerate(HERE[page]):
        command = line.replace(".venv/", f"{here}/.venv/")
        if command.startswith("make "):
            command = f"make -C {here} {command.removeprefix('make ')}"
        script += f"echo '$ '{number}\n{command}\n"
    done = run_command(["bash", "-e", "-c", script], cwd=tmp_path, stdin=subprocess.DEVNULL, timeout=1700)
    assert done.returncode == 0, f"{HERE[page]}\n{done.stdout}{done.stderr}"
    if "make demo" in HERE[page]:
        look_at_demo(done.stdout)


def look_at_demo(output):
    """What make demo printed, and the run folder of its job: the launch script with no argument."""
    assert f"alice@login:~/hpctrain$ {DEMO}\n" in output
    assert re.search(r"^Slurm job \d+: COMPLETED, exit code 0, on n1 n2$", output, re.M), output
    assert re.search(r"4 ranks on 2 hosts; test accuracy 0\.9[789]", output)
    run = REPOSITORY / re.search(r"^run folder: (runs/demo-\S+)", output, re.M)[1]
    hosts = [log.read_text().split(" on ")[1].split(",")[0] for log in sorted((run / "logs").iterdir())]
    assert hosts == ["n1", "n1", "n2", "n2"]
    config = json.loads((run / "config.json").read_text())
    assert config["world"] | {"rank": 0} == {
        "rank": 0,
        "size": 4,
        "local_rank": 0,
        "local_size": 2,
        "node_rank": 0,
        "nodes": 2,
        "launcher": "slurm",
    }
    assert re.fullmatch("sha256:[0-9a-f]{64}", config["image_digest"])
    assert re.fullmatch("[0-9a-f]{40}", config["revision"])
    assert (run / "curves.png").stat().st_size > 10_000


# The output of line N is in N.out. room: wait until fewer jobs than AT_ONCE are left; only one shell submits
# at a time. ended N...: wait until the jobs that these lines submitted have ended.
FUNCTIONS = rf"""
room() {{ flock 8; while (($(squeue --noheader --me | wc -l) >= {AT_ONCE})); do sleep 1; done; }}
ended() {{
    local job
    for line; do
        until [[ -e $out/$line.status ]]; do sleep 0.3; done
        job=$(sed -nE 's/^(Submitted batch job )?([0-9]+)([.]login)?$/\2/p' "$out/$line.out")
        while [[ -n $job && -n $(squeue --noheader --jobs="$job") ]]; do sleep 0.3; done
    done
}}
"""


@pytest.fixture
def smaller_jobs(cluster, few_examples):
    """The variables for smaller jobs.

    Meanwhile the launch scripts start one rank on a node unless the command says otherwise.

    Each rank imports torch. test_matrix.py and test_launch.py look at the ranks that the scripts start by
    themselves.
    """
    changes = {
        "\n#SBATCH --ntasks-per-node=2\n": "\n#SBATCH --ntasks-per-node=1\n",
        # qsub passes no variables on
        "\n#PBS -k oed\n": "\n#PBS -k oed\n"
        + "".join(f"export {name}={value}\n" for name, value in few_examples.items()),
    }
    scripts = {path: path.read_text() for path in cluster.host_path(HOME).glob("launch/*.sh")}
    assert all(any(line in text for text in scripts.values()) for line in changes)
    for path, text in scripts.items():
        for line, other in changes.items():
            text = text.replace(line, other)
        path.write_text(text)
    yield few_examples
    for path, text in scripts.items():
        path.write_text(text)


@pytest.mark.timeout(1800)  # two minutes on two idle cores, ten beside seven other test runs
@pytest.mark.parametrize(
    "pages",
    [
        pytest.param(
            ["README.md"],
            id="README.md",
            marks=pytest.mark.main_road(
                "`apptainer exec hpctrain-cu130.sif hpctrain`",
                "sbatch launch/apptainer_ddp.sh",
                "text classification, sentence pairs, named entities",
            ),
        ),
        pytest.param([page for page in ON_CLUSTER if page != "README.md"], id="docs"),
    ],
)
def test_on_the_cluster(cluster, smaller_jobs, request, pages):
    """Pages and jobs run side by side, but a line with a folder in runs/ waits for the job that writes it."""
    home = cluster.host_path(HOME)
    (home / "mine.py").write_text("import sys\nprint(sys.argv[1:])\n")
    out = home / f"commands-of-{request.node.callspec.id}"
    out.mkdir()
    out.chmod(0o777)  # this is root, and the commands are alice's
    begin = f"out={HOME}/{out.name}\nexec 8>>$out/lock\n{FUNCTIONS}"
    lines, writers = [], {}
    for page in pages:
        script = [begin]
        for line in ON_CLUSTER[page]:
            if line == DEMO:
                continue
            number = len(lines)
            lines.append(line)
            folders = re.findall(r"runs/[\w/-]+", line)
            before = [str(writers[folder]) for folder in folders if folder in writers]
            script.append(f"ended {' '.join(before)}")
            script.append("room" if re.search(r"\b(sbatch|qsub) ", line) else "")
            script.append(f"{{ {line}\n}} >$out/{number}.out 2>$out/{number}.err </dev/null 8>&-")
            script.append(
                f"status=$?; flock -u 8; echo $status >$out/{number}.status; ((status == 0)) || exit"
            )
            writers |= dict.fromkeys(folders, number)
        (out / f"{page}.sh").write_text("\n".join(script))

    def type_page(page):
        shell = ["bash", f"{HOME}/{out.name}/{page}.sh"]
        return cluster.exec("login", *shell, user="alice", cwd=HOME, env=smaller_jobs, check=False).stderr

    with ThreadPoolExecutor(len(pages)) as readers:
        said = "".join(readers.map(type_page, pages))
    jobs = {}
    for number, line in enumerate(lines):
        stdout, stderr, status = (out / f"{number}.{kind}" for kind in ("out", "err", "status"))
        assert status.exists(), f"{line}: a line before it on its page failed\n{said}"
        assert status.read_text() == "0\n", f"{line}\n{stdout.read_text()}{stderr.read_text()}"
        assert not said, said
        # sbatch, qsub
        if submitted := re.search(r"^(?:Submitted batch job )?(\d+)(?:[.]login)?$", stdout.read_text(), re.M):
            jobs[int(submitted[1])] = line
    assert len(jobs) >= 5
    for job, line in jobs.items():
        ended = cluster.wait(job)
        logs = [path for pattern in (f"slurm-{job}.out", f"*.o{job}") for path in home.glob(pattern)]
        assert ended.state == "COMPLETED", (
            f"{line}\n{''.join(log.read_text(errors='replace') for log in logs)}"
        )
