"""Block ownership in one worker's history: one owner at a time, and only cached blocks are shared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tools.history_events import Event, Handoff, Violation

Block = tuple[int, int]
"""Index and generation: the generation changes at each allocation."""
Holder = tuple[str, int, str]
"""Request, attempt, and for which of its reasons a handoff holds it."""
HOLDS = ("reserved", "owned")


@dataclass(slots=True)
class BlockBook:
    """The blocks of one process, event by event."""

    _owner: dict[int, Holder] = field(default_factory=dict)  # may write the block
    _sharers: dict[int, set[Holder]] = field(default_factory=dict)
    _generation: dict[int, int] = field(default_factory=dict)
    _published: set[Block] = field(default_factory=set)
    _held: dict[Holder, tuple[Event, set[Block]]] = field(default_factory=dict)
    _writable: set[Handoff] = field(default_factory=set)  # handoffs with blocks that a peer may write

    def take(self, event: Event) -> Iterator[Violation]:
        """Apply an event and yield its violations."""
        if event.name in HOLDS:
            yield from self._own(event)
            yield from self._share(event)
        elif event.name == "published":
            yield from self._publish(event)
        elif event.name == "let_go":
            yield from self._let_go(event)

    def writable(self, handoff: Handoff, on: bool) -> None:
        """Record whether a peer may write: from the reservation to the commit or the fence."""
        if on:
            self._writable.add(handoff)
        else:
            self._writable.discard(handoff)

    def rename(self, old: Handoff, new: Handoff) -> None:
        """Move the blocks of one handoff to another."""
        for holder in [holder for holder in self._held if holder[:2] == old]:
            event, blocks = self._held.pop(holder)
            renamed = (*new, holder[2])
            self._held[renamed] = (event, blocks)
            for index, _ in blocks:
                if self._owner.get(index) == holder:
                    self._owner[index] = renamed
                elif holder in self._sharers.get(index, ()):
                    self._sharers[index] ^= {holder, renamed}

    def held(self) -> Iterator[tuple[Event, int]]:
        """Yield the first event and the number of blocks of each remaining holder."""
        for event, blocks in self._held.values():
            yield event, len(blocks)

    def _own(self, event: Event) -> Iterator[Violation]:
        holder = _holder(event)
        for index, generation in event.blocks("own"):
            others = {self._owner.get(index), *self._sharers.get(index, ())} - {None}
            if others:
                yield Violation("one_owner", event.at, f"block {index} of {holder} is held by {others}")
            if generation <= self._generation.get(index, 0):
                text = f"block {index} in generation {generation}, after {self._generation[index]}"
                yield Violation("one_owner", event.at, text)
            self._owner[index], self._generation[index] = holder, generation
            self._hold(event, (index, generation))

    def _share(self, event: Event) -> Iterator[Violation]:
        holder = _holder(event)
        for block in event.blocks("shared"):
            if block not in self._published or self._generation.get(block[0]) != block[1]:
                yield Violation("one_owner", event.at, f"block {block} was not published: {holder} cannot share it")
            if self._owner.get(block[0]) == holder or holder in self._sharers.get(block[0], ()):
                yield Violation("one_owner", event.at, f"block {block[0]} is held by {holder} already")
            self._sharers.setdefault(block[0], set()).add(holder)
            self._hold(event, block)

    def _publish(self, event: Event) -> Iterator[Violation]:
        holder = _holder(event)
        for block in event.blocks("own"):
            if self._owner.get(block[0]) != holder or self._generation.get(block[0]) != block[1]:
                yield Violation("one_owner", event.at, f"block {block} is published by {holder}, who does not own it")
            if block in self._published:
                yield Violation("one_owner", event.at, f"block {block} was published before: it must not change")
            self._published.add(block)

    def _hold(self, event: Event, block: Block) -> None:
        self._held.setdefault(_holder(event), (event, set()))[1].add(block)

    def _let_go(self, event: Event) -> Iterator[Violation]:
        holder, gone = _holder(event), {*event.blocks("own"), *event.blocks("shared")}
        _, held = self._held.pop(holder, (event, set()))
        if gone != held:
            text = f"{holder} lets go of {sorted(gone - held)} too, and not of {sorted(held - gone)}"
            yield Violation("let_go", event.at, text)
        if event.handoff in self._writable and not holder[2]:
            yield Violation("let_go", event.at, f"{holder} lets go of blocks that may still be written")
        for index, _ in gone | held:
            if self._owner.get(index) == holder:
                del self._owner[index]
            self._sharers.get(index, set()).discard(holder)


def _holder(event: Event) -> Holder:
    return (*event.handoff, str(event.facts.get("part", "")))
