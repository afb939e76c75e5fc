"""What is looked up in a decode worker's tables: may this be reserved, and who holds what. Nothing is changed here."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from baton.core import HandoffId, WorkerInfo
from baton.errors import StaleAttempt
from baton.rpc.v1 import worker_pb2
from baton.worker import events
from baton.worker.census import Holding

if TYPE_CHECKING:
    from baton.history import Blocks
    from decode_workers.reservations import Entry, Reservations


def refusal_of(
    message: worker_pb2.Reserve,
    handoff: HandoffId,
    info: WorkerInfo,
    reservations: Reservations,
    here: Container[HandoffId],
) -> worker_pb2.WorkerEvent | None:
    """Why this can never be reserved here; None: it can, if there is room. `here`: what is under way."""
    if message.fingerprint != info.fingerprint:
        text = f"fingerprint: {message.fingerprint} asked, {info.fingerprint} is served here"
        return events.refused(handoff, worker_pb2.REFUSAL_REASON_FINGERPRINT, text)
    most = info.max_model_len
    if not 1 <= message.known_tokens <= most or message.max_total > most:
        text = f"{message.known_tokens} tokens, {message.max_total} with all that may follow, of {most} at most"
        return events.refused(handoff, worker_pb2.REFUSAL_REASON_TOO_LONG, text)
    if handoff in here:
        return events.refused(handoff, worker_pb2.REFUSAL_REASON_STALE, f"{handoff} is here already")
    try:
        reservations.check_new(handoff)
    except StaleAttempt as error:
        return events.refused(handoff, worker_pb2.REFUSAL_REASON_STALE, str(error))
    return None


def holdings(
    open_: Iterable[Entry],
    decoding: Iterable[tuple[HandoffId, Blocks | None]],
    fetched: Mapping[HandoffId, Blocks],
    owners: Mapping[HandoffId, str],
) -> Iterator[Holding]:
    """Of each handoff what it holds, and by whose wish. `owners`: the routers, "" for one that is gone."""
    for entry in open_:
        yield _holding(entry.handoff, entry.state.name.lower(), entry.reservation, owners)
    for handoff, allocation in decoding:
        yield _holding(handoff, "parked" if owners.get(handoff) == "" else "decoding", allocation, owners)
    for handoff, pin in fetched.items():
        yield _holding(handoff, "fetched", pin, owners)


def _holding(handoff: HandoffId, state: str, held: Blocks | None, owners: Mapping[HandoffId, str]) -> Holding:
    return Holding(handoff, state, held.blocks if held else (), owners.get(handoff, ""))
