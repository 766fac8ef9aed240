"""A judge behind an HTTP API, for reward functions: a language model that is asked about many completions at once.

The API is the chat completions of vLLM, SGLang, OpenAI and others. A function that is called per group or with what has
arrived (`reward_call.per`) hands over all its questions, so that they are asked side by side.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from paceline.errors import UserError
from paceline.files.reading import shorten

PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""Statuses after which it is worth asking again."""
FIRST_PAUSE = 0.5  # seconds before the second attempt, doubled before each one after
LONGEST_PAUSE = 30.0  # seconds, whatever the server asks for
MAX_BODY = 2**22  # bytes of a reply
Question = str | Sequence[Mapping[str, Any]]
"""A user message, or messages."""


class JudgeError(Exception):
    """The judge gave no answer."""


class _Passing(Exception):
    """What may be over when it is tried again."""

    def __init__(self, what: str, pause: float | None = None):
        super().__init__(what)
        self.pause = pause


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """They would take the question, and the key, somewhere else."""

    def redirect_request(self, *args: Any) -> None:
        return None


class Judge:
    def __init__(
        self,
        url: str,
        model: str,
        *,
        system: str | None = None,
        concurrency: int = 8,
        retries: int = 4,
        timeout_s: float = 20.0,
        per_minute: float | None = None,
        max_calls: int | None = None,
        key_env: str | None = None,
        on_failure: Literal["raise", "none"] = "raise",
        settings: Mapping[str, Any] | None = None,
    ):
        """`url` ends where `/chat/completions` begins, often with `/v1`. At most `concurrency` questions are open at a
        time, at most `per_minute` requests are begun in a minute, and `max_calls` in all, by each reward process. One
        that fails for a passing reason (a timeout, 429, 5xx) is asked again up to `retries` times, with growing pauses
        or when the server says; then `on_failure` raises, or answers None. `key_env` names the environment variable
        with the key. `settings` go into every request, `{"temperature": 0, "max_tokens": 16}` for example."""
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise UserError(f"Judge: url is '{shorten(url)}'; write http://HOST:PORT/v1 or https://HOST/v1")
        if concurrency < 1 or retries < 0 or timeout_s <= 0 or (per_minute is not None and per_minute <= 0):
            raise UserError("Judge: concurrency must be from 1, retries from 0, timeout_s and per_minute above 0")
        self.url = url.rstrip("/") + "/chat/completions"
        self.concurrency = concurrency
        self.retries = retries
        self.timeout_s = timeout_s
        self.calls = 0
        """Requests so far, those that failed included."""
        self._max_calls = max_calls
        self._raises = on_failure == "raise"
        self._interval = 60.0 / per_minute if per_minute else 0.0
        self._lock = threading.Lock()
        self._next = 0.0  # when the next request may begin (`time.monotonic`)
        self._first = [{"role": "system", "content": system}] if system else []
        self._body = {"model": model} | dict(settings or {})
        self._headers = {"Content-Type": "application/json"}
        if key_env is not None:
            if not (key := os.environ.get(key_env)):
                raise UserError(f"Judge: the environment variable {key_env}, which should have the key, is not set")
            self._headers["Authorization"] = f"Bearer {key}"
        self._opener = urllib.request.build_opener(_NoRedirects())

    def ask(self, questions: Sequence[Question]) -> list[str | None]:
        """The answers, in the order of the questions."""
        if not questions:
            return []
        with ThreadPoolExecutor(min(self.concurrency, len(questions))) as threads:
            return list(threads.map(self._answer, questions))

    def _answer(self, question: Question) -> str | None:
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else list(question)
        body = json.dumps(self._body | {"messages": [*self._first, *messages]}).encode()
        pause = FIRST_PAUSE
        for attempt in range(self.retries + 1):
            try:
                return self._post(body)
            except _Passing as problem:
                if attempt < self.retries:
                    wanted = problem.pause if problem.pause is not None else pause * random.uniform(0.75, 1.25)
                    time.sleep(min(LONGEST_PAUSE, wanted))
                    pause *= 2
                    continue
                if self._raises:
                    times = f"{attempt + 1} times" if attempt else "once"
                    raise JudgeError(f"the judge at {self.url} gave no answer, asked {times}: {problem}") from problem
        return None

    def _post(self, body: bytes) -> str:
        self._wait_for_turn()
        request = urllib.request.Request(self.url, body, self._headers)
        try:
            with self._opener.open(request, timeout=self.timeout_s) as reply:
                text = reply.read(MAX_BODY + 1)
        except urllib.error.HTTPError as err:
            said = f"status {err.code}: {shorten(err.read(1000).decode(errors='replace'), 200)}"
            if err.code in PASSING:
                raise _Passing(said, _seconds(err.headers.get("Retry-After"))) from err
            raise JudgeError(f"the judge at {self.url} refused with {said}") from err
        except (OSError, http.client.HTTPException) as err:  # a timeout, a connection that is refused or lost
            raise _Passing(f"{type(err).__name__}: {shorten(str(err), 200)}") from err
        try:
            return str(json.loads(text)["choices"][0]["message"]["content"] or "")
        except (ValueError, LookupError, TypeError) as err:
            shown = shorten(text[:1000].decode(errors="replace"), 160)
            raise JudgeError(
                f"the judge at {self.url} replied with something else than chat completions: {shown}"
            ) from err

    def _wait_for_turn(self) -> None:
        with self._lock:
            if self._max_calls is not None and self.calls >= self._max_calls:
                raise JudgeError(f"the judge at {self.url} was asked max_calls={self._max_calls} times, and no more")
            self.calls += 1
            now = time.monotonic()
            turn = max(now, self._next)
            self._next = turn + self._interval
        time.sleep(turn - now)


def _seconds(header: str | None) -> float | None:
    """Of Retry-After; a date is not read."""
    try:
        return max(0.0, float(header)) if header is not None else None
    except ValueError:
        return None
