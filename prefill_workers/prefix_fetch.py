"""Fetching a prompt's beginning from the decode worker that has it, when that is cheaper than computing it.

expect ──offer──> RECEIVING ──commit──> in the prefix cache, where the prompt finds it
   └──refused, aborted, lost, too late──> the prompt is computed from where it was
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.engine.prefix_cache import BlockHashChain, scope_key
from baton.errors import OfferRefused, StaleAttempt

if TYPE_CHECKING:
    from baton.clock import Clock
    from baton.core import HandoffId, SequenceSpec, WorkerRef
    from baton.engine.block_pool import Allocation
    from baton.engine.engine import Engine
    from kvtransfer.handoff import CommitState, Offer

_WEIGHT = 0.3  # of what was seen last
_MEASURED_TOKENS = 32  # of a step that says what computing costs
_LEAST_S = 0.5  # that a fetch is waited for
_SPARED = 6  # times as long as it was waited for, nothing is asked of who was late: each time costs a prompt as much


class CostModel:
    """What computing and fetching cost, as they did lately. Pure. Nothing is fetched before something was computed."""

    def __init__(self, fetch_s: float = 0.02, bytes_per_s: float = 1e9) -> None:
        self._fetch_s = fetch_s  # of a fetch of nothing, until one was seen
        self._byte_s = 1 / bytes_per_s
        self._token_s: float | None = None

    def computed(self, tokens: int, seconds: float) -> None:
        """A step with this many prompt tokens took so long."""
        self._token_s = _smoothed(self._token_s, seconds / tokens)

    def fetched(self, nbytes: int, seconds: float) -> None:
        """A fetch of this many bytes took so long, from the wish to the last block."""
        expected = self._fetch_s + nbytes * self._byte_s
        self._fetch_s *= 1 + _WEIGHT * (seconds / expected - 1)
        self._byte_s *= 1 + _WEIGHT * (seconds / expected - 1)

    def computing_s(self, tokens: int) -> float:
        """How long computing `tokens` takes; 0 as long as nothing was computed."""
        return tokens * (self._token_s or 0.0)

    def worth(self, tokens: int, nbytes: int) -> bool:
        """Is fetching the KV of `tokens` cheaper than computing it?"""
        return self._fetch_s + nbytes * self._byte_s < self.computing_s(tokens)


def _smoothed(old: float | None, new: float) -> float:
    return new if old is None else old + _WEIGHT * (new - old)


@dataclass(slots=True)
class Fetch:
    """KV of positions [begin, end) on its way from `source` into `allocation`. `lock` guards its state and all writes.

    `within_s`: how long to wait for it. `accepted`: it was offered. `whole`: all of it came. `over`: nothing is written
    any more.
    """

    source: WorkerRef
    begin: int
    end: int
    allocation: Allocation
    names: list[bytes]
    started: float
    within_s: float
    accepted: bool = False
    whole: bool = False
    over: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class Fetches:
    """What is being fetched, and whether it pays. Implements `kvtransfer.handoff.HandoffTable`.

    `on_end(handoff)` is called when one has ended, from any thread: the engine thread then calls `end`. Nothing is
    fetched for a model that `thinks`: KV would come without the thoughts that go with it.
    """

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        within_s: float,
        on_end: Callable[[HandoffId], None],
        *,
        thinks: bool = False,
    ) -> None:
        self.fetched_tokens = 0
        self._thinks = thinks
        self._engine = engine
        self._history = engine.pool.history
        self._clock = clock
        self._within_s = within_s
        self._on_end = on_end
        self._cost = CostModel()
        self._step_began: float | None = None
        self._spared: dict[WorkerRef, float] = {}  # who was late, until when
        self._lock = threading.Lock()
        self._fetches: dict[HandoffId, Fetch] = {}

    # --- the engine thread ---------------------------------------------------------------------------------------

    def begin(self, handoff: HandoffId, spec: SequenceSpec, source: WorkerRef, there: int) -> tuple[int, int] | None:
        """The positions that `source`, which has the first `there`, is to be asked for before the prompt is computed.

        None: that would not pay, or there is no room. They are whole blocks that are not in the cache here.
        """
        if self._thinks:
            return None
        size, pool = self._engine.layout.block_size, self._engine.pool
        names = self._names(spec, there // size)
        begin = len(pool.find(names))
        missing = len(names) - begin
        if (
            not missing
            or source in self._spared
            or not self._cost.worth(missing * size, missing * self._engine.layout.block_bytes)
        ):
            return None
        allocation = pool.allocate(missing, reserved=True)
        if allocation is None:
            return None
        self._history.blocks("owned", handoff, allocation, part="fetch")
        # At the worst, a prompt whose KV does not come takes twice as long as without the attempt, and the least wait.
        within_s = min(self._within_s, max(self._cost.computing_s(missing * size), _LEAST_S))
        began = self._clock.monotonic()
        fetch = Fetch(source, begin * size, len(names) * size, allocation, names[begin:], began, within_s)
        with self._lock:
            self._fetches[handoff] = fetch
        return fetch.begin, fetch.end

    def end(self, handoff: HandoffId) -> bool:
        """Nothing is written for it any more; what came as a whole is in the cache. False: there was none."""
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
        """The blocks that each comes to."""
        with self._lock:
            return {handoff: fetch.allocation for handoff, fetch in self._fetches.items()}

    def late(self) -> list[HandoffId]:
        """Those that took too long. Who was to send them is not asked again for a while."""
        now = self._clock.monotonic()
        self._spared = {source: until for source, until in self._spared.items() if until > now}
        with self._lock:
            late = {handoff: fetch for handoff, fetch in self._fetches.items() if now - fetch.started >= fetch.within_s}
        for fetch in late.values():
            self._spared[fetch.source] = max(self._spared.get(fetch.source, now), now + _SPARED * fetch.within_s)
        return list(late)

    def step_began(self) -> None:
        """To learn what computing costs."""
        self._step_began = self._clock.monotonic()

    def step_ended(self, tokens: int) -> None:
        """So many tokens were computed."""
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
        """Raises StaleAttempt or OfferRefused for what was not asked for."""
        fetch = self._fetch(handoff, sender)
        with fetch.lock:
            if (offer.skip, offer.known_tokens) != (fetch.begin, fetch.end) or fetch.accepted:
                raise OfferRefused(f"{handoff}: positions {fetch.begin} to {fetch.end} were asked for, once")
            fetch.accepted = True

    @contextlib.contextmanager
    def writing(self, handoff: HandoffId, sender: WorkerRef) -> Iterator[Sequence[int]]:
        """Blocks by position; those before what is fetched are no blocks of anybody, and are not written."""
        fetch = self._fetch(handoff, sender)
        with fetch.lock:
            if fetch.over or not fetch.accepted:
                raise StaleAttempt(f"the fetch of {handoff} has ended")
            yield [0] * (fetch.begin // self._engine.layout.block_size) + fetch.allocation.blocks

    def commit(self, handoff: HandoffId, sender: WorkerRef, commit: CommitState) -> None:
        """All of it came."""
        fetch = self._fetch(handoff, sender)
        with fetch.lock:
            if fetch.over or not fetch.accepted or commit.spec is not None:
                raise StaleAttempt(f"the fetch of {handoff} has ended")
            fetch.whole = fetch.over = True
        self._on_end(handoff)

    def fetch(self, handoff: HandoffId, sender: WorkerRef, begin: int, end: int, *, verify: bool = False) -> None:
        """Nobody fetches from a prefill worker."""
        raise OfferRefused("a prefill worker is not asked for KV")

    def aborted(self, handoff: HandoffId, sender: WorkerRef) -> None:
        """It gave up."""
        with self._lock:
            fetch = self._fetches.get(handoff)
        if fetch is not None and fetch.source == sender and not fetch.over:
            self._on_end(handoff)

    def lost(self, sender: WorkerRef) -> None:
        """The channel is closed."""
        with self._lock:
            found = [handoff for handoff, fetch in self._fetches.items() if fetch.source == sender and fetch.accepted]
        for handoff in found:
            self.aborted(handoff, sender)

    def _fetch(self, handoff: HandoffId, sender: WorkerRef) -> Fetch:
        with self._lock:
            fetch = self._fetches.get(handoff)
        if fetch is None or fetch.source != sender:
            raise StaleAttempt(f"nothing of {handoff} was asked of {sender}")
        return fetch
