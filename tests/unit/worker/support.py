"""A prefill and a decode role on real engines, in one thread: what happens next is for the test to say."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from baton.clock import FakeClock
from baton.core import HandoffId, Incarnation, Role, Sampling, SequenceSpec, WorkerInfo, WorkerRef
from baton.engine.engine import Engine
from baton.engine.oracle import OracleBackend, oracle_layout
from baton.errors import ChannelBroken, HandoffError, InvalidRequest, StaleAttempt
from baton.rpc import convert
from baton.rpc.v1 import worker_pb2 as pb
from baton.tokenizer import OracleTokenizer
from baton.worker.commands import not_taken
from decode_workers.role import DecodeRole
from kvtransfer.handoff import CommitState, Offer, PushJob, PushResult
from prefill_workers.role import PrefillRole

torch.set_num_threads(1)
BLOCK = 4
BACKEND = OracleBackend(oracle_layout(block_size=BLOCK), max_model_len=64)
P = WorkerRef("prefill-0", Incarnation(7, 1), "127.0.0.1:1")
D = WorkerRef("decode-0", Incarnation(7, 2), "127.0.0.1:2")
H = HandoffId("r", 1)
GREEDY = Sampling(max_tokens=6, temperature=0.0, ignore_eos=True)
NAN = float("nan")


def engine_of(role, total_blocks):
    return Engine(
        BACKEND, OracleTokenizer(), total_blocks=total_blocks, recompute_preempted=role is Role.PREFILL, max_running=16
    )


def info_of(ref, role, engine):
    return WorkerInfo(
        ref, role, BACKEND.fingerprint, "oracle", engine.max_model_len, engine.pool.total, engine.layout
    )  # fmt: skip


def prompt_of(handoff, length=9):
    return tuple((7 * i + sum(handoff.request_id.encode())) % 250 for i in range(length))


def spec_of(handoff=H, length=9, sampling=GREEDY):
    return SequenceSpec(prompt_of(handoff, length), sampling)


def reserve(handoff=H, known=9, deadline_s=0.0, fingerprint=BACKEND.fingerprint, max_total=0):
    message = pb.Reserve(
        handoff=convert.handoff_to_pb(handoff),
        fingerprint=fingerprint,
        known_tokens=known,
        max_total=max_total,
        deadline_s=deadline_s,
    )
    return pb.RouterCommand(reserve=message)


def prefill(handoff=H, spec=None, to=D, deadline_s=0.0):
    message = pb.Prefill(
        handoff=convert.handoff_to_pb(handoff),
        spec=convert.spec_to_pb(spec_of(handoff) if spec is None else spec),
        to=convert.ref_to_pb(to),
        deadline_s=deadline_s,
    )
    return pb.RouterCommand(prefill=message)


def fence(handoff=H):
    return pb.RouterCommand(fence=pb.Fence(handoff=convert.handoff_to_pb(handoff)))


def release(handoff=H):
    return pb.RouterCommand(release=pb.Release(handoff=convert.handoff_to_pb(handoff)))


def malformed():
    """Commands of every kind with something wrong, each with what its refusal names."""
    nobody, zeroth = pb.RouterCommand(), HandoffId("r", 0)
    hello = pb.RouterCommand(hello=pb.RouterHello(router_id="again"))
    no_seed = spec_of(sampling=Sampling(temperature=1.0))
    no_address = WorkerRef("decode-0", Incarnation(7, 2), "")
    broken = prefill()
    broken.prefill.spec.sampling.temperature = NAN
    foreign = prefill()
    foreign.prefill.spec.prompt.append(2**32 - 1)
    yield from [("nothing", nobody, "command"), ("hello", hello, "command")]
    for make in (reserve, prefill, fence, release):
        yield f"{make.__name__} without a request id", make(HandoffId("", 1)), "handoff"
        yield f"{make.__name__} of attempt 0", make(zeroth), "handoff"
    for make in (reserve, prefill):
        for seconds in (NAN, float("inf"), -1.0):
            yield f"{make.__name__} with deadline {seconds}", make(deadline_s=seconds), "deadline_s"
    yield "prefill without a prompt", prefill(spec=SequenceSpec((), GREEDY)), "prompt"
    yield "prefill without a seed", prefill(spec=no_seed), "seed"
    yield "prefill to nowhere", prefill(to=no_address), "to.address"
    yield "prefill at NaN degrees", broken, "temperature"
    yield "prefill of a foreign token", foreign, "prompt"
    yield "prefill that never fits", prefill(spec=spec_of(length=64)), "prompt"


class FakeSession:
    """What a role needs of a session."""

    def __init__(self, router_id="router-a"):
        self.router_id = router_id
        self.handoffs = set()
        self.messages = []  # one list of events per emit

    def emit(self, events):
        self.messages.append(list(events))

    @property
    def events(self):
        return [event for message in self.messages for event in message]

    def kinds(self, handoff=None):
        mine = [e for e in self.events if handoff is None or convert.handoff_from_pb(e.handoff) == handoff]
        return [event.WhichOneof("event") for event in mine]

    def tokens(self, handoff=H):
        mine = [e.tokens for e in self.events if convert.handoff_from_pb(e.handoff) == handoff and e.HasField("tokens")]
        return [token for message in mine for token in convert.tokens_from_pb(message)]


class SyncLoop:
    """Jobs wait until the test runs them, as they do for a step to end."""

    def __init__(self):
        self.jobs: deque[Any] = deque()

    def submit(self, job):
        self.jobs.append(job)

    def drain(self):
        while self.jobs:
            self.jobs.popleft()()


class Records:
    """An ownership log that remembers."""

    def __init__(self):
        self.notes = []

    def note(self, handoff, router_id, state):
        self.notes.append((handoff, router_id, state.name))


class Side:
    """One worker: its engine, its loop, its role."""

    def __init__(self, engine, role, loop):
        self.engine, self.role, self.loop = engine, role, loop

    def take(self, session, command):
        """As `WorkerService` hands it over."""
        try:
            self.role.command(session, command)
        except InvalidRequest as error:
            session.emit(not_taken(command, str(error)))

    def step(self):
        """One turn of the engine thread."""
        self.loop.drain()
        if self.engine.has_work():
            self.role.stepped(self.engine.step())
        self.role.tick()

    def run(self):
        for _ in range(500):
            self.step()
            if not self.engine.has_work() and not self.loop.jobs:
                return
        raise AssertionError("does not come to an end")

    @property
    def counts(self):
        return self.engine.pool.counts()

    @property
    def all_free(self):
        return self.counts.available == self.counts.total


class PrefillSide(Side):
    def __init__(self, blocks=40, clock=None):
        self.clock = clock or FakeClock()
        engine, loop = engine_of(Role.PREFILL, blocks), cast(Any, SyncLoop())
        super().__init__(engine, PrefillRole(info_of(P, Role.PREFILL, engine), engine, loop, self.clock), loop)
        self.pusher = FakePusher(self)
        self.role.attach(self.pusher)


class DecodeSide(Side):
    def __init__(self, blocks=40, clock=None):
        self.clock, self.records = clock or FakeClock(), cast(Any, Records())
        engine, loop = engine_of(Role.DECODE, blocks), cast(Any, SyncLoop())
        role = DecodeRole(info_of(D, Role.DECODE, engine), engine, loop, self.records, self.clock)
        super().__init__(engine, role, loop)


@dataclass
class Push:
    """Under way: what a sender has of it, and how far it got at the receiver."""

    job: PushJob
    stage: str = "queued"  # queued | offered | written | committed
    aborted: bool = False
    buffer: torch.Tensor | None = field(default=None, repr=False)


class FakePusher:
    """A sender that goes on when told: one stage at a time, over memory, into a reservation table."""

    def __init__(self, side):
        self.side = side
        self.pushes: dict[HandoffId, Push] = {}
        self.reports = []
        self.warmed = []
        self.refuse = None  # raised by push, and by warm when the sender is closed

    def warm(self, to):
        if isinstance(self.refuse, ChannelBroken):
            raise self.refuse
        self.warmed.append(to)

    def push(self, job):
        if self.refuse is not None:
            raise self.refuse
        if job.handoff in self.pushes:
            raise ValueError(f"push {job.handoff} is under way already")
        self.pushes[job.handoff] = Push(job)

    def abort(self, handoff):
        if (push := self.pushes.get(handoff)) is not None:
            push.aborted = True

    def done(self, handoff, outcome):
        """The one report of a push."""
        del self.pushes[handoff]
        self.reports.append(handoff)
        self.side.role.push_ended(handoff, outcome)

    def advance(self, handoff, decode):
        """One stage further towards `decode`'s table."""
        push, table = self.pushes[handoff], decode.role.reservations
        try:
            if push.aborted:
                raise StaleAttempt("aborted")
            self._stage(push, table, decode.engine.kv)
        except HandoffError as error:
            table.aborted(handoff, P)
            self.done(handoff, error)

    def break_channel(self, decode):
        """Every push fails, the table hears that the sender is gone."""
        for handoff in list(self.pushes):
            self.done(handoff, ChannelBroken("cut"))
        decode.role.reservations.lost(P)

    def _stage(self, push, table, kv):
        job, handoff, layout = push.job, push.job.handoff, kv.layout
        layers, count = range(layout.layers), layout.blocks_for(job.known_tokens)
        if push.stage == "queued":
            table.offer(handoff, P, Offer(BACKEND.fingerprint, job.known_tokens, 0, 1))
            push.stage = "offered"
        elif push.stage == "offered":
            data = torch.empty(count * layout.block_bytes, dtype=torch.uint8)
            self.side.engine.kv.gather(layers, job.blocks[:count], data)
            with table.writing(handoff, P) as blocks:
                kv.scatter(layers, blocks, data)
            push.stage = "written"
        elif push.stage == "written":
            table.commit(handoff, P, CommitState(job.spec, job.first, 0.1, 0.1, 64, "memory"))
            push.stage = "committed"
        else:
            self.done(handoff, PushResult(64, 0.1, "memory"))


class Pair:
    """Both sides, one clock."""

    def __init__(self, prefill_blocks=40, decode_blocks=40):
        self.clock = FakeClock()
        self.prefill = PrefillSide(prefill_blocks, self.clock)
        self.decode = DecodeSide(decode_blocks, self.clock)

    def hand_over(self, session, handoff=H, spec=None, *, upto="committed"):
        """From Reserve on, until the push reached stage `upto` ("reported": to its end)."""
        spec = spec or spec_of(handoff)
        self.decode.take(session, reserve(handoff, len(spec)))
        self.prefill.take(session, prefill(handoff, spec))
        self.prefill.run()
        pusher = self.prefill.pusher
        while handoff in pusher.pushes and pusher.pushes[handoff].stage != upto:
            pusher.advance(handoff, self.decode)
