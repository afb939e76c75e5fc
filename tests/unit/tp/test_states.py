"""States of recurrent layers on ranks, which are threads: handoffs between unequal sizes, checkpoints, equal bits. Each
answer is that of one rank.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import cache, partial
from typing import Any

import pytest
import torch

from baton.engine.determinism.checks import checked_shapes
from baton.engine.determinism.shapes import FixedShapes
from baton.engine.models.loading import load_model
from baton.worker.engine_factory import generate
from tests.support.engines import Streams, engine_of, hand_over, ids, key_of, move, numbers, run, spec_of
from tests.unit.model.checkpoints import RECURRENT
from tests.unit.tp.support import on_threads, plan

pytestmark = pytest.mark.slow
MODELS: dict[str, dict[str, Any]] = {
    "lfm2": {},
    "qwen3_next": {},  # four ranks share two key heads
    "granite-hybrid": {"mamba_n_heads": 8, "mamba_n_groups": 2},  # and two groups
    "granite-hybrid-one-group": {"mamba_n_heads": 8, "mamba_n_groups": 1},
    "nemotron_h": {"mamba_num_heads": 8, "n_groups": 4},
}
PAIRS = [(1, 2), (2, 1), (2, 4), (4, 2), (1, 4)]
Backends = Callable[..., Any]


@pytest.fixture(scope="module", params=MODELS)
def backends(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backends]:
    """Models on 1, 2 or 4 ranks. A model has one engine at a time, so each `copy` has its own."""
    folder = tmp_path_factory.mktemp("model")
    variant = RECURRENT[request.param.removesuffix("-one-group")]
    more = MODELS[request.param] | {"max_position_embeddings": 1024, "vocab_size": 259}
    variant._replace(settings=variant.settings | more).write(folder)
    with ExitStack() as stack:

        @cache
        def loaded(size: int, copy: int = 0) -> Any:
            if size == 1:
                return load_model(folder, block_size=8)
            made = on_threads(plan(tmp_path_factory.mktemp("ranks"), size, str(folder)), [])
            return stack.enter_context(closing(made))

        yield loaded


def poisoned(backend: Any, blocks: int = 60, **options: Any) -> Any:
    """Return an engine with states of NaN, so that one that is read before it is set gives no token."""
    engine = engine_of(backend, blocks, **options)
    engine._states.memory.fill_(torch.nan)
    return engine


def request_of(number: int, length: int, **options: Any) -> Any:
    return spec_of(numbers(random.Random(number), length, 250), **{"max_tokens": 12, **options})


@pytest.mark.sample(8)
@pytest.mark.parametrize(("giver", "taker"), PAIRS)
def test_ranks_of_any_number_hand_over_a_state(backends: Backends, giver: int, taker: int) -> None:
    """The second handoff is from a checkpoint, and the third is a move of a running sequence."""
    alone, sender, receiver = poisoned(backends(1, 1)), poisoned(backends(giver)), poisoned(backends(taker))
    for length in (5, 61):
        spec, states = request_of(length, length), list[Any]()
        seen = partial(noted, states)
        expected = ids(generate(alone, spec).tokens)
        for _ in range(2):
            assert hand_over(sender, receiver, spec, change=seen).ids(key_of()) == expected
        assert move(sender, receiver, spec, 3).ids(key_of()) == expected
        hand_over(alone, receiver, spec, change=seen)
        for state in states:  # in the order of one rank
            assert state.position == length
            torch.testing.assert_close(*(numbers_of(each) for each in (state, states[-1])), rtol=1e-4, atol=1e-4)
    assert sender.counters.cached_tokens > 0
    assert receiver.counters.prefill_tokens == 0


def noted(states: list[Any], state: Any) -> Any:
    states.append(state)
    return state


def numbers_of(state: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(state.data), dtype=torch.float32)


@pytest.mark.sample(4)
@pytest.mark.parametrize("size", [2, 4])
def test_answers_do_not_depend_on_company_chunks_or_preemptions(backends: Backends, size: int) -> None:
    specs = [request_of(seed, length) for seed, length in enumerate((5, 33, 70, 16, 17))]
    alone = poisoned(backends(1, 1), prefix_cache=False)
    expected = [ids(generate(alone, spec).tokens) for spec in specs]
    engine = poisoned(backends(size), 20, max_batched_tokens=30)
    for _ in range(2):
        streams = run(engine, specs)
        assert [streams.ids(key_of(number)) for number in range(len(specs))] == expected
    assert engine.counters.preemptions > 0
    assert engine.counters.cached_tokens > 0


@pytest.mark.sample(2)
def test_deterministic_requests_have_equal_bits_in_company(backends: Backends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ordinary forwards draw the least likely tokens later, so that states return to those before them."""
    backend = backends(2)
    shapes = checked_shapes(backend, FixedShapes(2, 16, exact_rows=32))
    assert shapes is not None, backend.nondeterminism
    assert shapes.exact_rows == 0
    spec = request_of(9, 150, deterministic=True, max_tokens=24, logprobs=2, temperature=0.7, seed=3)
    found = list[Any]()
    forward = type(backend).forward
    turned = lambda self, batch, kv: forward(self, batch, kv) * (1 if batch.fixed else -1)  # noqa: E731
    for company in (0, 3):
        engine, streams = poisoned(backend, 120, shapes=shapes), Streams()
        for number in range(company):
            engine.submit(key_of(number), request_of(number, 40, max_tokens=30, deterministic=number == 1))
            streams.step(engine)
        engine.submit(key_of(), spec)
        found.append([(token.token_id, token.logprobs) for token in streams.drain(engine).tokens[key_of()]])
        monkeypatch.setattr(type(backend), "forward", turned)
    assert found[0] == found[1]
    assert engine.counters.rollbacks > 0


def test_states_of_an_earlier_engine_are_refused(backends: Backends) -> None:
    engine = poisoned(backends(2))
    engine._states.memory = engine._states.memory.clone()
    engine.submit(key_of(), request_of(1, 5))
    assert "make_states" in str(engine.step().failed[0][1])
