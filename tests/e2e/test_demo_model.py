"""The trained demo model through Ray, as in README: its answers, which equal those of one process."""

import json
import random
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from baton.core import Constraint, Sampling, SequenceSpec
from baton.engine.engine import Engine
from baton.engine.models.loading import load_model
from baton.errors import BatonError
from baton.tokenizer import load_tokenizer
from baton.worker.engine_factory import generate
from tests.support.cluster_process import HANDED_OVER
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow
CONFIG, SETS = "configs/local.yaml", (HANDED_OVER,)
DEMO = Path(__file__).parents[2] / "models" / "demo"
ANSWERS = {"The color of dog": (" can vary widely", 3), "What is the largest ocean?": ("Pacific Ocean", 2)}


@pytest.fixture(scope="module")
def engine():
    return Engine(load_model(DEMO), load_tokenizer(DEMO), total_blocks=512)


def test_two_by_two_answers_and_uses_all_workers(home):
    with home.cluster("configs/local-2x2.yaml", HANDED_OVER) as cluster, cluster.client() as client:
        answer = client.generate("The color of dog", max_tokens=8, temperature=0)
        assert (answer.text, answer.finish_reason.value) == (" can vary widely", "eos")
        with ThreadPoolExecutor(16) as pool:
            found = list(pool.map(lambda n: client.generate(f"Count from {n}", max_tokens=20, seed=n), range(32)))
        assert {a.placement.prefill_worker for a in found} == {"prefill-0", "prefill-1"}
        assert {a.placement.decode_worker for a in found} - {""} == {"decode-0", "decode-1"}
        loads = cluster.loads()
        assert len(loads) == 4
        assert all(load.prefill_tokens for name, load in loads.items() if name.startswith("prefill"))
        assert all(load.decode_steps for name, load in loads.items() if name.startswith("decode"))


@pytest.mark.parametrize("prompt", ANSWERS)
def test_the_seed_prompts(cluster, engine, prompt):
    with cluster.client() as client:
        answer = client.generate(prompt, max_tokens=16, temperature=0)
    assert (answer.text, len(answer.tokens)) == ANSWERS[prompt]
    assert answer.finish_reason.value == "eos"
    assert answer.usage.prompt_tokens == len(engine.tokenizer.encode(prompt))
    assert (answer.placement.prefill_worker, answer.placement.decode_worker) == ("prefill-0", "decode-0")
    assert answer.placement.kv_bytes > 0


def test_a_conversation_is_answered_in_the_shape_that_is_asked_for(cluster, engine):
    """Chat template and constraints give the same result as in one process."""
    shape = {"type": "object", "properties": {"city": {"enum": ["Rome", "Paris"]}, "sea": {"type": "boolean"}}}
    schema = json.dumps(shape | {"required": ["city", "sea"], "additionalProperties": False})
    turns = [{"role": "user", "content": "The capital of"}, {"role": "user", "content": "France is"}]
    with cluster.client() as client:
        plain = client.chat(turns, max_tokens=8, temperature=0)
        named = client.chat(turns, max_tokens=8, temperature=0, choices=["Rome", " Paris", " Parisian"])
        shaped = client.chat(turns, max_tokens=64, temperature=0, json_schema=schema)
    assert (plain.text, named.text) == (" Paris", " Paris")
    assert plain.usage.prompt_tokens == len(engine.tokenizer.encode("The capital of France is"))
    found = json.loads(shaped.text)
    assert found["city"] in {"Rome", "Paris"}
    assert found["sea"] in {True, False}
    assert shaped.placement.decode_worker == "decode-0"
    sampling, constraint = Sampling(max_tokens=64, temperature=0), Constraint("json_schema", (schema,))
    spec = SequenceSpec(tuple(engine.tokenizer.encode("The capital of France is")), sampling, constraint=constraint)
    assert shaped.text == generate(engine, spec).text


def draw(rng, heldout):
    options = {"max_tokens": rng.randrange(1, 40), "temperature": rng.choice([0.0, 0.0, 0.9])}
    options |= {"seed": rng.randrange(2**62), "top_k": rng.choice([0, 4]), "min_p": rng.choice([0.0, 0.1])}
    return rng.choice(heldout), {**options, "ignore_eos": rng.random() < 0.3}


def test_concurrent_requests_equal_a_single_process(cluster, engine, seed):
    """32 mixed concurrent requests each equal one process's answer, in fp32, greedy and sampled."""
    heldout = [json.loads(line)["prompt"] for line in (DEMO.parent / "heldout.jsonl").read_text().splitlines()]
    rng = random.Random(seed)
    jobs = [draw(rng, heldout) for _ in range(32)]
    with cluster.client() as client, ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda job: client.generate(job[0], **job[1]), jobs))
    for (prompt, options), answer in zip(jobs, answers, strict=True):
        spec = SequenceSpec(tuple(engine.tokenizer.encode(prompt)), Sampling(**as_sent(options)))
        alone = generate(engine, spec)
        assert (list(answer.tokens), answer.text) == ([t.token_id for t in alone.tokens], alone.text), (prompt, options)
        assert answer.finish_reason == alone.finish.reason


def as_sent(options):
    """Round floats to the 32 bits that they have on the wire."""
    return {k: struct.unpack("f", struct.pack("f", v))[0] if isinstance(v, float) else v for k, v in options.items()}


def test_stop_strings_and_logprobs_cross_the_handoff(cluster, engine):
    prompt, options = "The days of the week are", dict[str, Any](max_tokens=40, temperature=0)
    whole = generate(engine, SequenceSpec(tuple(engine.tokenizer.encode(prompt)), Sampling(**options)))
    stop = whole.text[12:15]
    with cluster.client() as client:
        cut = client.generate(prompt, stop=[stop], logprobs=2, **options)
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason.value == "stop_string"
    assert len(cut.logprobs) == len(cut.tokens)
    assert all(len(item.top) == 2 and item.top[0][1] >= item.top[1][1] for item in cut.logprobs)


@pytest.mark.parametrize("worker", ["decode-0", "prefill-0"])
def test_ray_replaces_a_killed_worker(cluster, worker):
    pid = cluster.kill(worker)

    def serves():
        try:
            with cluster.client(timeout=10) as client:
                return client.generate("The color of dog", max_tokens=8, temperature=0).text
        except BatonError:
            return None

    assert eventually(serves, within_s=60) == " can vary widely"
    cluster.wait_replaced(worker, pid)
    if worker == "decode-0":  # without a prefill worker it computes prompts itself
        assert cluster.loads()["decode-0"].prefill_tokens == 0
