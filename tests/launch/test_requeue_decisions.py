"""What a batch script does when its launcher has ended, without a cluster: whether the job goes on, and how.

tests/launch/test_requeue.py has real jobs.
"""

import re
import shlex
import subprocess
import time

import pytest

from tests.launch.helpers import (
    BARE,
    LAUNCH,
    QUOTED,
    assert_refused,
    bash,
    library,
    put,
    put_squeue,
    zone_with_clocks_back_in,
)

RESUME = "--resume runs/x\n"


@pytest.fixture
def slurm(programs, tmp_path):
    """The environment of job 7, in which scontrol prints its words; (tmp_path / "control") is its folder."""
    (tmp_path / "control").mkdir()
    put(tmp_path, scontrol='echo "$@"')
    put_squeue(tmp_path)
    return programs | {"SLURM_JOB_ID": "7"}


@pytest.fixture
def conclude(slurm, tmp_path):
    """A function that ends a batch script whose launcher has ended with this status."""

    def end(status, files="", requeues=1, assignments="SCRIPT=x", env=None, **fields):
        for name in files.split():
            (tmp_path / "control" / name).write_text(RESUME)
        if fields:
            put_squeue(tmp_path, **fields)
        restarts = {"SLURM_RESTART_COUNT": str(fields["RestartCnt"])} if fields.get("RestartCnt") else {}
        facts = f"HPCTRAIN_CONTROL={tmp_path}/control HPCTRAIN_REQUEUES={requeues} NODES=2 TASKS=4 THREADS=8"
        script = (
            f"source {QUOTED}/lib/main.sh; {facts} GPUS=4 {assignments}; trap clean_up EXIT; exit {status}"
        )
        return bash(f"set -euo pipefail; {script}", slurm | restarts | (env or {}))

    return end


LAST_RESTART = "restart 1 of at most 1 (HPCTRAIN_REQUEUES)"
PREEMPTED = {"RestartCnt": 5, "PreemptTime": "@1795176000"}


@pytest.mark.parametrize(
    ("status", "files", "requeues", "fields", "ends_with", "requeued", "names"),
    [
        # An attempt that stops and saves nothing is counted: it was requeued for ever.
        *((status, "stop stopped saved", 0, {}, 75, True, "saved a checkpoint") for status in (0, 75)),
        *((status, "stop stopped", 1, {}, 75, True, LAST_RESTART) for status in (0, 75)),
        *((status, "stop stopped", 0, {}, 75, False, "continue with sbatch ") for status in (0, 75)),
        # srun did not reach a node. Ranks on other nodes may have started, and no checkpoint been saved.
        (233, "", 1, {}, 233, True, LAST_RESTART),
        (1, "", 1, {}, 1, False, ""),
        (137, "", 1, {}, 137, False, ""),
        # Slurm killed the ranks of a job with a checkpoint within a second of their second start.
        (137, "", 2, {"RestartCnt": 1}, 137, True, "restart 2 of at most 2 (HPCTRAIN_REQUEUES)"),
        (137, "", 2, {"RestartCnt": 2}, 137, False, "HPCTRAIN_REQUEUES"),
        (1, "", 2, {"RestartCnt": 1}, 1, False, ""),
        # A launcher that was ended because it waited, as after slurmstepd was killed, with work left or not
        (143, "saved lonely ended.1 stopped", 1, {}, 75, True, ""),
        (143, "saved lonely ended.1", 1, {}, 0, False, ""),
        # Slurm requeues a preempted job itself, whatever its script does (PreemptMode=REQUEUE).
        (143, "", 1, PREEMPTED, 143, True, "preempted"),
    ],
)
def test_whether_a_job_is_requeued(conclude, status, files, requeues, fields, ends_with, requeued, names):
    done = conclude(status, files, requeues, **fields)
    assert done.returncode == ends_with and ("requeue 7\n" in done.stdout) == requeued, done
    assert names in done.stdout, done


@pytest.mark.parametrize("status", [0, 1, 137])
def test_the_nodes_are_cleaned_however_the_job_has_ended(conclude, tmp_path, status):
    """In a trap, `return` without a number has the status before the trap: after a failure no step ran."""
    put(tmp_path, srun=f"touch {tmp_path}/stepped", scontrol="echo n1")
    done = conclude(status, assignments="SCRIPT=x JOB=7; clean() { on_every_node true; }; CLEAN_UP=(clean)")
    assert done.returncode == status and (tmp_path / "stepped").exists(), done


@pytest.mark.parametrize(("preempted", "requeued"), [("N/A", False), ("@1795176000", True)])
def test_a_rank_that_was_killed_in_an_image_that_srun_has_entered(conclude, preempted, requeued):
    """The tasks cannot ask Slurm why they got SIGTERM, and wrote `stop`: such a job started for ever."""
    done = conclude(137, "stop", assignments="SCRIPT=x SRUN_ENTERS=1", PreemptTime=preempted)
    assert done.returncode == 137 and ("requeue 7\n" in done.stdout) == requeued, done


CHECKPOINT = "checkpoints/epoch-0001.pt"


@pytest.mark.parametrize(
    ("words", "checkpoint", "files", "option"),
    [
        # An error of a rank that comes too late, of an import, ... ended the job, without a word.
        ("train_ddp", f"runs/train_ddp/7/{CHECKPOINT}", "", "--resume runs/train_ddp/7"),
        ("train_ddp", f"runs/train_ddp/7/{CHECKPOINT}", "failed", "--resume runs/train_ddp/7"),
        ("nlp.qa --out x", "x/checkpoints/epoch-0001-step-000003", "failed", "--resume x"),
        ("mine.py --resume=x", f"x/{CHECKPOINT}", "failed", ""),
        ("mine.py", "runs/mine-7/checkpoint-12", "failed", ""),
        ("sweep a/s.yaml", f"runs/s/trial-000/{CHECKPOINT}", "failed", ""),
        # one that training itself has met
        ("train_ddp", f"runs/train_ddp/7/{CHECKPOINT}", "failed trains", "--resume runs/train_ddp/7"),
        ("train_ddp", f"runs/train_ddp/7/{CHECKPOINT}", "trains", "--resume runs/train_ddp/7"),
        # no checkpoint of this job
        ("train_ddp", f"runs/train_ddp/6/{CHECKPOINT}", "failed", None),
        ("train_ddp --out x", "x/checkpoints/.epoch-0001.pt.tmp", "", None),
    ],
)
def test_a_job_that_has_a_checkpoint_starts_again_or_says_how(
    conclude, tmp_path, monkeypatch, words, checkpoint, files, option
):
    path = tmp_path / "folder" / checkpoint
    path.parent.mkdir(parents=True)
    path.touch()
    monkeypatch.chdir(tmp_path / "folder")
    done = conclude(1, files, 9, f"SCRIPT=x ARGUMENTS=({words})", RestartCnt=1)
    starts_again = option is not None and "trains" not in files
    assert done.returncode == 1 and ("requeue 7\n" in done.stdout) == starts_again, done
    says_how = f"continue with sbatch .* {words} {option}".rstrip()
    assert bool(re.search(says_how, done.stdout)) == (option is not None and "trains" in files), done


@pytest.mark.parametrize("checkpoint", ["7", "6"])
def test_a_launch_script_that_cannot_start_again_yet(slurm, tmp_path, monkeypatch, checkpoint):
    """As where the folder of the image is mounted late: the job was FAILED before its ranks started."""
    (tmp_path / f"runs/train_ddp/{checkpoint}/{CHECKPOINT}").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    put_squeue(tmp_path, RestartCnt=1)
    put(tmp_path, sleep="")
    facts = "NODES=2 TASKS=4 THREADS=8 GPUS=4 SCRIPT=x JOB=7 ATTEMPT=1 ARGUMENTS=(train_ddp)"
    env = slurm | {"ENVIRONMENT": "BATCH", "SLURM_RESTART_COUNT": "1"}
    done = library(f"{facts}; open_control; die 'no image'", **env)
    assert done.returncode == 2 and ("requeue 7\n" in done.stdout) == (checkpoint == "7"), done


@pytest.mark.parametrize(("silent", "failures"), [(2, 0), (99, 0), (2, 1), (99, 1)])
def test_a_slurmctld_that_does_not_answer_is_waited_for(conclude, tmp_path, silent, failures):
    """The job was FAILED, and its log said that Slurm had requeued it, or its only try to requeue it came too
    early.
    """
    (tmp_path / "squeue").rename(tmp_path / "answer")
    asked = f'cd {tmp_path}; echo >>asked; [ $(wc -l <asked) -gt {silent} ] && exec ./answer "$@"'
    refuse = f"[ $1 != requeue ] || [ $(echo >>{tmp_path}/tries; wc -l <{tmp_path}/tries) -gt {failures} ]"
    put(tmp_path, squeue=asked, sleep="", scontrol=f'{refuse} && echo "$@"')
    done = conclude(75, "saved stopped", assignments="SCRIPT=x ARGUMENTS=(train_ddp)")
    assert done.returncode == 75 and "requeuing the job\nrequeue 7\n" in done.stdout, done
    # Slurm may end the script while it waits.
    said = f"does not answer .* sbatch .*{re.escape(QUOTED)}/x train_ddp --resume runs/x"
    assert len(re.findall(said, done.stdout)) == 1, done


def test_the_attempt_is_not_that_of_the_job_in_which_it_was_submitted(tmp_path):
    """A job that a restarted one had submitted was never requeued."""
    put_squeue(tmp_path)
    env = {"PATH": f"{tmp_path}:{BARE['PATH']}", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "3"}
    done = library("JOB=7; keep_own_slurm_variables; is_current; echo $ATTEMPT", **env)
    assert done.stdout == "0\n", done.stderr


@pytest.mark.parametrize(
    ("restarts", "waited", "lasted", "seconds"),
    [(9, 0, 0, 30), (9, 60, 40, 120), (9, 1800, 5, 1920), (9, 60, 60, 0), (0, 1800, 0, 30)],
)
def test_restarts_that_end_soon_wait_longer_each_time(conclude, restarts, waited, lasted, seconds):
    """Ten of them were used up in two minutes, while /tmp was full. A job whose first restarts had been for
    other reasons, such as preemptions, then waited half an hour, as did one of sbatch --begin.
    """
    fields = {"RestartCnt": restarts, "SubmitTime": "@100", "EligibleTime": f"@{100 + waited}"}
    done = conclude(233, requeues=10, assignments=f"SECONDS={lasted}", **fields)
    assert done.returncode == 233 and "requeue 7\n" in done.stdout, done
    assert (f" {seconds} s " in done.stdout) == bool(seconds), done
    assert (f"\nupdate JobId=7 StartTime=now+{seconds}seconds\n" in done.stdout) == bool(seconds), done


# Asked to stop: a job of half an hour at once; one of four minutes, to which Slurm sends USR1 a minute too
# early, in the middle of its time; one of five minutes at once. Two thirds of the rest are for saving.
@pytest.mark.parametrize(
    ("before", "after", "stop", "kill"), [(1700, 100, 0, 66), (30, 210, 90, 170), (30, 270, 0, 180)]
)
@pytest.mark.parametrize("clocks", ["UTC", "go back"])
def test_when_ranks_are_to_stop(programs, tmp_path, clocks, before, after, stop, kill):
    """The hour in which clocks go back comes twice, and `date` takes local times for those of the second one.

    In the first one, the ranks were asked to stop after the end of their job.
    """
    now = int(time.time())
    put(
        tmp_path,
        squeue=f"""[[ "$*" == *StartTime* ]] && at=-{before} || at={after}
        date -d "@$(({now} + at))" "+${{SLURM_TIME_FORMAT:-%FT%T}}" """,
    )
    zone = zone_with_clocks_back_in(1800) if clocks == "go back" else "UTC"
    script = "request_stop >&2; echo $((STOP_AT - SECONDS)) $((KILL_AT - SECONDS))"
    done = library(f"HPCTRAIN_CONTROL={tmp_path}; {script}", **programs, SLURM_JOB_ID="7", TZ=zone)
    assert all(abs(int(a) - b) <= 3 for a, b in zip(done.stdout.split(), (stop, kill), strict=True)), done


def test_when_ranks_of_pbs_are_to_stop(programs, tmp_path):
    script = "request_stop >&2; echo $((STOP_AT - SECONDS)) $((KILL_AT - SECONDS))"
    done = library(f"HPCTRAIN_CONTROL={tmp_path} WALLTIME=1800 SECONDS=1700; {script}", **programs)
    stop, kill = map(int, done.stdout.split())
    assert abs(stop) <= 3 and abs(kill - 66) <= 3, done


@pytest.mark.parametrize(
    ("left", "then"), [("1 3", "n1 n3 0 1"), ("2 3 4", "n2 n3 1 1"), ("1", "n1 n2 1"), ("1 2 3", "n1 n2 1")]
)
def test_spare_nodes_take_the_place_of_those_that_failed(programs, tmp_path, left, then):
    """If there are enough, and only then."""
    stubs = "is_current() { :; }; export_job_env() { :; }; use_launcher() { :; }; set_command() { :; }"
    facts = f"HPCTRAIN_CONTROL={tmp_path} NODES=2 SPARE_NODES=1 HOSTS=(n1 n2) LAUNCHER_USED=()"
    script = f"nodes_left() {{ printf 'n%s\\n' {left}; }}; {stubs}; {facts}; replace_nodes >&2 || true"
    done = library(f"{script}; echo ${{HOSTS[*]}} $SPARE_NODES ${{SLURM_RESTART_COUNT:-}}", **programs)
    assert done.stdout.strip() == then, done


@pytest.mark.parametrize("scheduler", ["SLURM_JOB_ID", "PBS_JOBID"])
@pytest.mark.parametrize(("killed", "requeued"), [(True, True), (False, False)])
def test_a_launcher_that_ends_before_its_ranks_has_not_completed(
    conclude, programs, tmp_path, scheduler, killed, requeued
):
    """mpirun returned 0 after SIGKILL of its daemon on another node, and the job was COMPLETED."""
    rank = ["bash", "-c", "kill -KILL $PPID; exit 0" if killed else "exit 0"]
    env = programs | {"HPCTRAIN_CONTROL": f"{tmp_path}/control", scheduler: "7"}
    subprocess.run([LAUNCH / "lib/task.sh", "none", "--", *rank], env=env)
    done = conclude(0, "saved")
    assert (done.returncode == 137) == requeued and ("requeue 7\n" in done.stdout) == requeued, done


@pytest.mark.parametrize(
    ("spare", "gres", "shape"),
    [
        ("", "", "--nodes=2 --ntasks-per-node=4 --cpus-per-task=8 --gpus-per-node=4"),
        ("1", "x", "--nodes=3 --ntasks-per-node=4 --no-kill --cpus-per-task=8 --gres=gpu:4"),
    ],
)
def test_the_last_line_of_a_job_that_slurm_does_not_requeue_is_the_command_that_continues(
    conclude, tmp_path, spare, gres, shape
):
    """As after sbatch --no-requeue, and when a spare node has taken the place of another. Slurm may also have
    requeued the job while slurmctld did not answer this node, so the line names squeue.
    """
    put(tmp_path, scontrol='[ "$1" = show ]')
    words = f"{'OPTION[spare-nodes]=1' if spare else ''} SCRIPT=x.sh ARGUMENTS=(train_ddp --out 'a b')"
    done = conclude(0, "saved stopped", assignments=words, env={"SBATCH_GRES": gres} if gres else {})
    command = f" sbatch {shape} {QUOTED}/x.sh train_ddp --out a\\ b --resume runs/x"
    last = done.stdout.splitlines()[-1]
    assert done.returncode == 75 and last.endswith(command) and "squeue" in last, done


@pytest.mark.parametrize("number", ["x", "-1", "08"])
def test_an_invalid_number_of_restarts(number):
    done = library("open_control", HPCTRAIN_REQUEUES=number)
    assert_refused(done, "HPCTRAIN_REQUEUES", f"'{number}'")


# ---- a batch script of the user's own, which calls a launch script ----


@pytest.mark.parametrize(
    ("line", "trap", "left", "notice", "shell_ends", "names"),
    [
        ("", ":", 3600, 120, 0, []),
        ("#SBATCH --signal=USR1@300", ":", 3600, 300, 0, []),
        ("#SBATCH -N 2 --signal B:USR1", "trap : USR1", 3600, 60, 0, []),
        ("#SBATCH --signal=B:10@25", "trap '' USR1", 3600, 25, 0, []),
        ("#SBATCH --signal=B:SIGUSR1@25", ":", 3600, 120, 85, ["B:SIGUSR1@25", "exec", "205 s"]),
        (
            "#SBATCH --signal=RB:TERM@25",
            "trap : USR1",
            60,
            120,
            85,
            ["RB:TERM@25", "exec", "before the ranks"],
        ),
    ],
)
def test_the_signal_of_a_batch_script_of_ones_own(
    slurm, tmp_path, line, trap, left, notice, shell_ends, names
):
    """Slurm sends it to that script, and the ranks had no time to save. Without a trap it ended the job."""
    (tmp_path / "job.sh").write_text(f"#!/bin/bash\n{line}\nlaunch/apptainer_ddp.sh\n")
    put(tmp_path, scontrol=f'[[ "$*" == "write batch_script 7 -" ]] && cat {tmp_path}/job.sh')
    end = time.strftime("%FT%T", time.localtime(time.time() + left))
    put_squeue(tmp_path, EndTime=end, Requeue=1)
    script = f"source {QUOTED}/lib/main.sh; trap - USR1; {trap}; SLURM_TASK_PID=$$ SCRIPT=x.sh"
    done = bash(f'{script}; read_own_script; echo "$NOTICE $SHELL_ENDS"', slurm)
    assert done.stdout == f"{notice} {shell_ends}\n", done
    assert [name in done.stderr for name in names] == [True] * len(names) and bool(names) == bool(done.stderr)


def test_a_job_that_slurm_will_not_requeue_says_so_at_the_start(slurm, tmp_path):
    put_squeue(tmp_path, Requeue=0)
    done = bash(f"set -eu; source {QUOTED}/lib/main.sh; SCRIPT=x.sh read_own_script", slurm)
    assert done.returncode == 0 and "warning" in done.stderr and "--requeue" in done.stderr, done


STEP = """echo '--resume runs/x' >"$HPCTRAIN_CONTROL/saved"
for ((i = 0; i < 300; i++)); do
    [[ ! -e $HPCTRAIN_CONTROL/stop ]] || break
    /bin/sleep 0.1
done
echo "asked after $SECONDS s"
touch "$HPCTRAIN_CONTROL/stopped" """


@pytest.mark.slow
@pytest.mark.parametrize(("left", "seconds"), [(8, range(1, 6)), (123, range(1, 15))])
def test_a_job_of_ones_own_script_is_asked_before_its_time_limit(programs, tmp_path, left, seconds):
    """Two minutes before, or after half of a short one; and its script does not go on after the requeue."""
    times = {
        name: time.strftime("%FT%T", time.localtime(time.time() + add))
        for name, add in (("StartTime", left - 600 if left > 60 else 0), ("EndTime", left))
    }
    put_squeue(tmp_path, Requeue=1, **times)
    put(
        tmp_path,
        scontrol=f"case $1 in show) echo n1 ;; requeue) echo requeue $2 >>{tmp_path}/asked ;; esac",
        srun=f"[[ $* != *task.sh* ]] || {{ {STEP}\n}}",
        sleep='[[ $1 != 60 ]] || { echo waits; exit; }; exec /bin/sleep "$@"',
    )
    env = programs | {"ENVIRONMENT": "BATCH", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
    done = bash(f"{QUOTED}/apptainer_ddp.sh train_ddp", env, cwd=tmp_path)
    asked = re.search(r"asked after (\d+) s", done.stdout)
    assert done.returncode == 75 and asked and int(asked[1]) in seconds, done
    assert done.stdout.endswith("requeuing the job\nwaits\n"), done
    assert (tmp_path / "asked").read_text() == "requeue 7\n"


@pytest.mark.parametrize(
    ("end", "seconds"), [("+1 hour", 3600 - 120 - 85), ("N/A", None), ("Unknown", None), ("", None)]
)
def test_the_time_until_the_ranks_are_to_save(slurm, tmp_path, end, seconds):
    put_squeue(tmp_path, EndTime=f"'$(date -d '{end}' +%FT%T)'" if seconds else end)
    done = library("SHELL_ENDS=85; seconds_to_notice || echo none", **slurm)
    assert done.stdout == "none\n" if seconds is None else abs(int(done.stdout) - seconds) < 30, done


# ---- which rank failed first: srun ends with the status of the ranks that it has killed after that ----

LOST = "hpctrain: error: rank-0000 on n1 lost the connection to another rank, which has probably died: look"
EXITED = "Exited with exit code 1"
N1_EXITED, N2_EXITED = (f"srun: error: {task}: {EXITED}" for task in ("n1: task 0", "n2: task 3"))
SHUT_DOWN = "0: horovod.common.exceptions.HorovodInternalError: Horovod has been shut down. This"


@pytest.mark.parametrize(
    ("lines", "first", "last"),
    [
        (["3: step", "", f"srun: error: n2: task 3: {EXITED}"], f"n2 3 {EXITED}", "step"),
        # the list of the watchdog, and what Python and torch print after a reason
        (
            ["3: hpctrain: error: no rank", "3: hpctrain: rank 0 on n1 had finished 4 steps", N2_EXITED],
            f"n2 3 {EXITED}",
            "hpctrain: error: no rank",
        ),
        (
            [
                *("3: Fatal Python error: Aborted", "3: Current thread 0x7f (most recent call first):"),
                *('3:   File "a.py", line 3', "3: Extension modules: numpy", "3: [rank3]:[W1128] Warning"),
                "srun: error: n2: task 3: Aborted",
            ],
            "n2 3 Aborted",
            "Fatal Python error: Aborted",
        ),
        (["srun: error: n2: tasks 5-9,3: Killed"], "n2 5 Killed", ""),
        (["3: srun: error: n2: task 3: Killed"], "n1 1 Terminated", ""),  # printed by the program
        (["srun: error: Node failure on n2"], "n1 1 Terminated", ""),
        # srun told of the others first
        ([f" 0: {LOST}", N1_EXITED, "srun: error: n2: task 13: Killed"], "n2 13 Killed", ""),
        (
            [f"0: {LOST}", "2: [rank2]: OSError: a: b", N1_EXITED, "srun: error: n2: tasks 2-3: Killed"],
            f"n2 2 {EXITED}",
            "OSError: a: b",
        ),
        ([f"0: {LOST}", N1_EXITED], f"n1 0 {EXITED}", LOST),
        # as Horovod, MPI and mpi4py end the others
        (["1: RuntimeError: ill", SHUT_DOWN, N1_EXITED], f"n1 1 {EXITED}", "RuntimeError: ill"),
        (
            [
                "srun: error: n1: task 0: Killed",
                "srun: error: n2: task 2: Segmentation fault",
                f"{N1_EXITED}4",
            ],
            "n2 2 Segmentation fault",
            "",
        ),
        (
            [
                "3: ValueError: ünput",
                *(f"srun: error: {task}: Killed" for task in ("n1: tasks 0-2", "n2: task 3")),
            ],
            f"n2 3 {EXITED}",
            "ValueError: ünput",
        ),
    ],
)
def test_what_failed_first(programs, tmp_path, lines, first, last):
    earlier = "srun: error: n9: task 9: Exited with exit code 9\n"  # of another attempt
    lines = [*lines, "3: slurmstepd-n1: error", "srun: error: n1: task 1: Terminated"]
    log = tmp_path / "log"
    log.write_text(earlier + "\n".join(lines))
    script = f"source {QUOTED}/lib/main.sh; LAUNCH=(srun) LOG_BEGAN={len(earlier)}; first_failure"
    with log.open("a") as file:
        command = ["bash", "-euc", script]
        done = subprocess.run(command, env=programs, stdout=subprocess.PIPE, stderr=file, text=True)
    assert done.returncode == 0 and done.stdout == f"{first}\n{last}\n", done


# ---- jobs with spare nodes ----


@pytest.fixture
def shown(tmp_path):
    """What squeue prints. `scontrol requeue` and srun write into the file asked."""
    put(
        tmp_path,
        scontrol=f"""case $1:$2 in
            show:hostnames) echo "$3" | tr -d 'n[]' | sed 's/[0-9]/n&/g' | tr , '\\n' ;;
            requeue:7) echo requeue >>{tmp_path}/asked ;;
        esac""",
        srun=f"""echo "${{*%% bash*}}" | head -n 1 >>{tmp_path}/asked
            until [ "$1" = --quiet ]; do shift; done
            shift
            for SLURM_PROCID in 0 1; do SLURM_NTASKS=2 SLURM_PROCID=$SLURM_PROCID "$@" & done
            wait""",
        sleep=f"echo sleep >>{tmp_path}/asked; [ ! -e {tmp_path}/over ] && exec /bin/sleep 0.2",
    )

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
    facts = (
        f"HPCTRAIN_CONTROL={tmp_path} SPARE_NODES=1 NODES=2 HOSTS=(n1 n2) TASKS=1 THREADS=1 GPUS=0 SCRIPT=x"
    )
    env = shown(restarts, "1,2" if requeued else "2,3") | more
    done = library(f"{facts}; replace_nodes || conclude 137", HPCTRAIN_REQUEUES="9", **env)
    assert done.returncode == 137 and (tmp_path / "asked").exists() == requeued, done


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


# ---- PBS ----

QSTAT = """Job Id: 17.srv
    Job_Name = hpctrain
    job_state = R
    queue = workq
    Account_Name = st-pi-1
    Join_Path = oe
    Keep_Files = oed
    Mail_Points = abe
    Mail_Users = alice@example.org
    Output_Path = n1:{folder}/hpctrain.o17
    Priority = 0
    Rerunable = False
    Resource_List.filesystems = home:eagle
    Resource_List.mem = 2gb
    Resource_List.ncpus = 4
    Resource_List.nodect = 2
    Resource_List.place = scatter
    Resource_List.select = 2:ncpus=2:mpiprocs=2:mem=1gb
    Resource_List.walltime = {limit}
    Variable_List = PBS_O_HOME=/home/alice,PBS_O_QUEUE=workq,WORD=two,LINES=one
two,HPCTRAIN_IMAGE=/a,
\t_long_name,HPCTRAIN_ROOT=/b
    group_list = st-pi
    umask = 22
    run_count = 3
    project = _pbs_project_default
"""
MPIRUN = """[[ $1 != --version ]] || { echo 'mpirun (Open MPI) 5.0.7' && exit; }
echo '--resume runs/x' >"$HPCTRAIN_CONTROL/saved"
[[ $FAULT != yes ]] || exit 137
[[ $HPCTRAIN_PBS_RERUNS == 2 ]] || exit 1
echo trains >&2
for ((i = 0; i < 300; i++)); do
    [[ ! -e $HPCTRAIN_CONTROL/stop ]] || { sleep 2 && touch "$HPCTRAIN_CONTROL/stopped" && exit; }
    sleep 0.1
done"""
OPTIONS = (
    "-N hpctrain -A st-pi-1 -j oe -k oed -m abe -M alice@example.org -r n -l filesystems=home:eagle "
    "-l place=scatter -l select=2:ncpus=2:mpiprocs=2:mem=1gb -l walltime={} -W group_list=st-pi -W umask=22 "
    "-q workq"
)
VALUES = {"LINES": "one\ntwo", "JSON": '{"a": [1, 2]}', "QUOTE": "it's, $HOME", "BACK": "a\\b\\", "EMPTY": ""}
OF_THIS_JOB = {"NCPUS": "2", "OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "1", "DISK": "/tmp/pbs.17.srv"}


@pytest.fixture
def pbs(programs, tmp_path):
    """A function that starts a job of PBS, whose commands print and record as those of OpenPBS 23.06 do."""

    def start(limit="00:30:00", number="17.srv", qsub="echo 18.srv", **env):
        (tmp_path / "shown").write_text(QSTAT.format(limit=limit, folder=tmp_path))
        shown = f"[[ $1 == -f ]] && cat {tmp_path}/shown"
        put(tmp_path, mpirun=MPIRUN, qstat=f"echo qstat >>{tmp_path}/asked; {shown}")
        for name, more in {"qalter": "", "qdel": "", "qsub": f"\ncat >{tmp_path}/script\n{qsub}"}.items():
            put(tmp_path, **{name: f'echo {name} "$@" >>{tmp_path}/asked{more}'})
        env = programs | {"PBS_ENVIRONMENT": "PBS_BATCH", "PBS_JOBID": number, "PBS_O_QUEUE": "workq"} | env
        env |= {"PBS_O_WORKDIR": str(tmp_path), "PBS_NODEFILE": f"{tmp_path}/nodes"}
        script = [LAUNCH / "pbs_ddp.sh", "train_ddp", "--out", "a b"]
        return subprocess.Popen(script, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return start


RESUMED = f"{QUOTED}/pbs_ddp.sh train_ddp --out a\\ b --resume runs/x"


def how_it_ended(job, tmp_path, term=False):
    """The last line of a job's log, and what PBS was asked for."""
    with job:
        if term:
            assert job.stderr.readline() == "trains\n"
            job.terminate()
        said = job.stdout.read().splitlines()[-1]
    return said, (tmp_path / "asked").read_text().splitlines()


def test_a_pbs_job_goes_on_in_another_one_with_all_that_the_user_has_exported(pbs, tmp_path):
    """qsub -v refuses a quotation mark, and changes others; names after a line break were lost with qstat."""
    said, asked = how_it_ended(pbs(FAULT="yes", **VALUES | OF_THIS_JOB), tmp_path)
    assert said.endswith(": job 18.srv continues the run") and "restart 1 of at most 10" in said, said
    options = f"-S /bin/bash -W depend=afterany:17.srv {OPTIONS.format('00:30:00')}"
    # One job at a time: PBS does not start this one again. A slow server is asked once.
    assert asked == ["qstat", "qalter -r n 17.srv", f"qsub {options}"]
    script = (tmp_path / "script").read_text()
    assert script.endswith(f"exec {RESUMED}\n") and not script.startswith("#")
    new = bash(script.replace("exec ", "exec env -0 #"), env={})
    variables = dict(item.split("=", 1) for item in new.stdout.split("\0")[:-1])
    assert variables.items() >= (VALUES | {"HPCTRAIN_RESTARTS": "1", "FAULT": "yes"}).items()
    assert not [name for name in variables if name in OF_THIS_JOB or name.startswith("PBS_")], variables


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"HPCTRAIN_RESTARTS": "10"}, "HPCTRAIN_REQUEUES"),
        ({"qsub": "echo qsub: Bad UID for job execution >&2; exit 175"}, "Bad UID for job execution"),
        ({"number": "17[3].srv"}, ""),
    ],
)
def test_a_pbs_job_that_cannot_go_on_says_how(pbs, tmp_path, settings, reason):
    said, _ = how_it_ended(pbs(FAULT="yes", **settings), tmp_path)
    assert reason in said and "qsub: " not in said.replace(f"qsub: {reason}", "")
    assert said.endswith(f"echo {shlex.quote(RESUMED)} | qsub {OPTIONS.format('00:30:00')}"), said


@pytest.mark.slow
@pytest.mark.parametrize("case", ["walltime", "qdel", "qdel after USR1", "walltime unknown"])
def test_a_pbs_job_goes_on_after_its_walltime_and_not_after_qdel(pbs, tmp_path, case):
    """In the last two minutes qdel was taken for the end of the walltime, and another job went on."""
    limit = {"qdel": "00:30:00", "walltime unknown": "unlimited"}.get(case, "00:00:16")
    said, asked = how_it_ended(pbs(limit), tmp_path, term=case != "walltime")
    if case == "walltime":
        assert said.endswith(": job 18.srv continues the run") and asked[-1].startswith("qsub "), said
    else:
        assert "unless qstat shows that it goes on, continue with echo " in said and asked == ["qstat"], said


def test_qdel_is_not_taken_for_the_end_of_the_walltime():
    """PBS ends the children first, so the sleep of the timer before the timer."""
    order = "$(cat /proc/$TIMER/task/$TIMER/children) $TIMER $$"
    done = library(f"""QSTAT='    Resource_List.walltime = 01:00:00'
        trap 'echo USR1' USR1; trap 'echo TERM' TERM; read_pbs_fields; sleep 0.1
        for process in {order}; do kill -TERM $process 2>/dev/null || :; sleep 0.02; done""")
    assert done.stdout == "TERM\n", done


@pytest.mark.slow
def test_qdel_while_another_job_is_submitted_deletes_that_one(pbs, tmp_path):
    """PBS sends SIGTERM to every process of the session."""
    session = "kill -TERM $PPID $(awk '/^PPid/ { print $2 }' /proc/$PPID/status)"
    said, asked = how_it_ended(pbs(FAULT="yes", qsub=f"{session}; sleep 0.2; echo 18.srv"), tmp_path)
    assert asked[-1] == "qdel 18.srv" and "continue with echo " in said, said


@pytest.mark.parametrize("env", [{"SLURM_JOB_ID": "7"}, {"PBS_JOBID": "7"}, {"PBS_JOBID": "8"}])
def test_a_job_whose_trainers_have_folders_is_continued_by_its_number(tmp_path, env):
    """Their script has no --resume. Job 8 continues job 7."""
    folder = tmp_path / "runs/trainer-2/7"
    (folder / "checkpoints").mkdir(parents=True)
    for name in ("checkpoints/epoch-0001.pt", "attempt.json"):
        (folder / name).touch()
    env = env | ({"HPCTRAIN_CONTINUES": "7"} if "8" in env.values() else {})
    code = (
        f"cd {tmp_path}; SCRIPT=local.sh NODES=1 TASKS=1 THREADS=1 GPUS=0 ARGUMENTS=(train.py); STOPPING=''"
    )
    code += '; option=$(find_earlier_checkpoint) && how_to_resume "$option"'
    code += "; [[ -n ${SLURM_JOB_ID:-} ]] || export_for_next_job 0"
    said = library(code, **env).stdout.splitlines()
    begin = "sbatch --nodes=1" if "SLURM_JOB_ID" in env else "echo 'env HPCTRAIN_CONTINUES=7 "
    variable = "HPCTRAIN_CONTINUES=7 " if "SLURM_JOB_ID" in env else ""
    assert said[0].startswith(f"continue with {variable}{begin}") and "--resume" not in said[0], said
    exported = ["export HPCTRAIN_RESTARTS=1 HPCTRAIN_CONTINUES=7 "]
    assert said[-1:] == ([said[0]] if "SLURM_JOB_ID" in env else exported)
