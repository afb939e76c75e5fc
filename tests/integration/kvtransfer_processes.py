"""Both sides of handoffs between processes, as a test drives them; the program they run is `kvtransfer_peer`."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from baton.core import HandoffId, Incarnation, KVLayout, WorkerRef
from kvtransfer.handoff import TransferSettings
from kvtransfer.sender import Sender
from kvtransfer.transports.gloo import GlooTransport
from tests.integration.kvtransfer_peer import stream
from tests.unit.kvtransfer.support import FINGERPRINT, LAYOUT, P, Reports, hand_over, make_job, make_kv

ROOT = Path(__file__).parents[2]


class Process:
    """A `kvtransfer_peer` process."""

    def __init__(self, role: str, *flags: str, layout: KVLayout = LAYOUT) -> None:
        command = [
            sys.executable,
            "-m",
            "tests.integration.kvtransfer_peer",
            role,
            "--layout",
            json.dumps(asdict(layout)),
        ]
        self.process = subprocess.Popen(
            [*command, *flags], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def hear(self) -> dict:
        """The next message; log lines are passed over."""
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise AssertionError("the process ended")

    def tell(self, **command) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def ask(self, **command) -> dict:
        self.tell(**command)
        return self.hear()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        assert self.process.stdin
        self.process.stdin.close()
        return self.process.wait(20)


class Receiver(Process):
    """A decode worker's side; `ref` is how to reach it."""

    def __init__(self, *flags: str, counter: int = 2, layout: KVLayout = LAYOUT) -> None:
        super().__init__("receiver", "--counter", str(counter), *flags, layout=layout)
        self.ref = WorkerRef("decode-0", Incarnation(7, counter), self.hear()["address"])


class Prefill:
    """A sender in this process; after `close` it holds no thread and no descriptor."""

    def __init__(
        self, layout: KVLayout = LAYOUT, deadline_s: float = 5.0, me: WorkerRef = P, coalesce_below: int = 1
    ) -> None:
        self.reports = Reports()
        self.kv = make_kv(1, 64, layout)
        settings = TransferSettings("gloo", coalesce_below=coalesce_below, frame_deadline_s=deadline_s, verify_kv=True)
        transports = [GlooTransport(settings.bind_host)]
        self.sender = Sender(self.kv, me, FINGERPRINT, settings, transports, self.reports)

    def push(
        self, name: str, tokens: int, blocks: Sequence[int], to: WorkerRef, *, chunk: int = 0, skip: int = 0
    ) -> HandoffId:
        """`chunk`: say layer by layer what is computed; 0: all at once."""
        job = make_job(name, tokens, to, skip=skip)
        if not chunk:
            return hand_over(self.sender, job, blocks, self.kv.layout.layers)
        stream(self.sender, job, blocks, self.kv.layout.layers, chunk)
        return job.handoff
