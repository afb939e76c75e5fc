"""After the warm-up of a worker, no serving step launches a kernel variant for the first time.

A variant is a kernel with its constants, its options, and the classes of its other arguments, as Triton's launcher
computes them (`create_function_from_signature` in triton/runtime/jit.py, 3.7). Launches are recorded, not run: logits
are zeros.
"""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="no triton here (the dev extra has it on Linux)")

from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from baton.core import SequenceSpec
from baton.engine.determinism.shapes import FixedShapes
from baton.engine.engine import Engine
from baton.engine.kernels.gpu import warm_up as forwards
from baton.engine.kernels.gpu.cuda_graphs import Captured, DecodeGraphs, GraphedBackend, graphed
from baton.engine.kernels.gpu.ops import GpuKernels
from baton.engine.kernels.gpu.shapes import SPLIT_TOKENS
from baton.engine.kernels.gpu.warm_up import warm_forwards
from baton.engine.models.loading import TransformerBackend
from baton.tokenizer import OracleTokenizer
from baton.worker.engine_factory import generate
from benchmarks.lib.random_weights import random_model
from tests.support.engines import key_of, numbers, spec_of

SHAPE = {"architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 32, "intermediate_size": 32}
SHAPE |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
FAMILIES = {"llama": {}, "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 7}}
LONGEST, ROWS, CHUNK, BLOCKS = 20 * SPLIT_TOKENS + 48, 20, 512, 2000


@pytest.fixture
def launched(monkeypatch):
    """The variants launched so far."""
    backend, binders, seen = make_backend(GPUTarget("cuda", 90, 32)), {}, set()

    def record(self, *args, grid, warmup, **kwargs):
        if self not in binders:
            binders[self] = create_function_from_signature(self.signature, self.params, backend)
        _, specialization, options = binders[self](*args, **kwargs, debug=False)
        seen.add((self.fn.__name__, str(specialization), str(options)))

    monkeypatch.setattr(JITFunction, "run", record)
    for kind in (TransformerBackend, GraphedBackend):  # fixed forwards use the first; nothing has written the logits
        monkeypatch.setattr(kind, "forward", zeros_of(kind.forward))
    return seen


def zeros_of(forward):
    return lambda *args: torch.zeros_like(forward(*args))


def eager(forward):
    logits = forward()
    return Captured(lambda: logits.copy_(forward()), logits)


def engine_of(family):
    shape = SHAPE | FAMILIES[family] | {"max_position_embeddings": LONGEST}
    backend = random_model(shape, kernels=GpuKernels(132), device=torch.device("cpu"), dtype="float32", block_size=16)
    sizes: Any = {"total_blocks": BLOCKS, "max_batched_tokens": CHUNK, "max_running": ROWS}
    engine = Engine(backend, OracleTokenizer(), shapes=FixedShapes(2, 32), **sizes)
    graphs = DecodeGraphs(backend, engine.kv, engine.inputs.widest())
    graphs.capture(eager)
    engine.backend = graphed(backend, graphs)
    return engine


def serve(engine, rng):
    """Run requests of all lengths, which arrive while others are computed, until all have ended."""
    lengths = [1, LONGEST - 8, 40, 2, SPLIT_TOKENS + 3, *(rng.randint(1, 90) for _ in range(ROWS))]
    specs = [spec_of(numbers(rng, length), max_tokens=rng.randint(2, 6)) for length in lengths]
    specs.append(replace(spec_of(numbers(rng, 45), max_tokens=4), deterministic=True))
    for index, spec in enumerate(specs):
        engine.submit(key_of(index), spec)
        engine.step()
    while engine.has_work():
        assert engine.step().failed == []


def warm(engine):
    warm_forwards(engine.backend, engine.kv, CHUNK, ROWS, engine.max_model_len)
    for spec in (SequenceSpec((0,), spec_of().sampling), replace(spec_of((0, 0)), deterministic=True)):
        generate(engine, spec)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_serving_launches_no_variant_that_was_not_warmed(family, launched, seed):
    engine = engine_of(family)
    warm(engine)
    warmed = set(launched)
    serve(engine, random.Random(seed))
    assert launched - warmed == set()
    assert {"rms_norm_kernel", "prefill_kernel", "split_kernel", "combine_kernel"} <= {name for name, *_ in launched}


def test_one_prompt_does_not_warm_what_serving_needs(launched, seed):
    engine = engine_of("llama")
    generate(engine, SequenceSpec((0,), spec_of().sampling))
    warmed = set(launched)
    serve(engine, random.Random(seed))
    assert "prefill_kernel" in {name for name, *_ in launched - warmed}


@pytest.mark.parametrize(("limits", "rows"), [((512, 64, 4096), 64), ((8, 64, 100), 8), ((4, 1, 1), 1)])
def test_shapes_cover_the_limits_and_stay_within_them(limits, rows):
    shapes = list(forwards.shapes(*limits))
    assert max(len(shape) for shape in shapes) == rows
    assert max(context for shape in shapes for _, context in shape) == limits[2]
    assert all(sum(count for count, _ in shape) <= limits[0] and len(shape) <= limits[1] for shape in shapes)
    assert all(count <= context for shape in shapes for count, context in shape)
