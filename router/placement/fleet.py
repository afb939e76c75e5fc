"""The fleet: keeps the snapshot of this router's workers up to date, and learns their step costs from their reports.

Every change to a worker calls `touch` or `mark`, and its row is rewritten before the next choice.
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

_NEW_SPEED = 0.1  # weight of the latest report of channel speeds
Kind = tuple[str, int, bool]  # block hashes depend on it: fingerprint, block size, and whether the model thinks


class WorkerRow(Protocol):
    """The part of `router.workers.stream.WorkerStream` that the fleet reads."""

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
    channels: tuple[Channel, ...] = ()
    order: int = 0
    group: int = 0
    rewrite: bool = True  # more than the load has changed


class Prompt:
    """The hashes of a request's full blocks for one kind of worker, each computed on first use."""

    def __init__(self, spec: SequenceSpec, kind: Kind) -> None:
        fingerprint, block_size, thinks = kind
        self._rest = block_hashes_of(spec, fingerprint, block_size, thinks=thinks)
        self._computed: list[bytes] = []

    def __iter__(self) -> Iterator[bytes]:
        yield from self._computed
        for digest in self._rest:
            self._computed.append(digest[:NAME_BYTES])
            yield self._computed[-1]


class Fleet:
    """Maintains `snapshot`. `prefixes` finds cached blocks. `slo_itl_s` is the ITL limit of policy `predicted`."""

    def __init__(self, prefixes: PrefixIndex | None = None, slo_itl_s: float = np.inf) -> None:
        self._snapshot = Snapshot(slo_itl_s=slo_itl_s)
        self._prefixes = prefixes
        self._generation = 0  # of `prefixes`, when slots were last written
        self._members: dict[Holder, _Member] = {}
        self._owners: dict[tuple[Role, int], WorkerRef] = {}
        self._changed = False  # a worker was added or dropped: all rows must be written
        self._stale: set[_Member] = set()  # their rows must be written
        self._kinds: dict[Kind, None] = {}
        self._bits: dict[tuple[str, str], int] = {}  # numbers from 1 by fingerprint and determinism
        self._models: dict[str, CostModels] = {}  # by fingerprint
        self._byte_s: float | None = None
        self._prompts: tuple[SequenceSpec | None, dict[Kind, Prompt]] = (None, {})  # of the last request

    def add(self, link: WorkerRow) -> None:
        role = link.info.role
        side = self._snapshot.prefill if role is Role.PREFILL else self._snapshot.decode
        learned = WorkerCostModel(role, self._models.setdefault(link.info.fingerprint, CostModels()))
        member = self._members[_holder(link.info.ref)] = _Member(link, side, side.add(), learned)
        self._owners[role, member.row] = link.info.ref
        self._changed = True
        self.touch(link.info.ref)

    def drop(self, ref: WorkerRef) -> None:
        member = self._members.pop(_holder(ref))
        self._stale.discard(member)
        member.side.drop(member.row)
        del self._owners[member.link.info.role, member.row]
        self._changed = True

    def touch(self, ref: WorkerRef) -> None:
        """Mark a worker as changed after a possible report. Ignored if the worker is not in the fleet."""
        member = self._members.get(_holder(ref))
        if member is None:
            return
        load = member.link.view.load
        if member.learned.update(load):
            member.rewrite = True
            if load.channels is not member.channels:
                member.channels = load.channels
                self._speed(channel.bytes_per_s for channel in load.channels)
        self._stale.add(member)

    def mark(self, ref: WorkerRef) -> None:
        """Mark a worker's dispatched load as changed. Ignored if the worker is not in the fleet."""
        if (member := self._members.get(_holder(ref))) is not None:
            self._stale.add(member)

    def ref(self, role: Role, row: int) -> WorkerRef:
        """Return the worker of a row, as it was added. Raises KeyError."""
        return self._owners[role, row]

    def rows(self) -> Iterator[tuple[int, WorkerRow, Facts[float]]]:
        """Yield the rows of all workers, these workers, and their facts. Call `snapshot` first."""
        for member in self._members.values():
            yield member.row, member.link, member.side.facts(member.row)

    def facts(self, ref: WorkerRef) -> Facts[float]:
        """Return the facts of a worker as of the last `snapshot`."""
        member = self._members[_holder(ref)]
        return member.side.facts(member.row)

    @property
    def byte_s(self) -> float:
        return self._snapshot.byte_s

    def hide(self, refs: Iterable[WorkerRef]) -> None:
        """Leave these workers out of choices until the next `snapshot`."""
        for ref in refs:
            if (member := self._members.get(_holder(ref))) is not None:
                member.side.hide(member.row)
                self._stale.add(member)

    def snapshot(self) -> Snapshot:
        """Return the current snapshot, which overwrites the previous one."""
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
        """Return a request in numbers. Call `snapshot` first. `spec` None means no prefix lookup. `determinism` is the
        fingerprint that a deterministic request began with, if any.
        """
        by_slot = None if spec is None or self._prefixes is None else self._cached(spec, self._prefixes)
        snapshot = self._snapshot
        row = None if keep is None else self._members[_holder(keep)].row
        ask = Ask(tokens, snapshot.prefill.cached(by_slot), snapshot.decode.cached(by_slot), turn, row)
        if spec is None or not spec.deterministic:
            return ask
        bits = [number for (_, reported), number in self._bits.items() if determinism in {"", reported}]
        others = ~np.isin(snapshot.decode.bits[: len(ask.decode_cached)], bits)
        return replace(ask, bits=bits, decode_cached=np.where(others, 0.0, ask.decode_cached))

    def _cached(self, spec: SequenceSpec, prefixes: PrefixIndex) -> Column | None:
        """Return cached tokens by slot. Blocks are hashed once per request, and only as far as a worker has them."""
        if self._prompts[0] is not spec:
            self._prompts = (spec, {kind: Prompt(spec, kind) for kind in self._kinds})
        found: Column | None = None
        for (_, block_size, _), prompt in self._prompts[1].items():
            if levels := prefixes.leading(prompt):
                found = np.zeros(prefixes.slots + 1) if found is None else found
                spread(levels, block_size, found)
        return found

    def _number(self) -> None:
        """Renumber workers, groups and kinds, and write all rows, after a worker was added or dropped."""
        groups: dict[str, int] = {}
        for order, holder in enumerate(sorted(self._members, key=lambda one: (one.worker_id, str(one.incarnation)))):
            member = self._members[holder]
            member.order, member.group = order, groups.setdefault(member.link.info.fingerprint, len(groups))
        infos = [member.link.info for member in self._members.values()]
        kinds = ((info.fingerprint, info.layout.block_size, info.thinking_chunk > 0) for info in infos)
        self._kinds = dict.fromkeys(kinds)
        self._prompts = (None, {})
        self._models = {fingerprint: models for fingerprint, models in self._models.items() if fingerprint in groups}
        self._snapshot.groups = len(groups)
        compatible = dict.fromkeys((info.fingerprint, info.determinism) for info in infos if info.determinism)
        self._bits = {key: number for number, key in enumerate(compatible, 1)}
        for member in self._members.values():
            info = member.link.info
            member.side.bits[member.row] = self._bits.get((info.fingerprint, info.determinism), 0)
            member.rewrite = True
            self._write(member)

    def _speed(self, channels: Iterable[float]) -> None:
        """Update the cost of moving KV from the speeds that channel probes measured."""
        speeds = [speed for speed in channels if speed > 0]
        if speeds:
            new = len(speeds) / sum(speeds)
            self._byte_s = new if self._byte_s is None else self._byte_s + _NEW_SPEED * (new - self._byte_s)
            self._snapshot.byte_s = self._byte_s

    def _write(self, member: _Member) -> None:
        if not member.rewrite:
            member.side.put_load(member.row, loaded(member.link))
            return
        member.rewrite, learned = False, member.learned
        prompts = learned.prompts if member.side is self._snapshot.decode else UNKNOWN
        member.side.put(member.row, facts_of(member.link, member.order, member.group, learned.cost, prompts))


def loaded(link: WorkerRow) -> Loaded:
    """Return the facts that change with every report or dispatch."""
    view, block_size = link.view, link.info.layout.block_size
    able, blocks = link.usable and not view.full, view.load.blocks
    busy = blocks.owned + blocks.reserved + view.pending_blocks
    capacity = view.capacity_blocks * block_size if able else -1
    return able, view.requests, view.dispatched, view.prefill_backlog, capacity, blocks.available, busy * block_size


def facts_of(
    link: WorkerRow, order: int = 0, group: int = 0, cost: Cost = UNKNOWN, prompts: Cost = UNKNOWN
) -> Facts[float]:
    """Return a worker's facts. `prompts` is the cost of prompts on a decode worker, on top of its decode steps."""
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
    """Identify a worker by id and incarnation, because its address may be spelled in several ways."""
    return Holder(ref.worker_id, ref.incarnation)
