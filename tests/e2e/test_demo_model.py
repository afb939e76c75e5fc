"""The trained demo model: answers equal those of one process, conversations, its name in the Hub, and `baton demo`."""

import json
import random
import re
import signal
import struct
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from baton.core import Constraint, Sampling, SequenceSpec
from baton.engine.engine import Engine
from baton.engine.models.loading import load_model
from baton.tokenizer import load_tokenizer
from baton.worker.engine_factory import generate
from tests.support.cluster_process import HANDED_OVER
from tests.support.time_factor import scaled
from tests.support.waiting import eventually
from tests.unit.test_hub import COMMIT, snapshot

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]
CONFIG, SETS = "configs/local-2x2.yaml", (HANDED_OVER,)  # `baton demo`, below, has configs/local.yaml
PREFILL, DECODE = ({f"{role}-{number}" for number in range(2)} for role in ("prefill", "decode"))
DEMO = Path(__file__).parents[2] / "models" / "demo"
ANSWERS = {"The color of dog": (" can vary widely", 3), "What is the largest ocean?": ("Pacific Ocean", 2)}


@pytest.fixture(scope="module")
def engine():
    return Engine(load_model(DEMO), load_tokenizer(DEMO), total_blocks=512)


def test_all_workers_are_used(cluster):
    with cluster.client() as client, ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda n: client.generate(f"Count from {n}", max_tokens=20, seed=n), range(32)))
    assert {a.placement.prefill_worker for a in found} == PREFILL
    assert {a.placement.decode_worker for a in found} - {""} == DECODE
    loads = cluster.loads()
    assert set(loads) == PREFILL | DECODE
    assert all(loads[name].prefill_tokens for name in PREFILL)
    assert all(loads[name].decode_steps for name in DECODE)


@pytest.mark.parametrize("prompt", ANSWERS)
def test_the_seed_prompts(cluster, engine, prompt):
    with cluster.client() as client:
        answer = client.generate(prompt, max_tokens=16, temperature=0)
    assert (answer.text, len(answer.tokens)) == ANSWERS[prompt]
    assert answer.finish_reason.value == "eos"
    assert answer.usage.prompt_tokens == len(engine.tokenizer.encode(prompt))
    assert answer.placement.prefill_worker in PREFILL
    assert answer.placement.decode_worker in DECODE
    assert answer.placement.kv_bytes > 0


def test_kv_grows_by_a_position_at_each_step(cluster):
    """Prefill computes 4 positions. The end token, which the third decode step samples, is never fed back."""
    options = ("--name", cluster.name, "--temperature", 0, "--show", "kv")
    shown = cluster.home.baton("generate", "The color of dog", *options, check=True).stdout.splitlines()
    prefill, decode = re.findall(r" on (\S+):", shown[1] + shown[2])
    assert (prefill in PREFILL, decode in DECODE) == (True, True)
    assert shown == [
        " can vary widely",
        f"kv        4 on {prefill}: token 290 ' can'",
        f"kv        5 on {decode}: token 296 ' vary'",
        f"kv        6 on {decode}: token 297 ' widely'",
        f"kv        7 on {decode}: end, eos",
    ]


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
    assert shaped.placement.decode_worker in DECODE
    sampling, constraint = Sampling(max_tokens=64, temperature=0), Constraint("json_schema", (schema,))
    spec = SequenceSpec(tuple(engine.tokenizer.encode("The capital of France is")), sampling, constraint=constraint)
    assert shaped.text == generate(engine, spec).text


def draw(rng, heldout):
    options = {"max_tokens": rng.randrange(1, 40), "temperature": rng.choice([0.0, 0.0, 0.9])}
    options |= {"seed": rng.randrange(2**62), "top_k": rng.choice([0, 4]), "min_p": rng.choice([0.0, 0.1])}
    return rng.choice(heldout), {**options, "ignore_eos": rng.random() < 0.3}


def test_concurrent_requests_equal_a_single_process(cluster, engine, seed):
    """16 mixed concurrent requests each equal one process's answer, in fp32, greedy and sampled."""
    heldout = [json.loads(line)["prompt"] for line in (DEMO.parent / "heldout.jsonl").read_text().splitlines()]
    rng = random.Random(seed)
    jobs = [draw(rng, heldout) for _ in range(16)]
    with cluster.client() as client, ThreadPoolExecutor(16) as pool:
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


@pytest.mark.sample(1)
@pytest.mark.parametrize("worker", ["decode-0", "prefill-0"])
def test_ray_replaces_a_killed_worker(cluster, worker):
    """Another worker of its role serves during the restart, so an answer must name the replacement."""
    first = eventually(lambda: cluster.connected().get(worker)).info.ref

    def replaced():
        found = cluster.connected()
        return set(found) == PREFILL | DECODE and found[worker].info.ref.incarnation != first.incarnation

    def serves():
        with cluster.client() as client, ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: client.generate("The color of dog", max_tokens=8, temperature=0), range(8)))
        assert {answer.text for answer in found} == {" can vary widely"}
        return any(worker in {a.placement.prefill_worker, a.placement.decode_worker} for a in found)

    cluster.kill(worker)
    serves()
    eventually(replaced, within_s=60)
    eventually(serves, within_s=60)
    loads = cluster.loads()
    assert set(loads) == PREFILL | DECODE
    assert all(loads[name].prefill_tokens == 0 for name in DECODE)


# --- without Ray: a model by its Hub name, from the local cache and without network


@pytest.fixture(scope="module")
def from_hub(module_home, tmp_path_factory):
    sets = (HANDED_OVER, "model.path=hf:org/tiny", "prefill.threads=1", "decode.threads=1", "transfer.verify=kv")
    cache = tmp_path_factory.mktemp("cache")
    snapshot(cache)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HF_HOME", str(cache))
        environment.setenv("HF_HUB_OFFLINE", "1")
        with module_home.cluster("configs/no-ray.yaml", *sets) as cluster:
            yield cluster


def test_a_model_of_the_hub(from_hub):
    with from_hub.client() as client:
        answer = client.generate("The color of dog", model="org/tiny", max_tokens=8, temperature=0)
    assert answer.text == " can vary widely"
    for worker in ("prefill-0", "decode-0"):
        events = [json.loads(line) for line in from_hub.log(worker).splitlines() if line.startswith("{")]
        loaded = [event for event in events if event["event"] == "model_loaded"]
        assert {event["model"] for event in loaded} == {f"hf:org/tiny@{COMMIT}"}


# --- turns of a conversation


FIRST = " ".join(f"word{number}" for number in range(400))


def settled(cluster):
    return eventually(lambda: all(load.blocks.reserved + load.blocks.owned == 0 for load in cluster.loads().values()))


def test_a_second_turn_moves_little_and_a_new_prefill_worker_fetches(from_hub):
    cluster = from_hub
    with cluster.client() as client:
        first = client.generate(FIRST, max_tokens=24, temperature=0, ignore_eos=True)
        assert first.placement.kv_bytes > 2_000_000
        second = FIRST + first.text + " and then"
        expected = client.generate(second, max_tokens=24, temperature=0, ignore_eos=True)
        assert expected.placement.kv_bytes < 100_000  # the decode worker has the rest since the first turn
        assert settled(cluster)

        cluster.wait_replaced("prefill-0", cluster.kill("prefill-0"))
        eventually(lambda: "prefill-0" in cluster.connected(), within_s=30)  # until then decode-0 works alone
        client.generate("something else " * 20, max_tokens=2)  # teaches prefill-0 the cost of computing
        again = client.generate(second, max_tokens=24, temperature=0, ignore_eos=True)
        assert again.text == expected.text
        fetched = cluster.loads()["prefill-0"].fetched_tokens
        assert fetched == again.usage.cached_tokens > 1000
        assert again.placement.kv_bytes < 100_000
        assert settled(cluster)
        peers = {load.channels[0].peer for load in cluster.loads().values()}
        assert peers == {"prefill-0", "decode-0"}


# --- a newcomer's first steps: `baton demo`


demo = pytest.mark.sample(1, of="`baton demo`")
ENOUGH = 5  # requests in addition to the two prompts


def finished_of(address: str):
    """Yield the number of ended requests at each event of the page's source."""
    with urllib.request.urlopen(f"{address}live?interval_s=0.1", timeout=scaled(30)) as stream:
        for line in stream:
            if line.startswith(b"data:"):
                yield int(json.loads(line[5:])["status"]["finished"])


@demo
def test_requests_flow_on_its_page_until_it_is_told_to_stop(home):
    demo = home.start("demo", "-c", "configs/no-ray.yaml", "--stay")
    said = []
    for line in iter(demo.stdout.readline, ""):
        said.append(line)
        if line.startswith("the live page: "):
            break
    assert "can vary widely" in "".join(said), said
    address = said[-1].split()[3]
    with urllib.request.urlopen(address, timeout=scaled(30)) as page:
        assert b"<title>" in page.read()
    assert any(count >= 2 + ENOUGH for count in finished_of(address))
    demo.send_signal(signal.SIGINT)
    rest, _ = demo.communicate(timeout=scaled(90))
    assert demo.returncode == 0, rest


@demo
def test_ray_has_nothing_to_say_at_its_end(home):
    demo = home.start("demo")
    said, _ = demo.communicate(timeout=scaled(240))
    assert demo.returncode == 0, said
    _, answered, end = said.partition("can vary widely")  # before, a loaded machine may have started Ray twice
    assert answered, said
    assert "raylet" not in end
