"""A channel is agreed and proved before anything is offered on it: which transport, and whether it keeps bytes."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial

import pytest
import torch

from baton.errors import ChannelBroken
from baton.rpc.v1 import peer_pb2 as pb
from kvtransfer import probe
from kvtransfer.messages import FrameRefused, VersionRefused
from kvtransfer.transport import Ring
from tests.support.time_factor import scaled
from tests.unit.kvtransfer.byhand import SMALL, Receiver, running
from tests.unit.kvtransfer.conftest import wrapped
from tests.unit.kvtransfer.ends import FlippingEnd, StaleEnd, SwappingEnd, Wrapped, WrappedEnd
from tests.unit.kvtransfer.support import SETTINGS, P, same_kv

# the pattern


@pytest.mark.parametrize("nbytes", [1, 7, 8, 9, 64, 4097])
def test_no_two_words_and_no_two_frames_are_alike(nbytes: int) -> None:
    patterns = [probe.pattern(number, nbytes) for number in range(probe.FRAMES)]
    assert all((pattern.dtype, pattern.shape) == (torch.uint8, (nbytes,)) for pattern in patterns)
    whole = nbytes // 8 * 8
    words = torch.cat([pattern[:whole].view(torch.int64) for pattern in patterns]).tolist()
    assert len(set(words)) == len(words)
    assert nbytes < 8 or len({bytes(pattern.tolist()) for pattern in patterns}) == probe.FRAMES


def test_a_frame_of_the_probe_is_a_rectangle_of_nothing_that_fills_a_slot_up_to_a_limit() -> None:
    assert probe.frame(Ring(4, 1000)).nbytes == 1000
    assert probe.frame(Ring(4, 1 << 30)).nbytes == 1 << 20
    assert not probe.frame(Ring(4, 1000)).layers


# the probe


class Probing(WrappedEnd):
    """A sender's end: `out` is set when all of the probe has left."""

    def __init__(self, inner, out: threading.Event) -> None:
        super().__init__(inner)
        self._out = out

    def start(self, number: int, nbytes: int) -> None:
        self.inner.start(number, nbytes)
        if number == probe.FRAMES - 1:
            self._out.set()


class Probed(WrappedEnd):
    """A receiver's end that looks at the probe when all of it has left: the sender is at the stream then, and hears."""

    def __init__(self, inner, out: threading.Event) -> None:
        super().__init__(inner)
        self._out = out

    def finish(self, number: int) -> None:
        assert self._out.wait(scaled(5))
        self.inner.finish(number)


def first(wrap):
    """The ends of the first channel are wrapped, those after it are not."""
    wraps = [wrap]
    return wrapped(lambda end: wraps.pop()(end) if wraps else end)


SPOILERS = [*((partial(FlippingEnd, at=at), at) for at in range(probe.FRAMES)), (SwappingEnd, 1), (StaleEnd, 0)]


@pytest.mark.parametrize(("spoil", "frame"), SPOILERS)
def test_a_channel_that_changes_bytes_is_refused_by_name(pairs, spoil, frame: int) -> None:
    """Nothing is offered on it, and the next one is tried afresh."""
    out = threading.Event()
    send, recv = first(lambda end: Probing(end, out)), first(lambda end: spoil(Probed(end, out)))
    pair = pairs(send=send, recv=recv)
    bad = pair.push("r", 8, [1, 2], [11, 12])
    pair.reports.failed(bad, FrameRefused, f"the memory channel changes bytes: frame {frame}")
    pair.table.wait_for(("lost", P))
    assert pair.table.events == [("lost", P)]
    assert not any(command.HasField("offer") for command in pair.stream.said)
    pair.reports.done(pair.push("again", 8, [1, 2], [11, 12]))
    assert same_kv(pair.source, [1, 2], pair.target, [11, 12], 8)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_channel_that_changes_bytes_is_never_used(pairs, slots: int) -> None:
    """Whether the sender hears why, or sees the receiver's end close before."""
    pair = pairs(replace(SETTINGS, credits=slots), recv=first(partial(FlippingEnd, at=2)))
    pair.reports.failed(pair.push("r", 8, [1, 2], [11, 12]), ChannelBroken)
    pair.table.wait_for(("lost", P))
    assert pair.table.events == [("lost", P)]
    pair.reports.done(pair.push("again", 8, [1, 2], [11, 12]))


def test_the_probe_comes_before_the_first_offer_and_only_once(pair) -> None:
    for name in ("a", "b"):
        pair.reports.done(pair.push(name, 8, [1, 2], [11, 12]))
    commands = list(pair.stream.said)
    kinds = [command.WhichOneof("command") for command in commands]
    first = kinds.index("offer")
    assert kinds[:first] == ["hello", *["frame"] * (first - 1)]
    frames = [[frame.HasField("handoff") for frame in (c.frame, *c.more)] for c in commands if c.HasField("frame")]
    assert frames[: first - 1] == [[False] * len(batch) for batch in frames[: first - 1]]
    assert sum(map(len, frames[: first - 1])) == probe.FRAMES
    assert all(of_a_handoff for batch in frames[first - 1 :] for of_a_handoff in batch)


class SilentEnd(WrappedEnd):
    """A sender's end: nothing leaves."""

    def start(self, number: int, nbytes: int) -> None:
        pass


def test_a_probe_that_never_arrives_ends_by_the_deadline(pairs) -> None:
    pair = pairs(replace(SETTINGS, frame_deadline_s=0.3), send=wrapped(SilentEnd))
    pair.reports.failed(pair.push("r", 8, [1, 2], [11, 12]), ChannelBroken, "0.3 s", timeout=3)
    assert not any(kind == "offer" for kind, _ in pair.table.events)


def test_a_receiver_answers_the_probe_once_and_takes_no_more_of_it() -> None:
    with running(Receiver()) as receiver:
        call, spec = receiver.call().welcomed(), probe.frame(Ring(SMALL.credits, SMALL.frame_size))
        for number in range(probe.FRAMES):
            call.say(frame=pb.FrameAnnounce(sequence=number, nbytes=spec.nbytes))
            receiver.end.arrive(probe.pattern(number, spec.nbytes))
            if number == probe.FRAMES - 1:
                assert call.hear() == "probed"
            assert call.hear() == "credit"
        call.say(frame=pb.FrameAnnounce(sequence=probe.FRAMES, nbytes=spec.nbytes))
        call.refused("FRAME")
        assert len(receiver.end.expected) == probe.FRAMES


# which transport


def named(*names: str):
    """Transports of these names, each "name" or "name@reach"; all of them work between the two ends."""
    parts = [name.partition("@") for name in names]
    return lambda memory: [Wrapped(memory, name=name, reach=reach) for name, _, reach in parts]


@pytest.mark.parametrize(
    ("send", "recv", "chosen"),
    [
        (["fast", "slow"], ["fast", "slow"], "fast"),
        (["fast", "slow"], ["slow", "fast"], "fast"),  # the sender's order counts
        (["new", "slow"], ["fast", "slow"], "slow"),
        (["fast@here", "slow"], ["fast@here", "slow"], "fast"),
        (["fast@here", "slow"], ["fast@there", "slow"], "slow"),
        (["fast@here", "slow"], ["fast", "slow"], "slow"),
    ],
)
def test_the_best_that_both_have_is_used(pairs, send, recv, chosen: str) -> None:
    pair = pairs(send=named(*send), recv=named(*recv))
    handoff = pair.push("r", 8, [1, 2], [11, 12])
    assert pair.reports.done(handoff).transport == chosen
    assert pair.table.commits[handoff].transport == chosen
    assert same_kv(pair.source, [1, 2], pair.target, [11, 12], 8)


@pytest.mark.parametrize(
    ("send", "recv"),
    [(["one", "two"], ["three", "four"]), (["one@here", "two"], ["one@there", "four"]), ([], ["one"])],
)
def test_none_in_common_is_refused_and_both_lists_are_named(pairs, send, recv) -> None:
    pair = pairs(send=named(*send), recv=named(*recv))
    names = [name.partition("@")[0] for name in (*send, *recv)]
    pair.reports.failed(pair.push("r", 8, [1, 2], [11, 12]), VersionRefused, *names)
    assert not pair.table.events


def test_a_receiver_that_chooses_what_was_not_offered_is_left(pairs) -> None:
    def other(reply: pb.PeerReply) -> bool:
        if reply.HasField("welcome"):
            reply.welcome.transport = "gloo"
        return True

    pair = pairs(replace(SETTINGS, frame_deadline_s=scaled(0.3)), heard=other)
    pair.reports.failed(pair.push("r", 8, [1, 2], [11, 12]), ChannelBroken, "'gloo', not offered")
    assert not any(kind == "offer" for kind, _ in pair.table.events)
