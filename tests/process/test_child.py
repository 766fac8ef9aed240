"""Talking to child processes: nobody waits for one, and none is left over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from paceline.process.channel import QUEUED
from paceline.process.child import Child, Ended, Mailbox, Said
from paceline.process.guard import descendants

from ..processes import gone, runs

BIG = b"y" * 2**23
DEADLINE = 60.0  # seconds: turns a hang into a failure


@pytest.fixture
def mailbox():
    return Mailbox()


@pytest.fixture
def child(mailbox):
    child = Child("tests.process.echo", mailbox, guarded=False)
    yield child
    child.close()


@pytest.fixture
def guarded(mailbox):
    child = Child("tests.process.echo", mailbox, guarded=True)
    yield child
    child.close()


def take(mailbox: Mailbox, count: int = 1) -> list[Said | Ended]:
    out: list[Said | Ended] = []
    end = time.monotonic() + DEADLINE
    while len(out) < count:
        assert time.monotonic() < end, f"only {len(out)} of {count} came"
        out += mailbox.take(0.1)
    return out


@pytest.mark.parametrize("which", ["child", "guarded"])
def test_messages_of_any_size_in_order(mailbox, request, which):
    child = request.getfixturevalue(which)
    for value in (1, "two", BIG, [None]):
        child.send(("echo", value))
    said = take(mailbox, 4)
    assert [news.message for news in said] == [1, "two", BIG, [None]]
    assert [news.at for news in said] == sorted(news.at for news in said)


def test_many_megabytes_both_ways_at_once(mailbox, child):
    """Neither reads before it has written: with one thread on each side both would wait for ever."""
    child.send(("flood", 4))
    for _ in range(4):
        child.send(("echo", BIG))
    messages = [news.message for news in take(mailbox, 9)]
    assert messages.index("flooded") == 4 and messages.count(BIG) == 4


@pytest.mark.parametrize("which", ["child", "guarded"])
def test_one_that_is_stopped_blocks_nobody_and_can_be_killed(mailbox, request, which):
    child = request.getfixturevalue(which)
    child.send(("pid", None))
    (news,) = take(mailbox)
    child.send(("flood", 1000))
    take(mailbox)  # it is in the middle of it
    os.kill(news.message, signal.SIGSTOP)
    for _ in range(16):
        child.send(("echo", BIG))  # a deadlock would hang here
    child.kill()
    while not isinstance(news, Ended):
        (*_, news) = take(mailbox)
    assert gone([child.pid])


def test_one_that_never_reads_is_ended(mailbox, child):
    child.send(("sleep", 600))
    take(mailbox)
    for _ in range(QUEUED + 1):  # the socket takes a few hundred kilobytes, the queue the rest
        child.send(("echo", b"z" * 1000))
        if child.process.poll() is not None:
            break
    for _ in range(QUEUED):
        child.send(("echo", b"z" * 1000))
    assert isinstance(take(mailbox)[-1], Ended)


def test_what_cannot_be_sent_is_said_to_the_sender(child):
    with pytest.raises((TypeError, AttributeError)):
        child.send(threading.Lock())


@pytest.mark.parametrize("data", [b"\xff" * 64, b"\x00\x00\x00\x04abcd", b"\x7f\xff\xff\xff"])
def test_garbage_ends_it_with_a_reason(mailbox, data):
    child = Child("tests.process.echo", mailbox, limit=2**20)
    try:
        child.send(("garbage", data))
        (news,) = take(mailbox)
        assert isinstance(news, Ended) and news.reason
    finally:
        child.close()


@pytest.mark.parametrize(("code", "which"), [(3, "child"), (3, "guarded"), (0, "guarded")])
def test_how_it_ended(mailbox, request, code, which):
    child = request.getfixturevalue(which)
    child.send(("exit", code))
    assert isinstance(take(mailbox)[-1], Ended) and child.how_it_ended() == code


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_how_a_guarded_one_was_killed(mailbox, guarded, number):
    guarded.send(("pid", None))
    (news,) = take(mailbox)
    os.kill(news.message, number)
    assert isinstance(take(mailbox)[-1], Ended) and guarded.how_it_ended() == -number


def test_what_it_has_started_ends_with_it(mailbox, guarded):
    guarded.send(("fork", 600))
    (news,) = take(mailbox)
    daemon = news.message
    assert runs(daemon)
    guarded.close()
    assert gone([daemon, guarded.pid])


PARENT = textwrap.dedent("""
    import sys, threading, time
    from paceline.process.child import Child, Mailbox
    mailbox = Mailbox()
    def start():
        global children
        children = [Child("tests.process.echo", mailbox, guarded=guarded) for guarded in (False, True)]
    thread = threading.Thread(target=start)  # which ends, and its children must not end with it
    thread.start()
    thread.join()
    time.sleep(0.3)
    for child, what in zip(children, ("sleep", "fork")):
        child.send((what, 600))
        while not mailbox.take(0.1):
            pass
    print("ready", flush=True)
    time.sleep(600)
""")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_of_a_parent_that_was_killed(number):
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout.readline() == "ready\n"
        below = descendants(parent.pid)
        assert len(below) >= 4, "a child, a guardian, its child and that one's daemon"
    finally:
        parent.send_signal(number)
        parent.wait()
    assert gone(below)
