"""Digests of each frame as sent and of the whole KV, which does not depend on the size and order of frames."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.core import HandoffId, KVLayout
from baton.errors import DigestMismatch
from baton.rpc.v1 import peer_pb2 as pb
from kvtransfer.frames import Coverage, FrameSpec, KVDigest, wire_digest
from kvtransfer.receive_loop import IncomingHandoff
from tests.unit.kvtransfer.support import LAYOUT, SETTINGS, SMALL_FRAMES, hand_over, layouts


class Whole:
    """KV of positions [begin, end) in wire format: uint8 [layers, tensors, positions, bytes of a row]."""

    def __init__(self, layout: KVLayout, begin: int, end: int, seed: int, zeros: float = 0.0) -> None:
        self.layout, self.begin, self.end = layout, begin, end
        generator = torch.Generator().manual_seed(seed)
        shape = (layout.layers, len(layout.tensors), end - begin, layout.layer_token_bytes // len(layout.tensors))
        self.bytes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        self.bytes[torch.rand(shape[:3], generator=generator) < zeros] = 0

    def frame(self, layers: range, begin: int, end: int) -> tuple[FrameSpec, torch.Tensor]:
        data = self.bytes[layers.start : layers.stop, :, begin - self.begin : end - self.begin].flatten()
        return FrameSpec(layers.start, layers.stop, begin, end, len(data)), data

    @property
    def all(self) -> tuple[FrameSpec, torch.Tensor]:
        return self.frame(range(self.layout.layers), self.begin, self.end)

    def digest(self, *frames: tuple[FrameSpec, torch.Tensor]) -> bytes:
        digest = KVDigest(self.layout)
        for spec, data in frames or [self.all]:
            digest.add(spec, data)
        return digest.value

    def cut(self, draw: random.Random) -> list[tuple[FrameSpec, torch.Tensor]]:
        """Cut the KV into random rectangles in random order."""
        frames, layer = [], 0
        while layer < self.layout.layers:
            below, position = draw.randint(layer + 1, self.layout.layers), self.begin
            while position < self.end:
                last = draw.randint(position + 1, self.end)
                frames.append(self.frame(range(layer, below), position, last))
                position = last
            layer = below
        draw.shuffle(frames)
        return frames


wholes = st.builds(
    lambda layout, begin, due, seed, zeros: Whole(layout, begin, begin + due, seed, zeros),
    layouts,
    st.integers(0, 70_000),
    st.integers(1, 9),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.5, 1.0]),
)


@given(wholes, st.randoms(use_true_random=False))
def test_the_whole_does_not_depend_on_the_frames(whole: Whole, draw: random.Random) -> None:
    assert whole.digest(*whole.cut(draw)) == whole.digest()
    assert len(whole.digest()) == 8


@given(wholes, st.data())
def test_any_bit_changes_it(whole: Whole, data: st.DataObject) -> None:
    before, rows = whole.digest(), whole.bytes.view(-1)
    at = data.draw(st.integers(0, len(rows) - 1), "byte")
    rows[at] ^= 1 << data.draw(st.integers(0, 7), "bit")
    assert whole.digest() != before


@given(wholes, st.data())
def test_rows_that_have_changed_places_change_it(whole: Whole, data: st.DataObject) -> None:
    """The rows are positions, layers, or K and V of one position."""
    before, rows = whole.digest(), whole.bytes.view(-1, whole.bytes.shape[-1])
    a, b = (data.draw(st.integers(0, len(rows) - 1), "row") for _ in range(2))
    same = torch.equal(rows[a], rows[b])
    rows[[a, b]] = rows[[b, a]]
    assert (whole.digest() == before) == same


@given(wholes, st.randoms(use_true_random=False))
def test_a_frame_that_is_missing_or_twice_there_changes_it(whole: Whole, draw: random.Random) -> None:
    """Frames of zeros count too, because unwritten memory may have other values."""
    frames = whole.cut(draw)
    assert KVDigest(whole.layout).value not in (whole.digest(), whole.digest(*frames))
    assert whole.digest(*frames, frames[0]) != whole.digest()
    if len(frames) > 1:
        assert whole.digest(*frames[1:]) != whole.digest()


@given(wholes, st.integers(1, 5))
def test_the_same_bytes_elsewhere_are_not_the_same(whole: Whole, shift: int) -> None:
    spec, data = whole.all
    assert whole.digest((replace(spec, begin=spec.begin + shift, end=spec.end + shift), data)) != whole.digest()


def test_a_frame_has_a_digest_of_its_own() -> None:
    data = torch.arange(1000).to(torch.uint8)
    digest = wire_digest(data)
    assert len(digest) == 16
    assert wire_digest(data.clone()) == digest
    data[999] ^= 128
    assert wire_digest(data) != digest


WRONG_FRAMES = {"axc": [1], "bac": [0, 1], "ab": [2], "abcd": [3], "": [0, 1, 2]}


@pytest.mark.parametrize(("sent", "wrong"), WRONG_FRAMES.items(), ids=repr)
def test_frames_that_differ_are_named(sent: str, wrong: list[int]) -> None:
    inbound = IncomingHandoff(HandoffId("r", 1), 8, 0, Coverage(LAYOUT, 0, 8), digests=[b"a", b"b", b"c"])
    with pytest.raises(DigestMismatch) as caught:
        inbound.check(pb.Commit(digests=[letter.encode() for letter in sent]), b"")
    assert f"{wrong} of 3" in str(caught.value)
    inbound.check(pb.Commit(digests=[b"a", b"b", b"c"]), b"")


VERIFYING = replace(SMALL_FRAMES, verify_kv=True)


def wrong_digest(command: pb.PeerCommand) -> None:
    if command.HasField("commit"):
        command.commit.kv_digest = bytes(8)


def swapped_layers(command: pb.PeerCommand) -> None:
    """Swap the announcements of two layers: sizes and frame digests agree."""
    for frame in (command.frame, *command.more) if command.HasField("frame") else ():
        begin = {0: 1, 1: 0, 2: 2}[frame.layer_begin]
        frame.layer_begin, frame.layer_end = begin, begin + 1


def test_a_receiver_that_verifies_takes_nothing_without_a_digest_of_the_whole(pairs) -> None:
    pair = pairs(SETTINGS, receiver=VERIFYING)
    handoff = pair.push("r", 30, range(8), range(10, 18))
    pair.reports.failed(handoff, DigestMismatch, "no digest of the whole KV was sent")
    assert not pair.table.commits
    pair.table.wait_for(("aborted", handoff))


@pytest.mark.parametrize("settings", [SMALL_FRAMES, VERIFYING], ids=["asked for", "set"])
@pytest.mark.parametrize("alter", [None, wrong_digest, swapped_layers])
def test_a_push_is_verified_if_it_asks_for_it_or_the_settings_say_so(pairs, alter, settings) -> None:
    """KV that is wrong as a whole is rejected although each frame is right. No other check finds it."""
    pair, asks = pairs(settings), not settings.verify_kv
    pair.reports.done(pair.push("right", 8, [1, 2], [13, 14]))
    pair.stream.alter = alter or pair.stream.alter
    if asks:
        pair.reports.done(pair.push("unverified", 8, [1, 2], [15, 16]))
    job = replace(pair.reserve("r", 8, [11, 12]), verify=asks)
    hand_over(pair.sender, job, [1, 2])
    if alter:
        pair.reports.failed(job.handoff, DigestMismatch, "as a whole")
    else:
        pair.reports.done(job.handoff)
    commits = [bool(each.commit.kv_digest) for each in pair.stream.said if each.HasField("commit")]
    assert alter or commits == [settings.verify_kv, *([False] * asks), True]
    assert (job.handoff in pair.table.commits) == (alter is None)
