"""Deterministic requests for `test_determinism.py`, concurrent load, and comparison of answers event by event."""

import json
import random
import urllib.request
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from baton import Client
from baton.client.types import Completion, Delta
from tests.e2e.struck import struck
from tests.support.cluster_process import ClusterProcess
from tests.support.waiting import eventually

WORDS = "the river runs to a wide sea and cities grow on it".split()
EOS = 0  # banned, because after it the model is certain of all later tokens
MANY = {"max_tokens": 96, "logit_bias": {EOS: -100.0}, "logprobs": 1, "seed": 11}
LONGER = {"max_tokens": 800}


def text_of(seed, words):
    """Return the same text for the same seed. Its continuation is so uncertain that the last bits of a logit matter."""
    return " ".join(random.Random(seed).choices(WORDS, k=words))


# Load cuts these contexts into more or fewer splits. One is long enough for both sizes of chunks on the grid. Both are
# rolled back at some point, even without load.
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": text_of(10, 300), "temperature": 0.0, **MANY},
    "sampled": {"prompt": text_of(5, 160), "temperature": 0.8, **MANY},
}


@dataclass(frozen=True)
class Recorded:
    """An answer, and each event of its stream."""

    deltas: tuple[Delta, ...]
    answer: Completion

    def check(self, right: Completion) -> Completion:
        """Check that the answer and each event equal `right` bit by bit, so that no sent token was taken back."""
        tokens, logprobs, came = right.tokens, exact(right.logprobs), 0
        for delta in self.deltas:
            end = came + len(delta.tokens)
            assert (delta.choice, delta.start) == (0, came)
            assert delta.tokens == tokens[came:end], f"{delta} is not what came before at {came}"
            assert exact(delta.logprobs) == logprobs[came:end], f"{delta} has other bits than what came before"
            came = end
        assert came == len(tokens)
        assert bits(self.answer) == bits(right)
        return self.answer


def exact(logprobs):
    """Return the exact values of floats, because `==` does not distinguish zeros of both signs."""
    return [(each.logprob.hex(), [(token, value.hex()) for token, value in each.top]) for each in logprobs]


def bits(answer):
    """Return everything that must be equal."""
    said = list(answer.tokens), exact(answer.logprobs), answer.text, answer.finish_reason
    return *said, answer.usage.audit_digest, answer.system_fingerprint


def begin(client: Client, kind, **more):
    """Start a deterministic stream of this kind."""
    return client.stream(**{**KINDS[kind], "deterministic": True, **more})


def finish(stream) -> Recorded:
    with stream:
        return Recorded(tuple(stream), stream.collect())


def ask(client: Client, kind, **more) -> Recorded:
    return finish(begin(client, kind, **more))


@contextmanager
def others(client: Client, count, rng, *, known=True, tokens=(150, 400), words=(1, 60)):
    """Run `count` ordinary requests of other lengths in the background. `known`: return when each has an answer."""
    with ExitStack() as open_ones:
        how: dict[str, Any] = {"ignore_eos": True, "temperature": 1.0, "seed": 1}
        asked = [(text_of(rng.random(), rng.randint(*words)), rng.randint(*tokens)) for _ in range(count)]
        streams = [open_ones.enter_context(client.stream(prompt, max_tokens=most, **how)) for prompt, most in asked]
        for stream in streams if known else ():
            next(stream)
        yield streams


def handed_back(cluster: ClusterProcess, answer: Completion):
    """Return the reasons for which its attempts were requeued, in order, from the router's log."""
    lines = [json.loads(line) for line in cluster.log("router").splitlines() if '"request_handed_back"' in line]
    return [line["reason"] for line in lines if line["request_id"] == answer.request_id]


def metric(cluster: ClusterProcess, name, **labels):
    with urllib.request.urlopen(f"http://{cluster.state().metrics}/metrics", timeout=30) as page:
        families = list(text_string_to_metric_families(page.read().decode()))
    samples = [sample for family in families for sample in family.samples]
    return sum(sample.value for sample in samples if sample.name == name and labels.items() <= sample.labels.items())


def found_exact(cluster: ClusterProcess):
    """Return the largest exact decode step, in rows, that the decode worker found at its start."""
    lines = [json.loads(line) for line in cluster.log("decode-0").splitlines() if '"fixed_forwards_checked"' in line]
    print(f"exact steps of up to {lines[-1]['exact_rows']} rows")
    return lines[-1]["exact_rows"]


def survive(cluster: ClusterProcess, kind, rng, times):
    """Kill the decode worker `times` times, at a random token, each time during another request."""

    def once():
        eventually(lambda: len(cluster.connected()) == 3, within_s=60)
        found = struck(cluster, begin(client, kind, **LONGER), "decode", rng.randrange(1, 500))
        return found if found and found[1].placement.attempts > 1 else None

    with cluster.client(timeout=120.0) as client:
        right = ask(client, kind, **LONGER).answer
        for _ in range(times):
            deltas, answer = eventually(once, within_s=100)
            assert Recorded(tuple(deltas), answer).check(right).placement.attempts == 2


def pushed_out(cluster: ClusterProcess, client: Client, kind, right, rng):
    """Return whether concurrent requests preempted it, so that it was computed again."""
    with others(client, 6, rng, known=False, tokens=(250, 300), words=(10, 30)) as streams:
        answer = ask(client, kind, priority=-100).check(right)
        assert all(len(stream.collect().tokens) >= 250 for stream in streams)
    print(reasons := handed_back(cluster, answer))
    return "preempted" in reasons
