"""Policies: pure functions that choose a pair of workers for a request from a snapshot of the workers.

They use no network, clock or randomness, so tests, planner and simulator run the production code. Load counts from the
dispatch of a request, not from its first token.

A policy is an ordered list of criteria. Each is a number for every worker of one role. The smallest wins; later ones
break ties. As each concerns one role, the best pair is found without enumerating pairs. Criteria are computed on
demand, because the first ones usually decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import numpy as np

from baton.core import Role
from router.placement.snapshot import Ask, Column, Facts, Rows, Snapshot

Value = TypeVar("Value", float, Column)


class Pair(NamedTuple):
    """The rows of a prefill and a decode worker. `ttft_s` is the predicted TTFT in seconds, or 0.0 if it is unknown."""

    prefill: int
    decode: int
    ttft_s: float = 0.0


class Alone(NamedTuple):
    """The row of a decode worker that also computes the prompt, and the predicted TTFT in seconds."""

    decode: int
    ttft_s: float


Policy = Callable[[Snapshot, Ask], Pair | None]  # None if no pair has capacity
AlonePolicy = Callable[[Snapshot, Ask], Alone | None]
Criteria = list[tuple[Role, Callable[[], Column]]]

_LOCAL_TTFT_SHARE = 0.85  # of the pair's TTFT; local prefill must be below it, because predictions err
_TTFT_ERROR = 0.65  # a predicted TTFT times this: the typical error of one prediction
_CROWD = 4.0  # beyond 2x + 4 requests of the least busy worker, a worker's cached prefix does not count


def least_loaded(snapshot: Snapshot, ask: Ask) -> Pair | None:
    """Choose the decode worker with the fewest requests and the prefill worker with the shortest backlog."""
    prefill, decode = snapshot.prefill.at, snapshot.decode.at
    criteria: Criteria = [
        (Role.DECODE, lambda: decode.requests),
        (Role.DECODE, lambda: -decode.available),
        (Role.DECODE, lambda: decode.order),
        (Role.PREFILL, lambda: prefill.backlog),
        (Role.PREFILL, lambda: prefill.dispatched),
        (Role.PREFILL, lambda: prefill.order),
    ]
    return _least(snapshot, ask, criteria)


def round_robin(snapshot: Snapshot, ask: Ask) -> Pair | None:
    """Choose workers in turn by worker id, among those with capacity."""
    able = list(_candidates(snapshot, ask))
    if not able:
        return None
    decode = _in_turn(np.concatenate([right for _, right in able]), snapshot.decode.at.order, ask.turn)
    left = next(left for left, right in able if decode in right)
    return Pair(_in_turn(left, snapshot.prefill.at.order, ask.turn), decode)


def prefix(snapshot: Snapshot, ask: Ask) -> Pair | None:
    """Choose the least work until this prompt is computed, and the longest cached prefix on a decode worker that is not
    much busier than others.
    """
    prefill, decode = snapshot.prefill.at, snapshot.decode.at
    requests = decode.requests
    least = requests[decode.able > 0].min(initial=np.inf)
    criteria: Criteria = [
        (Role.PREFILL, lambda: prefill.backlog - ask.prefill_cached),
        (Role.DECODE, lambda: np.maximum(requests - (2.0 * least + _CROWD), 0.0)),
        (Role.DECODE, lambda: -ask.decode_cached),
        (Role.PREFILL, lambda: prefill.dispatched),
        (Role.DECODE, lambda: requests),
        (Role.DECODE, lambda: -decode.available),
        (Role.PREFILL, lambda: prefill.order),
        (Role.DECODE, lambda: decode.order),
    ]
    return _least(snapshot, ask, criteria)


def predicted(snapshot: Snapshot, ask: Ask) -> Pair | None:
    """Choose the lowest predicted TTFT among pairs with an ITL within the SLO; if there is none, the lowest ITL. A tie
    goes to the decode worker that will send the second token first. Unknown costs are 0; then `least_loaded` decides.
    """
    prefill, decode = snapshot.prefill.at, snapshot.decode.at
    ttft, itl = ttft_s(snapshot, ask), itl_s(snapshot, ask)

    def second() -> Column:
        move = (ask.tokens - ask.decode_cached) * decode.token_bytes * snapshot.byte_s
        return (move + itl + decode.backlog * decode.queued_s) * (itl > 0.0)

    criteria: Criteria = [
        (Role.DECODE, lambda: np.maximum(itl - snapshot.slo_itl_s, 0.0)),
        (Role.PREFILL, lambda: ttft),
        (Role.DECODE, second),
        (Role.DECODE, lambda: decode.requests),
        (Role.DECODE, lambda: -decode.available),
        (Role.DECODE, lambda: decode.order),
        (Role.PREFILL, lambda: prefill.backlog - ask.prefill_cached),
        (Role.PREFILL, lambda: prefill.dispatched),
        (Role.PREFILL, lambda: prefill.order),
    ]
    pair = _least(snapshot, ask, criteria)
    return None if pair is None else pair._replace(ttft_s=float(ttft[pair.prefill]))


def local_prefill(snapshot: Snapshot, ask: Ask) -> Alone | None:
    """Choose a decode worker to run prefill locally: the lowest predicted TTFT among workers with capacity and, if
    possible, an ITL within the SLO. Near-ties go to the fewest requests. Unknown costs count as 0.
    """
    itl = itl_s(snapshot, ask)
    first = chunked_s(snapshot.decode.at, ask.tokens, ask.decode_cached, snapshot.chunk)
    slow = np.maximum(itl - snapshot.slo_itl_s, 0.0)
    able = (snapshot.decode.at.capacity > ask.tokens) & (slow == 0.0)
    later = np.maximum(first - first[able].min(initial=np.inf) / _TTFT_ERROR, 0.0)
    found = _alone(snapshot, ask, lambda: slow, lambda: later)
    return None if found is None else found._replace(ttft_s=float(first[found.decode]))


def alone_least_loaded(snapshot: Snapshot, ask: Ask) -> Alone | None:
    """Choose the fewest requests; ties go to the fewest waiting prompt tokens."""
    return _alone(snapshot, ask, lambda: snapshot.decode.at.requests, lambda: snapshot.decode.at.backlog)


def alone_prefix(snapshot: Snapshot, ask: Ask) -> Alone | None:
    """Choose the least work until this prompt is computed, without its cached part. Much busier workers come last."""
    at = snapshot.decode.at
    crowd = 2.0 * at.requests[at.able > 0].min(initial=np.inf) + _CROWD
    crowded = np.maximum(at.requests - crowd, 0.0)
    return _alone(snapshot, ask, lambda: crowded, lambda: at.backlog - ask.decode_cached)


def local_round_robin(snapshot: Snapshot, ask: Ask) -> Alone | None:
    """Choose workers in turn by worker id, among those with capacity."""
    rows = _with_capacity(snapshot, ask)
    return Alone(_in_turn(rows, snapshot.decode.at.order, ask.turn), 0.0) if rows.size else None


def _alone(snapshot: Snapshot, ask: Ask, *columns: Callable[[], Column]) -> Alone | None:
    rows, at = _with_capacity(snapshot, ask), snapshot.decode.at
    rest = (lambda: at.requests, lambda: -ask.decode_cached, lambda: -at.available, lambda: at.order)
    criteria: Criteria = [(Role.DECODE, column) for column in (*columns, *rest)]
    return Alone(_narrowed(rows, criteria, Role.DECODE), 0.0) if rows.size else None


def local_prefill_if_faster(snapshot: Snapshot, ask: Ask, pair: Pair) -> Alone | None:
    """Return a decode worker for a local prefill, if that is clearly faster than the pair and meets the SLO's ITL. Two
    are candidates: the pair's, which sends its second token first, and the one that has most of the prompt cached.
    """
    if not pair.ttft_s or ask.keep is not None:
        return None
    at, cached = snapshot.decode.at, ask.decode_cached
    rows = [pair.decode]
    if np.count_nonzero(cached):
        most = int((cached * (at.capacity > ask.tokens) * (at.group == at.group[pair.decode])).argmax())
        if cached[most] > cached[pair.decode] and at.capacity[most] > ask.tokens:
            rows.append(most)
    offers = (alone_s(snapshot.decode.facts(row), ask.tokens, float(cached[row]), snapshot.slo_itl_s) for row in rows)
    ttft, row = min(zip(offers, rows, strict=True))
    return Alone(row, ttft) if ttft < pair.ttft_s * _LOCAL_TTFT_SHARE else None


def alone_s(decode: Facts[float], tokens: int, cached: float, slo_itl_s: float = np.inf) -> float:
    """Return the predicted TTFT of local prefill on a decode worker, in seconds. inf if the cost is unknown, or if the
    step would exceed the SLO's ITL for running requests. The prefill step also decodes one token of each running
    request and computes all waiting prompts. The step that runs now comes first: it decodes, and computes prompts if
    some wait.
    """
    if not decode.prompt_step_s + decode.prompt_token_s + decode.prompt_context_s:
        return np.inf
    new = tokens - cached
    usual = decode_step_s(decode, tokens)
    prompts = decode.prompt_step_s + decode.prompt_token_s * new + decode.backlog * decode.queued_s
    joint = usual + prompts + decode.prompt_context_s * new * (cached + (new + 1.0) * 0.5)
    if joint > slo_itl_s:
        return np.inf
    return joint + usual * ((decode.requests > 0.0) + (decode.backlog > 0.0))


POLICIES: dict[str, Policy] = {
    "predicted": predicted,
    "least_loaded": least_loaded,
    "prefix": prefix,
    "round_robin": round_robin,
}
ALONE: dict[str, AlonePolicy] = {
    "predicted": local_prefill,
    "least_loaded": alone_least_loaded,
    "prefix": alone_prefix,
    "round_robin": local_round_robin,
}


def ttft_s(snapshot: Snapshot, ask: Ask) -> Column:
    """Return the predicted TTFT per prefill row. 0 means unknown."""
    return prefill_s(snapshot.prefill.at, ask.tokens, ask.prefill_cached)


def itl_s(snapshot: Snapshot, ask: Ask) -> Column:
    """Return the predicted ITL per decode row, with this request in the step. 0 means unknown."""
    return decode_step_s(snapshot.decode.at, ask.tokens)


def prefill_s(at: Facts[Value], tokens: float, cached: Value | float) -> Value:
    """Return the predicted seconds of the backlog and of the uncached part of a prompt on prefill workers."""
    new = tokens - cached
    context = new * (cached + (new + 1.0) * 0.5)
    steps = at.step_s * (1.0 + (at.backlog > 0.0))  # a waiting prompt waits for the running step, too
    seconds: Value = at.backlog * at.queued_s + steps + at.token_s * new + at.context_s * context
    return seconds


def decode_step_s(at: Facts[Value], tokens: float, more: float = 1.0) -> Value:
    """Return the predicted seconds of a decode step with `more` requests, of `tokens` tokens together."""
    seconds: Value = at.step_s + at.token_s * (at.requests + more) + at.context_s * (at.kv_tokens + tokens)
    return seconds


def chunked_s(at: Facts[Value], tokens: float, cached: Value, chunk: float) -> Value:
    """Return the predicted TTFT in seconds of a prompt on workers that compute `chunk` tokens a step, less one per
    request. Waiting prompts come first. Each step decodes too, and one step is already running.
    """
    new = tokens - cached
    own: Value = np.maximum(np.ceil((at.backlog + new) / np.maximum(chunk - at.requests, 1.0)), 1.0)
    steps = own + (at.requests > 0.0)
    usual = decode_step_s(at, tokens)
    prompts = at.prompt_step_s * steps + at.prompt_token_s * new + at.backlog * at.queued_s
    seconds: Value = usual * steps + prompts + at.prompt_context_s * new * (cached + (new + 1.0) * 0.5)
    return seconds


def _candidates(snapshot: Snapshot, ask: Ask) -> Iterator[tuple[Rows, Rows]]:
    """Yield the prefill and decode rows that can take the request, per fingerprint that has both."""
    prefill, decode = snapshot.prefill.at, snapshot.decode.at
    left = prefill.able.nonzero()[0]
    if ask.keep is not None:
        left = left[left == ask.keep]
    right = _with_capacity(snapshot, ask)
    if snapshot.groups <= 1 and ask.bits is None:
        if left.size and right.size:
            yield left, right
        return
    kinds = (prefill.group, decode.group) if ask.bits is None else (snapshot.prefill.bits, snapshot.decode.bits)
    for kind in range(snapshot.groups) if ask.bits is None else ask.bits:
        ours, theirs = left[kinds[0][left] == kind], right[kinds[1][right] == kind]
        if ours.size and theirs.size:
            yield ours, theirs


def _with_capacity(snapshot: Snapshot, ask: Ask) -> Rows:
    rows = (snapshot.decode.at.capacity > ask.tokens).nonzero()[0]  # one more than the known tokens
    return rows if ask.bits is None else rows[np.isin(snapshot.decode.bits[rows], ask.bits)]


def _least(snapshot: Snapshot, ask: Ask, criteria: Criteria) -> Pair | None:
    best: tuple[list[float], Pair] | None = None
    for left, right in _candidates(snapshot, ask):
        pair = Pair(_narrowed(left, criteria, Role.PREFILL), _narrowed(right, criteria, Role.DECODE))
        if snapshot.groups <= 1 and ask.bits is None:
            return pair
        rank = [float(column()[pair.decode if role is Role.DECODE else pair.prefill]) for role, column in criteria]
        if best is None or rank < best[0]:
            best = rank, pair
    return best[1] if best else None


def _narrowed(rows: Rows, criteria: Criteria, role: Role) -> int:
    for whose, column in criteria:
        if len(rows) == 1:
            break
        if whose is role:
            values = column().take(rows)
            best = values == values[values.argmin()]  # faster than min()
            if np.count_nonzero(best) < len(rows):
                rows = rows[best]
    return int(rows[0])


def _in_turn(rows: Rows, order: Column, turn: int) -> int:
    return int(rows[order[rows].argsort()[turn % len(rows)]])
