"""Step 6: the engine on the GPU against the CPU: chunks, mixed batches, graphs, and bits of deterministic requests."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from baton.core import HandoffId, Sampling, SequenceSpec
from baton.engine.determinism.checks import checked_shapes
from baton.engine.determinism.shapes import FixedShapes
from baton.engine.engine import Engine
from baton.engine.kernels.gpu.cuda_graphs import with_graphs
from baton.engine.kernels.torch_reference import TorchKernels
from baton.engine.models.loading import TransformerBackend, load_model
from baton.tokenizer import ORACLE_MODEL, Tokenizer, load_tokenizer
from benchmarks.gpu_first.at import DEMO, At, Outcome, require
from benchmarks.lib.random_weights import random_model, settings_of
from benchmarks.lib.shapes import Shape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.core import Token

PROMPTS = ("The color of dog", "In spring", "A cat and a dog are", "The capital of the country is a city, and")
CHUNKS = (512, 7)  # tokens of a step: whole prompts, and parts of them among decode steps
TINY = settings_of(Shape(hidden=32, ffn=32, layers=1, heads=2, kv_heads=1, vocab=257), 512)
GREEDY = Sampling(max_tokens=24, temperature=0.0, ignore_eos=True)
SHAPES = FixedShapes(2, 32)
Tokens = list[tuple[int, float | None]]


def run(at: At) -> Outcome:
    """Compare greedy tokens with the CPU's, and the bits of deterministic requests alone and in company."""
    tokenizer, (reference, backend) = load_tokenizer(ORACLE_MODEL if at.dry else DEMO), backends(at)
    sampling = replace(GREEDY, max_tokens=at.size(24, 3))
    specs = [SequenceSpec(tuple(tokenizer.encode(text)), sampling) for text in at.size(PROMPTS, PROMPTS[:2])]
    expected = outputs(engine_of(reference, tokenizer), specs)
    chunks = at.size(CHUNKS, CHUNKS[1:])
    for chunk in chunks:
        found = outputs(engine_of(backend, tokenizer, chunk=chunk), specs)
        same = [ids(a) == ids(b) for a, b in zip(found, expected, strict=True)]
        require(all(same), f"with chunks of {chunk}, {same.count(False)} of {len(same)} answers differ")
    checked = _deterministic(at, backend, tokenizer, specs)
    graphs = "by graphs" if at.device.type == "cuda" else "without graphs"
    figures = {"answers": len(specs), "tokens": sampling.max_tokens, "deterministic_tokens": checked}
    text = f"{len(specs)} answers of {sampling.max_tokens} tokens equal the CPU's in chunks of {chunks}, {graphs}"
    return Outcome(f"{text}; {checked} deterministic tokens have equal bits alone and in company", figures)


def backends(at: At) -> tuple[TransformerBackend, TransformerBackend]:
    """Return a model in float32 on the CPU and on the GPU. A dry run has a tiny one with the kernels of both."""
    if not at.dry:
        there = load_model(DEMO, dtype="float32", device=at.device)
        return load_model(DEMO, dtype="float32"), there
    sets = TorchKernels(), at.kernels()
    here, there = (random_model(TINY, device=at.device, dtype="float32", block_size=16, kernels=each) for each in sets)
    return here, there


def engine_of(
    backend: TransformerBackend, tokenizer: Tokenizer, *, chunk: int = 512, shapes: FixedShapes | None = None
) -> Engine:
    """Return an engine with decode graphs if the backend is on a GPU."""
    sizes: dict[str, Any] = {"total_blocks": 128, "max_model_len": 512, "max_batched_tokens": chunk, "max_running": 8}
    engine = Engine(backend, tokenizer, shapes=shapes, **sizes)
    engine.backend = with_graphs(backend, engine.kv, engine.inputs.widest())
    require(engine.backend is not backend or backend.device.type == "cpu", "the decode graphs cannot be captured")
    return engine


def outputs(engine: Engine, specs: Sequence[SequenceSpec]) -> list[Tokens]:
    """Run all requests, which arrive one per step, and return ids and logprobs of their tokens."""
    found: dict[HandoffId, list[Token]] = {HandoffId(f"first-{i}", 1): [] for i in range(len(specs))}
    waiting = list(zip(found, specs, strict=True))
    while waiting or engine.has_work():
        if waiting:
            engine.submit(*waiting.pop(0))
        result = engine.step()
        if result.failed:
            raise result.failed[0][1]
        for output in result.outputs:
            found[output.key] += output.tokens
    return [[(token.token_id, _logprob(token)) for token in tokens] for tokens in found.values()]


def ids(tokens: Tokens) -> list[int]:
    """Return the ids."""
    return [token for token, _ in tokens]


def _logprob(token: Token) -> float | None:
    return None if token.logprobs is None else token.logprobs.logprob


def _deterministic(at: At, backend: TransformerBackend, tokenizer: Tokenizer, specs: Sequence[SequenceSpec]) -> int:
    """Run a deterministic request alone and among others. Returns the number of its tokens."""
    shapes = SHAPES if at.dry else checked_shapes(backend, SHAPES)
    require(shapes is not None, f"fixed forwards vary: {backend.nondeterminism}")
    one = replace(specs[0], sampling=replace(specs[0].sampling, logprobs=0), deterministic=True)
    alone = outputs(engine_of(backend, tokenizer, shapes=shapes), [one])[0]
    beside = outputs(engine_of(backend, tokenizer, shapes=shapes), [*specs[1:], one, *specs[1:]])[len(specs) - 1]
    require(ids(alone) == ids(beside), f"deterministic tokens differ: {ids(alone)} alone, {ids(beside)} in company")
    # numpy's products, which interpret a kernel, have other bits at other places.
    require(at.dry or alone == beside, "the bits of log-probabilities differ between alone and in company")
    return len(alone)
