"""Hosts as namespaces of this machine: each has its own network, name, processes, /etc/hosts, /run and /dev/shm.

A switch (a bridge in a namespace of its own) joins them, so nothing of the machine's own network is touched. All of a
host lives in one process namespace whose first process dies with the test: whatever happens, nothing is left. Nothing
has a name outside, so tests can run side by side.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Names = Literal["resolve", "debian", "none"]
"""What a host's own name leads to: the address by which others reach it; 127.0.1.1, as Debian's installer writes it; or
nothing."""

NET = "10.77.0"
PORT = 6379
OBJECT_STORE = 100_000_000  # bytes; Ray's own default is a third of the memory
RAY_ENV = {
    "RAY_TMPDIR": "/run",  # a host's own, and a short path: those of sockets may have 107 characters
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "OMP_NUM_THREADS": "1",
    # A host that is gone is noticed by Ray in about 6 s instead of 50.
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}


def why_not() -> str | None:
    """Why hosts cannot be made here, if so."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    missing = [tool for tool in ("ip", "bridge", "unshare", "nsenter", "setpriv") if not shutil.which(tool)]
    if missing:
        return f"network namespaces need {', '.join(missing)} (packages iproute2 and util-linux)"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "ip", "link", "add", "x", "type", "bridge"],
        capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip
    return None if tried.returncode == 0 else f"network namespaces cannot be made here ({tried.stderr.strip()[:200]})"


@dataclass
class Host:
    name: str
    address: str
    holder: subprocess.Popen[bytes]
    first: int
    """The first process of the host, by its number outside."""
    port: str = ""
    """Its port of the switch."""
    jobs: list[subprocess.Popen[str]] = field(default_factory=list)

    def command(self, words: Sequence[str | Path]) -> list[str]:
        spaces = ["nsenter", "--target", str(self.first), "--net", "--uts", "--mount", "--pid"]
        return [*spaces, f"--wd={os.getcwd()}", *map(str, words)]

    def run(self, *words: str | Path, timeout: float = 60, env: dict[str, str] | None = None) -> str:
        done = subprocess.run(
            self.command(words),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env=os.environ | (env or {}),
        )
        if done.returncode != 0:
            raise RuntimeError(f"{self.name}: {' '.join(map(str, words))}: {done.stderr or done.stdout}")
        return done.stdout

    def start(self, *words: str | Path, output: Path, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """In the background; what it prints goes to a file. Ends with the host at the latest."""
        with open(output, "a") as file:
            job = subprocess.Popen(
                self.command(words), stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
                env=os.environ | (env or {}),
            )  # fmt: skip
        self.jobs.append(job)
        return job

    def pids(self) -> list[int]:
        """Of all processes, as numbered outside."""
        space = os.readlink(f"/proc/{self.first}/ns/pid")
        out = []
        for folder in Path("/proc").iterdir():
            try:
                if folder.name.isdigit() and os.readlink(folder / "ns/pid") == space:
                    out.append(int(folder.name))
            except OSError:  # gone meanwhile
                continue
        return out

    def find(self, word: str) -> list[int]:
        """Processes with this word in their command line or title, as numbered outside."""
        out = []
        for pid in self.pids():
            try:
                if word in Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace"):
                    out.append(pid)
            except OSError:
                continue
        return out

    def kill(self) -> None:
        """As if its plug were pulled: every process at once, and then the network with them."""
        self.holder.kill()
        self.holder.wait(20)
        end = time.monotonic() + 20
        while os.path.exists(f"/proc/{self.first}") and time.monotonic() < end:
            time.sleep(0.05)
        for job in self.jobs:
            job.kill()  # only what is outside of the host is left: it may have been stopped with what it waits for
            job.wait(20)


@dataclass
class Hosts:
    switch: Host
    hosts: dict[str, Host]
    env: dict[str, str]
    """For Ray, with a token of this cluster alone: the user's own is neither needed nor touched."""

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts.values())

    def down(self, name: str) -> None:
        """The host's cable is pulled at the switch: packets are dropped without a word."""
        self._switch("ip", "link", "set", self.hosts[name].port, "down")

    def up(self, name: str) -> None:
        self._switch("ip", "link", "set", self.hosts[name].port, "up")

    def cut(self, *names: str) -> None:
        """These do not see each other any more; all others see all."""
        for name in names:
            self._switch("bridge", "link", "set", "dev", self.hosts[name].port, "isolated", "on")

    def restore(self) -> None:
        for host in self:
            self._switch("bridge", "link", "set", "dev", host.port, "isolated", "off")

    def kill(self, name: str) -> None:
        self.hosts[name].kill()

    def _switch(self, *words: str) -> None:
        self.switch.run(*words)


@contextmanager
def make_hosts(folder: Path, names: Names = "resolve", count: int = 3) -> Iterator[Hosts]:
    """Hosts a, b, c, ... that reach each other at NET.1, NET.2, ..."""
    with ExitStack() as stack:
        switch = _make_host(stack, "switch", f"{NET}.254")
        for words in (
            ["link", "set", "lo", "up"],
            ["link", "add", "bridge0", "type", "bridge"],
            ["link", "set", "bridge0", "up"],
        ):
            switch.run("ip", *words)
        switch.run("ip", "address", "add", f"{switch.address}/24", "dev", "bridge0")
        hosts = {}
        for i, letter in enumerate("abcdefgh"[:count]):
            host = _make_host(stack, f"host-{letter}", f"{NET}.{i + 1}")
            host.port = f"port-{letter}"
            _connect(switch, host)
            hosts[letter] = host
        for host in hosts.values():
            _furnish(host, list(hosts.values()), folder / host.name, names)
        token = folder / "token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        yield Hosts(switch, hosts, RAY_ENV | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)})


def _make_host(stack: ExitStack, name: str, address: str) -> Host:
    """A process that does nothing but keep the namespaces: it dies with this one, and all of the host with it."""
    script = f"hostname {name} && trap '' CHLD && echo ready && exec sleep infinity"
    holder = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--uts", "--mount", "--pid", "--mount-proc",
         "--kill-child=KILL", "sh", "-c", script],
        stdout=subprocess.PIPE, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    stack.callback(holder.wait, 20)
    stack.callback(holder.kill)
    assert holder.stdout is not None
    if holder.stdout.readline() != b"ready\n":
        raise RuntimeError(f"the namespaces of {name} could not be made")
    children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
    host = Host(name, address, holder, int(children[0]))
    stack.callback(host.kill)
    return host


def _connect(switch: Host, host: Host) -> None:
    # Only the network is entered: the peer's namespace is found by its process number outside.
    inside = ["nsenter", "--target", str(switch.first), "--net"]
    peer = ["peer", "name", "eth0", "netns", str(host.first)]
    for words in (["add", host.port, "type", "veth", *peer], ["set", host.port, "master", "bridge0", "up"]):
        subprocess.run([*inside, "ip", "link", *words], check=True, capture_output=True, timeout=20)


def _furnish(host: Host, hosts: list[Host], folder: Path, names: Names) -> None:
    host.run("ip", "link", "set", "lo", "up")
    host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
    host.run("ip", "link", "set", "eth0", "up")
    host.run("ip", "route", "add", "default", "via", f"{NET}.254")  # by which programs find their own address
    lines = ["127.0.0.1 localhost"]
    if names == "resolve":
        lines += [f"{h.address} {h.name}" for h in hosts]
    elif names == "debian":
        lines.append(f"127.0.1.1 {host.name}")
    (folder / "run").mkdir(parents=True)
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    (folder / "resolv.conf").write_text("")
    (folder / "nsswitch.conf").write_text("hosts: files\n")
    for name in ("hosts", "resolv.conf", "nsswitch.conf"):
        if os.path.exists(f"/etc/{name}"):
            host.run("mount", "--bind", folder / name, f"/etc/{name}")
    host.run("mount", "--bind", folder / "run", RAY_ENV["RAY_TMPDIR"])
    host.run("mount", "-t", "tmpfs", "-o", "size=400m", "shm", "/dev/shm")


def start_ray(hosts: Hosts, cpus: int = 1) -> str:
    """A Ray cluster over all hosts, its head on the first -> its address."""
    first, *others = list(hosts)
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--num-cpus={cpus}"]
    ray += [f"--object-store-memory={OBJECT_STORE}", "--disable-usage-stats"]
    first.run(*ray, "--head", f"--port={PORT}", "--include-dashboard=false", timeout=120, env=hosts.env)
    address = f"{first.address}:{PORT}"
    for host in others:
        host.run(*ray, f"--address={address}", timeout=120, env=hosts.env)
    return address


def wait_for(what: Callable[[], bool], seconds: float, name: str) -> None:
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            raise AssertionError(f"{name}: not within {seconds:.0f} s")
        time.sleep(0.1)


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
