"""`Admin.Watch` of a whole router, with scripted workers that hold any state."""

import asyncio

import pytest
from grpc import aio

from baton.errors import InvalidRequest, Overloaded, Unauthenticated
from baton.limits import MAX_WATCHERS
from baton.rpc.v1 import admin_pb2
from baton.rpc.v1.admin_pb2_grpc import AdminStub
from router import status
from tests.integration.access_support import bearer, token_file
from tests.support.in_process_router import STATES, at
from tests.support.routers import refused
from tests.support.time_factor import scaled
from tests.support.waiting import until


class Watching:
    """The messages that one watcher received."""

    def __init__(self, cluster, interval_s=0.1, metadata=None):
        self._channel = aio.insecure_channel(cluster.router.admin)
        self._call = AdminStub(self._channel).Watch(admin_pb2.WatchRequest(interval_s=interval_s), metadata=metadata)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        self._call.cancel()
        await self._channel.close()

    async def until(self, look, within_s=10.0):
        async with asyncio.timeout(scaled(within_s)):
            while True:
                live = await self._call.read()
                assert live is not aio.EOF
                if found := look(live):
                    return found

    async def next(self):
        return await self.until(lambda live: live)


STAGES = {"reserving": "reserve", "prefilling": "prefill", "transferring": "transfer", "decoding": "decode"}


@pytest.mark.parametrize("state", ["queued", *STATES])
async def test_a_request_is_shown_where_it_is(make, state):
    cluster = await make(blocks=1) if state == "queued" else await make()
    async with Watching(cluster) as watching:
        call = await at(cluster, state)
        stage = STAGES.get(state, "queue")
        view, *_ = await watching.until(lambda live: [each for each in live.requests if each.stage == stage])
        placed = () if state == "queued" else tuple(w.info.ref.worker_id for w in cluster.workers)
        assert (view.prefill_worker, view.decode_worker) == (placed or ("", ""))
        assert view.prompt_tokens > 0
        assert view.request_id in {each.name for each in cluster.router.context.running}
        assert view.tokens == (state in {"transferring", "decoding"})
        call.cancel()


async def test_only_the_newest_requests_are_shown(make, monkeypatch):
    monkeypatch.setattr(status, "MAX_SHOWN_REQUESTS", 3)
    cluster = await make()
    running = cluster.router.context.running
    calls, names = [await at(cluster, "decoding")], list[str]()
    for n in (1, 2, 2, 1):
        calls.append(cluster.call(n=n))
        await until(lambda: len(running) == len(calls), "it arrived")
        names.append(max(running, key=lambda call: call.arrival).name)
    async with Watching(cluster) as watching:
        shown = await watching.until(lambda live: live.requests)
        assert [view.request_id for view in shown] == [names[3], names[2], names[2]]
    for call in calls:
        call.cancel()


async def test_what_was_counted(make):
    cluster = await make(slo_ttft_s=60.0, slo_itl_s=60.0)
    async with Watching(cluster) as watching:
        await watching.next()
        await cluster.generate(max_tokens=8)
        live = await watching.until(lambda live: live if live.window.e2e.count else None)
        assert live.status.finished == 1
        assert len(live.status.workers) == 2
        assert live.window.ttft.count == 1
        assert live.window.itl.count == 7
        assert live.window.e2e.p50 >= live.window.ttft.p50 > 0
        assert live.window.slo_share == 1
        assert live.lately.tokens_per_s > live.window.tokens_per_s / 2 > 0


async def test_a_failure_is_told_to_whoever_watches_and_who_comes_later(cluster):
    async with Watching(cluster) as watching:
        first = await watching.next()
        assert {(one.kind, one.worker_id) for one in first.happenings} == {
            ("joined", worker.info.ref.worker_id) for worker in cluster.workers
        }
        with pytest.raises(InvalidRequest):
            await cluster.generate(max_tokens=-1)
        told = await watching.until(lambda live: live.happenings)
        assert [(one.kind, one.text) for one in told] == [("refused", "InvalidRequest: sampling.max_tokens")], (
            "no text of a caller's"
        )
        again = await watching.next()
        assert not again.happenings, "each is told once"
    async with Watching(cluster) as later:
        assert [one.kind for one in (await later.next()).happenings] == ["joined", "joined", "refused"]


@pytest.mark.parametrize(
    ("state", "told"), [("prefilling", {"fenced", "recovered", "left"}), ("decoding", {"recovered", "left"})]
)
async def test_a_lost_worker_and_its_recovery(make, state, told):
    cluster = await make(prefill=2, decode=2)
    async with Watching(cluster) as watching:
        call = await at(cluster, state)
        lost, *_, last = cluster.prefill if state == "prefilling" else cluster.decode
        last.open("first", "decode")
        await lost.kill()
        await cluster.answer(call)
        seen: set[tuple[str, str]] = set()

        def all_told(live):
            seen.update((one.kind, one.worker_id) for one in live.happenings)
            return told <= {kind for kind, _ in seen} and live.window.recoveries == 1

        await watching.until(all_told)
    name = lost.info.ref.worker_id
    assert {("left", name), ("recovered", name)} <= seen


@pytest.mark.parametrize("interval_s", [0.05, -1, 61, float("nan")])
async def test_an_interval_that_is_refused(cluster, interval_s):
    with refused(InvalidRequest, "interval_s"):
        async with Watching(cluster, interval_s) as watching:
            await watching.next()


async def test_no_more_than_so_many_watch(cluster):
    watchers = [Watching(cluster) for _ in range(MAX_WATCHERS)]
    for one in watchers:
        await one.next()
    for _ in range(5):
        await watchers[0].next()  # the others read nothing, and this one does not wait for them
    with refused(Overloaded):
        await Watching(cluster).next()
    for one in watchers:
        await one.__aexit__()
    await until(lambda: cluster.router._admin.live._watchers == 0, "all have left")
    async with Watching(cluster) as watching:
        await watching.next()


async def test_a_stop_does_not_wait_for_who_watches(cluster):
    async with Watching(cluster, 60) as watching, asyncio.timeout(scaled(20)):
        await watching.next()
        await cluster.router.stop(0)


async def test_who_watches_and_loses_the_right_to_is_told(make, tmp_path):
    file = tmp_path / "tokens"
    cluster = await make(tokens=token_file(file))
    async with Watching(cluster, metadata=bearer("admin")) as watching:
        await watching.next()
        file.write_text(file.read_text().replace(", role: admin", ""))
        await cluster.router.context.tokens.refresh()
        with refused(Unauthenticated):
            await watching.until(lambda _: False)
