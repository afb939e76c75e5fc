"""A recording reservation table, KV with known bytes, pushes, and a sender and a receiver without a network."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import strategies as st

from baton.core import HandoffId, Incarnation, KVLayout, Sampling, SequenceSpec, Token, WorkerRef
from baton.engine.kernels.gpu.cuda_memory import ExposedGpuMemory
from baton.engine.kv_cache import Exposed, KVCache, exposed_memory
from baton.engine.memory.exposed import Shape
from baton.errors import BatonError, HandoffError, OfferRefused, StaleAttempt
from baton.rpc import convert
from baton.rpc.v1 import peer_pb2 as pb
from kvtransfer.frames import FrameSpec
from kvtransfer.handoff import CommitState, Offer, PushEnd, PushJob, PushResult, TransferSettings
from kvtransfer.receiver import PeerService
from kvtransfer.sender import Sender
from kvtransfer.transports import base
from kvtransfer.transports.base import Transport
from kvtransfer.wire import frame_of
from tests.support.time_factor import scaled
from tests.support.transports import MainMemory, MemoryTransport
from tests.support.waiting import eventually
from tests.unit.kvtransfer.ends import Gate, wrapped

OnReply = Callable[[pb.PeerReply], object]
OnEnd = Callable[[str], None]
Choice = Callable[[MemoryTransport], Sequence[Transport] | base.Choice]


def as_choice(found: Sequence[Transport] | base.Choice) -> base.Choice:
    return found if isinstance(found, base.Choice) else base.Choice(found)


FINGERPRINT = "feedbead"
layouts = st.builds(
    KVLayout,
    layers=st.integers(1, 6),
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([1, 3, 8]),
    block_size=st.sampled_from([1, 4]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    tensors=st.sampled_from([("k", "v"), ("latent",)]),
)
LAYOUT = KVLayout(layers=3, kv_heads=2, head_dim=8, block_size=4, dtype="float32")
P = WorkerRef("prefill-0", Incarnation(7, 1), "in-process")
D = WorkerRef("decode-0", Incarnation(7, 2), "in-process")
SETTINGS = TransferSettings(transport="memory", frame_size=1 << 16, frame_deadline_s=5.0)
LAYER = 8 * LAYOUT.layer_token_bytes  # bytes of 8 positions, which are two blocks
SMALL_FRAMES = replace(SETTINGS, frame_size=LAYER)
ALL = slice(None)
OFTEN_S = 0.002  # between looks at what another thread does soon


def make_kv(
    seed: int | None,
    blocks: int = 64,
    layout: KVLayout = LAYOUT,
    *,
    exposed: bool = False,
    device: str = "cpu",
    gpu: MainMemory | None = None,
) -> KVCache:
    """Create KV of random values, or zeros without a seed, exposed on `gpu` if that is given."""
    memory: Exposed | None = exposed_memory(layout, blocks, device) if exposed else None
    if gpu is not None:
        memory = ExposedGpuMemory(Shape(blocks, blocks * layout.block_bytes), gpu)
    kv = KVCache(layout, blocks, device, exposed=memory)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for part in kv.tensors:
            part.copy_(torch.randn(part.shape, generator=generator))
    return kv


def rows(kv: KVCache, blocks: Sequence[int], begin: int, end: int) -> torch.Tensor:
    """Look up positions [begin, end) in `blocks`: [tensors, layers, positions, heads, dim]."""
    size = kv.layout.block_size
    where = [blocks[position // size] for position in range(begin, end)], [p % size for p in range(begin, end)]
    return torch.stack([tensor[:, where[0], where[1]] for tensor in kv.tensors])


def same_kv(a: KVCache, a_blocks: Sequence[int], b: KVCache, b_blocks: Sequence[int], tokens: int, skip: int = 0):
    return torch.equal(rows(a, a_blocks, skip, tokens), rows(b, b_blocks, skip, tokens))


def put(kv: KVCache, blocks: Sequence[int], begin: int, end: int, values: torch.Tensor | float, layers=ALL) -> None:
    """Set positions [begin, end) of these layers to a number, or to values in the order of `rows`."""
    size = kv.layout.block_size
    for position in range(begin, end):
        for n, tensor in enumerate(kv.tensors):
            value = values if isinstance(values, float) else values[n, :, position - begin]
            tensor[layers, blocks[position // size], position % size] = value


def only_these(kv: KVCache, blocks: Sequence[int], tokens: int, skip: int = 0) -> bool:
    """Return whether everything but positions [skip, tokens) of `blocks` is still zero."""
    rest = make_kv(None, kv.total_blocks, kv.layout)
    for mine, theirs in zip(rest.tensors, kv.tensors, strict=True):
        mine.copy_(theirs)
    put(rest, blocks, skip, tokens, 0.0)
    return not any(tensor.any() for tensor in rest.tensors)


def make_job(name: str, tokens: int, to: WorkerRef = D, *, attempt: int = 1, **fields: Any) -> PushJob:
    return PushJob(HandoffId(name, attempt), to, tokens, **fields)


def make_end(tokens: int) -> PushEnd:
    spec = SequenceSpec(tuple(range(tokens)), Sampling(max_tokens=4, temperature=0.0), (5,))
    return PushEnd(spec, [Token(0, 5, "five")])


def hand_over(sender: Sender, job: PushJob, blocks: Sequence[int], layers: int = LAYOUT.layers) -> HandoffId:
    sender.begin(job)
    sender.computed(job.handoff, blocks, layers, job.known_tokens)
    sender.finish(job.handoff, make_end(job.known_tokens))
    return job.handoff


class Reports:
    """An `on_done` to wait for. A second report of a handoff fails the test."""

    def __init__(self) -> None:
        self.outcomes: dict[HandoffId, PushResult | HandoffError] = {}
        self.twice: list[HandoffId] = []
        self.threads: set[str] = set()

    def __call__(self, handoff: HandoffId, outcome: PushResult | HandoffError) -> None:
        if handoff in self.outcomes:
            self.twice.append(handoff)
        self.threads.add(threading.current_thread().name)
        self.outcomes[handoff] = outcome

    def wait(self, handoff: HandoffId, timeout: float = 10.0) -> PushResult | HandoffError:
        eventually(lambda: handoff in self.outcomes, f"a report of {handoff}", within_s=timeout, every_s=OFTEN_S)
        assert not self.twice
        return self.outcomes[handoff]

    def done(self, handoff: HandoffId) -> PushResult:
        """Return the result. A failed push fails the test."""
        outcome = self.wait(handoff)
        assert isinstance(outcome, PushResult), outcome
        return outcome

    def failed(self, handoff: HandoffId, kind: type[HandoffError], *named: str, timeout: float = 10.0) -> None:
        """Wait for an error of this kind whose text has all these parts."""
        outcome = self.wait(handoff, timeout)
        assert isinstance(outcome, kind), outcome
        assert all(part in str(outcome) for part in named), outcome


class RecordingTable:
    """Reservations by the rules of the protocol. `hold` stops a write half way."""

    def __init__(self, layout: KVLayout = LAYOUT) -> None:
        self._layout = layout
        self._lock = threading.RLock()
        self.blocks: dict[HandoffId, list[int]] = {}
        self.bound: dict[HandoffId, WorkerRef] = {}
        self.commits: dict[HandoffId, CommitState] = {}
        self.written: Counter[HandoffId] = Counter()  # frames written to their blocks
        self.cached = 0  # positions of any prompt that can be fetched here
        self.fetches: list[tuple[HandoffId, WorkerRef, int, int, bool]] = []  # True: with a digest of the whole
        self.events: list[tuple[str, object]] = []
        self.hold: Callable[[], None] = lambda: None

    def reserve(self, handoff: HandoffId, blocks: Sequence[int]) -> None:
        self.blocks[handoff] = list(blocks)

    def fence(self, handoff: HandoffId) -> None:
        with self._lock:
            self.blocks.pop(handoff, None)
            self.bound.pop(handoff, None)

    def offer(self, handoff: HandoffId, sender: WorkerRef, offer: Offer) -> None:
        with self._lock:
            if handoff not in self.blocks or handoff in self.bound:
                raise StaleAttempt(f"no reservation {handoff}")
            if self._layout.blocks_for(offer.known_tokens) > len(self.blocks[handoff]):
                raise OfferRefused(f"{offer.known_tokens} tokens do not fit")
            self.bound[handoff] = sender
            self.events.append(("offer", handoff))

    @contextmanager
    def writing(self, handoff: HandoffId, sender: WorkerRef) -> Iterator[Sequence[int]]:
        self.hold()
        with self._lock:
            self._check(handoff, sender)
            yield self.blocks[handoff]
            self.written[handoff] += 1

    def commit(self, handoff: HandoffId, sender: WorkerRef, commit: CommitState) -> None:
        with self._lock:
            self._check(handoff, sender)
            self.commits[handoff] = commit
            self.events.append(("commit", handoff))

    def _check(self, handoff: HandoffId, sender: WorkerRef) -> None:
        if self.bound.get(handoff) != sender or handoff in self.commits:
            raise StaleAttempt(f"{handoff} is not bound to {sender}")

    def fetch(self, handoff: HandoffId, sender: WorkerRef, begin: int, end: int, *, verify: bool = False) -> None:
        if end > self.cached:
            raise StaleAttempt(f"{self.cached} positions are here")
        self.fetches.append((handoff, sender, begin, end, verify))
        self.events.append(("fetch", handoff))

    def aborted(self, handoff: HandoffId, sender: WorkerRef) -> None:
        if handoff not in self.commits:
            self.fence(handoff)
        self.events.append(("aborted", handoff))

    def lost(self, sender: WorkerRef) -> None:
        with self._lock:
            for handoff in [h for h, bound in self.bound.items() if bound == sender and h not in self.commits]:
                self.fence(handoff)
            self.events.append(("lost", sender))

    def wait_for(self, event: tuple[str, object]) -> None:
        eventually(lambda: event in self.events, f"{event}", every_s=OFTEN_S)

    def wait_written(self, handoff: HandoffId, frames: int) -> None:
        eventually(lambda: self.written[handoff] >= frames, f"{frames} frames of {handoff}", every_s=OFTEN_S)


class LoopbackPeer:
    """A PeerService in its own event loop. `connect` opens a sender's stream without a network."""

    def __init__(self, service: Callable[[], PeerService]) -> None:
        async def make() -> PeerService:
            return service()

        self.loop = asyncio.new_event_loop()
        self.streams: list[LoopbackStream] = []
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.service = self.run(make())

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(scaled(20))

    def connect(self, address: str, on_reply: OnReply, on_end: OnEnd) -> LoopbackStream:
        self.streams.append(LoopbackStream(self, on_reply, on_end))
        return self.streams[-1]

    def close(self) -> None:
        self.run(self.service.close())
        self.run(self.loop.shutdown_default_executor())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class LoopbackStream:
    """`said`: all commands so far. `alter` may change a command before it is sent."""

    def __init__(self, peer: LoopbackPeer, on_reply: OnReply, on_end: OnEnd) -> None:
        self._peer = peer
        self._on_end = on_end
        self._commands: asyncio.Queue[pb.PeerCommand | None] = asyncio.Queue()
        self.said: list[pb.PeerCommand] = []
        self.alter: Callable[[pb.PeerCommand], None] = lambda command: None
        self._call = asyncio.run_coroutine_threadsafe(self._serve(on_reply), peer.loop)

    def send(self, command: pb.PeerCommand) -> None:
        self.alter(command)
        self.said.append(command)
        self._put(command)

    def frames(self, handoff: HandoffId) -> list[FrameSpec]:
        wanted = convert.handoff_to_pb(handoff)
        said = [frame for command in list(self.said) for frame in (command.frame, *command.more)]
        return [frame_of(frame) for frame in said if frame.HasField("handoff") and frame.handoff == wanted]

    def close(self) -> None:
        self._put(None)
        with suppress(BatonError):
            self._call.result(scaled(20))

    def _put(self, command: pb.PeerCommand | None) -> None:
        with suppress(RuntimeError):  # the receiver and its loop were closed first
            self._peer.loop.call_soon_threadsafe(self._commands.put_nowait, command)

    async def _serve(self, on_reply: OnReply) -> None:
        async def write(reply: pb.PeerReply) -> None:
            on_reply(reply)

        context: Any = SimpleNamespace(write=write)
        await self._peer.service.Connect(self._stream(), context)
        self._on_end("ended")

    async def _stream(self):
        while (command := await self._commands.get()) is not None:
            yield command


def plain(memory: MemoryTransport) -> Sequence[Transport]:
    return [memory]


@dataclass
class Pair:
    table: RecordingTable
    source: KVCache
    target: KVCache
    reports: Reports
    peer: LoopbackPeer
    sender: Sender
    unfetched: queue.Queue[HandoffId]

    def reserve(self, name: str, tokens: int, target: Sequence[int], **job) -> PushJob:
        """Reserve blocks for a push that has not begun."""
        made = make_job(name, tokens, **job)
        self.table.reserve(made.handoff, target)
        return made

    def begin(self, name: str, tokens: int, target: Sequence[int], **job) -> PushJob:
        made = self.reserve(name, tokens, target, **job)
        self.sender.begin(made)
        return made

    def push(self, name: str, tokens: int, source: Sequence[int], target: Sequence[int], **job) -> HandoffId:
        return hand_over(self.sender, self.reserve(name, tokens, target, **job), source, self.source.layout.layers)

    def complete(self, job: PushJob, blocks: Sequence[int], end: PushEnd | None = None) -> PushResult:
        """Compute and finish a push that has begun. Return its result."""
        self.sender.computed(job.handoff, blocks, self.source.layout.layers, job.known_tokens)
        self.sender.finish(job.handoff, end or make_end(job.known_tokens))
        return self.reports.done(job.handoff)

    @property
    def stream(self) -> LoopbackStream:
        return self.peer.streams[-1]


class Pairs:
    """Creates pairs. `send`, `recv`: each side's transports. `heard` may change a reply, or return False to drop it."""

    def __init__(self) -> None:
        self.made: list[Pair] = []
        self._memories: list[MemoryTransport] = []

    def __call__(
        self,
        settings: TransferSettings = SETTINGS,
        *,
        receiver: TransferSettings | None = None,
        send: Choice = plain,
        recv: Choice = plain,
        source: KVCache | None = None,
        target: KVCache | None = None,
        layout: KVLayout = LAYOUT,
        fingerprint: str = FINGERPRINT,
        me: WorkerRef = P,
        connect=None,
        heard: Callable[[pb.PeerReply], bool] = lambda reply: True,
    ) -> Pair:
        source, target = source or make_kv(1), target or make_kv(None, layout=layout)
        memory, table, reports = MemoryTransport(), RecordingTable(target.layout), Reports()
        theirs = receiver or settings
        peer = LoopbackPeer(lambda: PeerService(target, D, FINGERPRINT, theirs, table, as_choice(recv(memory))))

        def filtered(address, on_reply, on_end) -> LoopbackStream:
            return peer.connect(address, lambda reply: heard(reply) and on_reply(reply), on_end)

        unfetched: queue.Queue[HandoffId] = queue.Queue()
        told: dict[str, Any] = {"on_unfetched": unfetched.put, "connect": connect or filtered}
        sender = Sender(source, me, fingerprint, settings, as_choice(send(memory)), reports, **told)
        self._memories.append(memory)
        self.made.append(Pair(table, source, target, reports, peer, sender, unfetched))
        return self.made[-1]

    def gated(self, settings: TransferSettings, **change) -> tuple[Pair, Gate]:
        """Create a pair whose sender stops before each frame."""
        gate = Gate()
        return self(settings, send=wrapped(gate), **change), gate

    def close(self) -> None:
        for memory in self._memories:
            memory.end()
        for pair in self.made:
            pair.sender.close()
            pair.peer.close()
