"""Models that think about their prompts (Thinking States, arXiv 2602.08332), on the engine's side.

A sequence is cut into chunks of `chunk_size` tokens. A thought follows each chunk, and determines the state for the
next chunk; chunk 0 has none. Chunks that are not thought about count as empty thoughts.

A forward of many chunks assumes empty thoughts where none are made yet. Then the thinking block (`models/thinking.py`)
reads all whole chunks. All is right up to the first non-empty thought; the rest is computed again, with its state.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import torch
from torch import Tensor

from baton.core import SequenceSpec, SequenceState, ThinkingState, Thought
from baton.engine.batch import Injection
from baton.engine.determinism.planner import VerifiedProgress
from baton.engine.models.thinking import Thinker
from baton.engine.sequence import UNLIMITED, ScheduledSequence, SequencePolicy, VerifyWork
from baton.engine.sequence import Sequence as Progress

ALL = UNLIMITED  # also more than the chunks of any sequence
# Tokens that a forward computes ahead, by the mean distance of the thoughts so far. Measured by benchmarks/thinking.py.
REACH = 1.5


class Notes:
    """Thoughts about the chunks of at most `most` cached blocks. A block without a note counts as not cached."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._notes: OrderedDict[bytes, tuple[tuple[int, ...], ...]] = OrderedDict()

    def put(self, block_hash: bytes, thoughts: Sequence[tuple[int, ...]]) -> None:
        self._notes[block_hash] = tuple(thoughts)
        self._notes.move_to_end(block_hash)
        if len(self._notes) > self._most:
            self._notes.popitem(last=False)

    def known(self, hashes: Iterable[bytes]) -> Iterator[bytes]:
        return takewhile(self._notes.__contains__, hashes)

    def thoughts(self, hashes: Iterable[bytes]) -> list[tuple[int, ...]]:
        """Return the thoughts about consecutive blocks that are `known`, and keep their notes for longer."""
        found = list[tuple[int, ...]]()
        for block_hash in hashes:
            found += self._notes[block_hash]
            self._notes.move_to_end(block_hash)
        return found


@dataclass(slots=True, eq=False)
class Thinking(SequencePolicy):
    """Thoughts of one sequence. A forward assumes empty thoughts for up to `ahead` tokens beyond the open chunk."""

    notes: Notes
    chunk_size: int
    until: int  # number of chunks that are thought about: those of the prompt, or ALL
    shared: int  # leading tokens with KV that others may use; later KV was computed without thoughts
    ahead: int = ALL  # the open chunk is that of the next position
    least: int | None = None  # smallest `ahead`; if set, `ahead` follows the distances of thoughts
    distances: tuple[int, int] = (0, 0)  # tokens computed, and forwards that a thought stopped, while `ahead` follows
    thoughts: list[tuple[int, ...]] = field(default_factory=list)  # made so far
    reported: int = 0  # thoughts that `new_thoughts` has returned
    rows: Tensor | None = None  # hidden rows of the open chunk so far, [offset, hidden_size], if it is thought about
    carried: tuple[int, Tensor] | None = None  # number and state of the open chunk at the handoff

    @property
    def settled(self) -> bool:
        return len(self.thoughts) >= self.until

    @property
    def last(self) -> int:
        """Number of the last chunk with a state that may differ from that of an empty thought."""
        return max(len(self.thoughts), self.carried[0] if self.carried is not None else 0)

    @property
    def shareable(self) -> int:
        return self.shared

    @property
    def cacheable(self) -> int:
        return self.shared

    def most(self, computed: int) -> int:
        if self.settled:
            return ALL
        return self.chunk_size - computed % self.chunk_size + self.ahead

    def update_ahead(self, tokens: int, *, stopped: bool) -> None:
        """Adapt `ahead` to a forward that computed `tokens` tokens. If `stopped`, a thought prevented more."""
        if self.least is None:
            return
        computed, stops = self.distances
        self.distances = computed + tokens, stops + stopped
        expected = int(REACH * (computed + tokens) / (stops + 1)) if stopped else 2 * self.ahead
        self.ahead = min(ALL, max(self.least, expected))

    def usable(self, hashes: Iterable[bytes]) -> Iterator[bytes]:
        return self.notes.known(hashes)

    def admitted(self, sequence: Progress, block_size: int) -> None:
        """Start over behind the cached blocks, with the thoughts about them."""
        blocks, chain = sequence.computed // block_size, sequence.chain
        hashes = [] if chain is None else [chain.digest(block) for block in range(blocks)]
        self.thoughts[:], self.rows, self.carried = self.notes.thoughts(hashes), None, None

    def published(self, hashes: Sequence[bytes], first: int, block_size: int) -> None:
        chunks = block_size // self.chunk_size
        for block, block_hash in enumerate(hashes, first):
            # Chunks that are not thought about have no entry, so that all sequences note the same.
            self.notes.put(block_hash, self.thoughts[block * chunks : (block + 1) * chunks])

    def new_thoughts(self) -> list[Thought]:
        found = [Thought(chunk, self.thoughts[chunk]) for chunk in range(self.reported, len(self.thoughts))]
        self.reported = max(self.reported, len(self.thoughts))
        return found


def thinking_of(sequence: Progress) -> Thinking:
    """Return the progress of a sequence of a model that thinks."""
    thinking = sequence.policy(Thinking)
    assert thinking is not None
    return thinking


class Thoughts:
    """Thinking of one engine. It reads and writes the tensors of `Thinking`."""

    def __init__(self, thinker: Thinker, total_blocks: int) -> None:
        self._thinker, self._dtype, self._notes = thinker, thinker.zeros.dtype, Notes(total_blocks)
        self._size, self._width = thinker.config.chunk_size, thinker.hidden_size

    def begin(self, spec: SequenceSpec) -> Thinking:
        mode, prompt = self._thinker.mode, len(spec.prompt)
        if mode == "off":
            return Thinking(self._notes, self._size, 0, ALL)
        until, shared = (ALL, ALL) if spec.think_while_decoding else (prompt // self._size, prompt)
        if mode == "sequential" or (mode == "fast" and self._thinker.unlimited):
            return Thinking(self._notes, self._size, until, shared, 0 if mode == "sequential" else ALL)
        cheap = self._thinker.cheap_rows
        return Thinking(self._notes, self._size, until, shared, cheap, cheap if mode == "auto" else 1)

    def adopt(self, spec: SequenceSpec, carried: SequenceState | None) -> Thinking:
        """Return progress with KV from elsewhere. Raises ValueError, naming the mismatch, if `carried` does not fit."""
        if not isinstance(carried, ThinkingState):
            raise ValueError("the model thinks, but the KV was sent without a thinking state")
        thinking, end = self.begin(spec), len(spec) - 1
        chunk, offset = divmod(end, self._size)
        continues = thinking.until > chunk
        facts = {
            "thinker": (carried.thinker, self._thinker.fingerprint),
            "chunk": (carried.chunk, chunk),
            "offset": (carried.offset, offset),
            "state": (len(carried.state), self._bytes(self._size)),
            "rows": (len(carried.rows), self._bytes(offset) if continues else 0),
            "thoughts": (len(carried.thoughts), min(chunk, thinking.until)),
        }
        if wrong := [f"{name} {given}, not {right}" for name, (given, right) in facts.items() if given != right]:
            raise ValueError(f"the thinking state does not fit: {'; '.join(wrong)}")
        thinking.thoughts[:], thinking.reported = carried.thoughts, len(carried.thoughts)
        thinking.carried = (chunk, self._tensor(carried.state))
        thinking.rows = self._tensor(carried.rows) if continues and offset else None
        return thinking

    def state(self, sequence: Progress) -> ThinkingState:
        """Return the thinking state that belongs to the KV of the computed positions, or of the final ones of a
        deterministic sequence, whose candidates do not move.
        """
        thinking, progress = thinking_of(sequence), sequence.policy(VerifiedProgress)
        chunk, offset = divmod(sequence.computed if progress is None else progress.final, self._size)
        rows = b"" if thinking.rows is None else _raw(thinking.rows)
        state = _raw(self._state(thinking, chunk))
        return ThinkingState(self._thinker.fingerprint, chunk, offset, state, rows, tuple(thinking.thoughts))

    def inject(self, work: Sequence[ScheduledSequence]) -> Injection:
        states, wanted, at = list[torch.Tensor](), list[int](), 0
        for item in work:
            sequence, thinking = item.sequence, thinking_of(item.sequence)
            states += self._states(thinking, sequence.computed, item.count)
            wanted += range(at, at + self._read(thinking, sequence.computed, item.count))
            at += item.count
        rows = torch.tensor(wanted, device=self._thinker.zeros.device) if wanted else None
        return Injection(torch.cat(states), rows)

    def inject_fixed(self, windows: Sequence[VerifyWork], rows: int) -> Injection:
        """Return the injection for a forward of `rows` rows. On the grid it wants all hidden rows, or none."""
        states = [piece for w in windows for piece in self._states(thinking_of(w.sequence), w.start, w.size)]
        missing = rows - sum(window.size for window in windows)
        states += [self._thinker.zeros.new_zeros(missing, self._width)] * (missing > 0)
        thinks = windows[0].on_grid and not thinking_of(windows[0].sequence).settled
        return Injection(torch.cat(states), torch.arange(rows, device=states[0].device) if thinks else None)

    def _states(self, thinking: Thinking, start: int, count: int) -> list[Tensor]:
        size, end, pieces = self._size, start + count, list[torch.Tensor]()
        while start < end and start // size <= thinking.last:
            stop = min(end, (start // size + 1) * size)
            pieces.append(self._state(thinking, start // size)[start % size : start % size + stop - start])
            start = stop
        if start < end:
            offset, trivial = start % size, self._thinker.state(())
            times = -(-(offset + end - start) // size)
            pieces.append((trivial if times == 1 else trivial.repeat(times, 1))[offset : offset + end - start])
        return pieces

    def _state(self, thinking: Thinking, chunk: int) -> Tensor:
        """Return the state of a chunk, [chunk_size, hidden_size]."""
        if thinking.carried is not None and thinking.carried[0] == chunk:
            return thinking.carried[1]
        if chunk == 0:
            return self._thinker.zeros
        return self._thinker.state(thinking.thoughts[chunk - 1] if chunk <= len(thinking.thoughts) else ())

    def _read(self, thinking: Thinking, start: int, count: int) -> int:
        """Return how many of these positions, from the first on, are in chunks that are thought about."""
        return max(0, min(start + count, thinking.until * self._size) - start)

    def settle(self, work: Sequence[ScheduledSequence], injection: Injection) -> None:
        """Think about the whole chunks of an ordinary batch. Reduce the `count` of work with wrong assumptions."""
        if injection.hidden is None:
            return
        at, chunks = 0, list[torch.Tensor]()
        read: list[tuple[ScheduledSequence, Tensor]] = []
        for item in work:
            thinking = thinking_of(item.sequence)
            if count := self._read(thinking, item.sequence.computed, item.count):
                new = injection.hidden[at : at + count]
                at += count
                rows = new if thinking.rows is None else torch.cat((thinking.rows, new))
                chunks.append(rows[: len(rows) // self._size * self._size])
                read.append((item, rows))
        whole = torch.cat(chunks).view(-1, self._size, self._width)
        first = iter(self._thinker.first_tokens(whole) if len(whole) else [])
        for item, rows in read:
            self._take(item, rows, [next(first) for _ in range(len(rows) // self._size)])

    def _take(self, item: ScheduledSequence, rows: Tensor, first: list[int]) -> None:
        """Think about one sequence: hidden `rows` from the open chunk's start, first tokens of thoughts in `first`."""
        sequence, thinking = item.sequence, thinking_of(item.sequence)
        begin = sequence.computed // self._size * self._size
        if stopped := self._think(thinking, rows, first):
            item.count = min(item.count, len(thinking.thoughts) * self._size - sequence.computed)
        thinking.update_ahead(item.count, stopped=stopped)
        computed = sequence.computed + item.count
        chunk = computed // self._size
        left = rows[chunk * self._size - begin : computed - begin]
        thinking.rows = left.clone() if len(left) and chunk < thinking.until else None

    def settle_fixed(self, window: VerifyWork, injection: Injection) -> bool:
        """Think after a grid forward. Return False if it must run again; rows before the thought keep their bits."""
        if injection.hidden is None:
            return True
        thinking, end, begin = thinking_of(window.sequence), window.start + window.count, window.start // self._size
        first = self._thinker.first_tokens(injection.hidden.view(-1, self._size, self._width))
        known, whole = len(thinking.thoughts) - begin, min(end // self._size, thinking.until) - begin
        stopped = self._think(thinking, injection.hidden[known * self._size :], first[known:whole])
        return not stopped or len(thinking.thoughts) * self._size >= end

    def _think(self, thinking: Thinking, rows: Tensor, first: list[int]) -> bool:
        """Note thoughts about these chunks, up to the first non-empty one. Return whether there is one."""
        for number, token in enumerate(first):
            if token != self._thinker.config.eos:
                chunk = rows[number * self._size : (number + 1) * self._size]
                thinking.thoughts.append(self._thinker.think(chunk, token))
                return True
            thinking.thoughts.append(())
        return False

    def _bytes(self, rows: int) -> int:
        return rows * self._width * self._dtype.itemsize

    def _tensor(self, raw: bytes) -> Tensor:
        found = torch.frombuffer(bytearray(raw), dtype=self._dtype).view(-1, self._width)
        return found.to(self._thinker.zeros.device)


def _raw(rows: Tensor) -> bytes:
    return rows.contiguous().view(torch.uint8).cpu().numpy().tobytes()
