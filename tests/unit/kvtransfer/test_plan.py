"""After any computation and withdrawal, frames tile the KV exactly, and the receiver accepts them."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.core import KVLayout
from kvtransfer.frames import Coverage, FrameSpec, Progress
from tests.unit.kvtransfer.support import layouts


def cells(frame: FrameSpec) -> set[tuple[int, int]]:
    return set(itertools.product(frame.layers, range(frame.begin, frame.end)))


class Handoffs(RuleBasedStateMachine):
    """An engine that computes, forgets and recomputes, a link that sends when it can, and a receiver that checks."""

    @initialize(layout=layouts, skip=st.integers(0, 9), due=st.integers(1, 20), data=st.data())
    def begin(self, layout: KVLayout, skip: int, due: int, data) -> None:
        self.layout, self.skip, self.tokens = layout, skip, skip + due
        token = layout.layer_token_bytes
        self.frame_size = data.draw(st.integers(1, 40) | st.integers(1, 40 * token), "frame_size")
        self.progress = Progress(layout, skip, self.tokens)
        self.coverage = Coverage(layout, skip, self.tokens)
        self.sent: set[tuple[int, int]] = set()
        self.final = [0] * layout.layers  # by layer: end of the positions in its blocks now
        self.told = [skip] * layout.layers  # by layer: end of the positions reported or sent
        self.start = self.stop = self.layer = 0  # the chunk that is being computed, and its next layer
        self.picked: FrameSpec | None = None  # chosen by the link, but not read yet

    @rule(size=st.integers(1, 12), layers=st.integers(1, 6))
    def compute(self, size: int, layers: int) -> None:
        """Compute some layers of the current chunk, or of the next one."""
        if self.layer == 0:
            self.stop = min(self.start + size, self.tokens)
        self.layer = min(self.layer + layers, self.layout.layers)
        self.final[: self.layer] = [self.stop] * self.layer
        self.told[: self.layer] = [max(told, self.stop) for told in self.told[: self.layer]]
        self.progress.computed(self.layer, self.stop)
        if self.layer == self.layout.layers:
            self.start, self.layer = self.stop, 0

    @rule(size=st.integers(1, 5))
    def past_the_end(self, size: int) -> None:
        """Tokens after the prompt are never sent."""
        if self.start == self.tokens:
            self.progress.computed(self.layout.layers, self.tokens + size)

    @rule(due=st.integers(1, 30))
    def pick(self, due: int) -> None:
        at_least = due * self.layout.layer_token_bytes
        self.picked = self.progress.next(self.frame_size, at_least)
        if self.picked is not None:
            token = self.layout.layer_token_bytes
            more = self.picked.nbytes + (self.picked.end - self.picked.begin) * token
            assert self.picked.nbytes >= at_least or more > self.frame_size

    @precondition(lambda self: self.picked is not None)
    @rule(lost_while_read=st.booleans(), again_from=st.floats(0, 1))
    def send(self, lost_while_read: bool, again_from: float) -> None:
        """Read and announce the chosen frame unless it was withdrawn, maybe with a withdrawal between the two."""
        assert self.picked is not None
        offered = self.progress.offers(self.picked)
        assert offered == all(self.picked.end <= self.told[layer] for layer in self.picked.layers)
        if offered:
            assert all(position < self.final[layer] for layer, position in cells(self.picked))
            if lost_while_read:
                self.withdraw(again_from)
            self.take(self.picked)
            assert not self.progress.offers(self.picked)
        self.picked = None

    @rule(again_from=st.floats(0, 1))
    def withdraw(self, again_from: float) -> None:
        """Free the blocks. The next chunk begins at an earlier position and has at least one token, like any prompt."""
        self.progress.withdrawn()
        self.start, self.layer = min(int(again_from * self.start), self.tokens - 1), 0
        self.final = [self.start] * self.layout.layers
        self.told = [self.end_of(layer) for layer in range(self.layout.layers)]
        assert self.progress.next(self.frame_size) is None

    def take(self, frame: FrameSpec) -> None:
        assert cells(frame)
        assert not cells(frame) & self.sent
        assert frame.nbytes == len(cells(frame)) * self.layout.layer_token_bytes
        assert frame.nbytes <= self.frame_size or len(cells(frame)) == 1
        assert self.coverage.accepts(frame)
        assert not self.coverage.accepts(frame)
        self.progress.took(frame)
        self.sent |= cells(frame)

    def end_of(self, layer: int) -> int:
        return self.skip + sum(sent == layer for sent, _ in self.sent)

    @property
    def due(self) -> set[tuple[int, int]]:
        return set(itertools.product(range(self.layout.layers), range(self.skip, self.tokens)))

    @invariant()
    def both_know_what_is_there(self) -> None:
        assert self.progress.complete == self.coverage.complete == (self.sent == self.due)
        assert self.coverage.nbytes == len(self.sent) * self.layout.layer_token_bytes

    @invariant()
    def what_is_there_can_leave(self) -> None:
        waits = any(told > self.end_of(layer) for layer, told in enumerate(self.told))
        assert waits == (self.progress.next(self.frame_size) is not None)

    def teardown(self) -> None:
        """Compute and send the rest."""
        if not hasattr(self, "sent"):
            return
        while self.start < self.tokens:
            self.compute(3, 2)
        while (frame := self.progress.next(self.frame_size)) is not None:
            self.take(frame)
        assert self.sent == self.due
        self.both_know_what_is_there()


TestHandoffs = pytest.mark.slow(Handoffs.TestCase)

LAYOUT = KVLayout(layers=6, kv_heads=1, head_dim=1, block_size=4, dtype="bfloat16")  # 4 bytes a position and layer
TOKEN = LAYOUT.layer_token_bytes


def drain(progress: Progress, frame_size: int, at_least: int = 1) -> list[FrameSpec]:
    frames = []
    while (frame := progress.next(frame_size, at_least)) is not None:
        progress.took(frame)
        frames.append(frame)
    return frames


@given(layouts, st.integers(0, 5), st.integers(1, 30))
def test_what_fits_one_frame_is_one_frame(layout: KVLayout, skip: int, due: int) -> None:
    nbytes = layout.layers * due * layout.layer_token_bytes
    progress = Progress(layout, skip, skip + due)
    for layers in range(1, layout.layers + 1):
        assert progress.next(nbytes, nbytes) is None
        progress.computed(layers, skip + due)
    assert drain(progress, nbytes, nbytes) == [FrameSpec(0, layout.layers, skip, skip + due, nbytes)]
    assert progress.complete


Step = tuple[int, int, list[tuple[int, int, int, int]]]
CHUNK = [(4, 10, [(0, 4, 0, 10)]), (6, 10, [])]  # six layers are sent as four and a rest of two, which is too little
STEPS: dict[str, tuple[int, int, list[Step]]] = {
    "whole layers travel together": (25, 1, [(6, 10, [(0, 2, 0, 10), (2, 4, 0, 10), (4, 6, 0, 10)])]),
    "a layer that is too large travels in parts": (4, 1, [(1, 10, [(0, 1, 0, 4), (0, 1, 4, 8), (0, 1, 8, 10)])]),
    "too little waits while more could come": (250, 30, [(2, 10, []), (3, 10, [(0, 3, 0, 10)])]),
    "a full frame does not wait for what it could not hold": (19, 30, [(1, 10, [(0, 1, 0, 10)])]),
    "a rest does not hold up the next chunk": (250, 40, [*CHUNK, (4, 20, [(0, 4, 10, 20)]), (6, 20, [(4, 6, 0, 20)])]),
    "layers that are ahead are left alone": (250, 40, [*CHUNK, (6, 20, [(4, 6, 0, 20), (0, 4, 10, 20)])]),
}


@pytest.mark.parametrize(("most", "least", "steps"), STEPS.values(), ids=STEPS)
def test_what_leaves_as_layers_are_computed(most: int, least: int, steps: list[Step]) -> None:
    """Frame limits in positions of a layer. A step: number of layers that are final, their end, and the frames."""
    progress = Progress(LAYOUT, 0, steps[-1][1])
    for layers, end, due in steps:
        progress.computed(layers, end)
        frames = drain(progress, most * TOKEN, least * TOKEN)
        assert [(frame.layer_begin, frame.layer_end, frame.begin, frame.end) for frame in frames] == due
        assert all(frame.nbytes == len(cells(frame)) * TOKEN for frame in frames)
    assert progress.complete == (steps[-1][0] == LAYOUT.layers)


def frame_of(first: int, last: int, begin: int, end: int) -> FrameSpec:
    return FrameSpec(first, last, begin, end, (last - first) * (end - begin) * TOKEN)


GOOD = frame_of(0, 2, 3, 5)
GAP, SKIPPED, BEHIND = [(0, 2, 4, 6)], [(0, 2, 2, 4), (0, 2, 0, 5)], [(0, 2, 3, 9)]
NO_LAYERS = [(5, 7, 3, 5), (6, 7, 3, 5), (9, 8, 3, 5), (-1, 1, 3, 5), (2, 2, 3, 5)]
NO_POSITIONS = [(0, 2, 3, 3), (0, 2, 5, 3)]
WRONG_SIZES = [replace(GOOD, nbytes=nbytes) for nbytes in (4 * TOKEN - 1, 4 * TOKEN + 1, 0)]
FIRST = [*WRONG_SIZES, *(frame_of(*each) for each in GAP + SKIPPED + BEHIND + NO_LAYERS + NO_POSITIONS)]
TWICE, OVERLAPPING, LATER_GAP = [(0, 2, 3, 5)], [(0, 2, 4, 6), (1, 3, 3, 5)], [(0, 2, 6, 8)]
ON_IN_ONE_LAYER_ONLY = [(1, 3, 5, 8)]
SECOND = [frame_of(*each) for each in TWICE + OVERLAPPING + LATER_GAP + ON_IN_ONE_LAYER_ONLY]


@pytest.mark.parametrize(
    ("taken", "frame"), [*((False, frame) for frame in FIRST), *((True, frame) for frame in SECOND)]
)
def test_what_does_not_go_on_is_refused_and_counts_for_nothing(taken: bool, frame: FrameSpec) -> None:
    """Layers of a frame must have the same end before it."""
    coverage = Coverage(LAYOUT, 3, 8)
    assert not taken or coverage.accepts(GOOD)
    assert not coverage.accepts(frame)
    assert coverage.nbytes == (GOOD.nbytes if taken else 0)
    assert taken or coverage.accepts(GOOD)
    assert coverage.accepts(FrameSpec(0, 2, 5, 8, 6 * TOKEN))
    assert not coverage.complete
    assert coverage.accepts(FrameSpec(2, 6, 3, 8, 20 * TOKEN))
    assert coverage.complete
