"""Bugs planted in the production classes, one at a time: each replaces a few characters of one method."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from baton.worker.service import Attempts
from decode_workers.reservations import Reservations
from decode_workers.worker import DecodeWorker
from kvtransfer.receive_loop import ReceiveLoop
from kvtransfer.send_queue import FlowControl, SendQueue
from prefill_workers.worker import PrefillWorker
from router.request.attempt import Attempt
from router.request.delivery import Delivery
from router.request.lifecycle import ChoiceRun


@dataclass(frozen=True, slots=True)
class Bug:
    """`old` in the source of a method becomes `new`."""

    name: str
    owner: type
    method: str
    old: str
    new: str

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Raises ValueError if the production method has no such source any more."""
        method: Any = vars(self.owner)[self.method]
        function: Any = method.fget if isinstance(method, property) else method
        source = textwrap.dedent(inspect.getsource(function))
        if self.old not in source:
            raise ValueError(f"{self.name}: {self.owner.__name__}.{self.method} does not contain {self.old!r}")
        names = dict(vars(sys.modules[self.owner.__module__]))
        exec(compile(source.replace(self.old, self.new, 1), self.name, "exec"), names)  # noqa: S102 (our own source)
        with patch.object(self.owner, self.method, names[self.method]):
            yield


BUGS = (
    # The reservation table
    Bug("a taken entry stays", Reservations, "take", "_entries.pop(", "_entries.get("),
    Bug("the same attempt counts as new", Attempts, "check_new", "<= last", "< last"),
    Bug("a fence undoes a commit", Reservations, "fence", "if entry.state is not State.COMMITTED", "if True"),
    Bug(
        "a commit is passed on twice",
        Reservations,
        "commit",
        "self._on_commit(",
        "self._on_commit(handoff, commit), self._on_commit(",
    ),
    Bug("a commit needs no open handoff", Reservations, "commit", "entry.require(State.RECEIVING, sender)", "pass"),
    # The decode worker
    Bug("a fence ends a running stream", DecodeWorker, "_fence", "(job is not None and job.adopted) or", ""),
    Bug("a released commit is adopted", DecodeWorker, "_adopt", "reservation is None or job is None", "False"),
    Bug("dropped reservations keep blocks", DecodeWorker, "_drop", "self._free(handoff, reservation)", "pass"),
    Bug("a lost router keeps its handoffs", DecodeWorker, "gone", "self._drop(handoff)", "pass"),
    # The receiver
    Bug("digests are not compared", ReceiveLoop, "_commit", "inbound.check(message, data)", "pass"),
    Bug("a commit may be claimed twice", ReceiveLoop, "claim", "self.open.pop(", "self.open.get("),
    Bug("a credit frees one frame more", ReceiveLoop, "_credit", "self.received - 1", "self.received"),
    Bug("a received frame is not counted", ReceiveLoop, "_receive", "self.received += 1", "pass"),
    # The sender
    Bug("one frame more than the window", FlowControl, "room", "<", "<="),
    Bug("a credit frees one frame less", FlowControl, "credited", "sequence + 1", "sequence"),
    Bug("an acknowledged push stays", SendQueue, "_acknowledged", "del self._pushes[handoff]", "pass"),
    Bug("a failed push stays", SendQueue, "_fail", "del self._pushes[push.job.handoff]", "pass"),
    Bug("a broken channel reports nothing", SendQueue, "stop", "self._close(push, self._error)", "pass"),
    Bug("an abort is ignored", SendQueue, "abort", "if push := self._pushes.get(handoff)", "if push := None"),
    # The prefill worker
    Bug("pushed KV is kept", PrefillWorker, "_pushed", 'self._forget(handoff, "pushed")', "pass"),
    Bug("a released push goes on", PrefillWorker, "_drop", "self._pusher.abort(handoff)", "pass"),
    # The router
    Bug("no fence after a failure", Attempt, "_failed", "self._placement.decode.send(", "dict("),
    Bug("no release of the decode worker", Attempt, "__aexit__", "partial(decode.send", "partial(dict"),
    Bug("no release of the prefill worker", Attempt, "__aexit__", "prefill.send(", "dict("),
    Bug("a repeated token is delivered", Delivery, "merge", "token.index == len(self.ids) and not self._early", "True"),
    Bug(
        "the next attempt starts without tokens",
        ChoiceRun,
        "_next_spec",
        "tuple(self.delivery.ids[",
        "tuple([][",
    ),
)
