"""What `test_failures_at_states.py` strikes with, and how it finds the moment.

The moment is found in the history of a worker (`Diary`), which is written before anything is said or sent: a process
that stands still writes nothing, so what the diary of a stopped one says is so. (A census cannot be asked of a stopped
worker, and that of a running one is over when it is read. The states are those of the census.)
"""

from __future__ import annotations

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
from tests.support.load import until
from tests.support.redis_ledger import killed_and_empty

STATES = {"prefill": "queued", "reserved": "reserved", "offered": "receiving"}
STATES |= {"committed": "committed", "fenced": "fenced", "adopted": "decoding"}
OVER = ("pushed", "aborted", "finished", "preempted", "released", "failed")


class Process:
    """By a descriptor, which never comes to mean another process. Within a block: it goes on in the end."""

    def __init__(self, pid):
        self.pid = pid
        self._file = None  # it is gone
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
        """Returns when all its threads stand still."""
        self._send(signal.SIGSTOP)
        until(f"process {self.pid} stands still", lambda: self.ended or self._threads() <= {"T"})

    def go_on(self):
        self._send(signal.SIGCONT)

    def _send(self, number):
        if self._file is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._file, number)

    def _threads(self):
        """The states they are in; one that ends meanwhile has none."""
        found = set()
        for task in Path(f"/proc/{self.pid}/task").glob("*/stat"):
            with suppress(OSError):
                found.add(task.read_text().rpartition(")")[2].split()[0])
        return found


class KeptRedis:
    """A Redis server of the test's own, at an address that it keeps."""

    def __init__(self, folder):
        self._folder = folder
        self._server = EmbeddedRedis.start(folder)
        self.url = self._server.url

    def strike(self, *, silent):
        """It says nothing until `go_on`; else it is killed, and replaced by an empty one."""
        if silent:
            os.kill(self._server.pid, signal.SIGSTOP)  # a child of this process: its number is its own
        else:
            self._server = killed_and_empty(self._server, self._folder)

    def go_on(self):
        os.kill(self._server.pid, signal.SIGCONT)

    def close(self):
        self.go_on()
        self._server.stop()


class Diary:
    """The states of the handoffs in one life of a worker."""

    def __init__(self, path):
        self._path = path
        self._states = {}
        self._counts: Counter[str] = Counter()
        self._read = 0

    def states(self):
        self.read()
        return set(self._states.values())

    def read(self):
        """How many events of each name there are."""
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
    """One life of a worker that the router is connected to."""

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
        """Those that the router is connected to, by worker."""
        infos = {name: worker.info for name, worker in self.cluster.connected().items()}
        ports = {name: int(info.ref.address.split(":")[1]) for name, info in infos.items()}
        return {name: Life(name, str(info.ref.incarnation), info.pid, ports[name]) for name, info in infos.items()}

    def diary(self, life):
        return Diary(self._histories / f"{life}.jsonl".replace("@", "-"))

    @contextmanager
    def caught(self, worker, state):
        """A life of the worker, and its process, standing still with a handoff in that state; it goes on in the end."""
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
        """Between this worker and all of the other role."""
        lives = list(self.lives().values())
        senders = [life] if life.sends else [other for other in lives if other.sends]
        ports = [other.port for other in lives if not other.sends] if life.sends else [life.port]
        return Links({sender.pid for sender in senders}, set(ports), [self.diary(sender) for sender in senders])


class Links:
    """Those of the processes `pids` to the decode workers at `ports`. `diaries`: of these processes."""

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
    """Wait until it stands still with a handoff in that state; False: it has ended, for reasons of its own."""

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
