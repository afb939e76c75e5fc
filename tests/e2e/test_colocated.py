"""Workers that mix prompt chunks into decode steps, on the oracle: their answers are exact even after a kill."""

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from tests.support.load import oracle_answer
from tests.support.waiting import until_interrupted

pytestmark = pytest.mark.slow
CHUNK = 48
CONFIG = "configs/colocated.yaml"
SETS = f"""
    model.path=oracle model.max_model_len=2048 decode.max_batched_tokens={CHUNK}
    router.queue.max_wait_s=60
""".split()
ANSWER: dict[str, Any] = {"ignore_eos": True, "temperature": 0.8, "seed": 7}


def joint(cluster):
    """Return the number of decode steps with a prompt chunk, and their prompt tokens."""
    paces = [load.joint_pace for load in cluster.loads().values()]
    return sum(pace.steps for pace in paces), sum(pace.tokens for pace in paces)


def test_both_are_alike_and_say_so(cluster):
    status = cluster.status()
    assert [worker["info"]["role"] for worker in status["workers"]] == ["decode", "decode"]
    assert [worker["note"] for worker in status["workers"]] == ["", ""]
    assert "2 colocated" in cluster.home.baton("status", "--name", cluster.name, check=True).stdout
    with cluster.client() as client:
        answer = client.generate("hello there", max_tokens=8, **ANSWER)
    placed = answer.placement
    assert placed.prefill_worker == placed.decode_worker in {"decode-0", "decode-1"}
    assert (answer.timings.transfer_s, answer.timings.commit_s, placed.kv_bytes) == (0.0, 0.0, 0)


def beside_streams(cluster, client, prompts):
    """Answer these prompts while each worker decodes. Return the number of mixed steps and their prompt tokens."""
    with ThreadPoolExecutor(4) as pool, ExitStack() as stack:
        before, streams = joint(cluster), list[Any]()
        while not all(load.running for load in cluster.loads().values()):  # distorted costs may draw several here
            streams.append(stack.enter_context(client.stream([len(streams)], max_tokens=1500, **ANSWER)))
            next(streams[-1])
        answers = [pool.submit(client.generate, prompt, max_tokens=10, **ANSWER) for prompt in prompts]
        for answer, prompt in zip(answers, prompts, strict=True):
            assert answer.result().tokens == oracle_answer(prompt, max_tokens=10, **ANSWER)
        found = [now - then for now, then in zip(joint(cluster), before, strict=True)]
        for number, stream in enumerate(streams):
            assert stream.collect().tokens == oracle_answer([number], max_tokens=1500, **ANSWER)
    return found


def test_long_prompts_are_chunked_beside_what_is_decoded(cluster, seed):
    """On a busy machine the streams may end before the prompts come: then it tries again."""
    rng, steps = random.Random(seed), 0
    with cluster.client() as client:
        for _ in range(5):
            prompts = [[rng.randrange(256) for _ in range(900)] for _ in range(4)]
            steps, tokens = beside_streams(cluster, client, prompts)
            assert tokens <= steps * (CHUNK - 1), "one at least is for who decodes"
            if steps > 900 // CHUNK:
                break
        assert steps > 900 // CHUNK


def test_a_worker_that_is_killed_is_no_loss(cluster):
    def attempt():
        with cluster.client() as client, client.stream([1, 2, 3], max_tokens=1500, **ANSWER) as stream:
            for _ in range(5):
                next(stream)
            name = next((name for name, load in cluster.loads().items() if load.running), None)
            pid = cluster.kill(name) if name else None
            answer = stream.collect()
        assert tuple(answer.tokens) == oracle_answer([1, 2, 3], max_tokens=1500, **ANSWER)
        if pid is not None:
            cluster.wait_replaced(name, pid)
        assert answer.placement.attempts == 1 or answer.placement.decode_worker != name
        return answer.placement.attempts == 2

    until_interrupted(attempt)
