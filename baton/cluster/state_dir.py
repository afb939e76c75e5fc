"""The files of a cluster: one folder per cluster name under `$BATON_HOME` (default `~/.baton`).

NAME/lock          held by `baton up` while it lives, so that two clusters of one name cannot run; names its process
NAME/state.json    addresses and process ids of the running cluster; 0600, because it holds the Redis password
NAME/cluster.yaml  the effective config that its processes read; 0600 for the same reason
NAME/logs/         one log per process; the previous part of a large log is FILE.log.1
NAME/scratch       a link to the temporary folder of a local Ray; leftovers of a killed cluster are removed by the next
"""

from __future__ import annotations

import errno
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
from baton.home import baton_home

LOG_BYTES = 64 * 2**20
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError of the block, which writes to `path`, into a ConfigError for the user."""
    try:
        yield
    except OSError as error:
        where = error.filename2 or error.filename or path
        raise ConfigError(f"BATON_HOME: cannot write to {where}: {error.strerror or error}") from None


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process. Its id alone is not enough, because ids are reused. `started`: the id of the machine's boot, and the
    clock ticks from that boot to the start of the process. A step of the clock changes neither.
    """

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Return the identity of a running process. Raises psutil.NoSuchProcess."""
        try:
            stat, boot = Path(f"/proc/{pid}/stat").read_bytes(), _BOOT_ID.read_text().strip()
        except OSError:
            raise psutil.NoSuchProcess(pid) from None
        ticks = stat.rpartition(b")")[2].split()[19]  # field 22; the second may contain spaces
        return cls(pid, f"{boot} {int(ticks)}")

    def process(self) -> psutil.Process | None:
        """Return the process if it is still the same one and alive."""
        try:
            process = psutil.Process(self.pid) if ProcessId.of(self.pid) == self else None
            return process if process is not None and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The state file of a cluster, for `baton status`, `generate` and `down`. Addresses are empty while it starts. All
    but name and supervisor are empty if the file of a running cluster is lost.
    """

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

    @property
    def lost(self) -> bool:
        return not self.redis_url


_STATE = TypeAdapter(ClusterState)
_PROCESS = TypeAdapter(ProcessId)


class StateFolder:
    """The folder of one cluster name. Methods that write raise ConfigError if they cannot, such as on a full disk."""

    def __init__(self, name: str, home: Path | None = None) -> None:
        self.name = name
        self.path = (home or baton_home()) / name
        self.logs = self.path / "logs"
        self.config = self.path / "cluster.yaml"
        self._state = self.path / "state.json"
        self._lock_file = self.path / "lock"
        self._written = b""  # the state file as this process wrote it
        self._scratch = self.path / "scratch"
        self._lock: IO[str] | None = None

    def acquire(self) -> None:
        """Lock the name for this process and remove a killed cluster's files. Raises ConfigError if it is in use. A
        second call changes nothing.
        """
        if self._lock is not None:
            return
        with writing(self.path):
            self.logs.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not os.access(self.logs, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self.logs))
            lock = self._lock_file.open("a", encoding="utf-8")  # another process may hold it
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                lock.close()
                if not isinstance(error, BlockingIOError):
                    raise
                stops = f"`baton down --name {self.name}` stops it" if self.read_state() else "end its `baton up`"
                text = f"a cluster named {self.name!r} is running; {stops}, or use another name for a second cluster"
                raise ConfigError(f"name: {text}") from None
            self._lock = lock
            try:
                self._clear()
                os.ftruncate(lock.fileno(), 0)
                os.write(lock.fileno(), _PROCESS.dump_json(ProcessId.of(os.getpid())))
            except OSError:
                self.release()
                raise

    def start_logs(self) -> None:
        """Move the logs of the run before to `previous`: a supervisor may start again before anyone has read them."""
        previous = self.logs / "previous"
        with writing(self.logs):
            if logs := list(self.logs.glob("*.log*")):
                previous.mkdir(mode=0o700, exist_ok=True)
                for old in previous.glob("*.log*"):
                    old.unlink()
            for log in logs:
                log.replace(previous / log.name)

    def bound_logs(self, most: int = LOG_BYTES) -> None:
        """Move a log of more than `most` bytes to FILE.log.1, replacing it, and truncate the log. It is not renamed,
        because processes keep appending to the open file. Lines written during the copy may be lost, and all of a file
        that the disk has no room for.
        """
        for file in self.logs.glob("*.log"):
            with suppress(OSError):  # a full disk must not end the cluster
                if file.stat().st_size > most:
                    _rotate(file, file.with_suffix(".log.1"))

    def release(self) -> None:
        """Unlock the name and remove the files that only a running cluster needs. The logs stay. Without the lock, the
        files are those of another cluster, and nothing is done.
        """
        if self._lock is None:
            return
        with suppress(OSError):  # a read-only disk; the next `acquire` tries again
            self._clear()
        with suppress(OSError):
            os.ftruncate(self._lock.fileno(), 0)
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
        self._written = _STATE.dump_json(state, indent=1)
        self.write_private(self._state, self._written.decode())

    def state_kept(self) -> bool:
        """Return whether the state file is as this process wrote it. It may have been damaged or removed."""
        try:
            return self._state.read_bytes() == self._written
        except OSError:
            return False

    def read_state(self) -> ClusterState | None:
        """Return the state of the running cluster, or None. A file left by a killed cluster does not count. If the file
        is damaged or of another version, the state is `lost`. Raises PermissionError if it is another user's.
        """
        state: ClusterState | None
        try:
            state = _STATE.validate_json(self._state.read_bytes())
        except PermissionError:
            raise
        except (OSError, ValueError):
            state = self._lost_state()
        return state if state is not None and state.name == self.name and state.supervisor.process() else None

    def _lost_state(self) -> ClusterState | None:
        try:
            supervisor = _PROCESS.validate_json(self._lock_file.read_bytes())
        except (OSError, ValueError):
            return None
        return ClusterState(self.name, supervisor, "", "", "", "", "")


def running_clusters(home: Path | None = None, *, strict: bool = False) -> list[ClusterState]:
    """Return the states of all clusters that run under this home, sorted by name. Those of other users are left out, or
    are a PermissionError if `strict`.
    """
    folder = home or baton_home()
    names = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    states = []
    for name in names:
        with suppress(*() if strict else (PermissionError,)):
            states.append(StateFolder(name, folder).read_state())
    return [state for state in states if state is not None]


def _rotate(file: Path, old: Path) -> None:
    """Move the content of a log to `old`, or drop it if the disk has no room for it."""
    try:
        shutil.copyfile(file, old)
    except OSError:
        old.unlink(missing_ok=True)
    os.truncate(file, 0)
