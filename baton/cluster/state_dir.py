"""The files of a cluster: one folder per cluster name under `$BATON_HOME` (default `~/.baton`).

NAME/lock          held by `baton up` while it lives, so that two clusters of one name cannot run
NAME/state.json    addresses and process ids of the running cluster; 0600, because it holds the Redis password
NAME/cluster.yaml  the effective config that its processes read; 0600 for the same reason
NAME/logs/         one log per process; the previous part of a large log is FILE.log.1
NAME/scratch       a link to the temporary folder of a local Ray; leftovers of a killed cluster are removed by the next
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil
from pydantic import TypeAdapter

from baton.errors import ConfigError

LOG_BYTES = 64 * 2**20


def baton_home() -> Path:
    """Return `$BATON_HOME`, or `~/.baton`."""
    return Path(os.environ.get("BATON_HOME") or Path.home() / ".baton").expanduser()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError of the block, which writes to `path`, into a ConfigError for the user."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"BATON_HOME: cannot write to {path}: {error.strerror or error}") from None


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process, identified also by its start time (seconds since the epoch), because process ids are reused."""

    pid: int
    started: float

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Return the identity of a running process. Raises psutil.NoSuchProcess."""
        return cls(pid, psutil.Process(pid).create_time())

    def process(self) -> psutil.Process | None:
        """Return the process if it is still the same one and alive."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started) < 0.01 and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return None
        return process if same else None


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The state file of a cluster, for `baton status`, `generate` and `down`. Addresses are empty while it starts."""

    name: str
    supervisor: ProcessId
    grpc: str
    admin: str
    metrics: str
    redis_url: str
    ray: str
    processes: dict[str, ProcessId] = field(default_factory=dict)
    http: str = ""  # empty without a gateway
    admins: list[str] = field(default_factory=list)  # admin addresses of all routers

    @property
    def ready(self) -> bool:
        return bool(self.grpc)


_STATE = TypeAdapter(ClusterState)


class StateFolder:
    """The folder of one cluster name. Methods that write raise ConfigError if they cannot, such as on a full disk."""

    def __init__(self, name: str, home: Path | None = None) -> None:
        self.name = name
        self.path = (home or baton_home()) / name
        self.logs = self.path / "logs"
        self.config = self.path / "cluster.yaml"
        self._state = self.path / "state.json"
        self._scratch = self.path / "scratch"
        self._lock: IO[str] | None = None

    def acquire(self) -> None:
        """Lock the name for this process and remove a killed cluster's files. Raises ConfigError if it is in use."""
        with writing(self.path):
            self.logs.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = (self.path / "lock").open("w", encoding="utf-8")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                lock.close()
                if not isinstance(error, BlockingIOError):
                    raise
                text = f"a cluster named {self.name!r} is running; `baton down --name {self.name}` stops it"
                raise ConfigError(f"name: {text}, or use another name for a second cluster") from None
            self._lock = lock
            try:
                self._clear()
            except OSError:
                self.release()
                raise

    def start_logs(self) -> None:
        with writing(self.logs):
            for old in self.logs.glob("*.log*"):
                old.unlink()

    def bound_logs(self, most: int = LOG_BYTES) -> None:
        """Move a log of more than `most` bytes to FILE.log.1, replacing it, and truncate the log. It is not renamed,
        because processes keep appending to the open file. Lines written during the copy may be lost.
        """
        for file in self.logs.glob("*.log"):
            with suppress(OSError):  # a full disk must not end the cluster
                if file.stat().st_size > most:
                    shutil.copyfile(file, file.with_suffix(".log.1"))
                    os.truncate(file, 0)

    def release(self) -> None:
        """Unlock the name and remove the files that only a running cluster needs. The logs stay."""
        with suppress(OSError):  # a read-only disk; the next `acquire` tries again
            self._clear()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _clear(self) -> None:
        for file in (self._state, self.config):
            file.unlink(missing_ok=True)
        if self._scratch.is_symlink():
            shutil.rmtree(self._scratch.readlink(), ignore_errors=True)
            self._scratch.unlink()

    def scratch(self) -> Path:
        """Create a temporary folder with a short path, which `release` removes."""
        try:
            folder = Path(tempfile.mkdtemp(prefix="baton-ray-"))
        except OSError as error:
            raise ConfigError(f"TMPDIR: cannot create {error.filename or 'a folder'}: {error.strerror}") from None
        with writing(self._scratch):
            try:
                self._scratch.symlink_to(folder)
            except OSError:
                folder.rmdir()  # only the link would record it for `release`
                raise
        return folder

    def write_private(self, path: Path, text: str) -> None:
        """Write a file atomically, readable only by its owner."""
        draft = path.with_suffix(".new")
        try:
            with writing(path):
                descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    file.write(text)
                draft.replace(path)
        finally:
            with suppress(OSError):  # it exists after an error only, and takes space on a full disk
                draft.unlink()

    def write_state(self, state: ClusterState) -> None:
        self.write_private(self._state, _STATE.dump_json(state, indent=1).decode())

    def read_state(self) -> ClusterState | None:
        """Return the state of the running cluster, or None. A file left by a killed cluster does not count."""
        try:
            state = _STATE.validate_json(self._state.read_bytes())
        except (OSError, ValueError):
            return None
        return state if state.supervisor.process() else None


def running_clusters(home: Path | None = None) -> list[ClusterState]:
    """Return the states of all clusters that run under this home, sorted by name."""
    folder = home or baton_home()
    names = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    states = (StateFolder(name, folder).read_state() for name in names)
    return [state for state in states if state is not None]
