"""Hosts on this machine: each a network namespace with its `eth0` plugged into one switch, which is a bridge.

The test is plugged in too. Links can be cut at the switch, like a pulled cable, and slowed down. Needs root and
iproute2. Names and addresses come from the process id, so that concurrent runs are separate. Every process in a
namespace is killed at its end.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

from baton.cluster.backend_process import PARENT, READY_FD
from tests.support.time_factor import Deadline, scaled

ROOT = Path(__file__).parents[2]
NAMESPACES = Path("/run/netns")


def command(*argv, check=True):
    """Run a command and return its output. Raises AssertionError with its error output."""
    done = subprocess.run(list(map(str, argv)), capture_output=True, text=True, timeout=scaled(30), check=False)
    assert not check or done.returncode == 0, f"{argv}: {done.stderr}"
    return done.stdout


def why_not():
    """Return why hosts are impossible here, or None if they are possible."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc") if not shutil.which(name)]
    if missing:
        return f"iproute2 is not installed: no {' and no '.join(missing)}"
    sweep()
    try:
        with Network("probe"):
            pass
    except AssertionError as error:
        return f"network namespaces cannot be made here: {error}"
    return None


def sweep():
    """Remove the leftovers of killed runs: namespaces of ended processes, and the processes in them."""
    for path in NAMESPACES.glob("baton-*-*"):
        pid = int(path.name.split("-")[1])
        if not psutil.pid_exists(pid):
            kill_all(path.name)
            command("ip", "netns", "del", path.name, check=False)
            command("ip", "link", "del", f"b{pid}br", check=False)


def kill_all(namespace, within_s=10.0):
    deadline = Deadline(within_s)
    while found := [int(pid) for pid in command("ip", "netns", "pids", namespace, check=False).split()]:
        assert not deadline.passed(), f"{found} do not end"
        for pid in found:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.02)


class Process:
    """A process in a host. `ready()` waits for its ready message (`report_ready`)."""

    def __init__(self, popen, pipe, log):
        self.popen, self.log, self._pipe = popen, log, pipe
        self.said = {}

    @property
    def pid(self):
        return self.popen.pid

    def ready(self):
        with self._pipe as pipe:
            line = pipe.readline()
        assert line, self.log.read_text()
        self.said = json.loads(line)
        return self.said

    def end(self, number=signal.SIGTERM, within_s=60.0):
        """Send a signal and return the exit code."""
        self.popen.send_signal(number)
        return self.popen.wait(scaled(within_s))


class Host:
    """One namespace. `address` is that of its eth0."""

    def __init__(self, network, number, name):
        self.name = name
        self.namespace = f"baton-{os.getpid()}-{name}"
        self.address = f"{network.prefix}.{number}"
        self._port = f"b{os.getpid()}p{number}"  # of the switch
        self._ip = ("ip", "-n", self.namespace)
        command("ip", "netns", "add", self.namespace)
        network.leaving.callback(self._remove)
        command("ip", "link", "add", self._port, "type", "veth", "peer", "name", "eth0", "netns", self.namespace)
        command("ip", "link", "set", self._port, "master", network.bridge, "up")
        command(*self._ip, "addr", "add", f"{self.address}/24", "dev", "eth0")
        for interface in ("lo", "eth0"):
            command(*self._ip, "link", "set", interface, "up")

    def start(self, argv, log, env=None):
        """Start `argv` here, with its output in the file `log`. It ends with the test."""
        read_fd, write_fd = os.pipe()
        argv = ["ip", "netns", "exec", self.namespace, *map(str, argv)]
        env = {**os.environ, READY_FD: str(write_fd), PARENT: str(os.getpid()), **(env or {})}
        with log.open("ab") as output:
            popen = subprocess.Popen(argv, stdout=output, stderr=output, env=env, pass_fds=(write_fd,), cwd=ROOT)
        os.close(write_fd)
        return Process(popen, os.fdopen(read_fd), log)

    def baton(self, *argv, log, **env):
        return self.start([sys.executable, "-m", "baton", *argv], log, env)

    def cut(self):
        command("ip", "link", "set", self._port, "down")

    def restore(self):
        command("ip", "link", "set", self._port, "up")

    def cap(self, mbit):
        """Limit the rate of everything that it sends."""
        limits = ("rate", f"{mbit}mbit", "burst", "32kb", "latency", "200ms")
        command("tc", "-n", self.namespace, "qdisc", "add", "dev", "eth0", "root", "tbf", *limits)

    def uncap(self):
        command("tc", "-n", self.namespace, "qdisc", "del", "dev", "eth0", "root")

    def cable(self, other):
        """Connect both hosts by a second network, as their eth1."""
        command(*self._ip, "link", "add", "eth1", "type", "veth", "peer", "name", "eth1", "netns", other.namespace)
        for host in (self, other):
            command(*host._ip, "addr", "add", f"{host.address_on_cable}/24", "dev", "eth1")
            command(*host._ip, "link", "set", "eth1", "up")

    @property
    def address_on_cable(self):
        """Its address in a documentation network, which no other host uses."""
        return f"198.51.100.{self.address.rpartition('.')[2]}"

    def sent(self, interface="eth0"):
        """Return the bytes sent through this interface."""
        found = json.loads(command(*self._ip, "-s", "-j", "link", "show", interface))
        return found[0]["stats64"]["tx"]["bytes"]

    def kill_all(self):
        kill_all(self.namespace)

    def _remove(self):
        try:
            self.kill_all()
        finally:
            command("ip", "netns", "del", self.namespace, check=False)
            command("ip", "link", "del", self._port, check=False)


class Network:
    """The switch, and hosts with these names. A context manager."""

    def __init__(self, *names):
        pid = os.getpid()
        self.names, self.hosts = names, {}
        self.bridge = f"b{pid}br"
        self.prefix = f"10.{64 + pid % 128}.{pid // 128 % 256}"
        self.address = f"{self.prefix}.254"  # of the test itself
        self.leaving = ExitStack()

    def __enter__(self):
        with self.leaving:
            command("ip", "link", "add", self.bridge, "type", "bridge")
            self.leaving.callback(command, "ip", "link", "del", self.bridge, check=False)
            command("ip", "addr", "add", f"{self.address}/24", "dev", self.bridge)
            command("ip", "link", "set", self.bridge, "up")
            for number, name in enumerate(self.names, 1):
                self.hosts[name] = Host(self, number, name)
            self.leaving = self.leaving.pop_all()
        return self

    def __exit__(self, *_):
        self.leaving.close()

    def __getitem__(self, name):
        return self.hosts[name]
