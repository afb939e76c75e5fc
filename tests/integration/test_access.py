"""Tokens at a real router over real gRPC, with scripted workers: access, and the limits of each tenant."""

import asyncio
import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from baton import limits
from baton.cli.setup.certs import certs
from baton.core import Role
from baton.errors import Cancelled, ConfigError, InvalidRequest, Overloaded, Unauthenticated
from baton.rpc import channel
from baton.rpc.channel import Wire
from baton.rpc.v1 import inference_pb2 as pb
from baton.tokenizer import OracleTokenizer
from router.auth.interceptor import RULES, Need
from router.context import RouterSettings
from router.server import serve
from tests.integration import access_support as support
from tests.integration.access_support import TOKENS, ask, bearer, methods_of, tls_of, token_file
from tests.integration.gateway_support import opened
from tests.support import routers
from tests.support.in_process_router import FakeWorker
from tests.support.routers import ids_of, refused
from tests.support.waiting import until

C = grpc.StatusCode


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    """A certificate of another CA."""
    made = tmp_path_factory.mktemp("stranger") / "other"
    certs(made, [], 30)
    return Wire.of_path(made)


def alice_may(**limits):
    """Return a mark that gives Alice's token these limits in the test's cluster."""
    return pytest.mark.parametrize("cluster", [limits], indirect=True, ids=[""])


@pytest.fixture
async def cluster(make, tmp_path, request):
    return await make(tokens=token_file(tmp_path / "tokens", **getattr(request, "param", {})))


@pytest.fixture
async def encrypted(make, tmp_path, folder):
    return await make(tokens=token_file(tmp_path / "tokens"), tls=tls_of(folder))


async def ask_all(address, wire, *asked):
    """Call these methods and return the answers."""
    with wire.sync(address) as link:
        return [await asyncio.to_thread(ask, link, *each) for each in asked]


def call(cluster, who, *args, **fields):
    return cluster.stub.Generate(routers.asked(*args, **fields), metadata=bearer(who))


async def generate(cluster, who, *args, **fields):
    return await cluster.answer(call(cluster, who, *args, **fields))


def test_every_method_has_a_rule_or_is_a_worker_s():
    known = support.methods(*support.baton_files(), *support.OTHERS)
    assert {name.split("/")[1] for name in known} == {name for names in support.LISTENERS.values() for name in names}
    assert set(known) - set(methods_of("worker")) == set(RULES)
    by_need = {need: {name for name in RULES if RULES[name] is need} for need in Need}
    assert by_need[Need.NOTHING] == {f"/grpc.health.v1.Health/{name}" for name in ("Check", "Watch")}
    assert by_need[Need.ADMIN] == {name for name in RULES if name.startswith("/baton.v1.Admin/")}


LISTENING = pytest.mark.parametrize(("listener", "at"), [("public", "grpc"), ("admin", "admin")])
EXPECTED = {  # by the rule's requirement: no token, wrong, a user's, an admin's. None stands for a service's answer
    "nothing": (None, None, None, None),
    "any token": (C.UNAUTHENTICATED, C.UNAUTHENTICATED, None, None),
    "an admin's token": (C.UNAUTHENTICATED, C.UNAUTHENTICATED, C.PERMISSION_DENIED, None),
    "no token suffices": (C.UNAUTHENTICATED, C.UNAUTHENTICATED, C.PERMISSION_DENIED, C.PERMISSION_DENIED),
}


@LISTENING
async def test_every_method_with_every_token(encrypted, folder, listener, at):
    people = (None, "wrong", "alice", "admin")
    asked = [(method, who) for method in methods_of(listener) for who in people]
    calls = [(method, bearer(who)) for method, who in asked]
    answers = await ask_all(getattr(encrypted.router, at), Wire.of_path(folder), *calls)
    for (method, who), answer in zip(asked, answers, strict=True):
        code = EXPECTED[RULES[method].value][people.index(who)]
        assert answer.reached if code is None else answer.code is code, (method, who, answer)


@LISTENING  # the worker's listener: tests/e2e/test_security.py
@pytest.mark.parametrize("who", ["in the clear", "trusts another CA", "without a certificate", "of another CA"])
async def test_every_method_with_every_certificate(encrypted, folder, stranger, listener, at, who):
    """Only the public listener requires no certificate of the cluster's CA."""
    mine = Wire.of_path(folder)
    wire = {
        "in the clear": Wire(),
        "trusts another CA": Wire(stranger.ca),
        "without a certificate": Wire(mine.ca),
        "of another CA": Wire(mine.ca, stranger.cert, stranger.key),
    }[who]
    let_in = listener == "public" and wire.ca == mine.ca
    answers = await ask_all(getattr(encrypted.router, at), wire, *([name] for name in methods_of(listener)))
    assert answers
    assert [answer.code is C.UNAVAILABLE for answer in answers] == [not let_in] * len(answers)


@pytest.mark.parametrize(("name", "code"), [("worker.example", None), ("other.example", C.UNAVAILABLE)])
async def test_a_name_that_all_processes_bear(make, tmp_path, name, code):
    certs(tmp_path / "tls", ["worker.example"], 30)
    cluster = await make(tls=tls_of(tmp_path / "tls"))
    named = replace(Wire.of_path(tmp_path / "tls"), name=name)
    (answer,) = await ask_all(cluster.router.admin, named, ["/baton.v1.Admin/Status"])
    assert answer.code is code


async def test_a_method_without_a_rule_is_refused(cluster, monkeypatch):
    left = {name: need for name, need in RULES.items() if not name.endswith("/ListModels")}
    monkeypatch.setattr("router.auth.interceptor.RULES", left)
    asked = [(f"/baton.v1.Inference/{name}", bearer("admin")) for name in ("ListModels", "NoSuch")]
    listed, unknown = await ask_all(cluster.router.grpc, Wire(), *asked)
    assert listed.code is C.PERMISSION_DENIED
    assert (unknown.code, unknown.of_baton) == (C.UNIMPLEMENTED, False)


async def test_two_tokens_in_one_call_are_none(cluster):
    both = (*bearer("alice"), *bearer("admin"))
    (answer,) = await ask_all(cluster.router.grpc, Wire(), ("/baton.v1.Inference/ListModels", both))
    assert answer.code is C.UNAUTHENTICATED


async def test_tenants_share_no_cached_prompt(cluster):
    asked = [*itertools.product(["alice", "bob"], ["", "s"]), ("alice", "s"), ("alice", "bob/"), ("bob", "x" * 256)]
    for who, scope in asked:
        await generate(cluster, who, cache_scope=scope)
    scopes = [spec.cache_scope for spec in cluster.prefill[0].specs]
    assert scopes[1] == scopes[4]
    assert len(set(scopes)) == len(asked) - 1
    assert all(scope.startswith(f"{who}/") for (who, _), scope in zip(asked, scopes, strict=True))
    assert max(map(len, scopes)) <= 256


@alice_may(max_concurrent=1)
async def test_a_token_has_so_many_requests_at_once(cluster):
    gate = cluster.decode[0].gates["decode"]
    gate.clear()
    first = call(cluster, "alice", max_tokens=4)
    await first.initial_metadata()
    await until(lambda: cluster.prefill[0].specs, "it is computed")
    with pytest.raises(Overloaded) as caught:
        await generate(cluster, "alice")
    assert caught.value.retry_after_s == 1.0
    second = call(cluster, "bob", max_tokens=4)
    await until(lambda: len(cluster.prefill[0].specs) == 2, "another tenant's is taken")
    gate.set()
    for running in (first, second):
        assert len(ids_of(await cluster.answer(running))) == 4
    assert len(ids_of(await generate(cluster, "alice", max_tokens=4))) == 4, "there is room again"


@alice_may(max_concurrent=1)
async def test_a_request_that_fails_gives_its_place_back(cluster):
    with pytest.raises(InvalidRequest):
        await generate(cluster, "alice", n=0)
    running = call(cluster, "alice", max_tokens=2000)
    await running.initial_metadata()
    running.cancel()
    await until(lambda: not cluster.router.context.running, "it is gone")
    assert len(ids_of(await generate(cluster, "alice", max_tokens=4))) == 4


@pytest.mark.parametrize(
    ("field", "beyond"),
    [
        ("sampling.max_tokens", {"max_tokens": 9}),
        ("sampling.max_tokens", {"max_tokens": 3, "n": 3}),
        ("n", {"max_tokens": None, "n": 9}),
        ("token_ids", {"prompt": [1] * 21}),
        ("priority", {"priority": 6}),
    ],
)
@alice_may(max_tokens=8, max_prompt_tokens=20, priority_max=5)
async def test_what_a_token_does_not_allow_is_refused_by_name(cluster, field, beyond):
    with pytest.raises(InvalidRequest) as caught:
        await generate(cluster, "alice", **beyond)
    assert [violation.field for violation in caught.value.violations] == [field]
    assert "this token allows at most" in str(caught.value)
    assert len(ids_of(await generate(cluster, "alice", [1] * 20, 8, priority=5))) == 8
    await generate(cluster, "bob", **beyond)


@alice_may(max_tokens=3, priority_max=-7)
async def test_what_a_caller_leaves_open_is_made_to_fit(cluster):
    assert len(ids_of(await generate(cluster, "alice", max_tokens=None))) == 3
    assert cluster.prefill[0].specs[0].priority == -7
    await generate(cluster, "alice", max_tokens=None, n=3)
    assert [spec.sampling.max_tokens for spec in cluster.prefill[0].specs] == [3, 1, 1, 1]


@pytest.mark.parametrize(("who", "found"), [("bob", False), ("alice", True), ("admin", True)])
async def test_only_its_own_tenant_and_an_admin_end_a_request(cluster, who, found):
    cluster.decode[0].gates["decode"].clear()
    running = call(cluster, "alice", max_tokens=4)
    request_id = dict(await running.initial_metadata())["baton-request-id"]
    reply = await cluster.stub.Cancel(pb.CancelRequest(request_id=request_id), metadata=bearer(who))
    assert reply.found is found
    cluster.decode[0].gates["decode"].set()
    if found:
        with pytest.raises(Cancelled):
            await cluster.answer(running)
    else:
        assert len(ids_of(await cluster.answer(running))) == 4


async def test_a_new_file_counts_from_its_next_look_on(cluster, tmp_path):
    (tmp_path / "tokens").write_text("tokens: [{token: somebody-else-0123456789, tenant: new}]")
    await cluster.router.context.tokens.refresh()
    with refused(Unauthenticated):
        await cluster.stub.ListModels(pb.ListModelsRequest(), metadata=bearer("alice"))


async def test_waiting_requests_of_one_tenant_leave_another_its_place_over_http_too(make, tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "MAX_HTTP_WAITING", 1)
    cluster = await make(
        prefill=0, decode=0, queue_max_requests=8, http="127.0.0.1:0", tokens=token_file(tmp_path / "tokens")
    )
    queue, writers = cluster.router.context.admission, []
    body = b'{"prompt": "x", "max_tokens": 4}'
    for count, tenant in enumerate(["alice"] * 8 + ["bob"], 1):
        token = f"Bearer {TOKENS[tenant]}"
        _, writer = await opened(cluster.router.http, "POST", "/v1/completions", body, authorization=token)
        writers.append(writer)
        await until(partial(lambda most: queue.waiting == most, count), f"{tenant} waits")
    for writer in writers:
        writer.close()


@pytest.mark.parametrize("key", ["tokens", "tls"])
async def test_a_router_does_not_start_without_its_files(tmp_path, key):
    settings = RouterSettings("test", "oracle", grpc="127.0.0.1:0", metrics="127.0.0.1:0")
    missing: dict[str, Any] = {"tokens": str(tmp_path / "none")} if key == "tokens" else {"tls": tls_of(tmp_path)}
    settings = replace(settings, **missing)
    with pytest.raises(ConfigError, match=rf"security\.{key}.*cannot be read"):
        await serve(settings, asyncio.Future, OracleTokenizer())


@pytest.mark.parametrize("other_ca", [False, True])
async def test_who_is_not_of_the_cluster_is_no_worker(make, folder, stranger, other_ca):
    """Prompts go only to workers with a certificate of the cluster's CA, even if the ledger lists others."""
    cluster = await make(tls=tls_of(folder))
    impostor = FakeWorker(Role.DECODE, "decode-9", 999)
    impostor.wire = stranger if other_ca else Wire()
    await impostor.start()
    cluster.infos = [*cluster.infos, impostor.info]
    pool = cluster.router.context.pool
    await until(lambda: [link.state for link in pool.links if link.info.ref == impostor.info.ref] == ["lost"], "tried")
    assert len(ids_of(await generate(cluster, None, max_tokens=2))) == 2
    await impostor.kill()
    assert impostor.commands == []


@pytest.mark.parametrize(("most", "seconds", "stay"), [(2, 20, 2), (100, 0.1, 0)], ids=["number", "time"])
async def test_a_flood_of_tls_connections_to_grpc_ends(folder, monkeypatch, most, seconds, stay):
    """Connections without a handshake count from their accept on, and have a time. They leave room for others."""
    monkeypatch.setattr(channel, "MAX_GRPC_CONNECTIONS", most)
    monkeypatch.setattr(channel, "MAX_HANDSHAKE_SECONDS", seconds)
    server, wire = channel.aio_server(), Wire.of_path(folder)
    health_pb2_grpc.add_HealthServicer_to_server(health_aio.HealthServicer(), server)
    address = channel.bind(server, "127.0.0.1:0", wire.public)
    await server.start()
    silent = [await asyncio.open_connection(*address.split(":")) for _ in range(12)]
    ended = [asyncio.create_task(reader.read()) for reader, _ in silent]
    assert set(await asyncio.gather(*ended[stay:])) == {b""}
    assert not any(one.done() for one in ended[:stay])
    for _, writer in silent:
        writer.close()
    async with wire.aio(address) as client:
        stub: Any = health_pb2_grpc.HealthStub(client)
        await stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
    await server.stop(None)
