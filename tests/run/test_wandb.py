"""--wandb: a live or an offline run of Weights & Biases. The training goes on whatever the service does."""

import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hpctrain.commands.export import steps
from hpctrain.distributed.python import SAFE_PYTHON
from hpctrain.run import wandb
from hpctrain.run.reader import read_metrics
from tests.helpers import run_command, wandb_key, wandb_records, write_digits

KEY = "0123456789abcdef" * 2 + "01234567"
OPTIONS = ["--checkpoint-every", "3", "--out", "run", "--resume", "auto", "--wandb"]


class Service(BaseHTTPRequestHandler):
    """The part of W&B's service that its client needs to create and resume a run and to send its history."""

    protocol_version = "HTTP/1.1"
    history: dict[int, dict[str, float]]  # by the number of the line
    starts: list[dict[str, str]]

    def do_POST(self):
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            content = gzip.decompress(content)
        answer = {}
        if self.path == "/graphql":
            answer = {"data": self.answer(**json.loads(content))}
        elif "file_stream" in self.path:
            part = (json.loads(content).get("files") or {}).get(
                "wandb-history.jsonl", {"offset": 0, "content": []}
            )
            self.history.update(enumerate(map(json.loads, part["content"]), part["offset"]))
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_PUT = do_POST

    def answer(self, query, variables=None, **_):
        project = {"id": "p", "name": "hpctrain", "entity": {"id": "e", "name": "me"}}
        if "RunResumeStatus" in query:
            last = json.dumps([json.dumps(self.history[max(self.history)])]) if self.history else "[]"
            counts = {"historyLineCount": len(self.history), "eventsLineCount": 0, "logLineCount": 0}
            texts = {
                "historyTail": last,
                "eventsTail": "[]",
                "summaryMetrics": "{}",
                "config": "{}",
                "wandbConfig": '{"t": 1}',
            }
            bucket = {
                "id": "b",
                "name": variables["name"],
                "displayName": "d",
                "tags": [],
                "notes": None,
                **counts,
                **texts,
            }
            return {"model": {**project, "bucket": bucket if self.starts else None}}
        if "upsertBucket" in query:
            self.starts.append(variables)
            bucket = {
                "id": "b",
                "name": variables["name"],
                "displayName": "d",
                "description": "",
                "config": "{}",
            }
            bucket |= {"sweepName": None, "historyLineCount": len(self.history), "project": project}
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if "CreateRunFiles" in query:
            address = f"http://{self.headers['Host']}/file"
            files = [{"name": name, "uploadUrl": address} for name in variables["files"]]
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        return {
            "viewer": {"id": "u", "username": "me", "entity": "me", "flags": "{}", "teams": {"edges": []}}
        }

    def log_message(self, *_):
        pass

    def handle(self):
        with suppress(ConnectionError):  # of a client that was killed
            super().handle()


@pytest.fixture
def service():
    """The class, with the address of its server."""
    kind = type("OwnService", (Service,), {"history": {}, "starts": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    kind.address = f"http://127.0.0.1:{server.server_port}"
    yield kind
    server.shutdown()


def command(tmp_path, epochs):
    if not (tmp_path / "digits").exists():
        write_digits(tmp_path / "digits")
    return [sys.executable, "-m", "hpctrain", "train_ddp", "--data=digits", *OPTIONS, "--epochs", str(epochs)]


def variables(**more):
    return {name: value for name, value in os.environ.items() if not name.startswith("WANDB")} | more


def train(tmp_path, **env):
    """Train for an epoch more than there are; returns what is printed."""
    epochs = (
        len(list(tmp_path.glob("run/checkpoints/epoch-????.pt")))
        and read_metrics(tmp_path / "run")[-1]["epoch"]
    )
    done = run_command(command(tmp_path, epochs + 1), cwd=tmp_path, env=variables(**env))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def kill_when(tmp_path, is_ready, **env):
    """Train, and kill the trainer when this becomes true."""
    with subprocess.Popen(
        command(tmp_path, 1000), cwd=tmp_path, env=variables(**env), stdout=subprocess.DEVNULL
    ) as trainer:
        deadline = time.monotonic() + 120
        while not is_ready():
            assert time.monotonic() < deadline and trainer.poll() is None
            time.sleep(0.01)
        trainer.kill()


def values(line):
    """What a line of a history has of the training."""
    return {
        name: value
        for name, value in line.items()
        if name in ("train_loss", "learning_rate", "test_loss", "test_accuracy")
    }


def expected(folder):
    return {
        int(row["step"]): values({name: x for name, x in row.items() if name != "step"})
        for row in steps(folder)
    }


def has_lines(folder, number):
    path = folder / "metrics.jsonl"
    return path.exists() and path.read_text().count("\n") >= number


@pytest.mark.slow
def test_offline_one_run_with_each_step_once_after_a_kill(tmp_path):
    folder = tmp_path / "run"
    kill_when(
        tmp_path, lambda: has_lines(folder, 8) and list(folder.glob("wandb/offline-run-*")), WANDB_API_KEY=""
    )
    out = train(tmp_path, WANDB_API_KEY="")
    assert "resuming after" in out and "hpctrain: --wandb: offline (" in out
    (written,) = folder.glob("wandb/offline-run-*")
    assert f"to upload it: wandb sync run/wandb/{written.name}\n" in out
    found = list(wandb_records(next(written.glob("*.wandb"))))
    lines = [
        {wandb_key(item): json.loads(item.value_json) for item in r.history.item}
        for r in found
        if r.HasField("history")
    ]
    assert {line["_step"]: values(line) for line in lines} == expected(folder) and len(lines) == len(
        expected(folder)
    )
    (start,) = [record.run for record in found if record.HasField("run")][:1]
    assert start.run_id == wandb.identity(json.loads((folder / "config.json").read_text()))
    sync = [sys.executable, "-m", "wandb", "sync", "--dry-run", written]
    done = run_command(sync, cwd=tmp_path, env=variables(), timeout=120)
    assert done.returncode == 0 and written.name in done.stdout + done.stderr


@pytest.mark.slow
def test_live_one_run_with_each_step_once_after_a_kill(tmp_path, service):
    folder, env = tmp_path / "run", {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": service.address}
    kill_when(tmp_path, lambda: has_lines(folder, 8) and len(service.history) > 2, **env)
    before = len(service.history)
    out = train(tmp_path, **env)
    identity = wandb.identity(json.loads((folder / "config.json").read_text()))
    assert f"hpctrain: --wandb: live at {service.address}/me/hpctrain/runs/{identity}\n" in out
    assert {start["name"] for start in service.starts} == {identity}
    lines = [service.history[number] for number in sorted(service.history)]
    assert before < len(lines) == len(expected(folder))
    assert {line["_step"]: values(line) for line in lines} == expected(folder)
    # no secret in the run folder, and nothing of this machine at the service
    assert KEY.encode() not in b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert not {start.get(name) for start in service.starts for name in ("host", "repo", "commit")} - {
        None,
        "",
    }


RAISES = "def setup(): raise RuntimeError('the wandb of this test')\n"
HANGS = "import time\ntime.sleep(300)\n"


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["raises", "hangs", "silent", "folder"])
def test_a_service_that_fails_does_not_end_the_run(tmp_path, fault, monkeypatch):
    env = {"WANDB_API_KEY": KEY}
    if fault in ("raises", "hangs"):
        (tmp_path / "modules").mkdir()
        (tmp_path / "modules/wandb.py").write_text(RAISES if fault == "raises" else HANGS)
        env["PYTHONPATH"] = str(tmp_path / "modules")
    elif fault == "silent":
        listener = socket.create_server(("127.0.0.1", 0))  # takes connections, and never answers
        env["WANDB_BASE_URL"] = f"http://127.0.0.1:{listener.getsockname()[1]}"
    else:
        (tmp_path / "run").mkdir()
        (tmp_path / "run/wandb").touch()
    started = time.monotonic()
    out = train(tmp_path, **env)
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert out.count("hpctrain: --wandb: ") == 1
    assert "the training goes on without" in out and "hpctrain export wandb run" in out, out
    assert time.monotonic() - started < result["seconds"] + wandb.MAX_END_SECONDS + 60
    if fault == "raises":
        assert "--wandb: the wandb of this test: " in out


def test_a_process_that_is_stopped_is_not_waited_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(wandb, "MAX_END_SECONDS", 0.5)
    monkeypatch.setattr(wandb, "SAFE_PYTHON", [sys.executable, "-c", "import time; time.sleep(300)"])
    mirror = wandb.Mirror(tmp_path)
    mirror.start()
    process = mirror._process
    mirror.start()
    assert mirror._process is process
    process.send_signal(signal.SIGSTOP)
    mirror.close()
    assert process.wait(60) == -signal.SIGKILL
    assert "hpctrain: --wandb: W&B has not ended within 0.5 s: " in capsys.readouterr().err


def test_a_process_that_cannot_be_started(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(wandb, "SAFE_PYTHON", [str(tmp_path / "none")])
    mirror = wandb.Mirror(tmp_path)
    mirror.start()
    mirror.start()
    mirror.close()
    assert capsys.readouterr().err.count("hpctrain: --wandb: ") == 1


def test_the_id_does_not_change_when_the_digest_is_added():
    config = {
        "trainer": "train_ddp",
        "job": "17",
        "host": "n1",
        "started": "2026-11-20T10:00:00+0000",
        "command": ["a"],
    }
    assert wandb.identity(config) == wandb.identity(config | {"image_digest": "sha256:ab"})
    assert wandb.identity(config) != wandb.identity(config | {"job": "18"})


def test_settings_of_the_current_folder_are_not_read(tmp_path):
    """With its base_url another user would get the API key."""
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb/settings").write_text("[default]\nbase_url = http://127.0.0.1:1\n")
    program = (
        "import wandb; from hpctrain.run.wandb import _read_settings; _read_settings(wandb); "
        "print(wandb.setup().settings.base_url)"
    )
    command = [*SAFE_PYTHON, "-c", program]
    done = run_command(command, cwd=tmp_path, check=True)
    assert done.stdout.startswith("https://api.")
