"""`benchmarks.lib.subject` of any revision, with the digest of the logits of a decode, and decode steps in pieces.

The program runs as a file. `baton` and `benchmarks` are those of PYTHONPATH, so it uses only parts that all measured
revisions have.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch

import baton
from benchmarks.lib import subject
from benchmarks.lib.protocol import serve

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.lib.protocol import Answer, Handler, Setup

BATCH, CONTEXT, NEW = 4, 65, 24


class DigestedBackend(subject.TimedBackend):
    """A timed backend that hashes the bytes of all logits while `digest` is set."""

    digest: Any = None

    def forward(self, *args: Any) -> torch.Tensor:
        """Run, time and hash the backend's forward."""
        found = super().forward(*args)
        if self.digest is not None:
            self.digest.update(found.float().contiguous().view(torch.uint8).numpy())
        return found


class PiecewiseSubject(subject.Subject):
    """A subject whose sequences stay open between measurements, so that two processes decode in short turns."""

    _open: tuple[Any, ...] = ()

    def start(self, batch: int, context: int) -> Answer:
        """Prefill `batch` sequences of `context` tokens."""
        self._open = tuple(self._submit(self._prompt(context), subject.FOREVER) for _ in range(batch))
        waiting = set(self._open)
        while waiting:
            waiting -= self._step()
        return {}

    def steps(self, count: int) -> Answer:
        """Return the seconds of each of the next `count` decode steps of the open sequences."""
        return {"seconds": [self._timed_step()[0] for _ in range(count)]}

    def end(self) -> Answer:
        """Release the open sequences."""
        for key in self._open:
            self._engine.release(key)
        return {}


def load(setup: Setup) -> tuple[Answer, Mapping[str, Handler]]:
    """Return the answer of `benchmarks.lib.subject`, with more handlers and the file of `baton`."""
    made: list[DigestedBackend] = []

    def backend(loaded: Any) -> DigestedBackend:
        made.append(DigestedBackend(loaded))
        return made[-1]

    subject.TimedBackend = backend  # type: ignore[misc, assignment]
    subject.Subject = PiecewiseSubject  # type: ignore[misc]
    about, handlers = subject.load(setup)

    def logits() -> Answer:
        made[0].digest = hashlib.sha256()
        handlers["decode"](batch=BATCH, context=CONTEXT, steps=NEW)
        digest, made[0].digest = made[0].digest.hexdigest(), None
        return {"digest": digest}

    measured = handlers["prefill"].__self__  # type: ignore[attr-defined]
    pieces = {"start": measured.start, "steps": measured.steps, "end": measured.end}
    return {**about, "baton": baton.__file__}, {**handlers, **pieces, "logits": logits}


if __name__ == "__main__":
    serve(load)
