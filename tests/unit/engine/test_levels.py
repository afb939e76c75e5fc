"""Exact steps of the demo model at each level of instructions, in each dtype, and with quantised weights."""

import random
from dataclasses import replace
from typing import get_args

import pytest

from baton.engine.determinism.checks import checked_shapes
from baton.engine.determinism.shapes import FixedShapes
from baton.engine.engine import Engine
from baton.engine.kernels.cpu.compiler import LEVELS, load_library
from baton.engine.kernels.quantized import Quantize
from baton.engine.models.loading import load_model
from baton.tokenizer import load_tokenizer
from tests.support.compiled_kernels import compiled_or_skip
from tests.support.engines import Streams, key_of, numbers, spec_of
from tests.unit.engine.test_determinism import DEMO

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("level"),
    pytest.mark.parametrize("level", LEVELS, indirect=True),
]
dtypes = pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
weights = pytest.mark.parametrize("quantize", get_args(Quantize))
COMPANIES = (0, 1, 3, 7, 31)  # other sequences
LITTLE = 60  # blocks, so that 31 others preempt each other
ROWS = 64


def demo(dtype, quantize):
    """Load the model. The splits of its ordinary batch depend on load, so that only exact steps have equal bits."""
    compiled_or_skip(lambda: load_library({"bfloat16": "bf16", "float32": "f32"}[dtype]))
    return load_model(DEMO, dtype=dtype, quantize=quantize, attention_splits="load_bf16")


@pytest.mark.sample(6)
@dtypes
@weights
def test_decode_steps_are_exact(dtype, quantize):
    shapes = FixedShapes(exact_rows=ROWS)
    assert checked_shapes(demo(dtype, quantize), shapes) == replace(shapes, everywhere=quantize != "none", ragged=True)


@pytest.mark.sample(4)
@dtypes
@weights
def test_streams_are_equal_in_any_company(dtype, quantize, seed):
    """Half of the others are deterministic too. They begin before it, in different steps. The first stream is verified
    by passes, so workers with and without them can take over from each other.
    """
    backend, rng, found = demo(dtype, quantize), random.Random(seed), []
    asked = spec_of(numbers(rng, 70, 256), deterministic=True, max_tokens=16, temperature=0.8, seed=5, logprobs=2)
    exact = checked_shapes(backend, FixedShapes(exact_rows=ROWS))
    for count in (None, *COMPANIES):
        blocks, budget = LITTLE if count == max(COMPANIES) else 512, rng.choice((2048, 256, 65))
        shapes = FixedShapes() if count is None else exact
        parts = backend, load_tokenizer(DEMO)
        engine = Engine(*parts, total_blocks=blocks, shapes=shapes, max_batched_tokens=budget)
        streams = Streams()
        for number in range(count or 0):
            others = spec_of(numbers(rng, rng.randrange(1, 60), 256), max_tokens=40, deterministic=number % 2 == 0)
            engine.submit(key_of(number), others)
            streams.step(engine)
        engine.submit(key_of("asked"), asked)
        streams.drain(engine)
        found.append([(token.token_id, token.logprobs) for token in streams.tokens[key_of("asked")]])
        replayed = blocks == LITTLE and quantize == "none"
        assert (engine.counters.verify_passes > 0) == (count is None or replayed)
    assert len(found[0]) == 16
    assert all(stream == found[0] for stream in found)
