"""`baton top` with a scripted router: keys, tables, lost and restored connections."""

import queue
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
from textual.pilot import Pilot
from textual.widgets import RichLog, Static
from typer.testing import CliRunner

from baton.cli.app import app as commands
from baton.cli.inspect.top import feed, render
from baton.cli.inspect.top.app import Sheet, Table, Top, Trace
from baton.cli.inspect.top.feed import Feed
from baton.cli.target import Admins, Credentials
from baton.errors import NoWorker, Unauthenticated
from baton.rpc.v1 import admin_pb2, common_pb2
from tests.support.clients import QuietAdmin
from tests.support.waiting import until

SIZE = (150, 48)
NO_CREDENTIALS = Credentials()


def worker(index: int, role: str, running: int, **blocks: int) -> admin_pb2.WorkerStatus:
    ref = common_pb2.WorkerRef(worker_id=f"{role}-{index}", incarnation=common_pb2.Incarnation(epoch=1, counter=index))
    counts = common_pb2.BlockCounts(**blocks)
    load = common_pb2.Load(running=running, decode_tokens=100 * running, transfer_bytes=3 * 2**20, blocks=counts)
    return admin_pb2.WorkerStatus(info=common_pb2.WorkerInfo(ref=ref, role=role), load=load, state="connected")


def live(at: float = 1000.0, requests: int = 3, **facts: Any) -> admin_pb2.Live:
    """Return a router's report of a small cluster at this time, with so many running requests."""
    left = worker(0, "prefill", 1, total=100, free=60, reserved=0, owned=30, cached=10)
    right = worker(0, "decode", 4, total=100, free=5, reserved=5, owned=90)
    plan = admin_pb2.Plan(prefill=1, decode=1, number=7, by="operator")
    decisions = [admin_pb2.Decision(age_s=5, kind="turn", text="decode-1: prefill waits")]
    said: Any = {"name": "local", "model": "tiny", "router_id": "r-1", "running": requests, "finished": 1234} | facts
    place: Any = {"stage": "decode", "prefill_worker": "prefill-0", "decode_worker": "decode-0", "attempt": 1}
    quantiles = admin_pb2.Quantiles(count=9, p50=0.012, p90=0.1, p99=1.5)
    window = admin_pb2.Window(seconds=60, ttft=quantiles, itl=quantiles, tokens_per_s=321, slo_share=0.97)
    control = admin_pb2.Control(plan=plan, decisions=decisions, age_s=1)
    control.slots.add(worker_id="decode-0", state="ready", note="quiet")
    control.slots.add(worker_id="decode-1", state="failed", note="no memory:\n{}")
    under_way = [
        admin_pb2.RequestView(request_id=f"req-{n}", prompt_tokens=10 * n, tokens=9 - n, age_s=n, **place)
        for n in range(requests)
    ]
    status = admin_pb2.StatusReply(workers=[left, right], control=control, **said)
    joined = admin_pb2.Happening(time_s=at, kind="joined", text=f"here at {at:g}", worker_id="decode-0")
    windows: Any = {"window": window, "lately": window}
    return admin_pb2.Live(time_s=at, status=status, requests=under_way, happenings=[joined], **windows)


class Router(QuietAdmin):
    """Sends the messages in `says`. An error ends the stream."""

    def __init__(self) -> None:
        self.says: queue.Queue[admin_pb2.Live | grpc.StatusCode] = queue.Queue()
        self.intervals: list[float] = []
        self.asked: list[str] = []
        self.tokens: list[str] = []
        self.address = ""

    def Watch(self, request, context):
        self.intervals.append(request.interval_s)
        self.tokens += [value for key, value in context.invocation_metadata() if key == "authorization"]
        while context.is_active():
            try:
                said = self.says.get(timeout=0.05)
            except queue.Empty:
                continue
            if not context.is_active():
                self.says.put(said)  # for the next watcher
                return
            if isinstance(said, grpc.StatusCode):
                context.abort(said, "as the test says")
            yield said

    def Status(self, request, context):
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "not here")

    Requests = Status

    def Trace(self, request, context):
        self.asked.append(request.request_id)
        if request.request_id == "req-2":
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "this one has none")
        spans = [
            common_pb2.Span(name="queue", process="r-1", role="router", start_s=5, duration_s=0.25),
            common_pb2.Span(name="compute", process="prefill-0", role="prefill", start_s=5.25, duration_s=0.75),
        ]
        spans[1].attributes["tokens"] = "17"
        return admin_pb2.TraceReply(request_id="req-1", trace_id="abc", outcome="finished", spans=spans)


@pytest.fixture
def router(monkeypatch, serve):
    monkeypatch.setattr(feed, "RETRY_S", 0.05)
    router = Router()
    router.address = serve(router)
    return router


def screen(router: Router, interval_s: float = 0.5, credentials: Credentials = NO_CREDENTIALS) -> Top:
    return Top(Feed(lambda: Admins([router.address], credentials), interval_s))


@asynccontextmanager
async def shown(
    router: Router, said: admin_pb2.Live | None = None, **options: Any
) -> AsyncIterator[tuple[Top, Pilot[Any]]]:
    """Yield the screen when it shows the three requests of the router's report."""
    app = screen(router, **options)
    router.says.put(said or live())
    async with app.run_test(size=SIZE) as pilot:
        await until(lambda: rows(app) == 3)
        yield app, pilot


def without_the_first(at: float) -> admin_pb2.Live:
    """Return a later report, after the first request has ended."""
    newer = live(at)
    del newer.requests[0]
    return newer


def rows(app: Top) -> int:
    return table(app, "requests").row_count


def text(app: Top, name: str) -> str:
    return str(app.screen_stack[0].query_one(f"#{name}", Static).render())


def table(app: Top, name: str) -> Table:
    return app.screen_stack[0].query_one(f"#{name}", Table)


def label(shown: Table, name: str) -> str:
    return next(str(column.label) for key, column in shown.columns.items() if key.value == name)


def column(shown: Table, name: str) -> list[str]:
    return [str(cell) for cell in shown.get_column(name)]


async def test_what_a_router_says_is_shown_and_the_token_is_not(router):
    async with shown(router, credentials=Credentials(token="marker-token-of-this-test")) as (app, _):
        assert (router.intervals, router.tokens) == ([0.5], ["Bearer marker-token-of-this-test"])
        assert "marker-token-of-this-test" not in app.export_screenshot()
        assert text(app, "head").startswith("local tiny  router r-1")
        assert "3 running, 0 queued  97% in SLO  1,234 finished" in text(app, "head")
        assert text(app, "ttft-text") == "TTFT  p50 12 ms  p99 1.5 s  last minute"
        assert text(app, "rate-text").startswith("tokens/s  321 out")
        assert text(app, "ledger") == "KV blocks: 65 free, 5 reserved, 120 owned, 10 cached = 200"
        workers = table(app, "workers")
        assert column(workers, "worker") == ["decode-0", "prefill-0"]
        assert column(workers, "KV blocks")[1].endswith(" 30%")
        assert column(workers, "KV blocks")[0].endswith(" 95%")
        assert column(workers, "busy")[0] == "█" * render.BAR
        assert column(table(app, "requests"), "request") == ["req-0", "req-1", "req-2"]
        assert "plan 7: 1 prefill, 1 decode, by operator" in text(app, "decisions")
        assert "decode-1: failed: no memory" in text(app, "decisions"), "its first line"
        assert "prefill waits" not in text(app, "decisions"), "decisions are events"
        (line,) = app.query_one("#happenings", RichLog).lines
        assert "joined    decode-0 here at 1000" in line.text


async def test_rows_go_and_come_and_the_cursor_stays_with_its_request(router):
    async with shown(router) as (app, pilot):
        requests = table(app, "requests")
        await pilot.press("down")
        newer = without_the_first(1001.0)  # the first request is above the cursor
        newer.requests[0].tokens = 77
        newer.status.workers[1].load.decode_tokens += 250
        router.says.put(newer)
        await until(lambda: rows(app) == 2)
        assert column(requests, "tokens")[0] == "77"
        assert requests.coordinate_to_cell_key(requests.cursor_coordinate).row_key.value == "req-1"
        assert column(table(app, "workers"), "tok/s") == ["250", "0"]


def shows(workers: Table, columns: int) -> bool:
    return len(workers.columns) == columns and workers.row_count == 2


async def test_the_columns_follow_the_width(router):
    async with shown(router) as (app, pilot):
        workers = table(app, "workers")
        workers.focus()
        for _ in render.WORKERS[render.WORKERS.index("worker") : -1]:
            await pilot.press("s")
        assert label(workers, "note").endswith("▲")
        for width, count in ((80, render.FIRST), (render.NARROW, len(render.WORKERS)), (100, render.FIRST)):
            await pilot.resize_terminal(width, 40)
            await until(partial(shows, workers, count))
            assert column(workers, "worker") == ["decode-0", "prefill-0"]


@pytest.mark.slow
async def test_keys(router):
    async with shown(router) as (app, pilot):
        requests = table(app, "requests")
        while not label(requests, "tokens").endswith("▲"):
            await pilot.press("s")
        assert column(requests, "tokens") == ["7", "8", "9"], "by number, and not as text"
        await pilot.press("r")
        assert column(requests, "tokens") == ["9", "8", "7"]
        assert label(requests, "tokens") == "tokens ▼"
        await pilot.press("shift+tab")
        assert app.focused is not requests
        await pilot.press("tab")
        assert app.focused is requests
        dark = app.current_theme.dark
        await pilot.press("d")
        assert app.current_theme.dark is not dark
        await pilot.press("question_mark")
        assert type(app.screen) is Sheet
        await pilot.press("escape")
        assert not isinstance(app.screen, Sheet)
        await pilot.press("q")
    assert app.return_value is None
    assert app.return_code == 0


async def test_a_pause_stops_the_screen_and_records_events_for_later(router):
    async with shown(router) as (app, pilot):
        await pilot.press("p")
        assert "PAUSED" in text(app, "head")
        router.says.put(live(1001.0, requests=2))
        log = app.query_one("#happenings", RichLog)
        await until(lambda: len(app._happened) == 2)
        assert (rows(app), len(log.lines)) == (3, 1)
        await pilot.press("p")
        router.says.put(live(1002.0, requests=1))
        await until(lambda: rows(app) == 1)
        assert [line.text[-7:] for line in log.lines] == ["at 1000", "at 1001", "at 1002"]
        assert "PAUSED" not in text(app, "head")


def event(at: float, kind: str, what: str, request_id: str = "") -> admin_pb2.Happening:
    return admin_pb2.Happening(time_s=at, kind=kind, text=what, request_id=request_id)


def test_events_are_by_time_and_rejections_with_one_reason_are_one():
    wait = "Overloaded: 3 requests wait {} s"
    given = [
        event(9, "refused", wait.format("1.5"), "a"), event(2, "decision", "start"), event(3, "left", "gone"),
        event(4, "refused", "InvalidRequest: n (3 times)"), event(5, "refused", "InvalidRequest: n", "b"),
        event(6, "failed", "EngineFault"), event(7, "failed", "EngineFault"), event(8, "refused", wait.format("2")),
        event(1, "refused", "InvalidRequest: seed", "c"),
    ]  # fmt: skip
    lines = [(item.time_s, item.text, item.request_id) for item in render.folded(given)]
    assert lines == [
        (1, "InvalidRequest: seed", "c"), (2, "start", ""), (3, "gone", ""), (5, "InvalidRequest: n (4 times)", ""),
        (6, "EngineFault", ""), (7, "EngineFault", ""), (9, "Overloaded: 3 requests wait 1.5 s (2 times)", ""),
    ]  # fmt: skip
    assert render.short_id("6b09b76eca678c40d3791c306bc739b7") == "…6bc739b7"
    assert "…6bc739b7" in render.happening(event(1, "failed", "x", "6b09b76eca678c40d3791c306bc739b7")).plain


async def test_80_columns_cut_nothing(router):
    said = live(requests=3, failed=12, refused=1_234, queued=10)
    said.requests[0].request_id = "6b09b76eca678c40d3791c306bc739b7"
    for worker in said.status.workers:
        worker.load.blocks.free, worker.load.blocks.total = 131_072, 131_072 + worker.load.blocks.owned
    said.window.itl.p50, said.window.ttft.p99, said.window.requests_per_s = 0.00361, 59.94, 12.345
    app = screen(router)
    router.says.put(said)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(lambda: rows(app) == 3)
        await pilot.pause()
        for name in ("head", "ttft-text", "itl-text", "rate-text", "ledger"):
            static = app.query_one(f"#{name}", Static)
            assert max(map(len, text(app, name).splitlines())) <= static.content_size.width, name
        for name in ("workers", "requests"):
            assert table(app, name).virtual_size.width <= 80
        assert "…6bc739b7" in column(table(app, "requests"), "request")


@pytest.mark.slow
async def test_the_trace_of_a_request_and_one_without(router):
    async with shown(router) as (app, pilot):

        def said() -> str:
            return str(app.screen.query_one("#text", Static).render())

        await pilot.press("down", "enter")
        assert isinstance(app.screen, Trace)
        await until(lambda: "trace abc" in said())
        assert re.search(r"r-1 +queue +█+·+ +250 ms", said())
        assert re.search(r"prefill-0 +compute +·+█+ +750 ms tokens=17", said())
        router.says.put(without_the_first(1001.0))
        await until(lambda: rows(app) == 2)  # the screen below is updated
        await pilot.press("escape", "t")
        await until(lambda: router.asked == ["req-1", ""])
        await pilot.press("escape", "down", "enter")
        await until(lambda: "this one has none" in said())


async def test_a_trace_needs_a_router_that_has_answered(router):
    with pytest.raises(NoWorker, match="no router has answered yet"):
        await Feed(lambda: Admins([router.address]), 0.5).trace("")
    assert router.asked == []


async def test_what_is_said_while_the_screen_goes_away_ends_nothing(router, monkeypatch):
    async with shown(router, interval_s=0.1) as (app, _):
        take = Mock(wraps=app._take)
        monkeypatch.setattr(app, "_take", take)
        await app.screen.query("*").remove()
        router.says.put(live(1001.0))
        await until(lambda: take.called)
    assert app.return_code in {0, None}


@pytest.mark.slow
@pytest.mark.parametrize("how", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, "silent"])
async def test_a_router_that_is_lost_is_waited_for(router, monkeypatch, how):
    if how == "silent":
        monkeypatch.setattr(feed, "SILENT_S", 1.0)
    async with shown(router, interval_s=0.1) as (app, _):
        lost = app.query_one("#lost", Static)
        assert not lost.display
        if how != "silent":
            router.says.put(how)
        await until(lambda: lost.display)
        assert text(app, "lost").startswith("no router answers: ")
        assert rows(app) == 3, "what was known stays"

        def back() -> bool:
            if router.says.empty():  # a stream that is being closed may take a report
                router.says.put(live(1001.0, requests=1))
            return not lost.display and rows(app) == 1

        await until(back)


async def test_what_a_router_says_again_when_it_is_back_is_shown_once(router):
    before, after = live(), live(1001.0)
    after.happenings.insert(0, before.happenings[0])
    for said in (before, grpc.StatusCode.UNAVAILABLE, after):
        router.says.put(said)
    app = screen(router)
    async with app.run_test(size=SIZE):
        log = app.query_one("#happenings", RichLog)
        await until(lambda: log.lines and "here at 1001" in log.lines[-1].text)
        assert ["here at 1000" in line.text for line in log.lines] == [True, False]


async def test_a_cluster_that_has_ended_is_waited_for(router):
    there = Admins([router.address])
    find = Mock(side_effect=[there, NoWorker("no cluster is running"), *[there] * 99])
    router.says.put(grpc.StatusCode.UNAVAILABLE)
    router.says.put(live())
    app = Top(Feed(find, 0.5))
    async with app.run_test(size=SIZE):
        await until(lambda: rows(app) == 3)
    assert find.call_count >= 3


async def test_who_may_not_watch_is_told_so(router):
    router.says.put(grpc.StatusCode.UNAUTHENTICATED)
    app = screen(router)
    async with app.run_test(size=SIZE):
        await until(lambda: app.return_value is not None)
    assert isinstance(app.return_value, Unauthenticated)


async def test_hostile_names_are_text(router):
    said = live(name="[bold]x[/bold] [", model="[/]")
    said.requests[0].request_id = "[red]r"
    said.happenings[0].text = "[/nothing] ends here"
    said.status.control.slots[1].note = "[link=http://x]"
    async with shown(router, said) as (app, pilot):
        assert text(app, "head").startswith("[bold]x[/bold] [ [/]")
        assert column(table(app, "requests"), "request")[0] == "[red]r"
        assert "[link=http://x]" in text(app, "decisions")
        await pilot.pause()


def test_without_a_terminal_it_points_elsewhere():
    result = CliRunner().invoke(commands, ["top", "--target", "127.0.0.1:1"])
    assert result.exit_code == 2
    assert "baton status --watch" in result.output
