"""A judge behind HTTP, against a real server: order, concurrency, retries, limits, refusals."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from paceline.errors import UserError
from paceline.tasks.judge import Judge, JudgeError


class Server(ThreadingHTTPServer):
    """Replies with the question in capitals; `plan` says by question what to do before."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.plan: dict[str, list[tuple[int, dict[str, str]]]] = {}
        self.delay = 0.0
        self.pause = threading.Event()
        self.asked: Counter[str] = Counter()
        self.bodies: list[dict] = []
        self.keys: set[str | None] = set()
        self.now = 0
        self.most = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        s = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][-1]["content"]
        with s.lock:
            s.now += 1
            s.most = max(s.most, s.now)
            s.asked[question] += 1
            s.bodies.append(body)
            s.keys.add(self.headers["Authorization"])
            steps = s.plan.get(question, [])
            status, headers = steps.pop(0) if steps else (200, {})
        s.pause.wait(s.delay)
        with s.lock:
            s.now -= 1
        reply = {"choices": [{"message": {"content": question.upper()}}]} if self.path.startswith("/v1") else {}
        text = b"no" if status != 200 else json.dumps(reply).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_questions_are_asked_side_by_side_and_answered_in_order(server):
    server.delay = 0.1
    judge = Judge(server.url, "m", system="Be brief.", concurrency=4, settings={"temperature": 0})
    questions = [f"q{i}" for i in range(12)]
    assert judge.ask(questions) == [q.upper() for q in questions] and judge.ask([]) == []
    assert server.most == 4 and judge.calls == 12
    assert server.bodies[0]["model"] == "m" and server.bodies[0]["temperature"] == 0
    assert server.bodies[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert judge.ask([[{"role": "user", "content": "as messages"}]]) == ["AS MESSAGES"]


def test_what_passes_is_asked_again(server):
    soon = {"Retry-After": "0.01"}
    server.plan = {"a": [(503, soon), (429, soon)], "b": [(500, soon)] * 9}
    judge = Judge(server.url, "m", retries=2, on_failure="none")
    assert judge.ask(["a", "b", "c"]) == ["A", None, "C"]
    assert server.asked == {"a": 3, "b": 3, "c": 1}
    server.plan = {"d": [(500, soon)] * 9}
    with pytest.raises(JudgeError, match="gave no answer, asked 2 times: status 500: no"):
        Judge(server.url, "m", retries=1).ask(["d"])


def test_a_server_that_hangs_or_is_gone(server):
    server.delay = 1.0
    with pytest.raises(JudgeError, match="gave no answer, asked once: TimeoutError"):
        Judge(server.url, "m", retries=0, timeout_s=0.2).ask(["a"])
    with pytest.raises(JudgeError, match=r"gave no answer, asked once: URLError.*refused"):
        Judge("http://127.0.0.1:9/v1", "m", retries=0).ask(["a"])


def test_what_does_not_pass_is_not_asked_again(server):
    server.plan = {"a": [(401, {})], "b": [(307, {"Location": "http://127.0.0.1:9/"})]}
    with pytest.raises(JudgeError, match="refused with status 401: no"):
        Judge(server.url, "m").ask(["a"])
    with pytest.raises(JudgeError, match="refused with status 307"):
        Judge(server.url, "m").ask(["b"])
    with pytest.raises(JudgeError, match=r"something else than chat completions: \{\}"):
        Judge(server.url.replace("/v1/", "/v2/"), "m", on_failure="none").ask(["c"])
    assert server.asked == {"a": 1, "b": 1, "c": 1}


def test_limits(server, monkeypatch):
    waited = []
    monkeypatch.setattr("paceline.tasks.judge.time.sleep", lambda seconds: waited.append(seconds))
    judge = Judge(server.url, "m", concurrency=8, per_minute=1, max_calls=6)
    judge.ask([f"q{i}" for i in range(6)])
    assert [round(seconds / 60) for seconds in sorted(waited)] == [0, 1, 2, 3, 4, 5], "minutes between any two"
    with pytest.raises(JudgeError, match="max_calls=6"):
        judge.ask(["one more"])


def test_keys_and_mistakes(server, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sesame")
    Judge(server.url, "m", key_env="JUDGE_KEY").ask(["a"])
    assert server.keys == {"Bearer sesame"}
    with pytest.raises(UserError, match="NO_SUCH_KEY, which should have the key, is not set"):
        Judge(server.url, "m", key_env="NO_SUCH_KEY")
    with pytest.raises(UserError, match="url is 'localhost:8000/v1'; write http://HOST:PORT/v1"):
        Judge("localhost:8000/v1", "m")
    with pytest.raises(UserError, match="concurrency must be from 1"):
        Judge(server.url, "m", concurrency=0)
