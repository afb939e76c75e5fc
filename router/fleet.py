"""The snapshot of this router's workers, kept up to date row by row, and what their steps cost, fitted on the way.

Whoever changes what is known of a worker says so (`touch`); its row is written again before the next choice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from baton.core import Load, Pace, Role, SequenceSpec, WorkerInfo, WorkerRef
from baton.engine.prefix import Chain, scope_key
from baton.ledger.prefix_map import Holder, PrefixMap
from router.cost import UNKNOWN, Cost, StepFit
from router.snapshot import Ask, Column, Facts, Side, Snapshot, spread
from router.view import WorkerView

_STEPS = 8  # of a worker, after which its report is taken in though nobody chooses: else they become one observation
_NEW_SPEED = 0.1  # what the last report of channels counts


class Link(Protocol):
    """What the fleet reads of a `router.link.WorkerLink`."""

    @property
    def info(self) -> WorkerInfo: ...

    @property
    def view(self) -> WorkerView: ...

    @property
    def usable(self) -> bool: ...


@dataclass(slots=True, eq=False)
class _Member:
    link: Link
    side: Side
    row: int
    order: int = 0
    group: int = 0
    seen: Load = field(default_factory=Load)  # the last report that was taken in
    fit: StepFit = field(default_factory=StepFit)


class Fleet:
    """Feeds `snapshot`. `prefixes` says who has which blocks; `slo_itl_s` is what `predicted` keeps to."""

    def __init__(self, prefixes: PrefixMap | None = None, slo_itl_s: float = np.inf) -> None:
        self._snapshot = Snapshot(slo_itl_s=slo_itl_s)
        self._prefixes = prefixes
        self._generation = 0  # of the slots
        self._members: dict[WorkerRef, _Member] = {}
        self._owners: dict[tuple[Role, int], WorkerRef] = {}
        self._stale: dict[WorkerRef, None] = {}
        self._changed = False  # who is there
        self._kinds: dict[tuple[str, int], None] = {}  # fingerprints and block sizes
        self._likes: dict[tuple[Role, str], StepFit] = {}
        self._byte_s: float | None = None
        self._chains: tuple[SequenceSpec | None, dict[tuple[str, int], Chain]] = (None, {})  # of the last request

    def add(self, link: Link) -> None:
        """A worker is there."""
        role = link.info.role
        side = self._snapshot.prefill if role is Role.PREFILL else self._snapshot.decode
        member = self._members[link.info.ref] = _Member(link, side, side.add())
        self._owners[role, member.row] = link.info.ref
        self._changed = True

    def drop(self, ref: WorkerRef) -> None:
        """A worker is gone."""
        member = self._members.pop(ref)
        member.side.drop(member.row)
        del self._owners[member.link.info.role, member.row]
        self._stale.pop(ref, None)
        self._changed = True

    def touch(self, ref: WorkerRef) -> None:
        """What is known of this worker has changed. One that is not there: no-op."""
        member = self._members.get(ref)
        if member is None:
            return
        self._stale[ref] = None
        if member.link.view.load.step >= member.seen.step + _STEPS:
            self._take_in(member)

    def ref(self, role: Role, row: int) -> WorkerRef:
        """Whose row of the snapshot that is. Raises KeyError."""
        return self._owners[role, row]

    def snapshot(self) -> Snapshot:
        """As of now; what it held before is overwritten."""
        if self._changed:
            self._number()
        if self._prefixes is not None and (self._changed or self._prefixes.generation != self._generation):
            self._generation = self._prefixes.generation
            for ref, member in self._members.items():
                member.side.slots[member.row] = self._prefixes.slot(Holder(ref.worker_id, ref.incarnation))
        self._changed = False
        for ref in self._stale:
            self._write(self._members[ref])
        self._stale.clear()
        return self._snapshot

    def ask(self, tokens: int, turn: int, keep: WorkerRef | None, spec: SequenceSpec | None) -> Ask:
        """A request in numbers; after `snapshot`. `spec` None: nothing of it is looked for in the directory."""
        by_slot = None if spec is None or self._prefixes is None else self._cached(spec, self._prefixes)
        snapshot = self._snapshot
        row = None if keep is None else self._members[keep].row
        return Ask(tokens, snapshot.prefill.cached(by_slot), snapshot.decode.cached(by_slot), turn, row)

    def _cached(self, spec: SequenceSpec, prefixes: PrefixMap) -> Column | None:
        """Cached tokens by slot. Blocks are named once for a request, and no further than somebody has them."""
        if self._chains[0] is not spec:
            self._chains = (spec, {})
        found: Column | None = None
        for kind in self._kinds:
            chain, size = self._chains[1].get(kind), kind[1]
            if chain is None:
                chain = self._chains[1][kind] = Chain(scope_key(kind[0], spec.cache_scope), spec.tokens, size)
            levels = prefixes.leading(map(chain.digest, range((len(spec) - 1) // size)))
            if levels:
                found = np.zeros(prefixes.slots + 1) if found is None else found
                spread(levels, size, found)
        return found

    def _number(self) -> None:
        """Who is there has changed: places, groups and kinds are given anew."""
        groups: dict[str, int] = {}
        for order, ref in enumerate(sorted(self._members, key=lambda ref: (ref.worker_id, str(ref.incarnation)))):
            member = self._members[ref]
            member.order, member.group = order, groups.setdefault(member.link.info.fingerprint, len(groups))
        infos = [member.link.info for member in self._members.values()]
        self._kinds = dict.fromkeys((info.fingerprint, info.layout.block_size) for info in infos)
        self._likes = {like: fit for like, fit in self._likes.items() if like[1] in groups}
        self._snapshot.groups = len(groups)
        self._stale = dict.fromkeys(self._members)

    def _take_in(self, member: _Member) -> None:
        """Fit to what came since the last report."""
        load, info = member.link.view.load, member.link.info
        if load is member.seen or load.step < member.seen.step:
            return
        news = _pace(load, info.role).since(_pace(member.seen, info.role))
        like = self._likes.setdefault((info.role, info.fingerprint), StepFit())
        if news.steps > 0:
            member.fit.observe(news)
            like.observe(news)
            like.cost()
        else:
            member.fit.idle()
        if load.channels is not member.seen.channels:
            self._speed(channel.bytes_per_s for channel in load.channels)
        member.seen = load

    def _speed(self, channels: Iterable[float]) -> None:
        """What moving KV costs: as probes of channels found it, over all workers."""
        speeds = [speed for speed in channels if speed > 0]
        if speeds:
            new = len(speeds) / sum(speeds)
            self._byte_s = new if self._byte_s is None else self._byte_s + _NEW_SPEED * (new - self._byte_s)
            self._snapshot.byte_s = self._byte_s

    def _write(self, member: _Member) -> None:
        self._take_in(member)
        info = member.link.info
        cost = member.fit.cost(self._likes.get((info.role, info.fingerprint)))
        member.side.put(member.row, facts_of(member.link, member.order, member.group, cost))


def facts_of(link: Link, order: int = 0, group: int = 0, cost: Cost = UNKNOWN) -> Facts[float]:
    """A worker in numbers."""
    view, layout = link.view, link.info.layout
    blocks = view.load.blocks
    busy = blocks.owned + blocks.reserved + view.pending_blocks
    return Facts(
        able=float(link.usable and not view.full),
        group=group,
        order=order,
        requests=view.requests,
        dispatched=view.dispatched,
        backlog=view.prefill_backlog,
        room=blocks.available - view.pending_blocks - view.load.running if view.dispatched else np.inf,
        available=blocks.available,
        block_size=layout.block_size,
        kv_tokens=busy * layout.block_size,
        token_bytes=layout.layers * layout.layer_token_bytes,
        step_s=cost.step_s,
        token_s=cost.token_s,
        context_s=cost.context_s,
        queued_s=cost.queued_s,
    )


def _pace(load: Load, role: Role) -> Pace:
    return load.prefill_pace if role is Role.PREFILL else load.decode_pace
