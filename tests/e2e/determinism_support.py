"""Deterministic requests for `test_determinism.py`, others beside them, and what came of them, event by event."""

from __future__ import annotations

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
EOS = 0  # banned: once the model has said it, it is sure of all that follows
MANY = {"max_tokens": 96, "logit_bias": {EOS: -100.0}, "logprobs": 1, "seed": 11}
LONGER = {"max_tokens": 800}


def text_of(seed, words):
    """Always the same for a seed; what follows is so uncertain that the last bits of a logit decide here and there."""
    return " ".join(random.Random(seed).choices(WORDS, k=words))


# Contexts that load cuts into more or fewer splits, one of them long enough for both sizes of chunks on the grid. Both
# are rolled back in their course, also when they are alone.
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": text_of(10, 300), "temperature": 0.0, **MANY},
    "sampled": {"prompt": text_of(5, 160), "temperature": 0.8, **MANY},
}


@dataclass(frozen=True)
class Recorded:
    """An answer, and each event of its stream as it came."""

    deltas: tuple[Delta, ...]
    answer: Completion

    def check(self, right: Completion) -> Completion:
        """It is `right` to the bit, and so was each event: nothing came that had to be taken back."""
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
    """Floats as their exact values: with `==` alone, zeros of both signs would be equal."""
    return [(each.logprob.hex(), [(token, value.hex()) for token, value in each.top]) for each in logprobs]


def bits(answer):
    """All that is promised to be equal."""
    said = list(answer.tokens), exact(answer.logprobs), answer.text, answer.finish_reason
    return *said, answer.usage.audit_digest, answer.system_fingerprint


def begin(client: Client, kind, **more):
    """The stream of one of them; it is under way when this returns."""
    return client.stream(**{**KINDS[kind], "deterministic": True, **more})


def finish(stream) -> Recorded:
    with stream:
        return Recorded(tuple(stream), stream.collect())


def ask(client: Client, kind, **more) -> Recorded:
    return finish(begin(client, kind, **more))


@contextmanager
def others(client: Client, count, rng, *, known=True, tokens=(150, 400), words=(1, 60)):
    """So many ordinary requests of other lengths beside what is done here; with `known`, each has begun to answer."""
    with ExitStack() as open_ones:
        how: dict[str, Any] = {"ignore_eos": True, "temperature": 1.0, "seed": 1}
        asked = [(text_of(rng.random(), rng.randint(*words)), rng.randint(*tokens)) for _ in range(count)]
        streams = [open_ones.enter_context(client.stream(prompt, max_tokens=most, **how)) for prompt, most in asked]
        for stream in streams if known else ():
            next(stream)
        yield streams


def handed_back(cluster: ClusterProcess, answer: Completion):
    """Why its attempts were given up, one after the other, as the router's log has it."""
    lines = [json.loads(line) for line in cluster.log("router").splitlines() if '"request_handed_back"' in line]
    return [line["reason"] for line in lines if line["request_id"] == answer.request_id]


def metric(cluster: ClusterProcess, name, **labels):
    with urllib.request.urlopen(f"http://{cluster.state().metrics}/metrics", timeout=30) as page:
        families = list(text_string_to_metric_families(page.read().decode()))
    samples = [sample for family in families for sample in family.samples]
    return sum(sample.value for sample in samples if sample.name == name and labels.items() <= sample.labels.items())


def found_exact(cluster: ClusterProcess):
    """The most rows of a decode step that is exact, as the decode worker has found when it started."""
    lines = [json.loads(line) for line in cluster.log("decode-0").splitlines() if '"fixed_forwards_checked"' in line]
    print(f"exact steps of up to {lines[-1]['exact_rows']} rows")
    return lines[-1]["exact_rows"]


def survive(cluster: ClusterProcess, kind, rng, times):
    """Its decode worker is killed so many times, at any of its tokens, each time in another request."""

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
    """Whether it lost its blocks to others that grow beside it, and had to begin anew."""
    with others(client, 6, rng, known=False, tokens=(250, 300), words=(10, 30)) as streams:
        answer = ask(client, kind, priority=-100).check(right)
        assert all(len(stream.collect().tokens) >= 250 for stream in streams)
    print(reasons := handed_back(cluster, answer))
    return "preempted" in reasons
