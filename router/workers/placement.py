"""A pair of workers for one attempt, counted as loaded; and what a request wishes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from baton.core import SequenceSpec, WorkerInfo, WorkerRef
from router.workers.stream import WorkerStream


class Requirements(NamedTuple):
    """What a request has to do with the choice of its workers, beside its length.

    `keep`: the prefill worker that holds its KV already, and is taken while it is there. `spec`: the request, whose
    beginning some workers may have cached. `determinism`: what it was begun with, if it is a deterministic one.
    `thinks`: the fields by which it asks for a model that thinks.
    """

    keep: WorkerStream | None = None
    spec: SequenceSpec | None = None
    determinism: str = ""
    thinks: Sequence[str] = ()

    @property
    def is_special(self) -> bool:
        """Whether it waits beside the queue for workers that can do what it asks for."""
        return self.deterministic or bool(self.thinks)

    @property
    def deterministic(self) -> bool:
        """Whether its workers must be alike to the bit."""
        return self.spec is not None and self.spec.deterministic

    def accepts(self, info: WorkerInfo) -> bool:
        """Whether this worker may compute it, room aside."""
        if not self.deterministic:
            return True
        return info.determinism == self.determinism if self.determinism else bool(info.determinism)


NO_REQUIREMENTS = Requirements()


class Placement:
    """A pair of workers that counts as loaded from choice to `release`, which comes once and makes up for the rest.

    Without a prefill worker the decode worker is to compute the prompt itself. `tokens` are known, of which `cached`
    need no computing. `on_change` is told of each worker whose load changes.
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
        self.prefill = prefill
        self.decode = decode
        self.predicted_ttft_s: float | None = None  # from the choice to the first token; None: nobody knows
        self.on_first: Callable[[], None] = lambda: None
        self._on_change = on_change
        self._on_release = on_release
        self._computes = prefill or decode
        self._views = (self._computes.view, decode.view)  # a link that connects anew counts from zero in a new view
        self._tokens = tokens - cached
        self._blocks = decode.view.blocks_for(tokens)
        self._on_prefill = int(prefill is not None)
        self._views[0].dispatched += self._on_prefill
        self._views[0].queued_tokens += self._tokens
        decode.view.dispatched += 1
        decode.view.pending_blocks += self._blocks
        self._tell(self._computes, decode)

    @property
    def determinism(self) -> str:
        """What the workers say of their bits, if they say the same; else empty."""
        said = {self._computes.info.determinism, self.decode.info.determinism}
        return said.pop() if len(said) == 1 else ""

    def reserved(self) -> None:
        """The decode worker has answered: from here on its own reports count the blocks."""
        if self._blocks:
            self._views[1].pending_blocks -= self._blocks
            self._blocks = 0
            self._tell(self.decode)

    def computed(self) -> None:
        """The first token is here: the prompt is no backlog any more."""
        on_first, self.on_first = self.on_first, lambda: None
        self._no_backlog()
        on_first()

    def prefill_done(self) -> None:
        """The decode worker has taken over, or has said the first token itself."""
        self.computed()
        if self._on_prefill:
            self._views[0].dispatched -= self._on_prefill
            self._on_prefill = 0
            self._tell(self._computes)

    def release(self) -> None:
        """The request is off both workers."""
        self.on_first = lambda: None
        self.reserved()
        self.prefill_done()
        self._views[1].dispatched -= 1
        self._tell(self.decode)
        self._on_release()

    def _no_backlog(self) -> None:
        if self._tokens:
            self._views[0].queued_tokens -= self._tokens
            self._tokens = 0
            self._tell(self._computes)

    def _tell(self, *links: WorkerStream) -> None:
        for link in links:
            self._on_change(link.info.ref)
