"""A prefill and a decode role on real engines, in one thread: what happens next is for the test to say."""

from __future__ import annotations

from collections import deque
from typing import Any, cast

import torch

from baton.clock import FakeClock
from baton.core import HandoffId, Incarnation, Role, Sampling, SequenceSpec, WorkerInfo, WorkerRef
from baton.engine.engine import Engine
from baton.engine.oracle import OracleBackend, oracle_layout
from baton.engine.prefix import Chain, scope_key
from baton.errors import InvalidRequest
from baton.rpc import convert
from baton.rpc.v1 import worker_pb2 as pb
from baton.tokenizer import OracleTokenizer
from baton.worker.commands import not_taken
from decode_workers.role import DecodeRole
from prefill_workers.role import PrefillRole
from tests.unit.worker.pusher import FakePusher, P

torch.set_num_threads(1)
BLOCK = 4
BACKEND = OracleBackend(oracle_layout(block_size=BLOCK), max_model_len=64)
D = WorkerRef("decode-0", Incarnation(7, 2), "127.0.0.1:2")
H = HandoffId("r", 1)
GREEDY = Sampling(max_tokens=6, temperature=0.0, ignore_eos=True)
NAN = float("nan")


def engine_of(role, total_blocks, block_size=BLOCK, *, backend=BACKEND, **options):
    """Sizes of blocks may differ: the oracle's fingerprint does not."""
    if block_size != BLOCK:
        backend = OracleBackend(oracle_layout(block_size=block_size), max_model_len=64)
    options = {"recompute_preempted": role is Role.PREFILL, "max_running": 16, **options}
    return Engine(backend, OracleTokenizer(), total_blocks=total_blocks, **options)


def info_of(ref, role, engine, thinking_chunk=0):
    facts = engine.backend.fingerprint, "oracle", engine.max_model_len, engine.pool.total, engine.layout
    return WorkerInfo(ref, role, *facts, thinking_chunk=thinking_chunk)


def prompt_of(handoff, length=9):
    return tuple((7 * i + sum(handoff.request_id.encode())) % 250 for i in range(length))


def spec_of(handoff=H, length=9, sampling=GREEDY):
    return SequenceSpec(prompt_of(handoff, length), sampling)


def names_of(tokens, block_size=BLOCK):
    """What a cache calls the full blocks of `tokens`."""
    chain = Chain(scope_key(BACKEND.fingerprint, ""), tokens, block_size)
    return [chain.digest(block) for block in range(len(tokens) // block_size)]


def reserve(handoff=H, known=9, deadline_s=0.0, fingerprint=BACKEND.fingerprint, max_total=0, prefix=()):
    message = pb.Reserve(
        handoff=convert.handoff_to_pb(handoff),
        fingerprint=fingerprint,
        known_tokens=known,
        max_total=max_total,
        deadline_s=deadline_s,
        prefix=prefix,
    )
    return pb.RouterCommand(reserve=message)


def prefill(handoff=H, spec=None, to=D, deadline_s=0.0, skip=0):
    message = pb.Prefill(
        handoff=convert.handoff_to_pb(handoff),
        spec=convert.spec_to_pb(spec_of(handoff) if spec is None else spec),
        to=convert.ref_to_pb(to) if to is not None else None,
        deadline_s=deadline_s,
        skip=skip,
    )
    return pb.RouterCommand(prefill=message)


def repush(held=H, handoff=None, to=D, deadline_s=0.0, skip=0):
    """`handoff`: the next attempt."""
    handoff = handoff or next_of(held)
    message = pb.Repush(
        held=convert.handoff_to_pb(held),
        handoff=convert.handoff_to_pb(handoff),
        to=convert.ref_to_pb(to),
        deadline_s=deadline_s,
        skip=skip,
    )
    return pb.RouterCommand(repush=message)


def next_of(handoff):
    return HandoffId(handoff.request_id, handoff.attempt + 1)


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
    for make in (reserve, prefill, fence, release, repush):
        yield f"{make.__name__} without a request id", make(HandoffId("", 1)), "handoff"
        yield f"{make.__name__} of attempt 0", make(zeroth), "handoff"
    yield "repush under no name", repush(handoff=zeroth), "handoff"
    yield "repush to nowhere", repush(to=no_address), "to.address"
    for make in (reserve, prefill, repush):
        for seconds in (NAN, float("inf"), -1.0):
            yield f"{make.__name__} with deadline {seconds}", make(deadline_s=seconds), "deadline_s"
    yield "prefill without a prompt", prefill(spec=SequenceSpec((), GREEDY)), "prompt"
    yield "prefill without a seed", prefill(spec=no_seed), "seed"
    yield "prefill to nowhere", prefill(to=no_address), "to.address"
    yield "prefill at NaN degrees", broken, "temperature"
    yield "prefill of a foreign token", foreign, "prompt"
    yield "prefill that never fits", prefill(spec=spec_of(length=64)), "prompt"
    yield "prefill that skips all of it", prefill(skip=9), "skip"


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

    def cached_at(self, handoff):
        """What the decode worker said to its Reserve; None: it refused."""
        said = [e for e in self.events if convert.handoff_from_pb(e.handoff) == handoff and e.HasField("reserved")]
        return said[0].reserved.cached_tokens if said else None

    def tokens(self, handoff=H):
        mine = [e.tokens for e in self.events if convert.handoff_from_pb(e.handoff) == handoff and e.HasField("tokens")]
        return [token for message in mine for token in convert.tokens_from_pb(message)]


class SyncLoop:
    """Jobs wait until the test runs them, as they do for a step to end."""

    step_began = 1000.0  # when a FakeClock begins

    def __init__(self):
        self.jobs: deque[Any] = deque()

    def submit(self, job):
        self.jobs.append(job)

    def progressed(self):
        pass

    def drain(self):
        while self.jobs:
            self.jobs.popleft()()


class Records:
    """An ownership log that remembers."""

    def __init__(self):
        self.notes = []

    def note(self, handoff, router_id, state, stream=""):
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
    def __init__(self, blocks=40, clock=None, *, coalesce_below=0, thinking_chunk=0, **options):
        self.clock = clock or FakeClock()
        engine, loop = engine_of(Role.PREFILL, blocks, **options), cast(Any, SyncLoop())
        info = info_of(P, Role.PREFILL, engine, thinking_chunk)
        role = PrefillRole(info, engine, loop, self.clock, coalesce_below=coalesce_below)
        super().__init__(engine, role, loop)
        self.pusher = FakePusher(engine, role.push_ended)
        self.role.attach(self.pusher)


class DecodeSide(Side):
    def __init__(self, blocks=40, clock=None, **options):
        self.clock, self.records = clock or FakeClock(), cast(Any, Records())
        engine, loop = engine_of(Role.DECODE, blocks, **options), cast(Any, SyncLoop())
        role = DecodeRole(info_of(D, Role.DECODE, engine), engine, loop, self.records, self.clock)
        super().__init__(engine, role, loop)


class Pair:
    """Both sides, one clock."""

    def __init__(self, prefill_blocks=40, decode_blocks=40, *, decode_block_size=BLOCK, **options):
        self.clock = FakeClock()
        self.prefill = PrefillSide(prefill_blocks, self.clock, **options)
        self.decode = DecodeSide(decode_blocks, self.clock, block_size=decode_block_size)

    def begin(self, session, handoff=H, spec=None, *, known=True):
        """Reserve, and Prefill if there is room. `known`: the decode worker may have the beginning in its cache."""
        spec = spec or spec_of(handoff)
        prefix = names_of(spec.tokens, self.decode.engine.layout.block_size) if known else ()
        self.decode.take(session, reserve(handoff, len(spec), prefix=prefix))
        if (skip := session.cached_at(handoff)) is not None:
            self.prefill.take(session, prefill(handoff, spec, skip=skip))

    def end_pushes(self):
        """To whatever end, when all is computed; what waits for a Repush is released."""
        side = self.prefill
        side.run()
        for handoff in list(side.pusher.pushes):
            while handoff in side.pusher.pushes:
                side.pusher.advance(handoff, self.decode)
        side.run()
        for handoff, work in list(side.role._work.items()):
            side.take(work.session, release(handoff))
        side.run()

    def hand_over(self, session, handoff=H, spec=None, *, upto="committed"):
        """From Reserve on, until the push reached stage `upto` ("reported": to its end)."""
        self.begin(session, handoff, spec)
        self.prefill.run()
        pusher = self.prefill.pusher
        while handoff in pusher.pushes and pusher.pushes[handoff].stage != upto:
            pusher.advance(handoff, self.decode)
