"""Receipts of a router with scripted workers: over gRPC, HTTP and the SDK, after deaths and resumptions; replays."""

import json

import httpx2
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from structlog.testing import capture_logs

from baton import AsyncClient
from baton.cli.requests.receipt_files import Source
from baton.cli.requests.replay import Replay
from baton.errors import EngineFault, InvalidRequest
from baton.receipts import form
from baton.receipts.form import logprob_of
from baton.receipts.keys import ReceiptKey
from tests.integration.gateway_support import HELLO, asking
from tests.support.routers import asked, ids_of, recovered, right
from tests.support.time_factor import scaled

PROMPT = list(range(1, 41))
ANSWER = right(PROMPT)
PAIR = {"prefill-0": "x", "decode-0": "x"}


@pytest.fixture
def key(tmp_path):
    """The file of a receipt key."""
    path = tmp_path / "receipt.pem"
    formats = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path.write_bytes(Ed25519PrivateKey.generate().private_bytes(*formats))
    path.chmod(0o600)
    return path


@pytest.fixture
async def signing(make, key):
    """A function that starts a cluster whose router has a key, and whose workers send log-probabilities."""

    async def start(bits=PAIR, **options):
        cluster = await make(bits=bits, receipt_key=str(key), **options)
        for worker in cluster.workers:
            worker.scored = True
        return cluster

    return start


def request(**fields):
    return asked(PROMPT, **{"receipt": True, "sampling": {"seed": 5}, **fields})


async def ask(cluster, **fields):
    return await cluster.answer(cluster.stub.Generate(request(**fields)))


def checked(key, text):
    """Return the receipt after a check of its signature."""
    receipt = form.parse(json.loads(text) if isinstance(text, str) else text)
    ReceiptKey.read(key).public().check(receipt)
    return receipt


def bits_of(receipt, choice=0):
    return [logprob_of(bits) for bits in receipt.opening.choices[choice].bits]


async def test_a_receipt_covers_all_choices_and_is_not_logged(signing, key):
    cluster = await signing()
    with capture_logs() as logs:
        events = await ask(cluster, n=2)
    receipt = checked(key, events[-1].completed.receipt)
    assert [each.ids for each in receipt.opening.choices] == [ANSWER, ANSWER]
    assert bits_of(receipt) == [-0.25 * index for index in range(8)]
    assert (receipt.model, receipt.system_fingerprint, receipt.request_id) == ("oracle", "x", events[0].request_id)
    assert (receipt.prompt, receipt.parameters()["seed"]) == (form.prompt_digest(PROMPT), 5)
    assert all(spec.deterministic and spec.logprobs == 0 for spec in cluster.prefill[0].specs)
    assert not [line for line in logs if "signature" in str(line)], "a receipt is for the client alone"
    assert not (await ask(cluster, receipt=False))[-1].completed.receipt


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"deterministic": False}, "deterministic: must be omitted or true with receipt"),
        ({"prompt_logprobs": 0}, "prompt_logprobs: cannot be combined with receipt"),
        ({"think_while_decoding": True}, "think_while_decoding: cannot be combined with deterministic"),
    ],
)
async def test_fields_that_exclude_it_are_named(signing, fields, words):
    with pytest.raises(InvalidRequest, match=words):
        await ask(await signing(), **fields)


async def test_without_a_key_it_is_rejected(make):
    with pytest.raises(InvalidRequest, match=r"receipt: not available: .* sets no security.receipt_key"):
        await ask(await make(bits=PAIR))


async def test_after_the_death_of_a_decode_worker(signing, key):
    cluster = await signing(PAIR | {"decode-1": "x"}, decode=2)
    cluster.decode[0].hold(3)
    events = []
    async for item in cluster.stub.Generate(request()):
        events.append(item)
        if len(ids_of(events)) == 3 and cluster.decode[0].alive:
            await cluster.decode[0].kill()
    assert recovered(events) == [(2, "decode_lost")]
    receipt = checked(key, events[-1].completed.receipt)
    assert receipt.opening.choices[0].ids == ANSWER
    assert len(bits_of(receipt)) == 8


async def test_a_resumed_one_is_computed_from_its_first_token_on(signing, key):
    """The router signs no value that it has from the client alone."""
    cluster = await signing()
    events = await cluster.resume(request(), ANSWER[:3], fingerprint="x")
    assert ids_of(events, 3) == ANSWER[3:], "the client gets only the rest"
    assert not cluster.prefill[0].specs[-1].known
    receipt = checked(key, events[-1].completed.receipt)
    assert receipt.opening.choices[0].ids == ANSWER
    assert bits_of(receipt)[:3] == [-0.25 * index for index in range(3)]
    assert events[-1].completed.usage.audit_digest == (await ask(cluster))[-1].completed.usage.audit_digest
    with pytest.raises(EngineFault, match="token 0 of the answer, computed again, differs from the one in received"):
        await cluster.resume(request(), [1, 2], fingerprint="x")


async def test_over_http(signing, key):
    cluster = await signing(http="127.0.0.1:0")
    async with asking(cluster.router.http, max_tokens=8) as gateway:
        done = await gateway.complete(PROMPT, seed=5, extra_body={"receipt": True})
        assert checked(key, done.model_extra["receipt"]).opening.choices[0].ids == ANSWER
        assert done.choices[0].logprobs is None
        both = await gateway.complete([PROMPT, [1, 2]], extra_body={"receipt": True})
        assert [checked(key, each).prompt.tokens for each in both.model_extra["receipt"]] == [40, 2]
        stream = await gateway.complete(PROMPT, stream=True, extra_body={"receipt": True})
        *_, last = [chunk async for chunk in stream]
        assert (checked(key, last.model_extra["receipt"]).choices[0].tokens, last.choices) == (8, [])


BODIES = {
    "responses": {"input": "hi", "max_output_tokens": 4},
    "messages": {"messages": HELLO, "max_tokens": 4},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_over_apis_that_are_translated_to_chat(signing, key, path, stream):
    cluster = await signing(http="127.0.0.1:0")
    body = {**BODIES[path], "receipt": True, "stream": stream}
    async with httpx2.AsyncClient(timeout=scaled(30)) as client:
        reply = await client.post(f"http://{cluster.router.http}/v1/{path}", json=body)
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if '"signature"' in line]
    (found,) = map(json.loads, events)
    assert checked(key, found.get("response", found)["receipt"]).choices[0].tokens == 4


async def test_replays_of_the_sdk_find_the_first_difference(signing, key):
    cluster = await signing()
    keys = ReceiptKey.read(key).public()
    async with AsyncClient(cluster.router.grpc, max_retries=0) as client:
        answer = await client.generate(PROMPT, max_tokens=8, receipt=True)
        receipt = form.parse(json.loads(form.with_prompt(answer.receipt, PROMPT)))
        replays = Replay(client, keys, None)
        (outcome,) = await replays.all([Source("a", receipt)], 1)
        assert (outcome.result, outcome.request_id) == ("equal", answer.request_id)
        first, again = cluster.prefill[0].specs
        assert (again.cache_scope[:7], first.cache_scope) == ("replay ", "")
        assert (again.priority, first.priority) == (-100, 0)

        def other(item):
            for index, score in zip(range(getattr(item.tokens, "from"), 9), item.tokens.logprobs, strict=False):
                score.logprob = -9.0 if index == 5 else score.logprob

        for worker in cluster.workers:
            worker.before_emit = other
        (outcome,) = await replays.all([Source("a", receipt)], 1)
        assert outcome.difference is not None
        assert (outcome.result, outcome.difference.position) == ("differs", 5)
        assert (outcome.difference.recorded.logprob, outcome.difference.replayed.logprob) == (-1.25, -9.0)
        elsewhere = receipt.model_copy(update={"system_fingerprint": "z"})
        (outcome,) = await Replay(client, None, None).all([Source("a", elsewhere)], 1)
        assert outcome.result == "error"
        assert "no worker has the receipt's fingerprint z; workers of this cluster have x" in outcome.error
        (outcome,) = await Replay(client, keys, None).all([Source("a", elsewhere)], 1)
        assert "receipt.signature" in outcome.error
