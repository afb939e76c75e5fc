"""The load of this router's workers, and the predicted latencies of a typical request, for the autoscaler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baton.core import Role
from baton.ledger.control_state import RouterReport, WorkerDemand
from router.placement.policy import chunked_s
from router.placement.snapshot import Facts, WorkerView

_NEW = 0.05  # weight of a new prompt in the mean


class TypicalRequest:
    """A running mean of prompts: their known tokens, and how many of those were cached on the chosen worker."""

    def __init__(self) -> None:
        self.tokens = self.cached = 0.0

    def saw(self, tokens: int, cached: int) -> None:
        """Add a request that was given to a worker."""
        new = _NEW if self.tokens else 1.0
        self.tokens += new * (tokens - self.tokens)
        self.cached += new * (cached - self.cached)


def expected(
    router_id: str, rows: Sequence[tuple[WorkerView, Facts[float]]], typical: TypicalRequest, chunk: float | None = None
) -> RouterReport:
    """Return the load of these workers, and the predicted latencies of a typical prompt. TTFT is that of prefill
    workers even if local prefill would be faster, because a prefill pool that needs this help is too small. If `chunk`
    is set, the decode workers are colocated ones, and compute so many tokens a step.
    """
    if chunk is None:
        prefills = (at for view, at in rows if view.info.role is Role.PREFILL)
        offers = ((at.able, _backlog_s(at) + _prompt_s(at, typical), _prompt_s(at, typical)) for at in prefills)
    else:
        asked = typical.tokens, typical.cached, chunk
        offers = ((at.able, chunked_s(at, *asked), chunked_s(_idle(at), *asked)) for _, at in rows)
    ttft_s, ttft_alone_s = _least(offers)
    itl_s, itl_alone_s = _least(
        (at.able, _step_s(at, 1, typical.tokens), at.step_s + at.token_s + at.context_s * typical.tokens)
        for view, at in rows
        if view.info.role is Role.DECODE
    )
    return RouterReport(
        router_id=router_id,
        prompt_tokens=typical.tokens,
        ttft_s=ttft_s,
        ttft_alone_s=ttft_alone_s,
        itl_s=itl_s,
        itl_alone_s=itl_alone_s,
        workers={view.info.ref.worker_id: _worker(view, at) for view, at in rows},
    )


def _least(offers: Iterable[tuple[float, float, float]]) -> tuple[float, float]:
    """Return the smallest time now, and that without load. Workers that take no request count only if all are so."""
    _, now, alone = min(((not able, now, alone) for able, now, alone in offers), default=(True, 0.0, 0.0))
    return now, alone


def _prompt_s(at: Facts[float], typical: TypicalRequest) -> float:
    """Return the seconds to prefill on an idle worker, as `policy.ttft_s` does."""
    new = typical.tokens - typical.cached
    return at.step_s + at.token_s * new + at.context_s * new * (typical.cached + (new + 1.0) * 0.5)


def _idle(at: Facts[float]) -> Facts[float]:
    return at._replace(requests=0.0, backlog=0.0, kv_tokens=0.0)


def _backlog_s(at: Facts[float]) -> float:
    """Return the seconds until a new request's turn."""
    return at.backlog * at.queued_s + at.step_s * (at.backlog > 0)


def _step_s(at: Facts[float], more: int, tokens: float) -> float:
    """Return the seconds of a decode step with `more` requests of `tokens` tokens, as `policy.itl_s` does."""
    return at.step_s + at.token_s * (at.requests + more) + at.context_s * (at.kv_tokens + tokens)


def _worker(view: WorkerView, at: Facts[float]) -> WorkerDemand:
    load, prefills = view.load, view.info.role is Role.PREFILL
    total = load.blocks.total or 1
    return WorkerDemand(
        role=view.info.role,
        running=load.running,
        waiting=load.waiting,
        queued_tokens=view.prefill_backlog,
        used=(load.blocks.owned + load.blocks.reserved) / total,
        reserved=load.blocks.reserved / total,
        step_s=0.0 if prefills or not at.requests else _step_s(at, 0, 0.0),
        busy_s=load.prefill_pace.seconds if prefills else 0.0,
    )
