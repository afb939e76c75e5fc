"""The failures of `test_failures_at_states.py`, and the search for their moment.

A worker's history (`Diary`) shows the moment, because it is written before a message is sent. A stopped process's last
line is its state. (A census needs a running worker and is outdated when it arrives. The states are those of a census.)
"""

import json
import os
import select
import signal
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import redis

from baton.ledger.embedded_redis import EmbeddedRedis
from tests.support.ledger import killed_and_empty
from tests.support.load import until

STATES = {"prefill": "queued", "reserved": "reserved", "offered": "receiving"}
STATES |= {"committed": "committed", "fenced": "fenced", "adopted": "decoding"}
OVER = ("pushed", "aborted", "finished", "preempted", "released", "failed")


class Process:
    """A process by its descriptor, which never refers to another process. It runs again after the block."""

    def __init__(self, pid):
        self.pid = pid
        self._file = None  # None: the process has ended
        with suppress(ProcessLookupError):
            self._file = os.pidfd_open(pid)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.go_on()
        if self._file is not None:
            os.close(self._file)

    @property
    def ended(self):
        return self._file is None or bool(select.select([self._file], [], [], 0)[0])

    def kill(self):
        self._send(signal.SIGKILL)
        until(f"process {self.pid} is dead", lambda: self.ended)

    def stop(self):
        """Stop the process and wait until all its threads have stopped."""
        self._send(signal.SIGSTOP)
        until(f"process {self.pid} stands still", lambda: self.ended or self._threads() <= {"T"})

    def go_on(self):
        self._send(signal.SIGCONT)

    def _send(self, number):
        if self._file is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._file, number)

    def _threads(self):
        """Return the states of its threads. Skips threads that have just ended."""
        found = set()
        for task in Path(f"/proc/{self.pid}/task").glob("*/stat"):
            with suppress(OSError):
                found.add(task.read_text().rpartition(")")[2].split()[0])
        return found


class KeptRedis:
    """The test's own Redis server, with a fixed address."""

    def __init__(self, folder):
        self._folder = folder
        self._server = EmbeddedRedis.start(folder)
        self.url = self._server.url

    def strike(self, *, silent):
        """Stop the server until `go_on`, or, without `silent`, kill it and start an empty one."""
        if silent:
            os.kill(self._server.pid, signal.SIGSTOP)  # a child of this process, so its pid is not reused
        else:
            self._server = killed_and_empty(self._server, self._folder)

    def go_on(self):
        os.kill(self._server.pid, signal.SIGCONT)

    def close(self):
        self.go_on()
        self._server.stop()


class Diary:
    """The states of the handoffs in one incarnation of a worker."""

    def __init__(self, path):
        self._path = path
        self._states = {}
        self._counts: Counter[str] = Counter()
        self._read = 0

    def states(self):
        self.read()
        return set(self._states.values())

    def read(self):
        """Return the number of events by name."""
        with self._path.open("rb") as file:
            file.seek(self._read)
            whole, end, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + len(end)
        for line in whole.splitlines():
            self._take(json.loads(line))
        return self._counts

    def _take(self, event):
        name, handoff = event["event"], (event.get("request"), event.get("attempt"))
        self._counts[name] += 1
        before = self._states.get(handoff)
        if name == "repush":
            held = self._states.pop((event["request"], event["held"]), "queued")
            self._states[handoff] = "prefilling" if held == "waiting" else held
        elif name == "failed" and event.get("held"):
            self._states[handoff] = "waiting"
        elif name in OVER:
            self._states.pop(handoff, None)
        elif name in STATES:
            self._states[handoff] = STATES[name]
        elif name == "tokens" and before in {"queued", "prefilling"}:
            self._states[handoff] = "pushing"
        elif (name, before) in {("owned", "queued"), ("let_go", "prefilling")} and not event.get("part"):
            self._states[handoff] = "prefilling" if name == "owned" else "queued"


@dataclass(frozen=True)
class Life:
    """One incarnation of a worker that the router is connected to."""

    worker: str
    incarnation: str
    pid: int
    port: int

    def __str__(self):
        return f"{self.worker}@{self.incarnation}"

    @property
    def sends(self):
        return self.worker.startswith("prefill")


class Field:
    """A cluster and the folder of its histories."""

    def __init__(self, cluster, histories):
        self.cluster = cluster
        self._histories = histories
        self._ledger = redis.Redis.from_url(cluster.state().redis_url)

    def close(self):
        self._ledger.close()

    def lives(self):
        """Return the incarnations that the router is connected to, by worker."""
        infos = {name: worker.info for name, worker in self.cluster.connected().items()}
        ports = {name: int(info.ref.address.split(":")[1]) for name, info in infos.items()}
        return {name: Life(name, str(info.ref.incarnation), info.pid, ports[name]) for name, info in infos.items()}

    def diary(self, life):
        return Diary(self._histories / f"{life}.jsonl".replace("@", "-"))

    @contextmanager
    def caught(self, worker, state):
        """Yield an incarnation of the worker and its process, stopped with a handoff in that state. Resume it then."""
        while True:
            life = until(f"{worker} is there", lambda: self.lives().get(worker))
            with Process(life.pid) as victim:
                if _stands(victim, self.diary(life), state):
                    yield life, victim
                    return

    def has_lease(self, life):
        key = f"baton:{self.cluster.name}:worker:{life.worker}"
        return self._ledger.hget(key, "incarnation") == life.incarnation.encode()

    def links(self, life):
        """Return the links between this worker and all workers of the other role."""
        lives = list(self.lives().values())
        senders = [life] if life.sends else [other for other in lives if other.sends]
        ports = [other.port for other in lives if not other.sends] if life.sends else [life.port]
        return Links({sender.pid for sender in senders}, set(ports), [self.diary(sender) for sender in senders])


class Links:
    """The links from the processes `pids`, which have these `diaries`, to the decode workers at `ports`."""

    def __init__(self, pids, ports, diaries):
        self.pids = pids
        self.ports = ports
        self._diaries = diaries
        self._before = self._failures()

    def failed(self):
        return self._failures() > self._before

    def _failures(self):
        return sum(diary.read()["failed"] for diary in self._diaries)


def _stands(victim, diary, state):
    """Stop the process with a handoff in that state and return True, or return False if the process ends first."""

    def look():
        if victim.ended:
            return True
        if state not in diary.states():
            return False
        victim.stop()
        if state in diary.states():
            return True
        victim.go_on()
        return False

    until(f"a handoff is {state}", look)
    return not victim.ended
