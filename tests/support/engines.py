"""Small engines over the oracle, requests for them, their tokens, and a handoff between two engines."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from baton.core import Finish, HandoffId, Sampling, SequenceSpec, ThinkingState, Token
from baton.engine.block_pool import Allocation, BlockPool, Reservation
from baton.engine.engine import Engine
from baton.engine.model_backend import ModelBackend
from baton.engine.oracle import OracleBackend, oracle_layout
from baton.engine.prefix_cache import BlockHashChain, scope_key
from baton.engine.step_result import StepResult
from baton.tokenizer import OracleTokenizer

BLOCK = 4
SPEC_FIELDS = {field.name for field in fields(SequenceSpec)}
BRIEF: dict[str, Any] = {"max_tokens": 9, "temperature": 0.0, "ignore_eos": True}


def oracle(block_size: int = BLOCK, max_model_len: int = 128) -> OracleBackend:
    return OracleBackend(oracle_layout(block_size=block_size), max_model_len=max_model_len)


def engine_of(backend: ModelBackend, total_blocks: int = 40, **options: Any) -> Any:
    """Return an engine, as Any because tests read parts of it that may be None."""
    return Engine(backend, OracleTokenizer(), total_blocks=total_blocks, **options)


def key_of(name: object = "r", attempt: int = 1) -> HandoffId:
    return HandoffId(str(name), attempt)


def spec_of(prompt: str | Iterable[int] = "abc", **options: Any) -> SequenceSpec:
    """Return a greedy request for nine tokens without an end token. Options set fields of the spec or its sampling."""
    ids = tuple(prompt.encode()) if isinstance(prompt, str) else tuple(prompt)
    whole = {name: options.pop(name) for name in list(options) if name in SPEC_FIELDS}
    return SequenceSpec(ids, **{"sampling": Sampling(**BRIEF | options), **whole})


def numbers(rng: random.Random, length: int, end: int = 256) -> tuple[int, ...]:
    return tuple(rng.randrange(end) for _ in range(length))


def ids(tokens: Iterable[Token]) -> list[int]:
    return [token.token_id for token in tokens]


def block_names(backend: ModelBackend, tokens: Sequence[int], scope: str = "", size: int = BLOCK) -> list[bytes]:
    """Return the block hashes of the full blocks of `tokens`."""
    chain = BlockHashChain(scope_key(backend.fingerprint, scope), tokens, size)
    return [chain.digest(block) for block in range(len(tokens) // size)]


class Streams:
    """Output by request, from any engines. Rejects failed steps and output after the end of a request."""

    def __init__(self) -> None:
        self.tokens: dict[HandoffId, list[Token]] = defaultdict(list)
        self.finishes: dict[HandoffId, Finish] = {}
        self.thoughts: dict[HandoffId, list[tuple[int, ...]]] = defaultdict(list)
        self.steps = 0

    def step(self, engine: Engine) -> StepResult:
        self.steps += 1
        return self.take(engine, engine.step())

    def take(self, engine: Engine, result: StepResult) -> StepResult:
        assert result.failed == []
        for key, thoughts in result.thoughts:
            assert [each.chunk for each in thoughts] == [len(self.thoughts[key]) + i for i in range(len(thoughts))]
            self.thoughts[key] += [each.token_ids for each in thoughts]
        for output in result.outputs:
            assert output.key not in self.finishes, "output behind the end"
            known = self.tokens[output.key]
            known += output.tokens
            assert all(token.index == known[0].index + place for place, token in enumerate(known))
            if output.finish is not None:
                self.finishes[output.key] = output.finish
        engine.pool.counts()
        return result

    def drain(self, engine: Engine, on_step: Callable[[StepResult], object] = lambda result: None) -> Streams:
        """Step until the engine has no work."""
        while engine.has_work():
            on_step(self.step(engine))
        return self

    def ids(self, key: HandoffId) -> list[int]:
        return ids(self.tokens[key])


def arriving(engine: Engine, specs: Iterable[SequenceSpec]) -> Streams:
    """Submit one request before each step, with their numbers as keys, and drain."""
    streams = Streams()
    for number, spec in enumerate(specs):
        engine.submit(key_of(number), spec)
        streams.step(engine)
    return streams.drain(engine)


def run(engine: Engine, specs: Iterable[SequenceSpec] | Mapping[HandoffId, SequenceSpec]) -> Streams:
    """Submit all requests, with their numbers as keys if they have none, and drain."""
    named = specs if isinstance(specs, Mapping) else {key_of(number): spec for number, spec in enumerate(specs)}
    for key, spec in named.items():
        engine.submit(key, spec)
    return Streams().drain(engine)


def reserved(engine: Engine, tokens: int, prefix: Sequence[bytes] = ()) -> Reservation:
    room = engine.reserve(tokens, prefix)
    assert room is not None
    return room


def allocated(pool: BlockPool, n: int, **options: Any) -> Allocation:
    allocation = pool.allocate(n, **options)
    assert allocation is not None
    return allocation


def kv_of(sender: Engine, spec: SequenceSpec, begin: int = 0) -> tuple[Streams, torch.Tensor]:
    """Compute `spec` and one token on `sender`, which holds it. Return its KV from `begin` on in wire format."""
    sender.submit(key := key_of(), spec, hold=True)
    streams, layout = Streams().drain(sender), sender.layout
    nbytes = layout.layers * (len(spec) - begin) * layout.layer_token_bytes
    wire = torch.empty(nbytes, dtype=torch.uint8, device=sender.kv.device)
    if (mark := sender.kv.mark()) is not None:
        mark.wait()
    sender.kv.gather(range(layout.layers), sender.held(key).blocks, begin, len(spec), wire)
    sender.kv.settle()
    return streams, wire


def hand_over(
    sender: Engine,
    receiver: Engine,
    spec: SequenceSpec,
    room: Reservation | None = None,
    *,
    change: Callable[[Any], ThinkingState | None] = lambda state: state,
) -> Streams:
    """Prefill on one engine, decode on another in `room`. Return both outputs. `change` spoils the thinking state."""
    key, room = key_of(), room or reserved(receiver, len(spec))
    streams, wire = kv_of(sender, spec, room.cached_tokens)
    layers, wire = range(receiver.layout.layers), wire.to(receiver.kv.device)
    receiver.kv.scatter(layers, room.blocks, room.cached_tokens, len(spec), wire)
    receiver.kv.settle()
    try:
        known = (*spec.known, *streams.ids(key))
        receiver.adopt(key, replace(spec, known=known), room, change(sender.state_of(key)))
    except ValueError:
        room.release()
        raise
    finally:
        sender.release(key)
    return streams.drain(receiver)


def move(
    sender: Engine, receiver: Engine, spec: SequenceSpec, after: int, ahead: int = 0, candidates: int = 0
) -> Streams:
    """Run `spec` until it has `after` tokens and `ahead` more, then continue on the other engine. Return all output. If
    it is deterministic, it has `candidates` that are not verified then.
    """
    sender.submit(key := key_of(), spec)
    streams = Streams()
    request = sender._requests[key]
    while len(streams.tokens[key]) < after or request.sequence.known < len(request.choice.tokens) + candidates:
        streams.step(sender)
    streams.take(sender, sender.land())
    halted = sender.halt(key, ahead)
    assert halted is not None
    tokens, blocks = halted
    stop = len(tokens) + ahead
    while sender.has_work():
        streams.step(sender)
    assert len(tokens) == stop
    room, layers = reserved(receiver, len(tokens) - 1), range(receiver.layout.layers)
    wire = torch.empty(len(layers) * (len(tokens) - 1) * receiver.layout.layer_token_bytes, dtype=torch.uint8)
    sender.kv.gather(layers, blocks.blocks, 0, len(tokens) - 1, wire)
    receiver.kv.scatter(layers, room.blocks, 0, len(tokens) - 1, wire)
    known = tuple(tokens[len(spec.prompt) :])
    receiver.adopt(key, replace(spec, known=known), room, sender.state_of(key))
    sender.release(key)
    streams.drain(receiver)
    assert [engine.pool.counts().owned for engine in (sender, receiver)] == [0, 0]
    assert receiver.counters.prefill_tokens == 0
    return streams


class Faulty(OracleBackend):
    """An oracle that raises or returns NaN for batches or rows with the token `poison` (None: always)."""

    def __init__(self, fault: str = "", poison: int | None = None) -> None:
        super().__init__(oracle_layout(block_size=BLOCK), max_model_len=128)
        self.fault, self.poison = fault, poison

    def forward(self, batch: Any, kv: Any) -> torch.Tensor:
        logits = super().forward(batch, kv)
        poisoned = (batch.token_ids == self.poison) if self.poison is not None else batch.token_ids >= 0
        if self.fault == "raise" and poisoned.any():
            raise RuntimeError("out of luck")
        if self.fault == "nan":
            logits[poisoned[batch.logit_rows]] = float("nan")
        return logits
