"""The snapshot of this router's workers, kept up to date row by row, and what their steps cost, fitted on the way.

Whoever changes what is known of a worker says so (`touch`), and its row is written again before the next choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from baton.core import Channel, Role, SequenceSpec, WorkerInfo, WorkerRef
from baton.engine.prefix_cache import block_hashes_of
from baton.ledger.prefix_index import NAME_BYTES, Holder, PrefixIndex
from router.placement.cost_model import UNKNOWN, Cost, CostModels, WorkerCostModel
from router.placement.snapshot import Ask, Column, Facts, Loaded, Side, Snapshot, WorkerView, spread

_NEW_SPEED = 0.1  # what the last report of channels counts
Kind = tuple[str, int, bool]
"""What the names of blocks depend on beside the request: fingerprint, block size, and whether the model thinks."""


class WorkerRow(Protocol):
    """What the fleet reads of a `router.workers.stream.WorkerStream`."""

    @property
    def info(self) -> WorkerInfo: ...

    @property
    def view(self) -> WorkerView: ...

    @property
    def usable(self) -> bool: ...


@dataclass(slots=True, eq=False)
class _Member:
    link: WorkerRow
    side: Side
    row: int
    learned: WorkerCostModel
    channels: tuple[Channel, ...] = ()  # as last reported
    order: int = 0
    group: int = 0
    anew: bool = True  # more than its load has changed


class Prompt:
    """The names of a request's full blocks as one kind of worker calls them, each made when it is first asked for."""

    def __init__(self, spec: SequenceSpec, kind: Kind) -> None:
        fingerprint, block_size, thinks = kind
        self._left = block_hashes_of(spec, fingerprint, block_size, thinks=thinks)
        self._names: list[bytes] = []

    def __iter__(self) -> Iterator[bytes]:
        yield from self._names
        for name in self._left:
            self._names.append(name[:NAME_BYTES])
            yield self._names[-1]


class Fleet:
    """Feeds `snapshot`. `prefixes` says who has which blocks; `slo_itl_s` is what `predicted` keeps to."""

    def __init__(self, prefixes: PrefixIndex | None = None, slo_itl_s: float = np.inf) -> None:
        self._snapshot = Snapshot(slo_itl_s=slo_itl_s)
        self._prefixes = prefixes
        self._generation = 0  # of the slots
        self._members: dict[Holder, _Member] = {}
        self._owners: dict[tuple[Role, int], WorkerRef] = {}
        self._changed = False  # who is there: all rows are to be written
        self._stale: set[_Member] = set()  # whose rows are to be written
        self._kinds: dict[Kind, None] = {}
        self._bits: dict[tuple[str, str], int] = {}  # fingerprints, of KV and of bits: from 1 on
        self._likes: dict[str, CostModels] = {}  # by fingerprint
        self._byte_s: float | None = None
        self._prompts: tuple[SequenceSpec | None, dict[Kind, Prompt]] = (None, {})  # of the last request

    def add(self, link: WorkerRow) -> None:
        """A worker is there."""
        role = link.info.role
        side = self._snapshot.prefill if role is Role.PREFILL else self._snapshot.decode
        learned = WorkerCostModel(role, self._likes.setdefault(link.info.fingerprint, CostModels()))
        member = self._members[_holder(link.info.ref)] = _Member(link, side, side.add(), learned)
        self._owners[role, member.row] = link.info.ref
        self._changed = True
        self.touch(link.info.ref)

    def drop(self, ref: WorkerRef) -> None:
        """A worker is gone."""
        member = self._members.pop(_holder(ref))
        self._stale.discard(member)
        member.side.drop(member.row)
        del self._owners[member.link.info.role, member.row]
        self._changed = True

    def touch(self, ref: WorkerRef) -> None:
        """It may have reported: all that is known of this worker may have changed. One that is not there: no-op."""
        member = self._members.get(_holder(ref))
        if member is None:
            return
        load = member.link.view.load
        if member.learned.told(load):
            member.anew = True
            if load.channels is not member.channels:
                member.channels = load.channels
                self._speed(channel.bytes_per_s for channel in load.channels)
        self._stale.add(member)

    def mark(self, ref: WorkerRef) -> None:
        """What is on this worker has changed, and it has not reported since. One that is not there: no-op."""
        if (member := self._members.get(_holder(ref))) is not None:
            self._stale.add(member)

    def ref(self, role: Role, row: int) -> WorkerRef:
        """Whose row of the snapshot that is, as it was added. Raises KeyError."""
        return self._owners[role, row]

    def rows(self) -> Iterator[tuple[WorkerRow, Facts[float]]]:
        """All workers, and what is known of each in numbers; after `snapshot`."""
        for member in self._members.values():
            yield member.link, member.side.facts(member.row)

    def snapshot(self) -> Snapshot:
        """As of now; what it held before is overwritten."""
        if self._changed:
            self._number()
        else:
            for member in self._stale:
                self._write(member)
        self._stale.clear()
        if self._prefixes is not None and (self._changed or self._prefixes.generation != self._generation):
            self._generation = self._prefixes.generation
            for holder, member in self._members.items():
                member.side.slots[member.row] = self._prefixes.slot(holder)
        self._changed = False
        return self._snapshot

    def ask(
        self, tokens: int, turn: int, keep: WorkerRef | None, spec: SequenceSpec | None, determinism: str = ""
    ) -> Ask:
        """A request in numbers; after `snapshot`. `spec` None: nothing of it is looked for in the directory.

        `determinism`: what a deterministic one was begun with, if it was.
        """
        by_slot = None if spec is None or self._prefixes is None else self._cached(spec, self._prefixes)
        snapshot = self._snapshot
        row = None if keep is None else self._members[_holder(keep)].row
        ask = Ask(tokens, snapshot.prefill.cached(by_slot), snapshot.decode.cached(by_slot), turn, row)
        if spec is None or not spec.deterministic:
            return ask
        bits = [number for (_, said), number in self._bits.items() if determinism in {"", said}]
        others = ~np.isin(snapshot.decode.bits[: len(ask.decode_cached)], bits)
        return replace(ask, bits=bits, decode_cached=np.where(others, 0.0, ask.decode_cached))

    def _cached(self, spec: SequenceSpec, prefixes: PrefixIndex) -> Column | None:
        """Cached tokens by slot. Blocks are named once for a request, and no further than somebody has them."""
        if self._prompts[0] is not spec:
            self._prompts = (spec, {kind: Prompt(spec, kind) for kind in self._kinds})
        found: Column | None = None
        for (_, block_size, _), prompt in self._prompts[1].items():
            if levels := prefixes.leading(prompt):
                found = np.zeros(prefixes.slots + 1) if found is None else found
                spread(levels, block_size, found)
        return found

    def _number(self) -> None:
        """Who is there has changed: places, groups and kinds are given anew, and all rows are written."""
        groups: dict[str, int] = {}
        for order, holder in enumerate(sorted(self._members, key=lambda one: (one.worker_id, str(one.incarnation)))):
            member = self._members[holder]
            member.order, member.group = order, groups.setdefault(member.link.info.fingerprint, len(groups))
        infos = [member.link.info for member in self._members.values()]
        self._kinds = dict.fromkeys(
            (info.fingerprint, info.layout.block_size, info.thinking_chunk > 0) for info in infos
        )
        self._prompts = (None, {})
        self._likes = {fingerprint: like for fingerprint, like in self._likes.items() if fingerprint in groups}
        self._snapshot.groups = len(groups)
        kinds = dict.fromkeys((info.fingerprint, info.determinism) for info in infos if info.determinism)
        self._bits = {kind: number for number, kind in enumerate(kinds, 1)}
        for member in self._members.values():
            info = member.link.info
            member.side.bits[member.row] = self._bits.get((info.fingerprint, info.determinism), 0)
            member.anew = True
            self._write(member)

    def _speed(self, channels: Iterable[float]) -> None:
        """What moving KV costs: as probes of channels found it, over all workers."""
        speeds = [speed for speed in channels if speed > 0]
        if speeds:
            new = len(speeds) / sum(speeds)
            self._byte_s = new if self._byte_s is None else self._byte_s + _NEW_SPEED * (new - self._byte_s)
            self._snapshot.byte_s = self._byte_s

    def _write(self, member: _Member) -> None:
        if not member.anew:
            member.side.put_load(member.row, loaded(member.link))
            return
        member.anew, learned = False, member.learned
        prompts = learned.prompts if member.side is self._snapshot.decode else UNKNOWN
        member.side.put(member.row, facts_of(member.link, member.order, member.group, learned.cost, prompts))


def loaded(link: WorkerRow) -> Loaded:
    """What changes all the time, in numbers."""
    view, block_size = link.view, link.info.layout.block_size
    able, blocks = link.usable and not view.full, view.load.blocks
    busy = blocks.owned + blocks.reserved + view.pending_blocks
    room = view.room * block_size if able else -1
    return able, view.requests, view.dispatched, view.prefill_backlog, room, blocks.available, busy * block_size


def facts_of(
    link: WorkerRow, order: int = 0, group: int = 0, cost: Cost = UNKNOWN, prompts: Cost = UNKNOWN
) -> Facts[float]:
    """A worker in numbers; `prompts`: what they cost at a decode worker, beside what it decodes."""
    layout = link.info.layout
    return Facts(
        *loaded(link),
        group=group,
        order=order,
        token_bytes=layout.layers * layout.layer_token_bytes,
        step_s=cost.step_s,
        token_s=cost.token_s,
        context_s=cost.context_s,
        queued_s=cost.queued_s if link.info.role is Role.PREFILL else prompts.queued_s,
        prompt_step_s=prompts.step_s,
        prompt_token_s=prompts.token_s,
        prompt_context_s=prompts.context_s,
    )


def _holder(ref: WorkerRef) -> Holder:
    """A worker by its life: its address may be told in other words."""
    return Holder(ref.worker_id, ref.incarnation)
