"""Log-probabilities of prompts: equal to transformers', whatever else is computed, and without cached prefixes."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from baton.core import Finish, FinishReason
from baton.engine.determinism.shapes import FixedShapes
from baton.engine.engine import Engine
from baton.engine.models.loading import load_model
from baton.engine.oracle import OracleBackend
from baton.engine.sampling.prompt_logprobs import ROWS
from baton.errors import InvalidRequest
from baton.tokenizer import load_tokenizer
from tests.support.engines import Streams, engine_of, ids, key_of, numbers, oracle, run, spec_of
from tests.unit.engine.test_determinism import DEMO
from tests.unit.tp.support import on_threads, plan

SHAPES = FixedShapes(rows=4, tokens=8)


def scored(engine: Engine, *specs) -> list[list[Any]]:
    """Return the scored tokens of each request, and check that their parts follow each other."""
    found: dict = {key_of(number): [] for number in range(len(specs))}
    for number, spec in enumerate(specs):
        engine.submit(key_of(number), spec)

    def collect(result):
        for key, part in result.prompts:
            assert part.start == 1 + len(found[key])
            found[key] += part.tokens

    streams = Streams().drain(engine, collect)
    assert set(streams.finishes) == set(found)
    return list(found.values())


def demo_engine(backend=None, **options) -> Engine:
    backend = backend or load_model(DEMO)
    return Engine(backend, load_tokenizer(DEMO), total_blocks=256, **options)


@pytest.fixture(scope="module")
def reference():
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)

    def logprobs(prompt):
        with torch.inference_mode():
            return model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)

    return logprobs


@pytest.mark.parametrize("kind", ["ordinary", "deterministic", "ranks"])
def test_scores_equal_those_of_transformers(reference, kind, tmp_path):
    backend = on_threads(plan(tmp_path, 2, str(DEMO)), []) if kind == "ranks" else load_model(DEMO)
    engine = demo_engine(backend, shapes=SHAPES if kind == "deterministic" else None)
    prompts = [numbers(random.Random(length), length, 2048) for length in (1, 2, ROWS, ROWS + 2, 300)]
    options = {"max_tokens": 2, "prompt_logprobs": 3, "deterministic": kind == "deterministic"}
    for prompt, tokens in zip(prompts, scored(engine, *(spec_of(p, **options) for p in prompts)), strict=True):
        wanted = reference(prompt)
        assert [each.token_id for each in tokens] == list(prompt[1:])
        for row, each in zip(wanted, tokens, strict=False):
            assert each.logprobs is not None
            best = row.topk(3)
            assert each.logprobs.logprob == pytest.approx(float(row[each.token_id]), abs=2e-4)
            assert [value for _, value in each.logprobs.top] == pytest.approx(best.values.tolist(), abs=2e-4)
            assert abs(each.rank - 1 - int((row > row[each.token_id]).sum())) <= 1  # almost equal logits may swap
    backend.close()


def alone(prompt: tuple[int, ...], top: int) -> list:
    """Return the log-probabilities of each token, drawn one by one by the sampler of answers."""
    found = []
    for end in range(1, len(prompt)):
        spec = spec_of(prompt[:end], max_tokens=1, logprobs=256, ignore_eos=True)
        [token] = run(engine_of(oracle()), [spec]).tokens[key_of(0)]
        assert token.logprobs is not None
        every = dict(token.logprobs.top)
        assert len(every) == 256
        found.append((every.get(prompt[end]), token.logprobs.top[:top]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_scores_do_not_depend_on_other_requests_chunks_or_preemption(seed, deterministic, monkeypatch):
    rng = random.Random(seed)
    monkeypatch.setattr("baton.core.SAMPLING", ())  # all alternatives, for the reference
    monkeypatch.setattr("baton.engine.sampling.prompt_logprobs.ROWS", 5)
    prompts = [numbers(rng, rng.randrange(12, 24)) for _ in range(6)]
    options = {"prompt_logprobs": 2, "max_tokens": 20, "deterministic": deterministic}
    specs = [spec_of(prompt, **options) for prompt in prompts]
    others = [spec_of(numbers(rng, 9)) for _ in range(3)]
    options = {"total_blocks": 16, "max_batched_tokens": 16, "shapes": SHAPES if deterministic else None}
    engine = engine_of(oracle(), **options)
    found = scored(engine, *specs, *others)
    assert engine.counters.preemptions  # the small pool makes some start over
    for prompt, tokens in zip(prompts, found[:6], strict=True):
        assert [each.token_id for each in tokens] == list(prompt[1:])
        for each, (logprob, top) in zip(tokens, alone(prompt, 2), strict=True):
            assert dict(each.logprobs.top) == pytest.approx(dict(top))
            assert logprob is None or each.logprobs.logprob == pytest.approx(logprob)
    assert found[6:] == [[], [], []]


def test_a_cached_prefix_is_used_only_without_scores():
    engine, prompt = engine_of(OracleBackend()), numbers(random.Random(1), 40)
    run(engine, [spec_of(prompt)])
    first = scored(engine, spec_of(prompt, prompt_logprobs=0))
    assert engine.counters.cached_tokens == 0
    assert scored(engine, spec_of(prompt, prompt_logprobs=0)) == first
    run(engine, [spec_of(prompt)])
    assert engine.counters.cached_tokens > 0


@pytest.mark.parametrize("deterministic", [False, True])
def test_without_new_tokens_the_prompt_is_computed_and_nothing_is_kept(deterministic):
    engine, prompt = engine_of(oracle(), shapes=SHAPES), numbers(random.Random(2), 128)
    spec = spec_of(prompt, max_tokens=0, prompt_logprobs=1, deterministic=deterministic)
    streams = run(engine, [spec])
    assert (ids(streams.tokens[key_of(0)]), streams.finishes[key_of(0)]) == ([], Finish(FinishReason.LENGTH))
    assert engine.counters.prefill_tokens >= len(prompt)
    assert engine.pool.counts().owned == 0
    with pytest.raises(InvalidRequest, match="128 tokens"):
        engine.validate(replace(spec, prompt=(*prompt, 1)))


def test_the_end_token_has_logprobs():
    engine = engine_of(oracle())
    spec = next(
        spec
        for n in range(5000)
        if not run(engine, [spec := spec_of(f"p{n}", ignore_eos=False, max_tokens=1, logprobs=1)]).tokens[key_of(0)]
    )
    finish = run(engine, [spec]).finishes[key_of(0)]
    assert (finish.reason, finish.matched) == (FinishReason.EOS, "256")
    assert finish.logprobs is not None
    assert finish.logprobs.top == ((256, finish.logprobs.logprob),)
