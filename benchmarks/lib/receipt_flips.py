"""Flipped bits of KV in the cache of an engine, and the first position that a replay finds."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from baton.core import Finish, HandoffId, Sampling, SequenceSpec, Token
from baton.engine.determinism.checks import bits_fingerprint, checked_shapes
from baton.engine.determinism.shapes import FixedShapes
from baton.engine.engine import Engine
from baton.engine.models.loading import load_model
from baton.receipts import form
from baton.receipts.compare import Replayed, first_difference
from baton.receipts.issuer import ComputedChoice, Issuer
from baton.tokenizer import load_tokenizer
from benchmarks.lib.receipt_run import MODEL

if TYPE_CHECKING:
    from baton.engine.model_backend import ModelBackend
    from baton.receipts.keys import ReceiptKey

TOKENS, PROMPT = 24, 40


@dataclass(frozen=True)
class Flip:
    """One bit of K or V at a position of the context, flipped when `after` tokens of the answer were there."""

    tensor: int
    layer: int
    position: int
    byte: int
    bit: int
    after: int


@dataclass(frozen=True)
class Flips:
    """Counts of flips by their effect: `found` changed the first token after the flip, `later` a later one, `without`
    none, and `failed` made a number infinite, so that the engine ended the request. `missed` counts answers for which
    the replay did not report the true position.
    """

    found: int
    later: int
    without: int
    failed: int
    missed: int


class Subject:
    """An engine with the demo model, which computes one deterministic answer at a time."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.backend: ModelBackend = load_model(MODEL, dtype="bfloat16")
        shapes = checked_shapes(self.backend, FixedShapes(exact_rows=64))
        if shapes is None:
            raise RuntimeError(f"deterministic requests are not possible here: {self.backend.nondeterminism}")
        self.fingerprint = bits_fingerprint(self.backend, shapes)
        self.engine = Engine(self.backend, load_tokenizer(MODEL), total_blocks=64, shapes=shapes, prefix_cache=False)
        self._number = 0

    def answer(self, spec: SequenceSpec, flip: Flip | None = None) -> ComputedChoice | None:
        """Compute an answer. `flip` changes the cache between two steps. Return None if the engine ends the request."""
        self._number += 1
        key, tokens, finish = HandoffId(str(self._number), 1), list[Token](), list[Finish]()
        self.engine.submit(key, spec)
        while self.engine.has_work():
            result = self.engine.step()
            if result.failed:
                return None
            for output in result.outputs:
                tokens += output.tokens
                finish += [output.finish] if output.finish else []
            if flip is not None and len(tokens) == flip.after:
                self._flip(flip)
                flip = None
        logprobs = [token.logprobs for token in tokens if token.logprobs is not None]
        return ComputedChoice([token.token_id for token in tokens], logprobs, finish[0])

    def _flip(self, flip: Flip) -> None:
        size = self.engine.layout.block_size
        block = self.blocks()[flip.position // size]
        row = self.engine.kv.tensors[flip.tensor][flip.layer, block, flip.position % size]
        row.view(torch.uint8).view(-1)[flip.byte] ^= 1 << flip.bit

    def blocks(self) -> list[int]:
        """Return the blocks of the only sequence."""
        (request,) = self.engine._requests.values()
        allocation = request.sequence.allocation
        return [] if allocation is None else list(allocation.blocks)


def measure(count: int, seed: int, key: ReceiptKey) -> Flips:
    """Flip `count` bits, each in another answer, whose receipt is replayed without the flip."""
    subject, rng, issuer = Subject(), random.Random(seed), Issuer(key, "demo")
    found = later = without = failed = missed = 0
    for number in range(count):
        prompt = tuple(rng.randrange(1, subject.backend.vocab_size) for _ in range(PROMPT))
        sampling = Sampling(max_tokens=TOKENS, temperature=1.0, seed=number, ignore_eos=True, logprobs=0)
        spec, flip = SequenceSpec(prompt, sampling, deterministic=True), _drawn(rng, subject)
        damaged, right = subject.answer(spec, flip), subject.answer(spec)
        if damaged is None or right is None:
            failed += 1
            continue
        text = issuer.issue(str(number), spec, subject.fingerprint, [damaged], 0.0)
        place = _replayed(text, right)
        true = _first(damaged, right)
        missed += place != true
        found += place == true == flip.after
        later += true is not None and true > flip.after
        without += true is None
    return Flips(found, later, without, failed, missed)


def _drawn(rng: random.Random, subject: Subject) -> Flip:
    layout, after = subject.engine.layout, rng.randrange(1, TOKENS - 1)
    # The KV of the last token is written by the next step.
    position = rng.randrange(PROMPT + after - 1)
    tensor, layer = rng.randrange(len(layout.tensors)), rng.randrange(layout.layers)
    return Flip(tensor, layer, position, rng.randrange(layout.row_bytes), rng.randrange(8), after)


def _replayed(text: str, right: ComputedChoice) -> int | None:
    """Return the position that the comparison of `baton replay` reports."""
    receipt = form.parse(json.loads(text))
    reason = right.finish.reason.value if right.finish else ""
    difference = first_difference(receipt, [Replayed(right.opened(), reason, "")])
    return None if difference is None else difference.position


def _first(some: ComputedChoice, others: ComputedChoice) -> int | None:
    """Return the first index with another token or log-probability, by comparing the values themselves."""
    pairs = zip(some.tokens, some.logprobs, others.tokens, others.logprobs, strict=True)
    return next((at for at, (a, b, c, d) in enumerate(pairs) if (a, b) != (c, d)), None)
