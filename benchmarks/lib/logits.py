"""`benchmarks.lib.subject` of any revision, with the digest of the logits of a decode.

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


def load(setup: Setup) -> tuple[Answer, Mapping[str, Handler]]:
    """Return what `benchmarks.lib.subject` returns, with the handler `logits` and the file of `baton`."""
    made: list[DigestedBackend] = []

    def backend(loaded: Any) -> DigestedBackend:
        made.append(DigestedBackend(loaded))
        return made[-1]

    subject.TimedBackend = backend  # type: ignore[misc, assignment]
    about, handlers = subject.load(setup)

    def logits() -> Answer:
        made[0].digest = hashlib.sha256()
        handlers["decode"](batch=BATCH, context=CONTEXT, steps=NEW)
        digest, made[0].digest = made[0].digest.hexdigest(), None
        return {"digest": digest}

    return {**about, "baton": baton.__file__}, {**handlers, "logits": logits}


if __name__ == "__main__":
    serve(load)
