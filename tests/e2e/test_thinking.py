"""The coin model through a real cluster: its state goes with the KV, its thoughts come once, whoever dies on the way.

What is right is what one engine in this process says, strictly one chunk after the other.
"""

from __future__ import annotations

import json
import os
import random
import signal
import urllib.request
from functools import cache

import pytest

from baton.core import HandoffId, Sampling, SequenceSpec
from baton.engine.engine import Engine
from baton.engine.model.build import load_model
from baton.errors import InvalidRequest
from baton.tokenizer import load_tokenizer
from tests.support.cluster_process import HANDED_OVER, ROOT
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.xdist_group("thinking")]
COIN = ROOT / "models" / "coin"
SENTENCE = "A coin's state is heads. Alice flips, then Bob flips. What's the state? A:"
SETS = ("model.path=models/coin", "decode.replicas=2", "router.policy=round_robin", HANDED_OVER)
GREEDY = {"temperature": 0.0, "thoughts": True}


@pytest.fixture(scope="module")
def cluster(module_home):
    with module_home.cluster("configs/no-ray.yaml", *SETS) as running:
        yield running


@pytest.fixture
def client(cluster):
    with cluster.client(timeout=60.0) as client:
        workers = [f"decode-{n}" for n in range(2)] + ["prefill-0"]
        eventually(lambda: sorted(w.info.ref.worker_id for w in client.cluster().workers) == workers, within_s=60)
        eventually(lambda: {w.state for w in client.cluster().workers} == {"connected"}, within_s=60)
        yield client


@cache
def engine():
    return Engine(load_model(COIN, thinking="sequential"), load_tokenizer(COIN), total_blocks=400)


@cache
def alone(prompt, max_tokens=16, ignore_eos=False, think_while_decoding=False):
    """Tokens and the ids of all thoughts."""
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=ignore_eos)
    spec = SequenceSpec(tuple(load_tokenizer(COIN).encode(prompt)), sampling)
    if think_while_decoding:
        spec = SequenceSpec(spec.prompt, sampling, think_while_decoding=True)
    engine().submit(HandoffId("alone", 1), spec)
    tokens, thoughts = [], []
    while engine().has_work():
        result = engine().step()
        thoughts += [thought for _, made in result.thoughts for thought in made]
        tokens += [token.token_id for output in result.outputs for token in output.tokens]
    assert [thought.chunk for thought in thoughts] == list(range(len(thoughts)))
    return tokens, [thought.token_ids for thought in thoughts]


def said(answer):
    assert [thought.chunk for thought in answer.thoughts] == list(range(len(answer.thoughts)))
    return list(answer.tokens), [thought.token_ids for thought in answer.thoughts]


def texts(answer):
    return [thought.text for thought in answer.thoughts]


def test_the_sentence(cluster, client):
    answer = client.generate(SENTENCE, max_tokens=8, **GREEDY)
    assert answer.text.strip().removesuffix(".") == "heads"
    thoughts = texts(answer)
    assert [text for text in thoughts if text] == ["tails", "heads"]
    assert "" in thoughts[thoughts.index("tails") : thoughts.index("heads")]
    assert answer.usage.thinking_tokens == sum(len(thought.token_ids) for thought in answer.thoughts) > 0
    assert answer.usage.completion_tokens == len(answer.tokens)
    assert answer.placement.prefill_worker == "prefill-0"
    assert answer.placement.decode_worker.startswith("decode-")
    workers = {worker.info.ref.worker_id: worker.load for worker in client.cluster().workers}
    assert workers["prefill-0"].decode_tokens == 0
    assert sum(load.prefill_tokens for name, load in workers.items() if name != "prefill-0") == 0


def test_other_phrasings(client):
    phrasings = [json.loads(line) for line in (ROOT / "models" / "coin_phrasings.jsonl").read_text().splitlines()]
    assert len(phrasings) >= 10
    for each in phrasings:
        answer = client.generate(each["prompt"], max_tokens=8, **GREEDY)
        assert answer.text == each["answer"], each
        assert [text for text in texts(answer) if text] == each["thoughts"], each


def test_nobody_is_told_who_did_not_ask(client):
    answer = client.generate(SENTENCE, max_tokens=8, temperature=0.0)
    assert (answer.thoughts, answer.usage.thinking_tokens > 0) == ((), True)


@pytest.mark.parametrize("while_decoding", [False, True])
def test_handoff_at_every_offset_of_a_chunk(client, while_decoding):
    """Prompts of all lengths, cut anywhere: each goes on with the state that it has there."""
    words = f"{SENTENCE} heads. {SENTENCE}".split(" ")
    for end in range(4, len(words), 2):
        prompt = " ".join(words[:end])
        answer = client.generate(prompt, max_tokens=16, ignore_eos=True, think_while_decoding=while_decoding, **GREEDY)
        assert said(answer) == alone(prompt, 16, True, while_decoding), prompt


def test_the_stream_has_thoughts_before_the_tokens_that_follow(client):
    with client.stream(SENTENCE, max_tokens=8, **GREEDY) as stream:
        deltas = list(stream)
    kinds = ["thought" if delta.thoughts else "tokens" for delta in deltas if delta.thoughts or delta.tokens]
    assert kinds == sorted(kinds)
    assert "thought" in kinds


def test_choices_share_what_was_thought_about_the_prompt(client):
    answer = client.generate(SENTENCE, max_tokens=4, n=3, **GREEDY)
    assert [len(choice.thoughts) > 0 for choice in answer.choices] == [True, False, False]
    assert {choice.text for choice in answer.choices} == {answer.text}
    alone_usage = client.generate(SENTENCE, max_tokens=4, **GREEDY).usage
    assert answer.usage.thinking_tokens == alone_usage.thinking_tokens


def test_deterministic(client):
    """Equal to the bit, from the cache or not, on either decode worker."""
    options = {"max_tokens": 24, "ignore_eos": True, "deterministic": True, "logprobs": 2, **GREEDY}
    answers = [client.generate(f"{SENTENCE} heads. {SENTENCE}", **options) for _ in range(4)]
    assert {answer.placement.decode_worker for answer in answers} == {"decode-0", "decode-1"}
    assert len({answer.usage.audit_digest for answer in answers}) == 1
    assert len({str(answer.logprobs) for answer in answers}) == 1
    for answer in answers:
        assert said(answer) == alone(f"{SENTENCE} heads. {SENTENCE}", 24, True)


@pytest.mark.parametrize(
    ("worker", "while_decoding"),
    [
        ("decode", True),
        ("prefill", False),
        pytest.param("decode", False, marks=pytest.mark.chaos),
        pytest.param("prefill", True, marks=pytest.mark.chaos),
    ],
)
def test_a_worker_dies_in_mid_answer(cluster, client, worker, while_decoding):
    """The decode worker after a drawn number of tokens; or the prefill worker, while others wait for it too."""
    rng = random.Random(seed := random.randrange(2**32))
    print(f"seed {seed}")
    prompt = f"{SENTENCE} heads. " * 6 + SENTENCE
    options = {"max_tokens": 600, "ignore_eos": True, "think_while_decoding": while_decoding, **GREEDY}
    right = alone(prompt, 600, True, while_decoding)

    def struck():
        after = rng.randrange(1, 300) if worker == "decode" else 0
        thoughts, tokens = list[tuple[int, ...]](), list[int]()
        with client.stream(prompt, **options) as stream:
            while len(tokens) < after:
                delta = next(stream)
                thoughts += [thought.token_ids for thought in delta.thoughts]
                tokens += delta.tokens
            busy = [w.info.ref.worker_id for w in client.cluster().workers if w.info.role == worker and w.dispatched]
            if not busy:
                return None  # it had ended before
            pid = cluster.pid(busy[0])
            os.kill(pid, signal.SIGKILL)
            for delta in stream:
                thoughts += [thought.token_ids for thought in delta.thoughts]
                tokens += delta.tokens
            answer = stream.collect()
        eventually(lambda: cluster.pid(busy[0]) != pid, within_s=60)
        eventually(lambda: {w.state for w in client.cluster().workers} == {"connected"}, within_s=60)
        assert (tokens, thoughts) == right == said(answer)
        return answer if answer.placement.attempts > 1 else None

    assert eventually(struck, within_s=120).placement.attempts == 2


def test_a_router_dies_in_mid_answer(cluster, client):
    """The next router has the tokens from the decode worker, and the client each thought once."""
    prompt = f"{SENTENCE} heads. " * 3 + SENTENCE
    right = alone(prompt, 600, True, True)
    options = {"max_tokens": 600, "ignore_eos": True, "think_while_decoding": True, **GREEDY}
    with cluster.client(max_retries=10) as patient, patient.stream(prompt, **options) as stream:
        while len(stream.tokens) < 5:
            next(stream)
        pid = cluster.pid("router")
        os.kill(pid, signal.SIGKILL)
        assert said(stream.collect()) == right
    eventually(lambda: cluster.pid("router") != pid, within_s=60)
    with cluster.client(timeout=60.0) as another:
        eventually(lambda: len(another.cluster().workers) == 3, within_s=60)


def test_the_command_line_shows_thoughts(cluster):
    shown = cluster.home.baton(
        "generate", SENTENCE, "--name", cluster.name, "--temperature", 0, "--show", "thoughts", check=True
    )
    assert "heads" in shown.stdout
    assert [line.split(": ")[1] for line in shown.stderr.splitlines() if not line.endswith("-")] == ["tails", "heads"]


def test_over_http(cluster):
    body = {"prompt": SENTENCE, "max_tokens": 8, "temperature": 0, "thoughts": True}
    request = urllib.request.Request(
        f"http://{cluster.state().http}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        answer = json.load(reply)
    thoughts = [thought["text"] for thought in answer["choices"][0]["thoughts"] if thought["text"]]
    assert thoughts == ["tails", "heads"]
    assert answer["usage"]["thinking_tokens"] > 0


def test_a_model_that_does_not_think_refuses_by_name(module_home):
    with module_home.cluster(name="thoughtless") as running, running.client() as client:
        eventually(lambda: len(client.cluster().workers) == 2, within_s=60)
        for field in ("thoughts", "think_while_decoding"):
            with pytest.raises(InvalidRequest, match=f"{field}: .*does not think"):
                client.generate("The color of dog", **{field: True})


def test_blocks_that_are_no_whole_chunks_are_refused_by_key(module_home):
    sets = ("--set", "name=odd", "--set", "model.path=models/coin", "--set", "decode.block_size=7")
    refused = module_home.baton("up", "-c", "configs/no-ray.yaml", *sets, "--detach")
    assert refused.returncode != 0
    said = refused.stdout + refused.stderr + module_home.logs()
    assert "decode.block_size: must be a multiple of 2" in said
