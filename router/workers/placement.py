"""Placements: the workers of one attempt, counted as loaded, and a request's requirements for them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from baton.core import SequenceSpec, WorkerInfo, WorkerRef
from router.placement.promise import Flight
from router.workers.stream import WorkerStream


class Requirements(NamedTuple):
    """The requirements of a request for its workers, besides capacity. `keep` is the prefill worker that holds its KV;
    it is chosen while connected. Some workers may have cached a prefix of `spec`. `determinism` is the fingerprint that
    a deterministic request began with. The fields `thinks` need a model that thinks. `flight` is for forecasts.
    """

    keep: WorkerStream | None = None
    spec: SequenceSpec | None = None
    determinism: str = ""
    thinks: Sequence[str] = ()
    flight: Flight | None = None

    @property
    def capability(self) -> Hashable | None:
        """A key of the capability that only some workers have, or None if any worker can compute the request."""
        if not self.deterministic and not self.thinks:
            return None
        return self.deterministic and (self.determinism,), *self.thinks

    @property
    def absence(self) -> str:
        """Text for an error: no capable worker is connected."""
        fingerprint = f"with the system fingerprint {self.determinism} " if self.determinism else ""
        kind = f"{fingerprint}that computes deterministic requests " if self.deterministic else ""
        return f"no decode worker {kind}is connected"

    @property
    def deterministic(self) -> bool:
        """Whether its workers must be bitwise compatible."""
        return self.spec is not None and self.spec.deterministic

    def accepts(self, info: WorkerInfo) -> bool:
        """Return whether this worker may compute the request, whatever its capacity."""
        if not self.deterministic:
            return True
        return info.determinism == self.determinism if self.determinism else bool(info.determinism)


NO_REQUIREMENTS = Requirements()


class Placement:
    """The workers of one attempt, counted as loaded until `release`, which is called once and ends every other count.
    Without a prefill worker, the decode worker computes the prompt. `cached` of the known `tokens` need no computing.
    `on_change` is called with each worker that changes its load.
    """

    def __init__(
        self,
        prefill: WorkerStream | None,
        decode: WorkerStream,
        tokens: int,
        cached: int,
        on_change: Callable[[WorkerRef], None],
        on_release: Callable[[], None],
    ) -> None:
        self.prefill, self.decode, self.cached = prefill, decode, cached
        self.on_first: Callable[[], None] = lambda: None
        self.on_end: Callable[[], None] = lambda: None
        self._on_change, self._on_release = on_change, on_release
        self._computes = prefill or decode
        self._views = (self._computes.view, decode.view)  # kept, because a reconnected stream has a new view
        self._tokens = tokens - cached
        self._blocks = decode.view.blocks_for(tokens)
        self._on_prefill = int(prefill is not None)
        self._views[0].dispatched += self._on_prefill
        self._views[0].queued_tokens += self._tokens
        decode.view.dispatched += 1
        decode.view.pending_blocks += self._blocks
        self._notify(self._computes, decode)

    @property
    def determinism(self) -> str:
        """The determinism fingerprint of both workers, or "" if they differ."""
        determinism = self.decode.info.determinism
        return determinism if self._computes.info.determinism == determinism else ""

    def reserved(self) -> None:
        """End the count of pending blocks, because the decode worker's own reports contain them from now on."""
        if self._blocks:
            self._views[1].pending_blocks -= self._blocks
            self._blocks = 0
            self._notify(self.decode)

    def computed(self) -> None:
        """End the backlog of the prompt, at its first token."""
        on_first, self.on_first = self.on_first, lambda: None
        if self._tokens:
            self._views[0].queued_tokens -= self._tokens
            self._tokens = 0
            self._notify(self._computes)
        on_first()

    def prefill_done(self) -> None:
        """End the prefill, after the first message of the decode worker."""
        self.computed()
        if self._on_prefill:
            self._views[0].dispatched -= self._on_prefill
            self._on_prefill = 0
            self._notify(self._computes)

    def release(self) -> None:
        """End all counts: the request has left both workers."""
        self.on_first = lambda: None
        self.reserved()
        self.prefill_done()
        self._views[1].dispatched -= 1
        self._notify(self.decode)
        self.on_end()
        self._on_release()

    def _notify(self, *links: WorkerStream) -> None:
        for link in links:
            self._on_change(link.info.ref)
