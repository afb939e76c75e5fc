"""The screen of `baton top`. `feed` delivers its data, `render` formats it."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.css.query import NoMatches
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, RichLog, Sparkline, Static

from baton.cli.inspect.top import render
from baton.cli.inspect.top.feed import Feed
from baton.cli.target import Admins
from baton.errors import BatonError
from baton.rpc.v1 import admin_pb2

POINTS = 120  # values of a chart
HAPPENINGS = 500
HELP = """[b]baton top[/b]: the live view of one router

[b]tab[/b], [b]shift+tab[/b]  the next table, or the one before; arrows move in it
[b]s[/b]  sort by the next column            [b]r[/b]  reverse the order
[b]enter[/b]  on a request: its time in each stage
[b]t[/b]  the same for the request that ended last
[b]p[/b]  pause, continue                    [b]d[/b]  dark, light
[b]q[/b]  quit                               [b]escape[/b]  close this

[b]busy[/b]  running and waiting requests, as a share of those of the busiest worker
[b]KV blocks[/b]  in use: reserved, owned or quarantined; cached blocks count as free
[b]TTFT, ITL, tok/s[/b]  of the last minute; the lines show the last five seconds over time
[b]ids[/b]  of requests are shown by their end; [b]enter[/b] shows the whole id"""


class Sheet(ModalScreen[None]):
    """A text over the rest of the screen."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,question_mark,enter", "dismiss", "close")]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="sheet"):
            yield Static(self._text, id="text")


class Trace(Sheet):
    """The spans of one request."""

    def __init__(self, feed: Feed, request_id: str) -> None:
        super().__init__("...")
        self._feed = feed
        self._request_id = request_id

    def on_mount(self) -> None:
        self.run_worker(self._load(), exit_on_error=False)

    async def _load(self) -> None:
        text = self.query_one("#text", Static)
        try:
            reply = await self._feed.trace(self._request_id)
        except BatonError as error:
            text.update(Text(f"{self._request_id or 'the last request'}: {error}"))
            return
        text.add_class("spans")
        text.update(Text("\n").join(render.spans(reply, max(10, self.size.width // 3))))


class Table(DataTable[render.Cell]):
    """A table with named rows. A row that remains keeps its place and the cursor."""

    def __init__(self, columns: Sequence[str], sorted_by: str, *, id: str) -> None:
        super().__init__(id=id, cursor_type="row", zebra_stripes=True)
        self._names: Sequence[str] = ()
        self._chosen = columns
        self._sorted_by = sorted_by
        self._reverse = False

    def on_mount(self) -> None:
        self.choose(self._chosen)

    def choose(self, columns: Sequence[str]) -> None:
        """Show these columns, without rows if they change."""
        if columns == self._names:
            return
        self.clear(columns=True)
        self._names = columns
        self._sorted_by = self._sorted_by if self._sorted_by in columns else columns[0]
        for name in columns:
            self.add_column(name, key=name)

    def fill(self, rows: Mapping[str, Sequence[render.Cell]]) -> None:
        under = self._under_cursor()
        for key in [key for key in self.rows if key.value not in rows]:
            self.remove_row(key)
        for name, every in rows.items():
            cells = every[: len(self._names)]
            if name not in self.rows:
                self.add_row(*cells, key=name)
                continue
            for column, cell in zip(self._names, cells, strict=True):
                if self.get_cell(name, column) != cell:
                    self.update_cell(name, column, cell, update_width=True)
        self._order(under)

    def sort_by_next(self) -> None:
        self._sorted_by = self._names[(self._names.index(self._sorted_by) + 1) % len(self._names)]
        self._mark()

    def reverse_order(self) -> None:
        self._reverse = not self._reverse
        self._mark()

    def _mark(self) -> None:
        for key, column in self.columns.items():
            arrow = (" ▼" if self._reverse else " ▲") if key.value == self._sorted_by else ""
            column.label = Text(f"{key.value}{arrow}")
        self._order(self._under_cursor())
        self.refresh()

    def _order(self, under: str | None) -> None:
        self.sort(self._sorted_by, key=lambda cell: cell.rank, reverse=self._reverse)
        if under is not None and under in self.rows:
            self.move_cursor(row=self.get_row_index(under), scroll=False)

    def _under_cursor(self) -> str | None:
        if not self.row_count:
            return None
        return self.coordinate_to_cell_key(self.cursor_coordinate).row_key.value


class Top(App[BatonError | None]):
    """The app. It returns None when the user quits, or the error for which `feed` cannot continue."""

    TITLE = "baton top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { overflow: hidden; }
    #head { height: 2; padding: 0 1; background: $panel; }
    #lost { display: none; padding: 0 1; background: $error; color: $text; }
    #lost.shown { display: block; }
    #charts { height: 4; }
    #charts > Vertical { width: 1fr; padding: 0 1; }
    #charts Static { height: 1; text-wrap: nowrap; text-overflow: ellipsis; }
    #charts Sparkline { height: 3; }
    #workers { height: auto; max-height: 40%; }
    Table { scrollbar-size: 0 1; }
    #ledger { height: auto; padding: 0 1; }
    #requests { height: auto; max-height: 45%; min-height: 4; }
    #below { height: 1fr; min-height: 5; }
    #happenings { width: 3fr; padding: 0 1; scrollbar-size-vertical: 1; background: $surface; }
    #control { width: 2fr; scrollbar-size-vertical: 1; padding: 0 1; }
    .spans { text-wrap: nowrap; text-overflow: ellipsis; }
    .-low #charts { height: 3; }
    .-low #charts Sparkline { height: 2; }
    .-low #workers { max-height: 6; }
    Sheet { align: center middle; }
    #sheet { width: 90%; height: auto; max-height: 90%; padding: 1 2; background: $surface; border: round $primary; }
    """
    VERTICAL_BREAKPOINTS = [(0, "-low"), (32, "-high")]  # noqa: RUF012  (as textual declares it)
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("s", "sort", "sort"),
        Binding("r", "reverse", "reverse"),
        Binding("p", "pause", "pause"),
        Binding("t", "trace", "last trace"),
        Binding("d", "dark", "dark/light"),
        Binding("question_mark", "help", "help"),
    ]

    def __init__(self, feed: Feed) -> None:
        super().__init__()
        self._feed = feed
        self._paused = False
        self._live: admin_pb2.Live | None = None  # the view on screen
        self._rates: dict[str, float] = {}
        self._tokens: dict[str, int] = {}
        self._reported_at = 0.0
        self._happened: dict[bytes, admin_pb2.Happening] = {}  # a router repeats recent ones after a reconnect
        self._unseen = False  # some of these are not on screen yet
        self._lines = {name: deque([0.0] * POINTS, POINTS) for name in ("ttft", "itl", "rate")}

    def compose(self) -> ComposeResult:
        yield Static("...", id="head")
        yield Static(id="lost")
        with Horizontal(id="charts"):
            for name in self._lines:
                with Vertical():
                    yield Static(id=f"{name}-text")
                    yield Sparkline(id=name)
        yield Table(render.worker_columns(self.size.width), "worker", id="workers")
        yield Static(id="ledger")
        yield Table(render.REQUESTS, "age", id="requests")
        with Horizontal(id="below"):
            yield RichLog(id="happenings", max_lines=HAPPENINGS, wrap=True, min_width=1)
            with VerticalScroll(id="control"):
                yield Static(id="decisions")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#requests").focus()
        self.run_worker(self._follow(), exit_on_error=True)

    def on_resize(self) -> None:
        self.call_after_refresh(self._resized)

    def _resized(self) -> None:
        if self.screen_stack:
            with contextlib.suppress(NoMatches):  # the app is ending
                self._show()

    async def _follow(self) -> None:
        try:
            async for message in self._feed.views():
                with contextlib.suppress(NoMatches):  # the app is ending, and its widgets are already gone
                    self._take(message)
        except BatonError as error:
            self.exit(error)

    def _take(self, message: admin_pb2.Live | BatonError) -> None:
        """Process one message. While paused, the screen keeps its content; rates and events are recorded for later."""
        if not self.screen_stack:
            return  # the app is ending
        lost = self.screen_stack[0].query_one("#lost", Static)
        lost.set_class(isinstance(message, BatonError), "shown")
        if isinstance(message, BatonError):
            lost.update(Text(f"no router answers: {message}; trying again"))
            return
        self._count(message)
        for item in message.happenings:
            if (key := item.SerializeToString(deterministic=True)) not in self._happened:
                self._happened[key], self._unseen = item, True
        while len(self._happened) > HAPPENINGS:
            del self._happened[next(iter(self._happened))]
        if not self._paused:
            self._live = message
            self._show()

    def _count(self, live: admin_pb2.Live) -> None:
        """Update the charts and rates over time, which messages do not contain."""
        points = {"ttft": live.lately.ttft.p99, "itl": live.lately.itl.p99, "rate": live.lately.tokens_per_s}
        for name, value in points.items():
            self._lines[name].append(value)
        loads = {render.process_of(worker): worker.load for worker in live.status.workers}
        tokens = {name: load.prefill_tokens + load.decode_tokens for name, load in loads.items()}
        passed = live.time_s - self._reported_at
        if passed > 0:
            self._rates = {
                name: max(0, count - self._tokens.get(name, count)) / passed for name, count in tokens.items()
            }
        self._tokens, self._reported_at = tokens, live.time_s

    def _show(self) -> None:
        live, screen = self._live, self.screen_stack[0]
        if live is None:
            return
        wide = self.size.width >= render.NARROW
        texts = {
            "head": render.head(live, paused=self._paused),
            "ledger": render.ledger_sum(live),
            "decisions": render.control(live.status.control if live.status.HasField("control") else None),
            "ttft-text": render.quantiles("TTFT", live.window.ttft, wide=wide),
            "itl-text": render.quantiles("ITL", live.window.itl, wide=wide),
            "rate-text": render.rates(live.window, wide=wide),
        }
        for name, text in texts.items():
            screen.query_one(f"#{name}", Static).update(text)
        for name, line in self._lines.items():
            screen.query_one(f"#{name}", Sparkline).data = list(line)
        screen.query_one("#workers", Table).choose(render.worker_columns(self.size.width))
        if self._unseen and not self._paused:
            self._unseen, lines = False, screen.query_one("#happenings", RichLog)
            lines.clear()
            for item in render.folded(list(self._happened.values())):
                lines.write(render.happening(item), expand=True, scroll_end=True)
        screen.query_one("#workers", Table).fill(render.workers(live, self._rates))
        screen.query_one("#requests", Table).fill(render.requests(live))

    async def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        if event.data_table.id == "requests":
            await self.push_screen(Trace(self._feed, (event.row_key.value or "").strip()))

    def action_sort(self) -> None:
        if isinstance(self.focused, Table):
            self.focused.sort_by_next()

    def action_reverse(self) -> None:
        if isinstance(self.focused, Table):
            self.focused.reverse_order()

    def action_pause(self) -> None:
        self._paused = not self._paused
        self._show()

    async def action_trace(self) -> None:
        await self.push_screen(Trace(self._feed, ""))

    def action_dark(self) -> None:
        self.theme = "textual-light" if self.current_theme.dark else "textual-dark"

    async def action_help(self) -> None:
        await self.push_screen(Sheet(HELP))


def run_top(name: str | None, target: str | None, tls: Path | None, interval_s: float) -> None:
    """Show the view until the user quits. Raises BatonError if there is no cluster or it denies access."""
    find = partial(Admins.find, name, target, tls)
    find()  # before the screen opens, so that a missing cluster is reported normally
    failure = Top(Feed(find, interval_s)).run()
    if failure is not None:
        raise failure
