"""Fetch of a prompt's prefix from the decode worker that caches it, if that is cheaper than computing it.

expect ──offer──> RECEIVING ──commit──> in the prefix cache, where the prompt finds it
   └──refused, aborted, lost, too late──> the prompt is computed after the prefix cached here
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from baton.clock import Clock
from baton.core import HandoffId, SequenceSpec, WorkerRef
from baton.engine.block_pool import Allocation
from baton.engine.engine import Engine
from baton.engine.prefix_cache import BlockHashChain, scope_key
from baton.errors import OfferRefused, StaleAttempt
from kvtransfer.handoff import CommitState, Offer

_WEIGHT = 0.3  # of the newest sample
_MEASURED_TOKENS = 32  # smallest step that counts as a sample of the compute cost
_LEAST_S = 0.5  # shortest timeout of a fetch
_BACKOFF = 6  # back-off after a timed-out fetch, in timeouts, because every timeout delays a prompt that long


class CostModel:
    """Costs of computing and fetching, from recent samples. Pure. Nothing is fetched before a prompt was computed."""

    def __init__(self, fetch_s: float = 0.02, bytes_per_s: float = 1e9) -> None:
        self._fetch_s = fetch_s  # cost of an empty fetch, until one was seen
        self._byte_s = 1 / bytes_per_s
        self._token_s: float | None = None

    def computed(self, tokens: int, seconds: float) -> None:
        """Record that a step with `tokens` prompt tokens took `seconds`."""
        sample_s = seconds / tokens
        self._token_s = sample_s if self._token_s is None else self._token_s + _WEIGHT * (sample_s - self._token_s)

    def fetched(self, nbytes: int, seconds: float) -> None:
        """Record that a fetch of `nbytes` took `seconds`, from the request to the last block."""
        expected = self._fetch_s + nbytes * self._byte_s
        self._fetch_s *= 1 + _WEIGHT * (seconds / expected - 1)
        self._byte_s *= 1 + _WEIGHT * (seconds / expected - 1)

    def computing_s(self, tokens: int) -> float:
        """Return the time to compute `tokens`, or 0 before the first sample."""
        return tokens * (self._token_s or 0.0)

    def worth(self, tokens: int, nbytes: int) -> bool:
        """Whether fetching the KV of `tokens` is cheaper than computing it."""
        return self._fetch_s + nbytes * self._byte_s < self.computing_s(tokens)


@dataclass(slots=True)
class Fetch:
    """A transfer of positions [begin, end) from `source` into `allocation`. `lock` guards its state and all writes."""

    source: WorkerRef
    begin: int
    end: int
    allocation: Allocation
    names: list[bytes]  # block hashes
    started: float
    within_s: float  # timeout
    accepted: bool = False  # offered
    whole: bool = False  # received completely
    over: bool = False  # nothing is written any more
    lock: threading.Lock = field(default_factory=threading.Lock)


class Fetches:
    """All fetches, and the decision whether to fetch. Implements `kvtransfer.handoff.HandoffTable`."""

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        within_s: float,
        on_end: Callable[[HandoffId], None],  # a fetch ended; from any thread; the engine thread then calls `end`
        *,
        stateful: bool = False,  # never fetch, because KV would come without its thoughts or its recurrent state
    ) -> None:
        self.fetched_tokens = 0
        self._stateful = stateful
        self._engine = engine
        self._history = engine.pool.history
        self._clock = clock
        self._within_s = within_s
        self._on_end = on_end
        self._cost = CostModel()
        self._step_began: float | None = None
        self._backoffs: dict[WorkerRef, float] = {}  # late sources, each with the end of its back-off
        self._lock = threading.Lock()
        self._fetches: dict[HandoffId, Fetch] = {}

    # --- the engine thread ---------------------------------------------------------------------------------------

    def begin(self, handoff: HandoffId, spec: SequenceSpec, source: WorkerRef, there: int) -> tuple[int, int] | None:
        """Start a fetch from `source`, which caches the first `there` positions, and return its positions. They are
        whole blocks that are not cached here. Return None if a fetch does not pay or no blocks are free.
        """
        if self._stateful:
            return None
        size, pool = self._engine.layout.block_size, self._engine.pool
        names = self._names(spec, there // size)
        begin = len(pool.find(names))
        missing = len(names) - begin
        if (
            not missing
            or source in self._backoffs
            or not self._cost.worth(missing * size, missing * self._engine.layout.block_bytes)
        ):
            return None
        allocation = pool.allocate(missing, reserved=True)
        if allocation is None:
            return None
        self._history.blocks("owned", handoff, allocation, part="fetch")
        # At worst, a failed fetch doubles the time of a prompt and adds the shortest timeout.
        within_s = min(self._within_s, max(self._cost.computing_s(missing * size), _LEAST_S))
        began = self._clock.monotonic()
        fetch = Fetch(source, begin * size, len(names) * size, allocation, names[begin:], began, within_s)
        with self._lock:
            self._fetches[handoff] = fetch
        return fetch.begin, fetch.end

    def end(self, handoff: HandoffId) -> bool:
        """End a fetch and cache its blocks if all of them came. Return False if there was none."""
        with self._lock:
            fetch = self._fetches.pop(handoff, None)
        if fetch is None:
            return False
        with fetch.lock:
            fetch.over = True
        if fetch.whole:
            fetch.allocation.activate()
            fetch.allocation.publish(0, fetch.names)
            self._history.blocks("published", handoff, fetch.allocation, part="fetch")
            nbytes = len(fetch.names) * self._engine.layout.block_bytes
            self._cost.fetched(nbytes, self._clock.monotonic() - fetch.started)
            self.fetched_tokens += fetch.end - fetch.begin
        self._history.blocks("let_go", handoff, fetch.allocation, part="fetch")
        fetch.allocation.release()
        return True

    def holdings(self) -> dict[HandoffId, Allocation]:
        with self._lock:
            return {handoff: fetch.allocation for handoff, fetch in self._fetches.items()}

    def late(self) -> list[HandoffId]:
        """Return the fetches past their timeout, and start the back-off of their sources."""
        now = self._clock.monotonic()
        self._backoffs = {source: until for source, until in self._backoffs.items() if until > now}
        with self._lock:
            late = {handoff: fetch for handoff, fetch in self._fetches.items() if now - fetch.started >= fetch.within_s}
        for fetch in late.values():
            self._backoffs[fetch.source] = max(self._backoffs.get(fetch.source, now), now + _BACKOFF * fetch.within_s)
        return list(late)

    def step_began(self) -> None:
        self._step_began = self._clock.monotonic()

    def step_ended(self, tokens: int) -> None:
        """Record a step's cost if it computed enough `tokens`."""
        if self._step_began is not None and tokens >= _MEASURED_TOKENS:
            self._cost.computed(tokens, self._clock.monotonic() - self._step_began)
        self._step_began = None

    def __contains__(self, handoff: HandoffId) -> bool:
        return handoff in self._fetches

    def _names(self, spec: SequenceSpec, blocks: int) -> list[bytes]:
        scope = scope_key(self._engine.backend.fingerprint, spec.cache_scope, spec.deterministic)
        chain = BlockHashChain(scope, spec.tokens, self._engine.layout.block_size)
        return [chain.digest(block) for block in range(blocks)]

    # --- kvtransfer.handoff.HandoffTable -------------------------------------------------------------------------

    def offer(self, handoff: HandoffId, sender: WorkerRef, offer: Offer) -> None:
        """Accept the requested positions, once. Raises StaleAttempt or OfferRefused for any other offer."""
        fetch = self._fetch(handoff, sender)
        with fetch.lock:
            if (offer.skip, offer.known_tokens) != (fetch.begin, fetch.end) or fetch.accepted:
                raise OfferRefused(f"{handoff}: positions {fetch.begin} to {fetch.end} were requested, once")
            fetch.accepted = True

    @contextlib.contextmanager
    def writing(self, handoff: HandoffId, sender: WorkerRef) -> Iterator[Sequence[int]]:
        """Yield blocks by position. Ids before the fetched positions are placeholders and must not be written."""
        fetch = self._fetch(handoff, sender)
        with fetch.lock:
            if fetch.over or not fetch.accepted:
                raise StaleAttempt(f"the fetch of {handoff} has ended")
            yield [0] * (fetch.begin // self._engine.layout.block_size) + fetch.allocation.blocks

    def commit(self, handoff: HandoffId, sender: WorkerRef, commit: CommitState) -> None:
        """Accept the complete fetch. Raises StaleAttempt if it has ended."""
        fetch = self._fetch(handoff, sender)
        with fetch.lock:
            if fetch.over or not fetch.accepted or commit.spec is not None:
                raise StaleAttempt(f"the fetch of {handoff} has ended")
            fetch.whole = fetch.over = True
        self._on_end(handoff)

    def fetch(self, handoff: HandoffId, sender: WorkerRef, begin: int, end: int, *, verify: bool = False) -> None:
        raise OfferRefused("a prefill worker sends no cached KV")

    def aborted(self, handoff: HandoffId, sender: WorkerRef) -> None:
        with self._lock:
            fetch = self._fetches.get(handoff)
        if fetch is not None and fetch.source == sender and not fetch.over:
            self._on_end(handoff)

    def lost(self, sender: WorkerRef) -> None:
        with self._lock:
            found = [handoff for handoff, fetch in self._fetches.items() if fetch.source == sender and fetch.accepted]
        for handoff in found:
            self.aborted(handoff, sender)

    def _fetch(self, handoff: HandoffId, sender: WorkerRef) -> Fetch:
        with self._lock:
            fetch = self._fetches.get(handoff)
        if fetch is None or fetch.source != sender:
            raise StaleAttempt(f"no KV of {handoff} was requested from {sender}")
        return fetch
