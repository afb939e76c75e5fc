"""The same deterministic request in all circumstances, on workers whose ordinary batch depends on load.

The demo model in bfloat16. `make test` runs each circumstance once, with load drawn from the run's seed; `make chaos`
runs it 20 times. Every event of every stream is compared, so that an unverified token would be found.
"""

import json
import random
import urllib.request
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton import Client
from baton.client.types import Completion, Delta
from baton.engine.kernels.cpu.compiler import load_library
from tests.support.cluster_process import HANDED_OVER, ClusterProcess
from tests.support.compiled_kernels import compiled_or_skip
from tests.support.load import struck
from tests.support.time_factor import scaled
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("determinism")]
WORDS = "the river runs to a wide sea and cities grow on it".split()
EOS = 0  # banned, because after it the model is certain of all later tokens
MANY = {"max_tokens": 96, "logit_bias": {EOS: -100.0}, "logprobs": 1, "seed": 11}
LONGER = {"max_tokens": 800}
MODEL = (
    "model.path=models/demo",
    "model.dtype=bfloat16",
    "decode.attention_splits=load_bf16",
    "determinism.verify=always",  # otherwise no token is rolled back here
    HANDED_OVER,
)
EXACT = "determinism.verify=auto"  # exact steps, if the kernels have them
SETS = (*MODEL, "decode.replicas=2", "router.policy=round_robin")
FRAME = 8192
# 1024 tokens in all: more than two or three long answers preempt the last one.
ROOM = "model.max_model_len=1024 decode.kv_memory=1MiB decode.block_size=8 prefill.block_size=32"
PIECES = f"transfer.transport=grpc transfer.frame_size={FRAME} transfer.credits=2 transfer.coalesce_below=1"
OTHERWISE = (*MODEL, *ROOM.split(), "prefill.max_batched_tokens=96", *PIECES.split())
LOADS = (0, 1, 3, 7, 31)

often = pytest.mark.parametrize(
    "repeats",
    [pytest.param(1, id="once"), pytest.param(20, id="often", marks=[pytest.mark.chaos, pytest.mark.timeout(600)])],
)


def text_of(seed, words):
    """Return the same text for the same seed. Its continuation is so uncertain that the last bits of a logit matter."""
    return " ".join(random.Random(seed).choices(WORDS, k=words))


# Load cuts these contexts into more or fewer splits. One is long enough for both sizes of chunks on the grid. Both are
# rolled back at some point, even without load.
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": text_of(10, 300), "temperature": 0.0, **MANY},
    "sampled": {"prompt": text_of(5, 160), "temperature": 0.8, **MANY},
}
kinds = pytest.mark.parametrize("kind", KINDS)
another_cluster = pytest.mark.sample(1, of="deterministic requests on a cluster of another kind")


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
    with urllib.request.urlopen(f"http://{cluster.state().metrics}/metrics", timeout=scaled(30)) as page:
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

    with cluster.client(timeout=scaled(120.0)) as client:

        def once():
            eventually(lambda: len(cluster.connected()) == 3, within_s=60)
            found = struck(cluster, begin(client, kind, **LONGER), "decode", rng.randrange(1, 500))
            return found if found and found[1].placement.attempts > 1 else None

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


@pytest.fixture(scope="module")
def otherwise(module_home):
    """Other block sizes, many small frames, another transport, and a decode worker with few blocks."""
    with module_home.cluster("configs/no-ray.yaml", *OTHERWISE, name="otherwise") as running:
        yield running


@pytest.fixture(scope="module")
def exactly(module_home):
    """Only compiled kernels have exact steps."""
    compiled_or_skip(lambda: load_library("bf16"))
    with module_home.cluster("configs/no-ray.yaml", *OTHERWISE, EXACT, name="exactly") as running:
        yield running


@pytest.fixture(scope="module")
def client(cluster):
    with cluster.client(timeout=scaled(120.0)) as found:
        yield found


@pytest.fixture(scope="module")
def alone(client):
    """The answer of each kind without load."""
    return {kind: ask(client, kind).answer for kind in KINDS}


@pytest.fixture
def rng(seed, request):
    return random.Random(f"{seed} {request.node.name}")


@pytest.mark.sample(3)
@often
@kinds
@pytest.mark.parametrize("count", LOADS)
def test_others_beside_it(client, alone, count, kind, repeats, rng):
    for _ in range(repeats):
        with others(client, count, rng):
            ask(client, kind).check(alone[kind])


@often
def test_many_of_them_side_by_side(client, alone, repeats, rng):
    for _ in range(repeats):
        order = [*KINDS] * 6
        rng.shuffle(order)
        with ExitStack() as streams:
            for kind, stream in [(kind, streams.enter_context(begin(client, kind))) for kind in order]:
                finish(stream).check(alone[kind])


@pytest.mark.sample(1)
@often
@kinds
def test_each_decode_worker(client, alone, kind, repeats):
    for _ in range(repeats):
        answers = [ask(client, kind).check(alone[kind]) for _ in range(2)]
        assert {answer.placement.decode_worker for answer in answers} == {"decode-0", "decode-1"}


@pytest.mark.sample(1)
@often
@kinds
def test_with_and_without_a_cached_prefix(client, alone, kind, repeats, rng):
    for _ in range(repeats):
        scope = {"cache_scope": f"{rng.random()}"}
        new, known = (ask(client, kind, **scope).check(alone[kind]) for _ in range(2))
        assert new.usage.cached_tokens == 0
        assert known.usage.cached_tokens >= 64, "at least one chunk of the grid"


@pytest.mark.sample(1)
@often
@kinds
def test_kv_that_arrives_in_other_pieces(otherwise, alone, kind, repeats, rng):
    with otherwise.client(timeout=scaled(120.0)) as client:
        for _ in range(repeats):
            answer = ask(client, kind, cache_scope=f"{rng.random()}").check(alone[kind])
            assert answer.placement.transport == "grpc" != alone[kind].placement.transport
            assert answer.placement.kv_bytes > 16 * FRAME


@pytest.mark.sample(1)
@often
@kinds
def test_preempted(otherwise, alone, kind, repeats, rng):
    preempted = metric(otherwise, "baton_recoveries_total", reason="preempted")
    with otherwise.client(timeout=scaled(120.0)) as client:
        for _ in range(repeats):
            assert any(pushed_out(otherwise, client, kind, alone[kind], rng) for _ in range(5))
    assert metric(otherwise, "baton_recoveries_total", reason="preempted") >= preempted + repeats


@often
def test_control_without_the_flag_some_answers_differ(client, repeats, rng):
    """The ordinary path varies with load. Otherwise the tests here would prove nothing.

    Logprobs are compared too: nearly all of them differ, while only 0 to 2 of 12 answers have other tokens.
    """
    asked = [{"prompt": text_of(number, 160), "temperature": 0.8 * (number % 2)} for number in range(12)]

    def answers(count):
        with others(client, count, rng), ExitStack() as all_at_once:
            streams = [all_at_once.enter_context(begin(client, "greedy", deterministic=False, **how)) for how in asked]
            return [bits(finish(stream).answer)[:2] for stream in streams]

    quiet = [bits(ask(client, "greedy", deterministic=False, **how).answer)[:2] for how in asked]
    # The heaviest load first, because it differs soonest.
    loads = sorted(LOADS, reverse=True) * min(repeats, 3)
    assert any(loaded != alone for count in loads for loaded, alone in zip(answers(count), quiet, strict=True))


@often
def test_candidates_were_wrong_meanwhile(cluster, client, alone, repeats, rng):
    """The streams here had wrong candidates. Runs before a worker dies, because that would reset the counters.

    A candidate is wrong only where other bits give another token, so new texts are sent until the first rollback.
    """
    for kind in list(KINDS) * repeats:
        with others(client, 7, rng):
            ask(client, kind).check(alone[kind])
    assert eventually(lambda: metric(cluster, "baton_verify_passes_total")) >= 4 * repeats
    for first in range(0, 240, 12):
        if metric(cluster, "baton_rollbacks_total") >= 1:
            break
        with ExitStack() as all_at_once:
            texts = [text_of(number, 160) for number in range(first, first + 12)]
            for stream in [all_at_once.enter_context(begin(client, "greedy", prompt=text)) for text in texts]:
                finish(stream)
    assert eventually(lambda: metric(cluster, "baton_rollbacks_total")) >= 1


@pytest.mark.sample(1)
@kinds
def test_after_the_death_of_its_decode_worker(cluster, kind, rng):
    survive(cluster, kind, rng, 1)


@another_cluster
@kinds
def test_int8_weights_beside_others_and_after_a_death(module_home, kind, rng):
    """Each answer is handed over, and its steps are exact if the kernels have them."""
    sets = (*SETS, EXACT, "model.quantize=int8")
    with module_home.cluster("configs/no-ray.yaml", *sets, name="int8") as running:
        with running.client(timeout=scaled(120.0)) as client:
            right = ask(client, kind).answer
            assert right.placement.prefill_worker != right.placement.decode_worker
            with others(client, 7, rng):
                ask(client, kind).check(right)
        assert found_exact(running) == 0 or metric(running, "baton_rollbacks_total") == 0
        survive(running, kind, rng, 1)


@pytest.mark.chaos
@kinds
@pytest.mark.parametrize("part", ["first", "second", "third", "fourth", "exact"])
def test_after_many_deaths(module_home, part, kind, rng):
    """Separate clusters, because a cluster gives up after ten deaths in a row."""
    with module_home.cluster("configs/no-ray.yaml", *SETS, *[EXACT] * (part == "exact"), name="mortal") as running:
        survive(running, kind, rng, 2 if part == "exact" else 5)


@another_cluster
@often
@kinds
def test_exact_steps(exactly, alone, kind, repeats, rng):
    """Without load, with load, and preempted. Workers with the same fingerprint give equal bits in all steps."""
    with exactly.client(timeout=scaled(120.0)) as client:
        right = ask(client, kind).answer
        if right.system_fingerprint == alone[kind].system_fingerprint:
            right = alone[kind]
        for count in (0, 1, 5) * repeats:
            with others(client, count, rng, words=(1, 20)):
                ask(client, kind).check(right)
            ask(client, kind, cache_scope=f"{rng.random()}").check(right)
        for _ in range(repeats):
            assert any(pushed_out(exactly, client, kind, right, rng) for _ in range(5))
    assert found_exact(exactly) == 0 or metric(exactly, "baton_rollbacks_total") == 0


@another_cluster
def test_workers_that_compute_prompts_in_chunks_beside_what_they_decode(module_home, alone, rng):
    """Colocated workers have the same fingerprint, and therefore the same bits."""
    sets = (*MODEL, "mode=colocated", "decode.max_batched_tokens=64")
    with (
        module_home.cluster("configs/no-ray.yaml", *sets, name="together") as running,
        running.client(timeout=scaled(120.0)) as client,
    ):
        for kind in KINDS:
            with others(client, 4, rng):
                answer = ask(client, kind).check(alone[kind])
            assert answer.placement.prefill_worker == answer.placement.decode_worker
