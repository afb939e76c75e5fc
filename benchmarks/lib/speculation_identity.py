"""Streams of all features with and without speculation: prompts elsewhere, decoding in company, and moves."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from baton.core import Constraint, HandoffId, Sampling, SequenceSpec
from baton.engine.engine import Engine
from baton.engine.speculation.checks import equal_rows
from baton.engine.speculation.forwards import SpeculationOptions
from baton.engine.speculation.suffix_index import NgramProposer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from baton.core import Token
    from baton.engine.model_backend import ModelBackend
    from baton.tokenizer import Tokenizer

BLOCKS, TOGETHER, MOVED_AFTER = 512, 6, 9
Stream = list[object]
REPEATED = "The cat sat on the mat. The dog sat on the mat. The cat sat on the"
CONSTRAINTS = (
    Constraint("regex", ("( the| cat| dog| sat| on){4,30}",)),
    Constraint("choices", (" the mat the mat the mat", " the dog and the dog and the dog")),
    Constraint("json_schema", ('{"type": "array", "items": {"enum": ["cat", "dog"]}, "minItems": 4, "maxItems": 9}',)),
)


def specs(count: int, tokenizer: Tokenizer) -> Iterator[SequenceSpec]:
    """Yield `count` requests with any mix of features, always the same ones. Four of each kind differ in the seed, as
    the choices of one request with n=4 do.
    """
    rng = random.Random(1)
    for number in range(count):
        if number % 4 == 0:
            prompt = tuple(tokenizer.encode(REPEATED if rng.random() < 0.7 else REPEATED[: rng.randrange(9, 40)]))
            sampling, constraint = _sampling(rng), rng.choice((None, None, None, *CONSTRAINTS))
            if constraint is not None:
                sampling = replace(sampling, min_tokens=0, ignore_eos=False, bad_words=())
        yield SequenceSpec(prompt, replace(sampling, seed=number), constraint=constraint)


def _sampling(rng: random.Random) -> Sampling:
    length = rng.randint(4, 40)
    return Sampling(
        max_tokens=length,
        min_tokens=rng.choice([0, 0, length // 2]),
        temperature=rng.choice([0.0, 0.3, 0.7, 1.0, 1.5]),
        top_p=rng.choice([1.0, 0.9]),
        top_k=rng.choice([0, 0, 20]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        stop=rng.choice([(), (), ("dog sat",), ("at", ". T")]),
        ignore_eos=rng.random() < 0.5,
        repetition_penalty=rng.choice([1.0, 1.0, 1.1]),
        presence_penalty=rng.choice([0.0, 0.0, 0.4]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.2]),
        logit_bias=rng.choice([(), (), ((5, 2.0), (7, -5.0))]),
        bad_words=rng.choice([(), (), ("mat",)]),
        logprobs=rng.choice([None, None, 3]),
    )


class Decoding:
    """Decode engines of one kind. `second` takes over the sequences that move."""

    def __init__(self, backend: ModelBackend, tokenizer: Tokenizer, *, speculates: bool) -> None:
        found = equal_rows(backend, 2048) if speculates else None
        if speculates and found is None:
            raise RuntimeError("the rows of a larger step round differently here")

        def engine() -> Engine:
            options = None if found is None else SpeculationOptions(NgramProposer(), found.rows, found.fixed)
            return Engine(backend, tokenizer, total_blocks=BLOCKS, recompute_preempted=False, speculation=options)

        self.first, self.second = engine(), engine()

    def streams(self, wave: Sequence[tuple[SequenceSpec, Token, torch.Tensor]]) -> list[Stream]:
        """Return ids, texts, log-probabilities and ends of the requests of a wave, which decode together. Each third
        one moves in the middle. Each has a first token, and the KV of its prompt in wire order.
        """
        found: dict[HandoffId, Stream] = {HandoffId(str(number), 0): [] for number in range(len(wave))}
        for key, (spec, first, kv) in zip(found, wave, strict=True):
            _adopt(self.first, key, replace(spec, known=(first.token_id,)), kv)
        to_move = [key for number, key in enumerate(found) if number % 3 == 1]
        while self.first.has_work() or self.second.has_work():
            for engine in (self.first, self.second):
                for output in engine.step().outputs:
                    found[output.key] += [(token.token_id, token.text, token.logprobs) for token in output.tokens]
                    found[output.key] += [output.finish] if output.finish else []
            for key in [key for key in to_move if len(found[key]) >= MOVED_AFTER]:
                to_move.remove(key)
                self._move(key, wave[int(key.request_id)][0])
        return list(found.values())

    def _move(self, key: HandoffId, spec: SequenceSpec) -> None:
        halted = self.first.halt(key)
        if halted is None:
            return  # it has just ended
        tokens, blocks = halted
        kv = _gathered(self.first, blocks.blocks, len(tokens) - 1)
        known = tuple(tokens[len(spec.prompt) :])
        self.first.release(key)
        _adopt(self.second, key, replace(spec, known=known), kv)


def identical(backend: ModelBackend, tokenizer: Tokenizer, count: int) -> tuple[int, float]:
    """Return how many of `count` streams are equal with and without, and the share of accepted proposals."""
    prompts = Engine(backend, tokenizer, total_blocks=BLOCKS)
    plain, ours = (Decoding(backend, tokenizer, speculates=speculates) for speculates in (False, True))
    given = list(specs(count, tokenizer))
    equal = 0
    for at in range(0, count, TOGETHER):
        wave = [each for spec in given[at : at + TOGETHER] if (each := _prefilled(prompts, spec)) is not None]
        equal += sum(a == b for a, b in zip(plain.streams(wave), ours.streams(wave), strict=True))
        equal += len(given[at : at + TOGETHER]) - len(wave)  # ended with the first token, before any decode step
    counters = ours.first.counters
    return equal, counters.accepted_tokens / max(counters.speculated_tokens, 1)


def _prefilled(engine: Engine, spec: SequenceSpec) -> tuple[SequenceSpec, Token, torch.Tensor] | None:
    engine.submit(key := HandoffId("prompt", 0), spec, hold=True)
    output = engine.step().outputs[0]
    found = None
    if output.finish is None:
        found = spec, output.tokens[0], _gathered(engine, engine.held(key).blocks, len(spec.prompt))
    engine.release(key)
    return found


def _gathered(engine: Engine, blocks: list[int], end: int) -> torch.Tensor:
    layers, nbytes = range(engine.layout.layers), engine.layout.layers * engine.layout.layer_token_bytes * end
    engine.kv.gather(layers, blocks, 0, end, out := torch.empty(nbytes, dtype=torch.uint8))
    return out


def _adopt(engine: Engine, key: HandoffId, spec: SequenceSpec, kv: torch.Tensor) -> None:
    reservation = engine.reserve(len(spec) - 1)
    if reservation is None:
        raise RuntimeError("the pool is too small")
    engine.kv.scatter(range(engine.layout.layers), reservation.blocks, 0, len(spec) - 1, kv)
    engine.adopt(key, spec, reservation)
