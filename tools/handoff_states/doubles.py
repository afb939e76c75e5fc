"""Replacements for all that the protocol does not depend on: clocks, logs, metrics, tensors, the engine's arithmetic.

KV of position n is the byte n + 1 in every attempt. 0 is memory that was freed or never written, 255 a torn frame. So a
read before its write, after a free, or of another position is visible in the value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

from baton.core import Finish, FinishReason, HandoffId, KVLayout, SequenceSpec, Token
from baton.engine.block_pool import Allocation, BlockPool, Reservation
from baton.engine.step_result import Counters, SequenceOutput, StepResult
from baton.errors import ChannelBroken

LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=1, block_size=2, dtype="float32")
BLOCKS, CREDITS, MAX_TOKENS = 12, 1, 3
LENGTH = Finish(FinishReason.LENGTH)


class Violation(Exception):
    """An invariant of the design does not hold."""


class Nothing:
    """Accepts every call and returns nothing: logs, metrics and times."""

    stages: Nothing

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _ignore

    def __reduce__(self) -> str:
        return "NOTHING"


def _ignore(*_: Any, **__: Any) -> None: ...


NOTHING = Nothing()
Nothing.stages = NOTHING


class Times(Nothing):
    """The times and fetches of a worker: there are none."""

    def __reduce__(self) -> str:
        return "TIMES"

    def no_spans(self, *_: Any) -> list[Any]:
        return []

    def verify_s(self, handoff: HandoffId) -> float:
        return 0.0

    ended = taken_over = take_spans = late = no_spans


TIMES = Times()


def times(clock: object) -> Times:
    """Return the times of a new job."""
    return TIMES


class Clock:
    """Stands still. `now` is changed only while an expiry is explored."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Still:
    """The module `time` of the transfer code."""

    @staticmethod
    def monotonic() -> float:
        return 0.0


class Unlocked:
    """A condition for one thread. A wait that is not over immediately would never end."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def notify_all(self) -> None: ...

    def wait(self, timeout_s: float | None = None) -> None:
        raise Violation("deadlock: a thread waits for a state that is not there")

    def wait_for(self, ready: Callable[[], Any], timeout_s: float | None = None) -> None:
        if timeout_s is None and not ready():
            self.wait()

    def __reduce__(self) -> str:
        return "UNLOCKED"


UNLOCKED = Unlocked()


class Journal:
    """The history of a worker. On a decode worker a handoff is committed or fenced, once."""

    def __init__(self) -> None:
        self.decided: dict[HandoffId, str] = {}

    def step(self, event: str, handoff: HandoffId, **facts: object) -> None:
        if event in ("committed", "fenced") and self.decided.setdefault(handoff, event) != event:
            raise Violation(f"one commit: {handoff} was {self.decided[handoff]}, and is {event}")

    def ignore(self, *_: object, **__: object) -> None: ...

    tokens = blocks = ignore


class Items(list[Any]):
    """A `queue.SimpleQueue` for one thread."""

    def put(self, item: Any) -> None:
        self.append(item)

    def get(self) -> Any:
        return self.pop(0)

    def empty(self) -> bool:
        return not self


class Tasks(list[Callable[[], None]]):
    """An engine loop, and the executor of reports, which calls immediately."""

    def submit(self, call: Callable[..., None], *args: Any) -> None:
        if args:
            call(*args)
        else:
            self.append(call)

    def progressed(self) -> None: ...


class Slot:
    """A staging slot with one byte per position."""

    def __init__(self) -> None:
        self.content = b""

    def __getitem__(self, span: slice) -> Slot:
        return self


def content(slot: Slot) -> bytes:
    """The digest of a frame is the frame."""
    return slot.content


class Ends:
    """Both ends of a data path. Bytes are in the slot as soon as they are announced."""

    control_socket = pool = None
    ordered = True

    def __init__(self) -> None:
        self.slots = [Slot() for _ in range(CREDITS)]
        self.broken = False

    def slot(self, number: int) -> Slot:
        return self.slots[number % CREDITS]

    def turn(self) -> AbstractContextManager[None]:
        return nullcontext()

    def start(self, number: int, nbytes: int) -> None: ...

    def finish(self, number: int) -> None:
        if self.broken:
            raise ChannelBroken("the bytes were lost")


class Memory:
    """The KV of a worker: one byte per position. `owners` returns the handoff that owns each block now."""

    layout, total_blocks, exposed = LAYOUT, BLOCKS, None

    def __init__(self, owners: Callable[[], dict[int, HandoffId]]) -> None:
        self.cells = [0] * (BLOCKS * LAYOUT.block_size)
        self.user: HandoffId | None = None  # of the access that follows
        self._owners = owners

    def mark(self) -> None: ...

    def settle(self) -> None: ...

    def places(self, blocks: Sequence[int], begin: int, end: int) -> list[int]:
        size = LAYOUT.block_size
        return [blocks[position // size] * size + position % size for position in range(begin, end)]

    def gather(self, layers: range, blocks: Sequence[int], begin: int, end: int, data: Slot) -> None:
        self._check("read", blocks)
        data.content = bytes(self.cells[place] for place in self.places(blocks, begin, end))
        if data.content != bytes(range(begin + 1, end + 1)):
            raise Violation(f"read before it was computed, or after it was freed: {data.content!r}")

    def scatter(self, layers: range, blocks: Sequence[int], begin: int, end: int, data: Slot) -> None:
        self._check("written", blocks)
        for place, value in zip(self.places(blocks, begin, end), data.content, strict=True):
            self.cells[place] = value

    def compute(self, blocks: Sequence[int], begin: int, end: int) -> None:
        for position, place in zip(range(begin, end), self.places(blocks, begin, end), strict=True):
            self.cells[place] = position + 1

    def scrub(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.cells[block * LAYOUT.block_size : (block + 1) * LAYOUT.block_size] = [0] * LAYOUT.block_size

    def _check(self, what: str, blocks: Sequence[int]) -> None:
        owners = self._owners()
        for block in blocks:
            if owners.get(block) != self.user:
                raise Violation(f"one owner: block {block} of {owners.get(block)} is {what} for {self.user}")


class Sequence_:
    """A sequence of the engine."""

    def __init__(self, key: HandoffId, spec: SequenceSpec, allocation: Allocation, computed: int = 0) -> None:
        self.key, self.spec, self.allocation, self.computed = key, spec, allocation, computed
        self.ids = list(spec.known)
        self.held = False


class Engine:
    """Blocks and sequences as the engine has them. Every step computes one sequence. Each
    process samples other tokens.
    """

    counters = Counters()
    backend = SimpleNamespace(device=SimpleNamespace(type="none"))
    layout = LAYOUT

    def __init__(self, number: int) -> None:
        self._number = number
        self.pool = BlockPool(BLOCKS)
        self.pool.on_index = _ignore
        self.pool.history = self.journal = Journal()  # type: ignore[assignment]
        self.kv = Memory(self.owners)
        self.sequences: dict[HandoffId, Sequence_] = {}
        self.reserved: Callable[[], Iterable[tuple[HandoffId, Reservation]]] = list
        self.withdraw: Callable[[Any], None] = _ignore

    def owners(self) -> dict[int, HandoffId]:
        """Return the owner of each block. Raises Violation if a block has two, or if its use is over."""
        found: dict[int, HandoffId] = {}
        held = [(key, one.allocation) for key, one in self.sequences.items()]
        for key, allocation in held + [(key, one.own) for key, one in self.reserved()]:
            for block, generation in zip(allocation.blocks, allocation.generations, strict=True):
                if block in found or self.pool._generation[block] != generation:
                    raise Violation(f"one owner: block {block} of {key} belongs to {found.get(block, 'nothing')}")
                found[block] = key
        return found

    # The interface of the engine

    def watch(self, on_layer: Callable[..., None], on_withdraw: Callable[[Any], None]) -> None:
        """The scheduler's calls are made by the explorer."""

    def validate(self, spec: SequenceSpec) -> None: ...

    def finish_of(self, spec: SequenceSpec) -> Finish | None:
        return LENGTH if len(spec.known) >= MAX_TOKENS else None

    def load(self) -> SimpleNamespace:
        return SimpleNamespace(starved=False)

    def state_of(self, key: HandoffId) -> None: ...

    def reserve(self, tokens: int, prefix: Sequence[bytes] = ()) -> Reservation | None:
        reservation = Reservation.of(self.pool, LAYOUT, tokens + 1, (), 0)
        self.kv.scrub(reservation.blocks if reservation is not None else ())
        return reservation

    def submit(self, key: HandoffId, spec: SequenceSpec, *, hold: bool = False) -> Sequence[int]:
        allocation = self.pool.allocate(LAYOUT.blocks_for(len(spec) + 1))
        assert allocation is not None
        self.sequences[key] = Sequence_(key, spec, allocation)
        return ()

    def adopt(self, key: HandoffId, spec: SequenceSpec, reservation: Reservation, thinking: None) -> Sequence[int]:
        blocks, known = reservation.blocks, len(spec) - 1
        found = [self.kv.cells[place] for place in self.kv.places(blocks, 0, known)]
        if found != list(range(1, known + 1)):
            raise Violation(f"decoded before its KV was there: {found}")
        self.sequences[key] = Sequence_(key, spec, reservation.activate(), known)
        return ()

    def held(self, key: HandoffId) -> Allocation:
        return self.sequences[key].allocation

    def rename(self, old: HandoffId, new: HandoffId) -> None:
        sequence = self.sequences[new] = self.sequences.pop(old)
        sequence.key = new

    def release(self, key: HandoffId) -> None:
        if (sequence := self.sequences.get(key)) is not None:
            self.withdraw(sequence)
            del self.sequences[key]
            self.kv.scrub(sequence.allocation.blocks)
            sequence.allocation.release()

    def holdings(self) -> Iterator[tuple[HandoffId, Allocation]]:
        return ((key, one.allocation) for key, one in self.sequences.items())

    # Steps

    def step(self, *, hold: bool) -> StepResult | None:
        """Compute one token of the first sequence that has work. Return None if there is no work."""
        for key, sequence in self.sequences.items():
            if not sequence.held:
                end = len(sequence.spec.prompt) + len(sequence.ids)
                self.kv.compute(sequence.allocation.blocks, sequence.computed, end)
                sequence.computed = end
                made = Token(len(sequence.ids), 100 * self._number + len(sequence.ids), "")
                sequence.ids.append(made.token_id)
                finish = LENGTH if len(sequence.ids) >= MAX_TOKENS else None
                sequence.held = hold
                if finish is not None:
                    self.release(key)
                return StepResult(outputs=[SequenceOutput(key, [made], finish)], computed=1)
        return None


@contextmanager
def expired(clock: Clock) -> Iterator[None]:
    """Let every deadline be over."""
    clock.now = 1e9
    yield
    clock.now = 0.0
