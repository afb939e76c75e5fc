"""The live page over HTTP: its data, access to it, and protection against requests that other sites forge."""

import json
from contextlib import asynccontextmanager

import pytest

from baton.limits import MAX_WATCHERS
from tests.integration.access_support import bearer, token_file
from tests.integration.gateway_support import alone, opened, raw
from tests.support.clients import soon
from tests.support.in_process_router import at
from tests.support.waiting import at_most, until


@pytest.fixture
async def cluster(make):
    return await make(http="127.0.0.1:0")


@asynccontextmanager
async def watching(cluster, query="interval_s=0.1", **headers):
    """Yield a function that returns the next event. The connection is closed at the end."""
    reader, writer = await opened(cluster.router.http, "GET", f"/live?{query}", host="localhost", **headers)
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    assert b"text/event-stream" in head

    async def following():
        line = b""
        while not line.startswith(b"data: "):
            line = await soon(reader.readline())
            if line == b"0\r\n":  # the last chunk
                return None
        return json.loads(line[6:])

    try:
        yield following
    finally:
        writer.close()


async def get(cluster, path, host="127.0.0.1:8000", **headers):
    status, found, body = await raw(cluster.router.http, "GET", path, host=host, **headers)
    return status, found, body if status == 200 else json.loads(body)["error"]


async def test_it_says_all_that_watch_says(cluster):
    async with watching(cluster) as following:
        first = await following()
        assert {one["kind"] for one in first["happenings"]} == {"joined"}
        assert [one["info"]["role"] for one in first["status"]["workers"]] == ["decode", "prefill"]
        assert first["status"]["queued"] == 0, "what is zero is there, too"
        call = await at(cluster, "prefilling")
        while not (view := await following())["requests"]:
            assert not view["happenings"], "each is told once"
        assert view["requests"][0]["stage"] == "prefill"
        assert view["requests"][0]["prefill_worker"] == "prefill-0"
        assert not {"text", "prompt", "token_ids"} & set(view["requests"][0]), "nothing of what was asked"
        call.cancel()


async def test_who_leaves_makes_room(cluster):
    live = cluster.router._admin.live
    for _ in range(2):
        async with watching(cluster) as following:
            await following()
            assert live._watchers == 1
        await until(lambda: live._watchers == 0, "it was noticed")


async def test_no_more_than_so_many_watch(cluster):
    live = cluster.router._admin.live
    await raw(cluster.router.http, "HEAD", "/live", host="localhost")
    assert live._watchers == 0, "a HEAD request takes no place"
    live._watchers = MAX_WATCHERS
    status, headers, error = await get(cluster, "/live")
    assert (status, error["code"]) == (503, "overloaded")
    assert int(headers["retry-after"]) > 0
    status, headers, body = await raw(cluster.router.http, "HEAD", "/live", host="localhost")
    assert (status, headers["content-type"], body) == (200, "text/event-stream; charset=utf-8", b"")


async def test_a_stop_does_not_wait_for_who_watches(cluster):
    async with watching(cluster, "interval_s=60") as following:
        await following()
        async with at_most(5):
            await cluster.router.stop(grace_s=0)


async def test_where_the_time_of_an_answer_went(cluster):
    body = json.dumps({"prompt": "hello", "max_tokens": 4}).encode()
    status, headers, _ = await raw(cluster.router.http, "POST", "/v1/completions", body)
    assert status == 200
    status, _, found = await get(cluster, f"/live/trace/{headers['x-request-id']}")
    assert status == 200
    trace = json.loads(found)
    assert (trace["request_id"], trace["outcome"]) == (headers["x-request-id"], "finished")
    assert {"queue", "prefill", "decode"} <= {span["name"] for span in trace["spans"] if span["role"] == "router"}
    assert (await get(cluster, "/live/trace/nobody"))[0] == 404


@pytest.mark.parametrize(("who", "status"), [(None, 401), ("unknown", 401), ("alice", 403), ("admin", 404)])
async def test_an_admin_s_token_is_needed(make, tmp_path, who, status):
    """The gateway accepts any host name with a token, because a page of another site has no token."""
    cluster = await make(http="127.0.0.1:0", tokens=token_file(tmp_path / "tokens"))
    headers = dict(bearer(who) or ())
    for path in ("/live", "/live/trace/x") if who != "admin" else ("/live/trace/x",):
        found, _, error = await get(cluster, path, host="public.example", **headers)
        assert found == status
        assert "router-" not in str(error)


async def test_who_watches_and_loses_the_token_sees_no_more(make, tmp_path):
    cluster = await make(http="127.0.0.1:0", tokens=token_file(tmp_path / "tokens"))
    async with watching(cluster, **dict(bearer("admin") or ())) as following:
        assert (await following())["status"]["router_id"]
        (tmp_path / "tokens").write_text("tokens: [{token: somebody-else-0123456789, tenant: new}]")
        await cluster.router.context.tokens.refresh()
        while await following() is not None:
            pass


HERE = ["localhost:1", "127.0.0.1", "127.9.9.9:80", "[::1]:8000", "router.localhost"]
FOREIGN = ["evil.example:8000", "localhost.evil.example", "10.0.0.1", "", "127.0.0.1.evil.example", "[", "[localhost]"]


@pytest.mark.parametrize(
    ("interval_s", "headers", "status", "code"),
    [
        *((interval_s, {}, 400, "invalid_value") for interval_s in ("0.01", "61", "nan", "x")),
        *(("x", {"host": host}, 400, "invalid_value") for host in HERE),
        *(("1", {"host": host}, 403, "wrong_host") for host in FOREIGN),
        *(("1", {"sec_fetch_site": site}, 403, "cross_site") for site in ("cross-site", "same-site")),
    ],
    ids=str,
)
async def test_what_may_not_watch(cluster, interval_s, headers, status, code):
    """A local name is accepted: only its interval is wrong. Rebound names and pages of other origins are rejected."""
    found, _, error = await get(cluster, f"/live?interval_s={interval_s}", **headers)
    assert (found, error["code"]) == (status, code)
    assert status == 403 or error["param"] == "interval_s"


FILES = {"": "html", "page/main.js": "javascript", "page/page.css": "css", "page/icon.svg": "svg+xml"}


async def test_files_and_their_headers(cluster):
    for path, kind in FILES.items():
        status, headers, body = await get(cluster, f"/{path}")
        assert (status, headers["content-type"].split(";")[0].split("/")[1]) == (200, kind)
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["content-security-policy"].startswith("default-src 'self';")
        assert "unsafe" not in headers["content-security-policy"]
        assert b"://" not in body.replace(b"http://www.w3.org/", b""), "no other host"
    for name in ("nothing.js", "../live.py", "..%2flive.py", "%2e%2e/app.py", "page.css%00", ".", ""):
        assert (await get(cluster, f"/page/{name}"))[0] == 404, name


async def test_a_gateway_alone_serves_the_page_and_says_that_it_shows_nothing():
    async with alone() as gateway:
        assert (await gateway.raw("GET", "/"))[0] == 200
        for path in ("/live", "/live/trace/x"):
            status, _, body = await gateway.raw("GET", path)
            assert (status, json.loads(body)["error"]["code"]) == (404, "no_live")
