"""The prefill worker's end: takes pushes, gives each to the link of its destination, reports each exactly once.

    push -> Link (one per destination incarnation and generation) -> on_done
A link that broke is never mended: the next push to that worker makes a new one, with the next generation.
"""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import structlog

from baton.errors import ChannelBroken, HandoffError
from kvtransfer.choose import make_transport
from kvtransfer.handoff import PushResult
from kvtransfer.link import Link, LinkSetup
from kvtransfer.stream import Connect, GrpcPeerStream

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.core import HandoffId, WorkerRef
    from baton.engine.kv import KVCache
    from kvtransfer.handoff import PushJob, TransferSettings
    from kvtransfer.transport import Transport

    OnDone = Callable[[HandoffId, PushResult | HandoffError], None]

log = structlog.get_logger()


class Sender:
    """Pushes KV out of `kv`. Thread-safe.

    `on_done` is called exactly once per push, from one thread of the sender's; from then on nothing reads the push's
    blocks. `transport` and `connect` are for workers that share a process, and for tests.
    """

    def __init__(
        self,
        kv: KVCache,
        me: WorkerRef,
        fingerprint: str,
        settings: TransferSettings,
        on_done: OnDone,
        *,
        transport: Transport | None = None,
        connect: Connect = GrpcPeerStream,
    ) -> None:
        transport = transport or make_transport(settings, kv.device)
        self.transport_name = transport.name
        self._setup = LinkSetup(kv, me, fingerprint, settings, transport, connect, self._report, self._forget)
        self._on_done = on_done
        self._lock = threading.Lock()
        self._links: list[Link] = []  # least recently used first; broken ones stay until their thread has ended
        self._generations = itertools.count(1)
        self._closed = False
        self._reports = ThreadPoolExecutor(1, thread_name_prefix="kv-reports")

    def push(self, job: PushJob) -> None:
        """Start a handoff; returns at once. The blocks must stay as they are until `on_done`.

        Raises ValueError for a job that contradicts itself or is under way already, ChannelBroken after `close`;
        `on_done` is not called then.
        """
        while not self._link_to(job.to).push(job):
            pass  # it broke in between; the next one is new

    def abort(self, handoff: HandoffId) -> None:
        """Give a push up, in whatever state: `on_done` follows soon, with StaleAttempt. Unknown: no-op."""
        with self._lock:
            links = list(self._links)
        for link in links:
            link.abort(handoff)

    def close(self) -> None:
        """End all pushes with ChannelBroken and free everything. Returns after the last `on_done`."""
        with self._lock:
            self._closed = True
            links = list(self._links)
        for link in links:
            link.stop("the sender was closed")
        for link in links:
            link.join()
        self._reports.shutdown()

    def _link_to(self, to: WorkerRef) -> Link:
        with self._lock:
            if self._closed:
                raise ChannelBroken("the sender was closed")
            link = next((link for link in self._links if link.to == to and not link.broken), None)
            if link is None:
                self._stop_idle()
                link = Link(self._setup, to, next(self._generations))
            else:
                self._links.remove(link)
            self._links.append(link)
            return link

    def _stop_idle(self) -> None:
        idle = [link for link in self._links if link.idle]
        for link in idle[: max(0, len(idle) + 1 - self._setup.settings.idle_channels)]:
            link.stop("idle")

    def _forget(self, link: Link) -> None:
        with self._lock:
            self._links.remove(link)

    def _report(self, handoff: HandoffId, outcome: PushResult | HandoffError) -> None:
        self._reports.submit(self._deliver, handoff, outcome)

    def _deliver(self, handoff: HandoffId, outcome: PushResult | HandoffError) -> None:
        try:
            self._on_done(handoff, outcome)
        except Exception:  # the boundary to the worker: one bad callback must not cost the others theirs
            log.exception("on_done failed", handoff=str(handoff))
