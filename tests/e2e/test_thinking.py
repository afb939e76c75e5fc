"""The coin model through a real cluster: its state is sent with the KV, and each thought comes once despite deaths.

The reference is one engine in this process, strictly one chunk after the other.
"""

import json
import random
from functools import cache

import pytest

from baton.core import HandoffId, Sampling, SequenceSpec
from baton.engine.engine import Engine
from baton.engine.models.loading import load_model
from baton.tokenizer import load_tokenizer
from tests.support.cluster_process import HANDED_OVER, ROOT
from tests.support.load import read, struck
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("thinking")]
COIN = ROOT / "models" / "coin"
SENTENCE = "A coin's state is heads. Alice flips, then Bob flips. What's the state? A:"
SETS = ("model.path=models/coin", "decode.replicas=2", "router.policy=round_robin", HANDED_OVER)
GREEDY = {"temperature": 0.0, "thoughts": True}


@pytest.fixture
def client(cluster):
    with cluster.client() as client:
        eventually(lambda: cluster.connected().keys() == {"decode-0", "decode-1", "prefill-0"}, within_s=60)
        yield client


@cache
def engine():
    return Engine(load_model(COIN, thinking="sequential"), load_tokenizer(COIN), total_blocks=400)


@cache
def alone(prompt, max_tokens=16, ignore_eos=False, think_while_decoding=False):
    """Return the tokens and the ids of all thoughts."""
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


def test_the_sentence(cluster, client):
    answer = client.generate(SENTENCE, max_tokens=8, **GREEDY)
    assert answer.text.strip().removesuffix(".") == "heads"
    thoughts = [thought.text for thought in answer.thoughts]
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
        assert [thought.text for thought in answer.thoughts if thought.text] == each["thoughts"], each


@pytest.mark.sample(1)
@pytest.mark.parametrize("while_decoding", [False, True])
def test_handoff_at_every_offset_of_a_chunk(client, while_decoding):
    """Prompts of all lengths, cut anywhere, continue with the state at their end."""
    words = f"{SENTENCE} heads. {SENTENCE}".split(" ")
    for end in range(4, len(words), 2):
        prompt = " ".join(words[:end])
        answer = client.generate(prompt, max_tokens=16, ignore_eos=True, think_while_decoding=while_decoding, **GREEDY)
        assert said(answer) == alone(prompt, 16, True, while_decoding), prompt


def test_deterministic(client):
    """Answers are bit-identical, cached or not, on either decode worker."""
    options = {"max_tokens": 24, "ignore_eos": True, "deterministic": True, "logprobs": 2, **GREEDY}
    answers = [client.generate(f"{SENTENCE} heads. {SENTENCE}", **options) for _ in range(4)]
    assert {answer.placement.decode_worker for answer in answers} == {"decode-0", "decode-1"}
    assert len({answer.usage.audit_digest for answer in answers}) == 1
    assert len({str(answer.logprobs) for answer in answers}) == 1
    for answer in answers:
        assert said(answer) == alone(f"{SENTENCE} heads. {SENTENCE}", 24, True)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("worker", "while_decoding"),
    [
        ("decode", True),
        ("prefill", False),
        pytest.param("decode", False, marks=pytest.mark.chaos),
        pytest.param("prefill", True, marks=pytest.mark.chaos),
    ],
)
def test_a_worker_dies_in_mid_answer(cluster, client, worker, while_decoding, seed):
    """A decode worker dies after a random number of tokens, or the prefill worker dies."""
    rng = random.Random(seed)
    prompt = f"{SENTENCE} heads. " * 6 + SENTENCE
    options = {"max_tokens": 600, "ignore_eos": True, "think_while_decoding": while_decoding, **GREEDY}
    right = alone(prompt, 600, True, while_decoding)

    def once():
        after = rng.randrange(1, 300) if worker == "decode" else 0
        if not (found := struck(cluster, client.stream(prompt, **options), worker, after)):
            return None
        deltas, answer = found
        tokens = [token for delta in deltas for token in delta.tokens]
        thoughts = [thought.token_ids for delta in deltas for thought in delta.thoughts]
        assert (tokens, thoughts) == right == said(answer)
        eventually(lambda: len(cluster.connected()) == 3, within_s=60)
        return answer if answer.placement.attempts > 1 else None

    assert eventually(once, within_s=120).placement.attempts == 2


def test_a_router_dies_in_mid_answer(cluster, client):
    """The next router gets the tokens from the decode worker, and the client gets each thought once."""
    prompt = f"{SENTENCE} heads. " * 3 + SENTENCE
    right = alone(prompt, 600, True, True)
    options = {"max_tokens": 600, "ignore_eos": True, "think_while_decoding": True, **GREEDY}
    with cluster.client(max_retries=100) as patient, patient.stream(prompt, **options) as stream:
        read(stream, 5)
        pid = cluster.kill("router")
        assert said(stream.collect()) == right
    cluster.wait_replaced("router", pid)
    eventually(lambda: len(cluster.connected()) == 3, within_s=60)
