"""Copies of a world, and the key that is equal for equal states."""

from __future__ import annotations

import enum
import hashlib
import marshal
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any
from unittest.mock import patch

from google.protobuf.message import Message

from baton.engine.block_pool import Reservation
from kvtransfer.handoff import Reports
from kvtransfer.transports.base import Endpoint
from tools.handoff_states.doubles import NOTHING, TIMES, UNLOCKED, Still, content, times
from tools.handoff_states.processes import ExploredAttempt, ExploredChannel, ExploredRun, Mailbox, PeerStream
from tools.handoff_states.world import World

REPLACED: dict[str, object] = {
    "kvtransfer.send_queue.time": Still,
    "kvtransfer.sender.time": Still,
    "kvtransfer.receive_loop.time": Still,
    "kvtransfer.sender.wire_digest": content,
    "kvtransfer.receive_loop.wire_digest": content,
    "kvtransfer.sender.SendChannel": ExploredChannel,
    "kvtransfer.wire.FRAMES": 1,
    "baton.event_journal.log": NOTHING,
    "kvtransfer.sender.log": NOTHING,
    "kvtransfer.receiver.log": NOTHING,
    "decode_workers.worker.log": NOTHING,
    "prefill_workers.worker.log": NOTHING,
    "prefill_workers.worker.PrefillTimes": times,
    "router.request.attempt.EventMailbox": Mailbox,
    "router.request.lifecycle.Attempt": ExploredAttempt,
}


@contextmanager
def replaced() -> Iterator[None]:
    """Replace time, threads and logs of the production modules."""
    with ExitStack() as stack:
        for name, value in REPLACED.items():
            stack.enter_context(patch(name, value))
        yield


# --- undo -------------------------------------------------------------------------------------------------------------


class Snapshot:
    """The content of everything that a world reaches and that can change. `restore` puts it back.

    A copy of the world takes several times as long, and to repeat a path takes longer with each event.
    """

    def __init__(self, world: World) -> None:
        self._fields: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._slots: list[tuple[Any, list[str], list[Any]]] = []
        self._lists: list[tuple[Any, list[Any]]] = []
        self._sets: list[tuple[Any, Any]] = []
        self._dicts: list[tuple[Any, Any]] = []
        self._seen: set[int] = set()
        self._visit([world])

    def restore(self) -> None:
        for fields, before in self._fields:
            fields.update(before)
        for value, names, parts in self._slots:
            for name, part in zip(names, parts, strict=True):
                setattr(value, name, part)
        for items, before_items in self._lists:
            if items or before_items:
                items.clear()
                items.extend(before_items)
        for members, before_members in self._sets:
            members.clear()
            members.update(before_members)
        for table, before_table in self._dicts:
            if table or before_table:
                table.clear()
                update = dict.update if type(table) is Counter else type(table).update  # a Counter would add
                update(table, before_table)

    def _visit(self, todo: list[Any]) -> None:
        seen, kinds, shared = self._seen, _KINDS, SHARED
        for value in todo:  # grows
            if id(value) not in seen:
                seen.add(id(value))
                kind = type(value)
                parts = (kinds.get(kind) or _learned(kind))(self, value)
                todo += [part for part in parts if type(part) not in shared]

    def object(self, value: Any) -> Iterable[Any]:
        fields: dict[str, Any] = value.__dict__
        self._fields.append((fields, fields.copy()))
        if isinstance(value, list):
            self._lists.append((value, value.copy()))
            return [*value, *fields.values()]
        return fields.values()

    def slotted(self, names: list[str], value: Any) -> list[Any]:
        parts = [getattr(value, name) for name in names]
        self._slots.append((value, names, parts))
        return parts

    def list(self, value: Any) -> Iterable[Any]:
        self._lists.append((value, value.copy()))
        return value  # type: ignore[no-any-return]

    def dict(self, value: Any) -> Iterable[Any]:
        self._dicts.append((value, value.copy()))
        return value.values()  # type: ignore[no-any-return]

    def set(self, value: Any) -> Iterable[Any]:
        self._sets.append((value, value.copy()))
        return ()


SHARED: set[type] = {int, str, bytes, float, bool, type(None), type, FunctionType, type(NOTHING), type(TIMES), Still}
SHARED |= {type(UNLOCKED), type(threading.Lock()), SimpleNamespace, range}
_HOLDING = (Endpoint, Reports, Reservation)  # frozen values that lead to others
_Visit = Callable[[Snapshot, Any], Iterable[Any]]
_KINDS: dict[type, _Visit] = {
    **dict.fromkeys((dict, OrderedDict, Counter), Snapshot.dict),
    **dict.fromkeys((list, deque), Snapshot.list),
    set: Snapshot.set,
    tuple: lambda snapshot, value: value,
    MethodType: lambda snapshot, value: (value.__self__,),
    partial: lambda snapshot, value: (value.func, *value.args),
}


def _learned(kind: type) -> _Visit:
    """Return how a class is visited. Constants, messages and errors never change."""
    slots = [name for one in kind.__mro__ for name in one.__dict__.get("__slots__", ())]
    if kind in _HOLDING:
        _KINDS[kind] = lambda snapshot, value: [getattr(value, name) for name in slots]
    elif getattr(getattr(kind, "__dataclass_params__", None), "frozen", False) or issubclass(kind, _UNCHANGED):
        SHARED.add(kind)
        return lambda snapshot, value: ()
    else:
        _KINDS[kind] = partial(_slotted, slots) if slots else Snapshot.object
    return _KINDS[kind]


_UNCHANGED = (enum.Enum, Message, BaseException)


def _slotted(names: list[str], snapshot: Snapshot, value: Any) -> Iterable[Any]:
    return snapshot.slotted(names, value)


# --- keys -------------------------------------------------------------------------------------------------------------


def key(world: World) -> int:
    """Return a digest of everything that decides what can happen. Numbers of blocks and texts do not."""
    streams = [_stream(world, stream) for stream in world.streams]
    parts: Any = (
        world.faults,
        world.late,
        [link.state for link in (world.link_p, world.link_d)],
        [[*link.up, 0, *link.down] for link in (world.link_p, world.link_d)],
        [[_attempts(link.handoffs), _attempts(link.mailboxes)] for link in (world.link_p, world.link_d)],
        world.p.ref.incarnation.counter,
        world.d.ref.incarnation.counter,
        _attempts(world.commits),
        _run(world.run),
        _prefill(world),
        _decode(world),
        streams,
    )
    return int.from_bytes(hashlib.blake2b(marshal.dumps(parts, 0), digest_size=8).digest(), "little")


def _attempts(handoffs: Any) -> list[int]:
    return [handoff.attempt for handoff in handoffs]


def _run(run: ExploredRun) -> tuple[object, ...]:
    held, at = run._held, run.at
    return (
        run.stage,
        run.observer.attempts,
        run.observer.is_accepted,
        run.client.outcome,
        run.delivery.ids,
        len(run.client.indices),
        sorted(run.delivery._early),
        run._failures,
        run._deaths,
        None if held is None else _attempt(held),
        None if at is None else _attempt(at),
    )


def _attempt(attempt: Any) -> tuple[object, ...]:
    """`fencing` and `lost` count by their type. Links differ by the incarnation of their worker."""
    placed = attempt._placement
    return (
        attempt.handoff.attempt,
        placed.prefill.info.ref.incarnation.counter,
        placed.decode.info.ref.incarnation.counter,
        attempt.cached_tokens,
        attempt.committed is not None,
        attempt.finish is not None,
        attempt.retry_reason,
        type(attempt.lost).__name__,
        type(attempt.fencing).__name__,
        (attempt.kept, attempt.died, attempt._decoding, attempt._holds, attempt._decode_ended),
        (attempt._computed, attempt._retransfers),
        [token.index for token in attempt._tokens],
    )


def _tasks(tasks: Any) -> list[tuple[object, ...]]:
    """Each task is a partial of a method with the handoff, and perhaps an outcome."""
    return [(one.func.__name__, one.args[0].attempt, [type(arg).__name__ for arg in one.args[1:]]) for one in tasks]


def _sequences(worker: Any) -> list[tuple[object, ...]]:
    cells = worker.engine.kv.cells
    return [
        (one.key.attempt, one.computed, one.ids, one.held, _content(cells, one.allocation.blocks))
        for one in worker.engine.sequences.values()
    ]


def _content(cells: list[int], blocks: Any) -> list[int]:
    return [cells[2 * block + part] for block in blocks for part in (0, 1)]


def _prefill(world: World) -> tuple[object, ...]:
    role = world.p.role
    work = [(handoff.attempt, job.first is not None, job.waits) for handoff, job in role._work.items()]
    reported = _attempts(world.p.sender.reported)
    return work, list(role._attempts._last.values()), _tasks(world.p.tasks), _sequences(world.p), reported


def _decode(world: World) -> tuple[object, ...]:
    role, cells = world.d.role, world.d.engine.kv.cells
    entries = [
        (
            *(one.handoff.attempt, one.state.value, one.sender and one.sender.incarnation.counter, one.known_tokens),
            *(_content(cells, one.reservation.blocks), one.reservation.own.state.value),
        )
        for one in role.reservations.entries()
    ]
    work = [(handoff.attempt, job.adopted) for handoff, job in role._work.items()]
    decided = [(handoff.attempt, event) for handoff, event in world.d.engine.journal.decided.items()]
    seen = list(role.reservations._attempts._last.values())
    return entries, work, seen, _tasks(world.d.tasks), _sequences(world.d), _attempts(role.fences), decided


def _stream(world: World, stream: PeerStream) -> tuple[object, ...]:
    queue, session = stream.sender.queue, stream.receiver
    window = queue.window
    pushes = [_push(world, push) for push in queue._pushes.values()]
    filled = stream.sender.filled
    sender = (
        stream.sender.running and stream.sender in world.p.sender._channels,
        (window.number, window._credited, len(window._unsent), stream.sender.to.incarnation.counter),
        filled and (filled[0].job.handoff.attempt, filled[1].begin, filled[0] in queue._pushes.values()),
    )
    receiver = None if session is None else _session(session)
    slots = [slot.content for slot in stream.ends.slots]
    sent = _attempts(stream.committed)
    return [*stream.up, 0, *stream.down], sent, sender, pushes, receiver, slots


def _push(world: World, push: Any) -> tuple[object, ...]:
    sequence = world.p.engine.sequences.get(push.job.handoff)
    return (
        push.job.handoff.attempt,
        push.state.value,
        push.deadline < 1e9,
        bool(push.blocks) and (sequence is not None and push.blocks == sequence.allocation.blocks),
        push.end is not None,
        push.progress._ready + push.progress._sent,
        push.digests,
    )


def _session(session: Any) -> tuple[object, ...]:
    loop = session._receive_loop
    inbound = [
        (one.handoff.attempt, one.dropped, one.announced._reached, one.digests, one.handoff in loop.open)
        for one in loop.inbound.values()
    ]
    items = [[_item(item) for item in items] for items in (loop.queue._items, session.todo, session.early)]
    return loop.over, loop.announced, loop.received, loop._credited, session.sender.incarnation.counter, inbound, items


def _item(item: Any) -> object:
    if item is None:
        return None
    about = item.inbound.handoff.attempt if item.inbound is not None else 0
    return about, item.spec.begin if hasattr(item, "spec") else (item.after, item.commit is not None)
