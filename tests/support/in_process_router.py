"""Scripted workers behind a real router over real gRPC, without engines and KV. Closed gates hold handoffs.

Like a real one, a prefill worker keeps computed KV until it is handed over, released or named by a Repush.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from grpc import aio

from baton.core import (
    Finish,
    FinishReason,
    HandoffId,
    Incarnation,
    KVLayout,
    PromptPart,
    PromptToken,
    Role,
    Thought,
    Token,
    TokenLogprobs,
    WorkerInfo,
    WorkerRef,
)
from baton.rpc import convert
from baton.rpc.channel import PLAINTEXT, Wire, aio_channel, aio_server, bind
from baton.rpc.status import from_rpc_error
from baton.rpc.v1 import admin_pb2, common_pb2, worker_pb2
from baton.rpc.v1 import inference_pb2 as pb
from baton.rpc.v1.admin_pb2_grpc import AdminStub
from baton.rpc.v1.inference_pb2_grpc import InferenceStub
from baton.rpc.v1.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from baton.tokenizer import OracleTokenizer
from router.context import RouterSettings
from router.server import Router, serve
from router.workers.stream import Item, WorkerStream
from tests.support.routers import asked, expected, right, thought
from tests.support.waiting import until

LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=8, block_size=16, dtype="float32")
Event = worker_pb2.WorkerEvent


def thoughts_about(spec: worker_pb2.SequenceSpec, size: int) -> list[Thought]:
    """Return the thoughts after all known tokens were computed, with `size` tokens a chunk."""
    known = len(spec.prompt) + (len(spec.known) if spec.think_while_decoding else 0)
    return [Thought(chunk, thought(chunk)) for chunk in range(known // size)]


@dataclass(eq=False)
class Work:
    """A prefill worker's state of one request. `computed`: the first token was sent, under any handoff id."""

    handoff: HandoffId
    spec: worker_pb2.SequenceSpec
    to: str
    computed: bool = False
    task: asyncio.Task[None] | None = None


class FakeWorker(WorkerServicer):
    """A worker in this process. Its role selects its script."""

    def __init__(self, role: Role, name: str, counter: int, blocks: int = 4000) -> None:
        self.role = role
        ref = WorkerRef(name, Incarnation(1, counter), "")
        self.info = WorkerInfo(ref, role, "fp", "oracle", 2048, blocks, LAYOUT)
        self.peers: dict[str, FakeWorker] = {}
        self.commands: list[tuple[str, HandoffId]] = []
        self.messages_in: list[worker_pb2.RouterCommand] = []
        self.specs: list[worker_pb2.SequenceSpec] = []  # specs of all prompts to compute
        self.gates = {
            name: asyncio.Event() for name in ("reserve", "think", "first", "commit", "decode", "hold", "score")
        }
        self.open(*self.gates)
        self.refuse_once: list[int] = []  # reasons, for a Reserve or a Repush
        self.hold_at: int | None = None  # token index before which the worker waits for "hold"
        self.spared = 0  # answers that do not wait there
        self.forgets = False  # whether Release ends the memory of a stream, as a real worker does
        self.preempt_at: list[int] = []  # token indices at which the request is requeued, each used once
        self.keeps = False  # a preempted request is held for a Repush, as by a decode worker that leaves
        self.ahead = 0  # tokens that it decodes after it is preempted, and sends after the Repush
        self.draining = False
        self.fail_push: list[worker_pb2.Failed] = []  # outcomes of the next pushes, instead of a commit
        self.commit_first = False  # D's message before P's first token
        self.repeats_thoughts = True  # a decode worker sends the prompt's thoughts again before its first token
        self.said_twice = 0  # tokens sent again for a Repush
        self.cached: list[int] = []  # tokens that P finds in its cache, by attempt
        self.cached_here = 0  # cached tokens in D's reply to a Reserve
        self.scored = False  # its tokens have logprobs
        self.scores_first = 0  # positions of a prompt that are scored before the gate "score"
        self.alive = True
        self.committed: set[HandoffId] = set()
        self.messages = 0
        self.said: dict[HandoffId, list[Event]] = {}  # events of each stream that a decode worker remembers
        self.decoded: dict[HandoffId, worker_pb2.SequenceSpec] = {}
        self._parked: set[HandoffId] = set()  # streams of a lost router: another gets their events after Attach
        self._work: dict[HandoffId, Work] = {}
        self._held: dict[HandoffId, int] = {}
        self._tasks: dict[HandoffId, asyncio.Task[None]] = {}
        self._queue: asyncio.Queue[list[Event] | None] = asyncio.Queue()
        self._server = aio_server()
        self.wire = PLAINTEXT
        self.load_fields: dict[str, Any] = {}  # further fields of its reports
        self.before_emit: Callable[[Event], None] = lambda item: None  # changes each event before it is sent

    def says(self, determinism: str) -> None:
        """Set the determinism fingerprint. Call it before `start`."""
        why_not = "" if determinism else f"{self.role} workers cannot"
        self.info = replace(self.info, determinism=determinism, nondeterminism=why_not)

    def open(self, *gates: str) -> None:
        for name in gates:
            self.gates[name].set()

    def close(self, *gates: str) -> None:
        for name in gates:
            self.gates[name].clear()

    def hold(self, index: int, *, spares: int = 0) -> None:
        """Hold every answer but the first `spares` before this token index until `open("hold")`."""
        self.hold_at, self.spared = index, spares
        self.close("hold")

    # --- process

    async def start(self) -> FakeWorker:
        add_WorkerServicer_to_server(self, self._server)
        address = bind(self._server, "127.0.0.1:0", self.wire.private)
        self.info = replace(self.info, ref=replace(self.info.ref, address=address))
        await self._server.start()
        return self

    async def depart(self) -> None:
        """End the router's stream in order, as a drained worker does, and then the process."""
        self._queue.put_nowait(None)
        await self.kill(1.0)

    async def kill(self, grace_s: float = 0.0) -> None:
        self.alive = False
        tasks = [*self._tasks.values(), *(work.task for work in self._work.values() if work.task)]
        for task in tasks:
            task.cancel()
        await self._server.stop(grace_s)

    async def Census(self, request, context):
        raise NotImplementedError

    async def Connect(self, request_iterator, context) -> None:  # type: ignore[override]
        self._queue, self._parked = asyncio.Queue(), set(self.said)
        reader = asyncio.create_task(self._read(request_iterator))
        welcome = Event(welcome=convert.info_to_pb(self.info))
        await context.write(worker_pb2.WorkerMessage(events=[welcome], load=self.load()))
        try:
            while (events := await self._queue.get()) is not None:
                self.messages += 1
                await context.write(worker_pb2.WorkerMessage(events=events, load=self.load()))
        finally:
            reader.cancel()

    async def _read(self, commands: AsyncIterator[worker_pb2.RouterMessage]) -> None:
        async for message in commands:
            for command in message.commands:
                self._command(command)

    def load(self) -> common_pb2.Load:
        used, total = sum(self._held.values()), self.info.total_blocks
        blocks = common_pb2.BlockCounts(total=total, free=total - used, reserved=used)
        return common_pb2.Load(blocks=blocks, draining=self.draining, **self.load_fields)

    def emit(self, *events: Event) -> None:
        heard = []
        for item in events:
            self.before_emit(item)
            name = convert.handoff_from_pb(item.handoff)
            self.said.setdefault(name, []).append(item)
            heard += [item] if name not in self._parked else []
        self._queue.put_nowait(heard)

    def count(self, kind: str) -> int:
        return self.kinds.count(kind)

    @property
    def kinds(self) -> list[str]:
        """Kinds of all commands received, in order."""
        return [kind for kind, _ in self.commands]

    @property
    def handoff(self) -> HandoffId:
        """The only handoff in the commands received."""
        [handoff] = {handoff for _, handoff in self.commands}
        return handoff

    @property
    def reserves(self) -> list[worker_pb2.Reserve]:
        return [command.reserve for command in self.messages_in if command.HasField("reserve")]

    @property
    def holds_nothing(self) -> bool:
        return not self._held and not self._work

    # --- commands

    def _command(self, command: worker_pb2.RouterCommand) -> None:
        kind = command.WhichOneof("command") or ""
        if kind == "hello":
            return
        body: Any = getattr(command, kind)
        handoff = convert.handoff_from_pb(body.handoff)
        self.commands.append((kind, handoff))
        self.messages_in.append(command)
        if kind == "reserve":
            self._tasks[handoff] = asyncio.create_task(self._reserve(handoff, command.reserve))
        elif kind == "prefill" and self.info.role is Role.DECODE:
            reserving = self._tasks.get(handoff)
            self._tasks[handoff] = asyncio.create_task(self._compute(handoff, command.prefill.spec, reserving))
        elif kind == "prefill":
            self.specs.append(command.prefill.spec)
            self._go_on(Work(handoff, command.prefill.spec, command.prefill.to.worker_id))
        elif kind == "repush":
            self._repush(handoff, command.repush)
        elif kind == "fence":
            self.fence(handoff)
        elif kind == "attach":
            self._attach(handoff, command.attach)
        else:
            if self.forgets:
                self.said.pop(handoff, None)
            self._drop(handoff)

    def _drop(self, handoff: HandoffId) -> None:
        self._held.pop(handoff, None)
        if (work := self._work.pop(handoff, None)) is not None and work.task is not None:
            work.task.cancel()
        if (task := self._tasks.pop(handoff, None)) is not None:
            task.cancel()
        self.emit()

    def fence(self, handoff: HandoffId) -> None:
        self._drop(handoff)
        self.emit(event(handoff, fenced=worker_pb2.Fenced()))

    def _refuse(self, handoff: HandoffId, detail: str, reason: Any = worker_pb2.REFUSAL_REASON_STALE) -> None:
        reason = self.refuse_once.pop() if self.refuse_once else reason
        self.emit(event(handoff, refused=worker_pb2.Refused(reason=reason, detail=detail)))

    # --- prefill

    def _go_on(self, work: Work) -> None:
        self._work[work.handoff] = work
        work.task = asyncio.create_task(self._prefill(work))

    def _repush(self, handoff: HandoffId, message: worker_pb2.Repush) -> None:
        """Continue held work under its new id: compute, or repeat the first token."""
        work = self._work.pop(convert.handoff_from_pb(message.held), None)
        if work is not None and work.task is not None:
            work.task.cancel()
        if work is None or self.refuse_once:
            self._refuse(handoff, "nothing is held")
            return
        work.handoff, work.to = handoff, message.to.worker_id
        self._go_on(work)

    async def _prefill(self, work: Work) -> None:
        decode, spec = self.peers[work.to], work.spec
        if self.commit_first:
            decode.commit(work.handoff, spec)
        await self.gates["think"].wait()
        self._think(work.handoff, spec)
        await self._score(work.handoff, spec)
        if not work.computed:
            await self.gates["first"].wait()
        self.said_twice += work.computed
        work.computed, index = True, len(spec.known)
        if index == spec.sampling.max_tokens:  # the client has all tokens but not the end
            self._done(work, finish(work.handoff))
            return
        cached = self.cached.pop(0) if self.cached else 0
        first = convert.tokens_to_pb([token_at(list(spec.prompt), index, scored=self.scored)])
        said = [event(work.handoff, tokens=first, cached_tokens=cached)] if self.role is Role.PREFILL else []
        if self.role is Role.DECODE and self.ahead:
            late = [token_at(list(spec.prompt), at) for at in range(index + 1 - self.ahead, index + 1)]
            said = [event(work.handoff, tokens=convert.tokens_to_pb(late))]
        if index + 1 == spec.sampling.max_tokens:
            self._done(work, *said, finish(work.handoff))
            return
        self.emit(*said)
        await self.gates["commit"].wait()
        failed = self.fail_push.pop(0) if self.fail_push else None
        if failed is None and not (decode.alive and decode.commit(work.handoff, spec)):
            failed = worker_pb2.Failed(kind="ChannelBroken", message="cut", held=True)
        if failed is None:
            self._done(work, event(work.handoff, pushed=worker_pb2.Pushed(kv_bytes=100)))
        elif failed.held:
            self.emit(event(work.handoff, failed=failed))
        else:
            self._done(work, event(work.handoff, failed=failed))

    def _think(self, handoff: HandoffId, spec: worker_pb2.SequenceSpec) -> None:
        """Send the first chunk in its own message, the others together."""
        about = thoughts_about(spec, self.info.thinking_chunk) if self.info.thinking_chunk else []
        for some in (about[:1], about[1:]):
            if some:
                self.emit(event(handoff, thoughts=convert.thoughts_to_pb(some)))

    async def _score(self, handoff: HandoffId, spec: worker_pb2.SequenceSpec) -> None:
        """Send log-probabilities of the prompt, two positions a message. After `scores_first` positions, the gate."""
        for begin in range(1, len(spec.prompt) if spec.HasField("prompt_logprobs") else 0, 2):
            if begin > self.scores_first:
                await self.gates["score"].wait()
            ids = spec.prompt[begin : begin + 2]
            tokens = tuple(PromptToken(i, 1, TokenLogprobs(-0.5 * i)) for i in ids)
            part = convert.prompt_part_to_pb(PromptPart(begin, tokens))
            self.emit(event(handoff, prompt_logprobs=part))
            await asyncio.sleep(0)

    def _done(self, work: Work, *last: Event) -> None:
        del self._work[work.handoff]
        self.emit(*last)

    # --- decode

    async def _reserve(self, handoff: HandoffId, message: worker_pb2.Reserve) -> None:
        await self.gates["reserve"].wait()
        need = LAYOUT.blocks_for(message.known_tokens + 1)
        if self.refuse_once or sum(self._held.values()) + need > self.info.total_blocks:
            self._refuse(handoff, "full", worker_pb2.REFUSAL_REASON_NO_ROOM)
            self.emit()
            return
        self._held[handoff] = need
        self.emit(event(handoff, reserved=worker_pb2.Reserved(cached_tokens=self.cached_here)))

    def _attach(self, handoff: HandoffId, message: worker_pb2.Attach) -> None:
        self._parked.discard(handoff)
        ours, theirs = convert.spec_from_pb(self.decoded[handoff]), convert.spec_from_pb(message.spec)
        same = replace(ours, known=()) == replace(theirs, known=())
        if handoff not in self.said or self.refuse_once or not same:
            self._refuse(handoff, "not here")
            self._parked.add(handoff)
            return
        known = len(message.spec.known)
        missed = [
            e
            for e in self.said[handoff]
            if e.HasField("finish") or e.HasField("thoughts") or getattr(e.tokens, "from") + len(e.tokens.ids) > known
        ]
        bits = next(each.determinism for each in self.reserves if convert.handoff_from_pb(each.handoff) == handoff)
        self._queue.put_nowait([event(handoff, attached=worker_pb2.Attached(room=2**20, determinism=bits)), *missed])

    def commit(self, handoff: HandoffId, spec: worker_pb2.SequenceSpec) -> bool:
        """Return whether the commit was accepted, now or earlier."""
        if handoff in self._held and self._tasks[handoff].done():
            self._tasks[handoff] = asyncio.create_task(self._decode(handoff, spec))
            self.committed.add(handoff)
            self.decoded[handoff] = spec
        return handoff in self.committed

    async def _compute(
        self, handoff: HandoffId, spec: worker_pb2.SequenceSpec, reserving: asyncio.Task[None] | None
    ) -> None:
        """Compute the prompt too, in the reserved blocks."""
        if reserving is not None:
            await reserving
        if handoff not in self._held:
            self._refuse(handoff, "nothing is reserved")
            return
        self.specs.append(spec)
        self._think(handoff, spec)
        await self._score(handoff, spec)
        await self.gates["first"].wait()
        if len(spec.known) == spec.sampling.max_tokens:
            self._held.pop(handoff, None)
            self.emit(finish(handoff))
            return
        first = convert.tokens_to_pb([token_at(list(spec.prompt), len(spec.known))])
        self.emit(event(handoff, tokens=first, cached_tokens=self.cached_here))
        await self._go_on_decoding(handoff, spec)

    async def _decode(self, handoff: HandoffId, spec: worker_pb2.SequenceSpec) -> None:
        prompt, index = list(spec.prompt), len(spec.known)
        done = worker_pb2.Committed(transfer_s=0.0, commit_s=0.0, kv_bytes=100, transport="memory")
        first = token_at(prompt, index, scored=self.scored)
        self.emit(event(handoff, committed=done))
        if self.repeats_thoughts:
            self._think(handoff, spec)
        self.emit(event(handoff, tokens=convert.tokens_to_pb([first])))
        await self._go_on_decoding(handoff, spec)

    async def _go_on_decoding(self, handoff: HandoffId, spec: worker_pb2.SequenceSpec) -> None:
        prompt, index = list(spec.prompt), len(spec.known)
        last = spec.sampling.max_tokens - 1
        self.spared -= 1
        held = self.spared < 0
        if index == last:
            self._held.pop(handoff, None)
            self.emit(finish(handoff))
        for at in range(index + 1, last + 1):
            await self.gates["decode"].wait()
            if held and at == self.hold_at:
                await self.gates["hold"].wait()
            if at in self.preempt_at:
                self.preempt_at.remove(at)
                self._held.pop(handoff, None)
                if self.keeps:
                    self._keep(handoff, spec, at - 1 + self.ahead)
                known = len(prompt) + at - 1 + self.ahead if self.keeps else 0
                preempted = worker_pb2.Preempted(reason="full", held=self.keeps, known_tokens=known)
                self.emit(event(handoff, preempted=preempted))
                return
            if at == last:
                self._held.pop(handoff, None)
            said = event(handoff, tokens=convert.tokens_to_pb([token_at(prompt, at, scored=self.scored)]))
            new = self._thought_before(spec, len(prompt) + at)
            before = [event(handoff, thoughts=convert.thoughts_to_pb(new))] if new else []
            self.emit(*before, said, *([finish(handoff)] if at == last else []))
            await asyncio.sleep(0)

    def _keep(self, handoff: HandoffId, spec: worker_pb2.SequenceSpec, last: int) -> None:
        """Hold the KV of all tokens before number `last`."""
        kept, prompt = worker_pb2.SequenceSpec(), list(spec.prompt)
        kept.CopyFrom(spec)
        kept.known[:] = right(prompt, last)
        self._work[handoff] = Work(handoff, kept, "", computed=True)

    def _thought_before(self, spec: worker_pb2.SequenceSpec, position: int) -> list[Thought]:
        """Return the thought about the chunk that ends before the generated token at `position`."""
        size = self.info.thinking_chunk
        if not (spec.think_while_decoding and size) or position % size:
            return []
        return [Thought(position // size - 1, thought(position // size - 1))]


def event(handoff: HandoffId, **body) -> Event:
    return Event(handoff=convert.handoff_to_pb(handoff), **body)


def finish(handoff: HandoffId) -> Event:
    return event(handoff, finish=convert.finish_to_pb(Finish(FinishReason.LENGTH, tail="!")))


def token_at(prompt: list[int], index: int, *, scored: bool = False) -> Token:
    return Token(index, expected(prompt, index), f"<{index}>", TokenLogprobs(-0.25 * index) if scored else None)


async def released(*workers: FakeWorker) -> None:
    """Wait until each worker has received exactly one Release."""
    for worker in workers:
        await until(lambda: worker.count("release") == 1, f"release to {worker.info.ref}")  # noqa: B023


class InProcessCluster:
    """Fake workers and a router in front of them."""

    def __init__(self, prefill: list[FakeWorker], decode: list[FakeWorker], settings: RouterSettings) -> None:
        self.prefill, self.decode, self.settings = prefill, decode, settings
        self.infos: list[WorkerInfo] = []

    @property
    def workers(self) -> list[FakeWorker]:
        return [*self.prefill, *self.decode]

    async def start(self) -> None:
        for worker in self.workers:
            worker.peers = {peer.info.ref.worker_id: peer for peer in self.decode}
        for worker in self.workers:
            worker.wire = Wire.of(self.settings.tls)
            await worker.start()
        self.infos = [worker.info for worker in self.workers]
        self.router: Router = await serve(self.settings, self.source, OracleTokenizer())
        self.channel = self.router.context.wire.aio(self.router.grpc)
        self.stub = InferenceStub(self.channel)
        await until(lambda: sum(link.usable for link in self.links) == len(self.workers), "connected")

    async def joined(self, decode: FakeWorker) -> None:
        """Start another decode worker and register it, along with all others in the lists."""
        self.decode.append(await decode.start())
        for worker in self.workers:
            worker.peers[decode.info.ref.worker_id] = decode
        self.infos = [worker.info for worker in self.workers]

    async def source(self) -> list[WorkerInfo]:
        return self.infos

    async def stop(self) -> None:
        await self.channel.close()
        await self.router.stop(grace_s=0.0)
        for worker in self.workers:
            await worker.kill()

    @property
    def links(self) -> list[WorkerStream]:
        return self.router.context.pool.links

    def call(self, prompt: list[int] | None = None, max_tokens: int = 8, timeout: float | None = None, **fields):
        return self.stub.Generate(asked(prompt, max_tokens, **fields), timeout=timeout)

    async def answer(self, call) -> list[pb.GenerateEvent]:
        try:
            return [event async for event in call]
        except aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    async def generate(self, *args, **kwargs) -> list[pb.GenerateEvent]:
        return await self.answer(self.call(*args, **kwargs))

    async def resume(
        self,
        request: pb.GenerateRequest,
        *received: list[int],
        name: str = "earlier",
        fingerprint: str = "",
        at: InferenceStub | None = None,
    ) -> list[pb.GenerateEvent]:
        """Return the events after `received`. `at`: the stub of another router."""
        message = pb.ResumeRequest(request_id=name, request=request, system_fingerprint=fingerprint)
        message.received.extend(common_pb2.TokenIds(ids=ids) for ids in received)
        return await self.answer((at or self.stub).Resume(message))

    def hears(self, *said: tuple[Role, Item]) -> None:
        """Put all items into the mailbox of the only request in one turn, in this order."""
        handoff = self.prefill[0].handoff
        mailbox, _ = next(found for link in self.links if (found := link.mailboxes.get(handoff)))
        for source, item in said:
            mailbox.put(source, item)

    @property
    def idle(self) -> bool:
        views = [link.view for link in self.links]
        return all(v.dispatched == v.queued_tokens == v.pending_blocks == 0 for v in views)

    @property
    def handed_over(self) -> bool:
        return bool(self.prefill[0].specs) and self.links[0].view.dispatched == 0

    def waits(self, count: int) -> bool:
        return self.router.context.admission.waiting == count

    async def nothing_is_left(self) -> None:
        """Wait until no live worker has a claim, a reservation or KV."""
        await until(lambda: self.idle, "every claim is given back")
        alive = [worker for worker in self.workers if worker.alive]
        await until(lambda: all(worker.holds_nothing for worker in alive), "every worker has let go")
        await until(lambda: not self.router.context.running, "no request is left")

    async def status(self) -> admin_pb2.StatusReply:
        async with aio_channel(self.router.admin) as channel:
            return await AdminStub(channel).Status(admin_pb2.StatusRequest())

    async def http(self, path: str, of: Router | None = None) -> str:
        """Return the reply of a router's metrics port, by default the first router's."""
        reader, writer = await asyncio.open_connection(*(of or self.router).metrics.split(":"))
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        text = (await reader.read()).decode()
        writer.close()
        return text


@asynccontextmanager
async def clusters() -> AsyncIterator[Any]:
    """Yield a function that starts a cluster. All clusters are stopped at the end."""
    made: list[InProcessCluster] = []

    async def build(
        prefill: int = 1,
        decode: int = 1,
        blocks: int = 4000,
        bits: Mapping[str, str] | None = None,
        thinks: int = 0,
        **settings,
    ) -> InProcessCluster:
        """`bits`: determinism fingerprints by worker id; the other workers have none. `thinks`: tokens a chunk."""
        addresses = dict.fromkeys(("grpc", "admin", "metrics"), "127.0.0.1:0")
        cluster = InProcessCluster(
            [FakeWorker(Role.PREFILL, f"prefill-{i}", 100 + i) for i in range(prefill)],
            [FakeWorker(Role.DECODE, f"decode-{i}", 200 + i, blocks) for i in range(decode)],
            RouterSettings(name="test", model="oracle", **{**addresses, **settings}),
        )
        for worker in cluster.workers:
            worker.says((bits or {}).get(worker.info.ref.worker_id, ""))
            worker.info = replace(worker.info, thinking_chunk=thinks)
        await cluster.start()
        made.append(cluster)
        return cluster

    try:
        yield build
    finally:
        for cluster in made:
            await cluster.stop()


async def at(cluster: InProcessCluster, state: str):
    """Return a request that is held in `state`."""
    prefill, decode = cluster.prefill[0], cluster.decode[0]
    if state == "queued":
        decode.close("decode")
        cluster.call()
        await until(lambda: decode.count("reserve") == 1, "first one placed")
        call = cluster.call()
        await until(partial(cluster.waits, 1), state)
        return call
    gate = {"reserving": "reserve", "prefilling": "first", "transferring": "commit", "decoding": "decode"}[state]
    for worker in cluster.workers:
        worker.close(gate)
    call = cluster.call()
    await until(lambda: decode.count("reserve") == 1, state)
    if state != "reserving":
        await until(lambda: prefill.specs, state)
    if state == "transferring":
        await until(lambda: cluster.links[0].view.queued_tokens == 0, state)
    if state == "decoding":
        await until(lambda: cluster.handed_over, state)
    return call


STATES = ("reserving", "prefilling", "transferring", "decoding")
