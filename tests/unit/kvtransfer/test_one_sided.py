"""One-sided channels: the receiver reads the sender's blocks, and checks that their generations did not change."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from baton.core import HandoffId
from baton.engine.kv_cache import Exposed, KVCache
from baton.engine.memory.exposed import ExposedMemory, MappedMemory
from baton.engine.tp.kv_memory import CopiedCache
from baton.errors import ChannelBroken, DigestMismatch, StaleAttempt
from baton.rpc.v1 import peer_pb2 as pb
from kvtransfer.frames import FrameSpec, Progress
from kvtransfer.handoff import PushJob
from kvtransfer.transports.base import Places
from kvtransfer.transports.cuda_ipc import CudaIpcTransport
from kvtransfer.transports.shm import MappedPool, ShmTransport
from kvtransfer.wire import FrameRefused
from tests.support.time_factor import scaled
from tests.support.transports import MainMemory
from tests.support.waiting import eventually
from tests.unit.kvtransfer.ends import Stopped
from tests.unit.kvtransfer.support import (
    LAYER,
    LAYOUT,
    SMALL_FRAMES,
    Pair,
    Pairs,
    make_end,
    make_kv,
    only_these,
    same_kv,
)

TOKENS = 22  # six blocks of the source
SOURCE, TARGET = [5, 9, 2, 40, 33, 1], [7, 3, 60, 11, 12, 13]


@pytest.fixture(params=["shm", "cuda_ipc"])
def over(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def shared(pairs: Pairs, over: str):
    """A function that makes a pair whose receiver reads the sender's memory, with frames of `transfer.frame_size`."""

    def make(transfer=SMALL_FRAMES, *, block_size: int = LAYOUT.block_size, copies: int = 1, **change) -> Pair:
        transfer = replace(transfer, frame_size=transfer.frame_size // transfer.credits)
        layout = replace(LAYOUT, block_size=block_size)
        if over == "cuda_ipc":  # ranks on GPUs have no copies
            gpu, single = MainMemory(), make_kv(None, layout=layout)
            source, vars(single)["gpu"] = make_kv(1, gpu=gpu), gpu.beside()
            ends = CudaIpcTransport(source, gpu), CudaIpcTransport(single, vars(single)["gpu"])
            return pairs(
                transfer, source=source, target=single, send=lambda _: ends[:1], recv=lambda _: ends[1:], **change
            )
        source = make_kv(1, exposed=True)
        target = CopiedCache([make_kv(None, layout=layout) for _ in range(copies)])
        made = [ShmTransport(kv) for kv in (source, target)]
        return pairs(transfer, source=source, target=target, send=lambda _: made[:1], recv=lambda _: made[1:], **change)

    return make


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("skip", [0, 5])
def test_the_kv_arrives_in_blocks_of_any_size(shared, over, block_size: int, skip: int) -> None:
    pair = shared(block_size=block_size)
    target = list(range(40, 40 + pair.target.layout.blocks_for(TOKENS)))
    result = pair.reports.done(pair.push("r", TOKENS, SOURCE, target, skip=skip))
    assert same_kv(pair.source, SOURCE, pair.target, target, TOKENS, skip)
    assert only_these(pair.target, target, TOKENS, skip)
    assert result.nbytes == LAYOUT.layers * (TOKENS - skip) * LAYOUT.layer_token_bytes
    assert pair.table.commits[HandoffId("r", 1)].kv_bytes == result.nbytes
    assert result.transport == over


def test_frames_without_staging_are_as_large_as_a_ring(shared) -> None:
    pair = shared(replace(SMALL_FRAMES, frame_size=LAYOUT.layers * TOKENS * LAYOUT.layer_token_bytes))
    assert pair.reports.done(pair.push("r", TOKENS, SOURCE, TARGET)).frames == 1


def exposed_in(kv: KVCache) -> Exposed:
    assert kv.exposed is not None
    return kv.exposed


def probed(pair: Pair) -> None:
    eventually(lambda: len(pair.sender.channels()) == 1)


def replaced(pair: Pair, block: int) -> None:
    """Give a block of the source to another sequence: change the generation first, then the content."""
    exposed_in(pair.source).generations[block] += 1
    for tensor in pair.source.tensors:
        tensor[:, block] = float("nan")


def given_back(pair: Pair, block: int, values) -> None:
    """Compute the content again in a block that was replaced."""
    exposed_in(pair.source).generations[block] += 1
    for tensor, value in zip(pair.source.tensors, values, strict=True):
        tensor[:, block] = value


@pytest.mark.parametrize(("over", "when"), [("shm", "before"), ("shm", "during")])
def test_blocks_that_are_given_away_are_read_again_after_they_were_computed_again(shared, when: str) -> None:
    """The sender withdraws while frames wait to be read. None of their bytes counts, wherever the reader is."""
    pair = shared()
    job = pair.begin("r", TOKENS, TARGET)
    where = pair.table if when == "before" else vars(pair.target).get("gpu", pair.target)
    probed(pair)
    stopped = Stopped(where, {pair.table: "hold", pair.target: "copy_from"}.get(where, "before"))
    pair.sender.computed(job.handoff, SOURCE, LAYOUT.layers, TOKENS)
    stopped.wait()
    kept = [tensor[:, SOURCE].clone() for tensor in pair.source.tensors]
    pair.sender.withdraw(job.handoff)
    for block in SOURCE:
        replaced(pair, block)
    stopped.go_on()
    for n, block in enumerate(SOURCE):
        given_back(pair, block, [tensor[:, n] for tensor in kept])
    pair.complete(job, SOURCE)
    assert same_kv(pair.source, SOURCE, pair.target, TARGET, TOKENS)
    assert pair.table.commits[job.handoff].kv_bytes == LAYOUT.layers * TOKENS * LAYOUT.layer_token_bytes


def test_stale_places_are_not_read_at_all() -> None:
    source, target = make_kv(1, exposed=True), make_kv(None)
    exposed = exposed_in(source)
    assert isinstance(exposed, ExposedMemory)
    memory = MappedMemory(exposed.file, exposed.shape)
    pool = MappedPool(target.reader_of(LAYOUT, source.total_blocks, memory.kv), memory)
    frame = FrameSpec(0, 3, 0, 8, 3 * LAYER)
    assert pool.read(target, frame, Places([5, 9], [0, 0]), [1, 2])
    assert same_kv(source, [5, 9], target, [1, 2], 8)
    exposed.generations[9] += 1
    assert not pool.read(target, frame, Places([5, 9], [0, 0]), [3, 4])
    assert only_these(target, [1, 2], 8)


def copies_of(kv: KVCache) -> tuple[KVCache, ...]:
    return tuple(kv.copies) if isinstance(kv, CopiedCache) else (kv,)


class Struck:
    """Runs `act` in the middle of a read: after `layers` layers of read number `number`, or as many copies of a GPU."""

    def __init__(self, pair: Pair, number: int, layers: int, act: Callable[[], None]) -> None:
        probed(pair)
        kv = copies_of(pair.target)[-1]
        self.done = threading.Event()
        self._copy, self._left, self._layers, self._act = kv.copy_from, number, layers, act
        if gpu := vars(kv).get("gpu"):
            gpu.before = self.before
        else:
            vars(kv)["copy_from"] = self.copy_from

    def before(self, number: int, count: int) -> None:
        if self._left == 0 and number == count * self._layers // LAYOUT.layers:
            self._act()
            self.done.set()
        self._left -= number == count

    def copy_from(self, source: KVCache, layers: range, *rest: Any) -> None:
        middle = min(layers.start + self._layers, layers.stop) if self._left == 0 else layers.start
        self._copy(source, range(layers.start, middle), *rest)
        if self._left == 0:
            self._act()
            self.done.set()
        self._left -= 1
        self._copy(source, range(middle, layers.stop), *rest)


@pytest.mark.slow
@example(number=0, layers=0, given_away={SOURCE[0]}, block_size=4, frame=LAYER, verify=True, copies=1)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    number=st.integers(0, 8),
    layers=st.integers(0, 3),
    given_away=st.sets(st.sampled_from(SOURCE), min_size=1),
    block_size=st.sampled_from([1, 4, 8]),
    frame=st.sampled_from([LAYER // 2, LAYER, 2 * LAYER]),
    verify=st.booleans(),
    copies=st.sampled_from([1, 2]),
)
def test_whatever_is_given_away_in_the_middle_of_a_read_no_wrong_byte_is_committed(
    shared, number, layers, given_away, block_size, frame, verify, copies
) -> None:
    """A sender that runs full withdraws, others get its blocks, and the prompt is computed again in other blocks. A
    receiver with ranks that share heads reads each frame into several copies; this happens in the middle of the last.
    """
    pair = shared(replace(SMALL_FRAMES, frame_size=frame), block_size=block_size, copies=copies)
    target = list(range(20, 20 + pair.target.layout.blocks_for(TOKENS)))
    job = pair.begin("r", TOKENS, target, verify=verify)
    truth, again = make_kv(1), [50, 51, 52, 53, 54, 55]

    def act() -> None:
        pair.sender.withdraw(job.handoff)
        for block in given_away:
            replaced(pair, block)

    struck = Struck(pair, min(number, 2), layers, act)
    pair.sender.computed(job.handoff, SOURCE, LAYOUT.layers, TOKENS)
    assert struck.done.wait(scaled(10))
    for mine, theirs in zip(pair.source.tensors, truth.tensors, strict=True):
        mine[:, again] = theirs[:, SOURCE]
    result = pair.complete(job, again)
    for one in copies_of(pair.target):
        assert same_kv(truth, SOURCE, one, target, TOKENS)
        assert only_these(one, target, TOKENS)
    assert pair.table.commits[job.handoff].kv_bytes == LAYOUT.layers * TOKENS * LAYOUT.layer_token_bytes
    assert result.nbytes >= pair.table.commits[job.handoff].kv_bytes


@pytest.mark.parametrize("verify", ["frames", "kv"])
def test_bytes_that_change_on_the_way_are_detected_if_digests_are_verified(shared, verify: str) -> None:
    pair = shared(replace(SMALL_FRAMES, verify_frames=verify == "frames", verify_kv=verify == "kv"))
    pair.reports.done(pair.push("right", TOKENS, SOURCE, TARGET))

    def flip() -> None:
        pair.target.k[0, TARGET[0], 0, 0, 0] += 1.0

    job = pair.begin("wrong", TOKENS, TARGET)
    Struck(pair, 0, LAYOUT.layers, flip)
    pair.sender.computed(job.handoff, SOURCE, LAYOUT.layers, TOKENS)
    pair.sender.finish(job.handoff, make_end(TOKENS))
    pair.reports.failed(job.handoff, DigestMismatch)
    assert job.handoff not in pair.table.commits
    assert ("aborted", job.handoff) in pair.table.events


WRONG = {
    "more": ({"blocks": [1, 2], "generations": [0]}, "2 places from block 0 of 6"),
    "too far": ({"first": 5, "blocks": [1, 2], "generations": [0, 0]}, "2 places from block 5 of 6"),
    "outside": ({"blocks": [64], "generations": [0]}, "block 64 is not in the sender's pool of 64 blocks"),
    "of nothing": ({"handoff": {"request_id": "other", "attempt": 1}}, "belong to no accepted handoff"),
    "none": ({}, "its places in the sender's pool are not known"),
}


@pytest.mark.parametrize(("change", "why"), WRONG.values(), ids=WRONG)
def test_places_that_make_no_sense_end_the_channel(shared, change, why: str) -> None:
    pair = shared()
    job = pair.begin("r", TOKENS, TARGET)
    eventually(lambda: pair.sender._channels[0].channel)

    def alter(command: pb.PeerCommand) -> None:
        if command.HasField("blocks"):
            blocks = {"handoff": command.blocks.handoff, "blocks": [], "generations": [], **change}
            command.blocks.CopyFrom(pb.PoolBlocks(**blocks))

    def altered(packet: bytes) -> None:
        command = pb.PeerCommand.FromString(packet)
        alter(command)
        send(command.SerializeToString())

    pair.stream.alter = alter
    if (path := pair.sender._channels[0].queue.control_socket) is not None:
        send, path.send = path.send, altered
    pair.sender.computed(job.handoff, SOURCE, LAYOUT.layers, TOKENS)
    pair.reports.failed(job.handoff, FrameRefused, why)


def test_a_sender_that_is_not_exposed_offers_no_shared_memory(pairs: Pairs) -> None:
    source, target = make_kv(1), make_kv(None)
    pair = pairs(
        source=source,
        target=target,
        send=lambda memory: [ShmTransport(source), memory],
        recv=lambda memory: [ShmTransport(target), memory],
    )
    assert pair.reports.done(pair.push("r", TOKENS, SOURCE, TARGET)).transport == "memory"


def test_the_commit_of_a_handoff_that_was_fenced_ends_no_other_push(shared) -> None:
    """The request was cancelled at the receiver. The sender learns of that only from the refusal."""
    pair = shared()
    fenced, other = pair.begin("fenced", TOKENS, TARGET), pair.begin("other", TOKENS, range(20, 26))
    eventually(lambda: fenced.handoff in pair.table.bound)
    pair.table.fence(fenced.handoff)
    for job in (fenced, other):
        pair.sender.computed(job.handoff, SOURCE, LAYOUT.layers, TOKENS)
        pair.sender.finish(job.handoff, make_end(TOKENS))
    pair.reports.failed(fenced.handoff, StaleAttempt)
    pair.reports.done(other.handoff)
    assert same_kv(pair.source, SOURCE, pair.target, list(range(20, 26)), TOKENS)
    assert only_these(pair.target, list(range(20, 26)), TOKENS)


def test_a_copy_that_failed_takes_back_what_it_overwrote(shared) -> None:
    """A frame was read and withdrawn before its credit. Its second copy meets blocks that are reused after an abort,
    which the receiver sees only after the commit.
    """
    pair = shared(replace(SMALL_FRAMES, frame_size=6 * LAYER, coalesce_below=1))
    job, again = pair.begin("r", TOKENS, TARGET), [50, 51, 52, 53, 54, 55]
    for tensor in pair.source.tensors:
        tensor[:, again] = tensor[:, SOURCE]
    second = Stopped(pair.table, "hold")
    pair.sender.computed(job.handoff, SOURCE[:3], LAYOUT.layers, 12)
    second.wait()
    pair.sender.withdraw(job.handoff)  # the read of the first frame begins only now, and succeeds
    abort = pair.stream.send
    vars(pair.stream)["send"] = lambda command: None if command.HasField("abort") else abort(command)

    def act() -> None:
        pair.sender.abort(job.handoff)
        for block in again:
            replaced(pair, block)

    struck = Struck(pair, 1, 0, act)
    pair.sender.computed(job.handoff, again, LAYOUT.layers, TOKENS)
    pair.sender.finish(job.handoff, make_end(TOKENS))
    second.go_on()
    assert struck.done.wait(scaled(10))
    pair.reports.failed(job.handoff, StaleAttempt)
    pair.reports.done(pair.push("next", TOKENS, SOURCE, [30, 31, 32, 33, 34, 35]))
    assert job.handoff not in pair.table.commits


@pytest.mark.parametrize("over", ["cuda_ipc"])
def test_only_the_first_copy_of_a_handoff_waits_for_the_compute_stream(shared) -> None:
    pair = shared()
    for name in ("r", "s"):
        assert pair.reports.done(pair.push(name, TOKENS, SOURCE, TARGET)).frames > 2
    assert vars(pair.target)["gpu"].streams[-1].followed == 2


@pytest.mark.parametrize("over", ["shm"])
def test_the_pool_of_the_sender_is_unmapped_when_its_channel_has_ended(shared) -> None:
    pair = shared()

    inode = os.fstat(exposed_in(pair.source).file).st_ino

    def mapped() -> int:
        return sum(line.split()[4] == str(inode) for line in Path("/proc/self/maps").read_text().splitlines())

    before = mapped()
    pair.reports.done(pair.push("r", TOKENS, SOURCE, TARGET))
    assert mapped() > before
    pair.sender.close()
    eventually(lambda: mapped() == before)


def test_a_frame_before_the_skipped_positions_ends_the_channel(shared) -> None:
    """They may be in blocks that other sequences read too."""
    pair = shared()
    job = pair.begin("r", TOKENS, TARGET, skip=5)
    probed(pair)
    queue = pair.sender._channels[0].queue
    queue._pushes[job.handoff].progress = Progress(LAYOUT, 0, TOKENS)
    pair.sender.computed(job.handoff, SOURCE, LAYOUT.layers, TOKENS)
    pair.reports.failed(job.handoff, ChannelBroken, "does not continue an accepted handoff")
    assert only_these(pair.target, [], 0)


def test_a_frame_that_was_withdrawn_and_computed_again_since_its_mark_is_not_announced(shared) -> None:
    """Its new KV may not be final yet on a GPU: the next announcement waits for the new mark."""
    pair, told = shared(), list[bool]()
    job = pair.begin("r", TOKENS, TARGET)
    probed(pair)
    queue = pair.sender._channels[0].queue
    mark_of, announce = queue.mark_of, queue.announce

    def withdrawn_meanwhile(push, frame):
        found = mark_of(push, frame)
        if not told:
            pair.sender.withdraw(job.handoff)
            pair.sender.computed(job.handoff, SOURCE, LAYOUT.layers, TOKENS)
        return found

    def announced(*args):
        told.append(announce(*args))
        return told[-1]

    vars(queue)["mark_of"], vars(queue)["announce"] = withdrawn_meanwhile, announced
    pair.sender.computed(job.handoff, SOURCE, LAYOUT.layers, TOKENS)
    pair.complete(job, SOURCE)
    assert told[:2] == [False, True]
    assert same_kv(pair.source, SOURCE, pair.target, TARGET, TOKENS)


def all_read(pair: Pair, job: PushJob) -> None:
    """Wait until the receiver has read all KV of a push that is not finished."""
    pair.sender.computed(job.handoff, SOURCE, LAYOUT.layers, TOKENS)
    queue = pair.sender._channels[0].queue
    push = queue._pushes[job.handoff]
    eventually(lambda: push.progress.complete and not queue._unread)


@pytest.mark.parametrize("ends", ["computed again", "aborted"])
def test_a_digest_of_the_whole_waits_for_blocks_that_were_withdrawn(shared, ends: str) -> None:
    """The push is withdrawn between its last frame and its commit. Other pushes of the channel go on."""
    pair, again = shared(), [50, 51, 52, 53, 54, 55]
    job = pair.begin("r", TOKENS, TARGET, verify=True)
    probed(pair)
    all_read(pair, job)
    kept = [tensor[:, SOURCE].clone() for tensor in pair.source.tensors]
    pair.sender.withdraw(job.handoff)
    for tensor, block in zip(pair.source.tensors, kept, strict=True):
        tensor[:, again] = block
    pair.sender.finish(job.handoff, make_end(TOKENS))
    pair.reports.done(pair.push("other", TOKENS, again, [30, 31, 32, 33, 34, 35], verify=True))
    if ends == "aborted":
        pair.sender.abort(job.handoff)
        pair.reports.failed(job.handoff, StaleAttempt)
    else:
        pair.complete(job, again)
        assert same_kv(pair.source, again, pair.target, TARGET, TOKENS)
    assert len(pair.peer.streams) == 1


def test_a_withdrawal_waits_for_a_layer_that_is_hashed_and_ends_the_hash(shared) -> None:
    pair = shared()
    job = pair.begin("r", TOKENS, TARGET, verify=True)
    probed(pair)
    all_read(pair, job)
    hashed = Stopped(pair.source, "copied")
    pair.sender.finish(job.handoff, make_end(TOKENS))
    hashed.wait()
    with ThreadPoolExecutor(1) as pool:
        withdrawn = pool.submit(pair.sender.withdraw, job.handoff)
        with pytest.raises(TimeoutError):
            withdrawn.result(0.05)
        hashed.go_on()
        withdrawn.result(scaled(5))
    pair.complete(job, SOURCE)
    assert same_kv(pair.source, SOURCE, pair.target, TARGET, TOKENS)
    assert len(pair.peer.streams) == 1
