"""hpctrain serve: the page and the JSON service, their token, and requests that are answered together."""

import argparse
import http.client
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from hpctrain.errors import HpctrainError
from hpctrain.nlp import page, serve
from tests.helpers import ask_socket, listening_ports, run_command
from tests.nlp.helpers import TASKS
from tests.tools.browser import Browser


class Pairs:
    """A task that answers without a model."""

    name, title, inputs = "qa", "Questions & answers", ("question", "context")
    examples = (("<What?>", "ABCdef"),)

    def __init__(self):
        self.sizes, self.go = [], threading.Event()
        self.go.set()

    def answer(self, model, tokenizer, rows, config, args, first):
        self.go.wait(60)
        self.sizes.append(len(rows))
        if any(question == "fails" for question, _ in rows):
            raise HpctrainError("this model cannot: use another")
        if any(question == "crashes" for question, _ in rows):
            raise IndexError("index out of range")
        if any(question == "panics" for question, _ in rows):
            raise PanicException("index out of bounds")
        return [{"answer": context[:3], "start": 0, "score": 0.75} for _, context in rows], 0

    def list_classes(self, labels):
        return labels


class PanicException(BaseException):
    """As the one of libraries in Rust."""


class Anything:
    """A model: all of its methods return itself."""

    def __getattr__(self, name):
        return lambda *_: self


@pytest.fixture
def task(monkeypatch, tmp_path):
    task = Pairs()
    monkeypatch.setattr(serve, "find_task", lambda folder: (task, {}))
    monkeypatch.setattr(serve, "load_tokenizer", lambda folder: None)
    monkeypatch.setattr(serve, "load_model", lambda task, folder, device: Anything())
    return task


@pytest.fixture
def server(task, tmp_path, monkeypatch):
    """A server of the task, with the token the-token."""
    args = argparse.Namespace(folder=tmp_path, device="cpu", batch_size=8, max_new_tokens=4)
    monkeypatch.setattr(serve, "fit_together", lambda *_: None)
    monkeypatch.setattr(serve.Handler, "model", serve.Model(args), raising=False)
    monkeypatch.setattr(serve.Handler, "token", "the-token", raising=False)
    server = serve.Server(("127.0.0.1", 0), serve.Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def ask(server):
    """A function that sends a request to the server, with its token unless told otherwise."""

    def send(method, path, body=None, headers=None):
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
        connection.request(
            method, path, body, {"Authorization": "Bearer the-token"} if headers is None else headers
        )
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        response.server = server.server_address
        return response, text

    return send


def post(ask, content):
    response, text = ask("POST", "/answer", json.dumps(content))
    return response.status, json.loads(text)


def test_json(ask):
    one = {"question": "What?", "context": "abcdef"}
    assert post(ask, one) == (200, {"answer": "abc", "start": 0, "score": 0.75})
    assert post(ask, [one, {"question": "?", "context": "가나다라"}])[1][1]["answer"] == "가나다"


@pytest.mark.parametrize(
    "content",
    [5, [], {}, {"question": "a"}, {"question": "a", "context": 5}, {"question": "a", "context": "\ud800"},
     [[1]], None, "x", 257 * [{"question": "a", "context": "b"}]],
)  # fmt: skip
def test_json_that_is_invalid(ask, content):
    status, answer = post(ask, content)
    assert status == 400 and answer["error"].startswith(
        "expected a JSON object with question and context, or a list"
    )


def test_requests_that_are_no_json_or_too_large(ask):
    assert ask("POST", "/answer", b"{\xff")[0].status == 400
    assert ask("POST", "/answer", "[" * 10**5)[0].status == 400
    for length in (str(serve.MAX_BODY + 1), "-1", "x", "1" * 5000):
        headers = {"Authorization": "Bearer the-token", "Content-Length": length}
        assert ask("POST", "/answer", None, headers)[0].status == 413
    assert ask("POST", "/nothing", "{}")[0].status == 404 and ask("GET", "/nothing")[0].status == 404
    assert ask("DELETE", "/")[0].status == 501


def test_many_programs_connect_at_once():
    # it does not accept any yet
    with serve.Server(("127.0.0.1", 0), serve.Handler) as server, ExitStack() as clients:
        for _ in range(100):
            clients.enter_context(socket.create_connection(server.server_address, timeout=5))


def test_a_client_that_ends_early_leaves_no_stack_in_the_log(ask, capfd):
    address = ask("GET", "/")[0].server
    for request in (b"GE", b"GET / HTTP/1.1\r\n\r\n" * 1000):
        with socket.create_connection(address) as client:
            client.sendall(request)
            # its end is a reset
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    time.sleep(0.5)
    assert ask("GET", "/")[0].status == 200 and capfd.readouterr().err == ""


def test_an_error_of_the_model_is_a_message(ask):
    assert post(ask, {"question": "fails", "context": "b"}) == (
        422,
        {"error": "this model cannot: use another"},
    )
    for question in ("crashes", "panics"):
        status, answer = post(ask, {"question": question, "context": "b"})
        assert status == 422 and "the model cannot answer this (" in answer["error"]
    assert post(ask, {"question": "a", "context": "bcde"})[1]["answer"] == "bcd"


def test_nobody_gets_in_without_the_token(ask, task):
    for headers in ({}, {"Authorization": "Bearer the-toke"}, {"Cookie": "token=x"}, {"Cookie": "\x01;=;"}):
        for method, path, body in (
            ("GET", "/", None),
            ("POST", "/", "question=a&context=b"),
            ("POST", "/answer", "{}"),
        ):
            response, text = ask(method, path, body, headers)
            assert response.status == 403 and "the token is missing or not of this server" in text
    assert ask("GET", "/?token=wrong", headers={})[0].status == 403
    assert task.sizes == []


def test_the_address_with_the_token_stores_it_in_a_cookie(ask):
    response, _ = ask("GET", "/?token=the-token", headers={})
    cookie = response.headers["Set-Cookie"]
    assert (
        (response.status, response.headers["Location"]) == (303, "/")
        and "HttpOnly" in cookie
        and "SameSite=Strict" in cookie
    )
    response, page = ask("GET", "/", headers={"Cookie": cookie.split(";")[0]})
    assert (
        response.status == 200 and "<title>Questions &amp; answers: " in page and page.count("<textarea") == 2
    )
    assert "default-src 'none'" in response.headers["Content-Security-Policy"] and "<script" not in page


def test_the_page_shows_the_answer_and_keeps_the_texts(ask):
    response, page = ask("POST", "/", "question=%3Cb%3E&context=%3Ci%3Edef")
    assert response.status == 200 and ">\n&lt;b&gt;</textarea>" in page
    assert re.search(r'<mark style="--color:#\w+">&lt;i&gt;<small>75.0%</small></mark>def', page)
    for body in ("question=a", "question=+&context=b", "", "\xff", "a=1&b=2&c=3&d=4"):
        _, page = ask("POST", "/", body.encode("latin-1"))
        assert '<span class="error">a field is empty: write a text in each</span>' in page
    _, page = ask("POST", "/", "question=fails&context=b")
    assert '<span class="error">this model cannot: use another</span>' in page


def test_an_example_is_answered_at_a_click(ask):
    _, page = ask("GET", "/")
    assert '<button name="example" value="0" formnovalidate>&lt;What?&gt; / ABCdef</button>' in page
    _, page = ask("POST", "/", "question=&context=&example=0")
    assert ">\n&lt;What?&gt;</textarea>" in page and "<small>75.0%</small></mark>def" in page
    for body in ("question=&context=&example=7", "question=&context=&example=x"):
        assert "a field is empty" in ask("POST", "/", body)[1]


@pytest.mark.parametrize("module", TASKS.values(), ids=TASKS)
def test_each_task_has_examples(module):
    assert module.TASK.examples and {len(row) for row in module.TASK.examples} == {len(module.TASK.inputs)}


def test_the_page_says_what_the_model_is_before_a_question(ask, tmp_path, monkeypatch):
    about = {"base": "klue/bert-base", "data": "a & b", "scores": {"test_f1": 0.98765, "test_f1/PS": 1.0}}
    config = {"labels": ["0", "1"], "meanings": {"1": "positive"}, "about": about}
    model = serve.Handler.model
    monkeypatch.setattr(model, "about", model.about | page.describe(Pairs(), config))
    _, html = ask("GET", "/")
    rows = dict(re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", html))
    assert rows == {
        "Model": str(tmp_path), "Base": "klue/bert-base", "Data": "a &amp; b", "Scores": "f1 0.9877",
        "Classes": "0, positive (1)",
    }  # fmt: skip
    shown = page.show_answer(("A",), {"label": "1", "probability": 0.5}, config["meanings"])
    assert shown.startswith("positive (1)<small>50.0%</small>")


@pytest.mark.parametrize(
    "config",
    [{}, {"labels": 5}, {"labels": [], "about": [], "meanings": 1}, {"labels": [], "about": {"base": 1}}],
)
def test_the_page_of_a_model_that_says_less(config):
    assert page.describe(Pairs(), config) == {}


@pytest.mark.parametrize(
    ("problem", "labels", "classes"),
    [("classify", ["a"], ["a"]), ("ner", ["O", "B-LC", "B-PS", "I-LC", "I-PS"], ["LC", "PS"])],
)
def test_what_an_answer_can_name(problem, labels, classes):
    assert TASKS[problem].TASK.list_classes(labels) == classes


def test_a_number_names_no_class():
    assert TASKS["pair"].TASK.for_problem("regression").list_classes(["score"]) == []


def test_requests_of_many_are_answered_together(ask, task):
    task.go.clear()
    contents = [
        {"question": "fails" if number == 5 else "a", "context": f"{number:03}"} for number in range(12)
    ]
    with ThreadPoolExecutor(12) as pool:
        started = [pool.submit(post, ask, content) for content in contents]
        while serve.Handler.model._waiting.qsize() < 4:  # the others are a batch
            time.sleep(0.02)
        time.sleep(0.5)
        task.go.set()
        answers = [each.result() for each in started]
    assert [status for status, _ in answers] == [200] * 5 + [422] + [200] * 6
    assert [answer["answer"] for _, answer in answers if "answer" in answer] == [
        f"{n:03}" for n in range(12) if n != 5
    ]
    assert 1 < max(task.sizes) <= 8


@pytest.mark.parametrize(
    ("row", "answer", "shown"),
    [
        (
            ("A <b> B",),
            {"entities": [{"start": 0, "end": 1, "type": "X"}, {"start": 6, "end": 7, "type": "Y"}]},
            '<mark style="--color:#56b4e9">A<small>X</small></mark> &lt;b&gt; '
            '<mark style="--color:#e69f00">B<small>Y</small></mark>',
        ),
        (("A",), {"entities": []}, "A\n<small>no entity</small>"),
        (("?", "a & b"), {"answer": "", "start": 0, "score": 0.5},
         "a &amp; b\n<small>no answer in this context (50.0%)</small>"),
        (("A",), {"label": "<1>", "probability": 0.987}, "&lt;1&gt;<small>98.7%</small>"),
        (("A <",), {"generated": "> B"}, "A &lt;<mark>&gt; B</mark>"),
        (("A",), {"other": "<"}, '{\n  &quot;other&quot;: &quot;&lt;&quot;\n}'),
    ],
)  # fmt: skip
def test_how_an_answer_looks(row, answer, shown):
    found = page.show_answer(row, answer, {})
    assert found == shown or ("probability" in answer and found.startswith(shown) and "width:99%" in found)


@pytest.mark.slow
@pytest.mark.main_road("`hpctrain serve` shows a model")
def test_the_page_in_a_browser_asks_for_the_token_and_marks_the_answer(server):
    with Browser() as browser:
        browser.resize(360, 900)
        browser.open(f"http://127.0.0.1:{server.server_port}/")
        assert "the token is missing" in browser.evaluate("document.body.innerText")
        browser.evaluate("document.querySelector('[name=token]').value = 'the-token'")
        browser.click("button")
        browser.wait_for("document.querySelector('[name=question]')")
        assert "token" not in browser.evaluate("location.href")
        assert browser.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        browser.evaluate("document.querySelector('[name=example]').focus()")  # by the keyboard alone
        for kind in ("keyDown", "keyUp"):
            browser.ask("Input.dispatchKeyEvent", type=kind, key="Enter", text="\r", windowsVirtualKeyCode=13)
        browser.wait_for("document.querySelector('mark')")
        assert browser.evaluate("document.querySelector('[name=context]').value") == "ABCdef"
        for name, text in (("question", "Who?"), ("context", "Kim <b>lives</b> in Seoul")):
            browser.evaluate(f"document.querySelector('[name={name}]').value = '{text}'")
        browser.click("button")
        browser.wait_for("document.querySelector('mark')?.innerText.startsWith('Kim')")
        assert "Kim75.0% <b>lives</b> in Seoul" in browser.evaluate(
            "document.querySelector('.answer').innerText"
        )
        assert (
            browser.evaluate("getComputedStyle(document.querySelector('mark')).backgroundColor")
            != "rgba(0, 0, 0, 0)"
        )
        assert browser.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.slow
def test_a_real_model_in_a_process_of_its_own(tmp_path):
    """The file with the address is private, and goes with the server."""
    hpctrain = [sys.executable, "-m", "hpctrain"]
    train = [*hpctrain, "nlp.classify", "--limit", "20", "--epochs", "1", "--out", "run"]
    assert subprocess.run(train, cwd=tmp_path, capture_output=True, timeout=600).returncode == 0
    with subprocess.Popen(
        [*hpctrain, "serve", "run", "--port", "0"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as server:
        assert (
            server.stdout.readline()
            == "serving classify; the address is in run/serve.url, which you alone can read\n"
        )
        note = tmp_path / "run/serve.url"
        assert note.stat().st_mode & 0o777 == 0o600
        host, port, token = re.fullmatch(
            r"http://([\d.]+):(\d+)/\?token=(\S{32})\n", note.read_text()
        ).groups()
        assert host == "127.0.0.1"
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
        connection.request(
            "POST", "/answer", json.dumps([{"text": "좋은 영화"}] * 3), {"Authorization": f"Bearer {token}"}
        )
        answers = json.loads(connection.getresponse().read())
        assert len(answers) == 3 and {"label", "probability"} <= answers[0].keys()
        connection.request("GET", "/", headers={"Authorization": f"Bearer {token}"})
        page = connection.getresponse().read().decode()
        for term, text in (("Model", "run"), ("Base", r"from scratch \(tiny\)"), ("Scores", "accuracy 0.*")):
            assert re.search(f"<dt>{term}</dt><dd>{text}</dd>", page)
        assert "<dt>Classes</dt><dd>negative (0), positive (1)</dd>" in page  # NSMC's README says so
        taken = run_command([*hpctrain, "serve", "run", "--port", port], cwd=tmp_path)
        assert taken.returncode == 1 and f"127.0.0.1:{port} cannot be listened on" in taken.stderr
        server.send_signal(signal.SIGTERM)
    assert server.returncode == 0 and not note.exists()
    # In a job it is not on a port, but on a socket of its user.
    command, env = [*hpctrain, "serve", "run"], os.environ | {"SLURM_JOB_ID": "18"}
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as server:
        assert "hpctrain: the page of classify starts on " in server.stdout.readline()
        path = Path(re.search(r"8888:(\S+)", server.stdout.readline())[1])
        token = (tmp_path / "runs/serve/18/token").read_text().strip()
        assert listening_ports(server.pid) == [] and path.stat().st_mode & 0o777 == 0o600
        assert [ask_socket(path, "/", Authorization=f"Bearer {given}")[0] for given in ("wrong", token)] == [
            403,
            200,
        ]
        server.send_signal(signal.SIGTERM)
    assert server.returncode == 0 and not path.parent.exists()
