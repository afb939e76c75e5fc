"""Router commands as a role receives them, and a session that records the role's events."""

from dataclasses import replace

from baton.core import HandoffId, Incarnation, Sampling, SequenceSpec, WorkerRef
from baton.engine.oracle import OracleBackend, oracle_layout
from baton.engine.prefix_cache import BlockHashChain, scope_key
from baton.rpc import convert
from baton.rpc.convert import thoughts_from_pb
from baton.rpc.v1 import worker_pb2 as pb

BLOCK = 4
BACKEND = OracleBackend(oracle_layout(block_size=BLOCK), max_model_len=64)
P = WorkerRef("prefill-0", Incarnation(7, 1), "127.0.0.1:1")
D = WorkerRef("decode-0", Incarnation(7, 2), "127.0.0.1:2")
H = HandoffId("r", 1)
GREEDY = Sampling(max_tokens=6, temperature=0.0, ignore_eos=True)
STALE, DRAINING = pb.REFUSAL_REASON_STALE, pb.REFUSAL_REASON_DRAINING
NAN = float("nan")


def next_of(handoff):
    return HandoffId(handoff.request_id, handoff.attempt + 1)


def prompt_of(handoff, length=9):
    return tuple((7 * i + sum(handoff.request_id.encode())) % 250 for i in range(length))


def spec_of(handoff=H, length=9, sampling=GREEDY):
    return SequenceSpec(prompt_of(handoff, length), sampling)


def expected(spec=None, tokens=None):
    """Return the oracle's answer, or its first tokens."""
    return BACKEND.expected(spec or spec_of(), tokens)


def names_of(tokens, block_size=BLOCK):
    """Return the block hashes of the full blocks of `tokens`."""
    chain = BlockHashChain(scope_key(BACKEND.fingerprint, ""), tokens, block_size)
    return [chain.digest(block) for block in range(len(tokens) // block_size)]


# --- commands


def reserve(handoff=H, known=9, *, fingerprint=BACKEND.fingerprint, **fields):
    name = convert.handoff_to_pb(handoff)
    message = pb.Reserve(handoff=name, known_tokens=known, fingerprint=fingerprint, **fields)
    return pb.RouterCommand(reserve=message)


def prefill(handoff=H, spec=None, to=D, **fields):
    name, to = convert.handoff_to_pb(handoff), to and convert.ref_to_pb(to)
    spec = convert.spec_to_pb(spec_of(handoff) if spec is None else spec)
    return pb.RouterCommand(prefill=pb.Prefill(handoff=name, spec=spec, to=to, **fields))


def repush(held=H, handoff=None, to=D, **fields):
    """Return a Repush. `handoff` defaults to the next attempt."""
    held, handoff = convert.handoff_to_pb(held), convert.handoff_to_pb(handoff or next_of(held))
    return pb.RouterCommand(repush=pb.Repush(held=held, handoff=handoff, to=convert.ref_to_pb(to), **fields))


def attach(known=0, spec=None, said=None):
    """Return the Attach of a client that has the first `known` correct tokens, or the tokens `said`."""
    spec = replace(spec or spec_of(), known=tuple(said or expected(tokens=known)))
    message = pb.Attach(handoff=convert.handoff_to_pb(H), spec=convert.spec_to_pb(spec))
    return pb.RouterCommand(attach=message)


def fence(handoff=H):
    return pb.RouterCommand(fence=pb.Fence(handoff=convert.handoff_to_pb(handoff)))


def release(handoff=H):
    return pb.RouterCommand(release=pb.Release(handoff=convert.handoff_to_pb(handoff)))


def malformed():
    """Yield malformed commands of every kind, each with a word that its rejection must contain."""
    empty, zeroth = pb.RouterCommand(), HandoffId("r", 0)
    hello = pb.RouterCommand(hello=pb.RouterHello(router_id="again"))
    no_seed = spec_of(sampling=Sampling(temperature=1.0))
    no_address = WorkerRef("decode-0", Incarnation(7, 2), "")
    broken = prefill()
    broken.prefill.spec.sampling.temperature = NAN
    foreign = prefill()
    foreign.prefill.spec.prompt.append(2**32 - 1)
    yield from [("nothing", empty, "command"), ("hello", hello, "command")]
    for make in (reserve, prefill, fence, release, repush):
        yield f"{make.__name__} without a request id", make(HandoffId("", 1)), "handoff"
        yield f"{make.__name__} of attempt 0", make(zeroth), "handoff"
    yield "repush under no name", repush(handoff=zeroth), "handoff"
    yield "repush to nowhere", repush(to=no_address), "to.address"
    for make in (reserve, prefill, repush):
        for seconds in (NAN, float("inf"), -1.0):
            yield f"{make.__name__} with deadline {seconds}", make(deadline_s=seconds), "deadline_s"
    for seconds in (NAN, float("inf"), -1.0):
        yield f"reserve to be resumed for {seconds}", reserve(resumable_s=seconds), "resumable_s: must be finite"
    yield "prefill without a prompt", prefill(spec=SequenceSpec((), GREEDY)), "prompt"
    yield "prefill without a seed", prefill(spec=no_seed), "seed"
    yield "prefill to nowhere", prefill(to=no_address), "to.address"
    yield "prefill at NaN degrees", broken, "temperature"
    yield "prefill of a foreign token", foreign, "prompt"
    yield "prefill that never fits", prefill(spec=spec_of(length=64)), "prompt"
    yield "prefill that skips all of it", prefill(skip=9), "skip"


class FakeSession:
    """The part of a session that a role uses. It records the events, also by handoff."""

    def __init__(self, router_id="router-a"):
        self.router_id = router_id
        self.handoffs = set()
        self.messages = []  # one list of events per emit
        self.events = []
        self._told = {}

    def emit(self, events):
        self.messages.append(list(events))
        self.events += self.messages[-1]
        for event in self.messages[-1]:
            self._told.setdefault((event.handoff.request_id, event.handoff.attempt), []).append(event)

    def told(self, handoff=None):
        """Return all events, or those of one handoff."""
        return self.events if handoff is None else self._told.get((handoff.request_id, handoff.attempt), [])

    def kinds(self, handoff=None):
        return [event.WhichOneof("event") for event in self.told(handoff)]

    def cached_at(self, handoff=H):
        """Return the decode worker's reply to Reserve: cached tokens, or None after a rejection."""
        return next((e.reserved.cached_tokens for e in self.told(handoff) if e.HasField("reserved")), None)

    def tokens(self, handoff=H):
        messages = [event.tokens for event in self.told(handoff) if event.HasField("tokens")]
        return [token for message in messages for token in convert.tokens_from_pb(message)]

    def ids(self, handoff=H):
        return [token.token_id for token in self.tokens(handoff)]

    def thoughts(self, handoff=None):
        """Return the thoughts of each event, in order."""
        return [thoughts_from_pb(event.thoughts) for event in self.told(handoff) if event.HasField("thoughts")]

    @property
    def refusals(self):
        """Reasons of all rejections."""
        return [event.refused.reason for event in self.events if event.HasField("refused")]

    @property
    def failure(self):
        """The last event, which must be a failure."""
        assert self.kinds()[-1] == "failed"
        return self.events[-1].failed
