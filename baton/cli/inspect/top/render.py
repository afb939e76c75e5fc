"""Formatting for `baton top`: rows of tables, bars and sums as text. No widgets and no calls to a router."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence

from rich.text import Text

from baton.core import first_line
from baton.rpc.v1 import admin_pb2, common_pb2

BAR = 8
_TIMES = re.compile(r" \((\d+) times\)$")  # as the router merges events
_NUMBERS = re.compile(r"\d+(\.\d+)?")
BLOCKS = " ▏▎▍▌▋▊▉█"
STATES = ("free", "reserved", "owned", "cached", "quarantined")
STATE_STYLES = {"connected": "green", "draining": "yellow", "connecting": "yellow", "lost": "bold red"}
ROLE_STYLES = {"prefill": "magenta", "decode": "cyan", "router": "green"}
STAGE_STYLES = {"prefill": "magenta", "transfer": "blue", "commit": "blue", "decode": "cyan"}
KIND_STYLES = {"left": "yellow", "recovered": "yellow", "fenced": "yellow", "refused": "red", "failed": "bold red"}
NARROW = 140  # terminals with fewer columns show less
FIRST = 8  # columns of workers that a narrow terminal shows
WORKERS = ("worker", "role", "state", "busy", "run", "wait", "tok/s", "KV blocks", "of which", "moved", "note")
REQUESTS = ("request", "stage", "prefill", "decode", "prompt", "tokens", "age", "try")


def worker_columns(width: int) -> Sequence[str]:
    """Return the columns of workers for a terminal of `width` columns."""
    return WORKERS[: len(WORKERS) if width >= NARROW else FIRST]


class Cell(Text):
    """A text with its sort key."""

    def __init__(self, text: str, rank: float | str | None = None, style: str = "", *, right: bool = False) -> None:
        super().__init__(text, style, justify="right" if right else "left", no_wrap=True)
        self.rank = text if rank is None else rank

    @classmethod
    def number(cls, value: float, text: str | None = None) -> Cell:
        return cls(f"{value:,.0f}" if text is None else text, value, right=True)


def short_id(request_id: str) -> str:
    """Return the end of a long request id, because all requests of some seconds have the same beginning."""
    return request_id if len(request_id) <= 12 else f"…{request_id[-8:]}"


def bar(share: float, style: str, width: int = BAR) -> Text:
    """Draw `share` (0 to 1) as blocks."""
    eighths = round(max(0.0, min(share, 1.0)) * width * 8)
    filled = "█" * (eighths // 8) + BLOCKS[eighths % 8].strip()
    return Text.assemble((filled, style), ("·" * (width - len(filled)), "dim"))


def seconds(value: float) -> str:
    """Format a duration with a suitable unit."""
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    if value < 120:
        return f"{value:.1f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


def size(value: float) -> str:
    """Format a number of bytes."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def state_of(worker: admin_pb2.WorkerStatus) -> str:
    """Return the displayed state of a worker."""
    return "draining" if worker.load.draining and worker.state == "connected" else worker.state


def workers(live: admin_pb2.Live, rates: Mapping[str, float]) -> dict[str, list[Cell]]:
    """Return a row for each worker. `rates` are tokens per second by process name."""
    most = max((worker.load.running + worker.load.waiting for worker in live.status.workers), default=0)
    rows = {}
    for worker in live.status.workers:
        load, ref = worker.load, worker.info.ref
        rows[process_of(worker)] = [
            Cell(ref.worker_id),
            Cell(worker.info.role, style=ROLE_STYLES.get(worker.info.role, "")),
            Cell(state_of(worker), style=STATE_STYLES.get(state_of(worker), "")),
            _bar_cell((load.running + load.waiting) / most if most else 0.0, "yellow"),
            Cell.number(load.running),
            Cell.number(load.waiting),
            Cell.number(rates.get(process_of(worker), 0.0)),
            _kv(load.blocks),
            Cell(ledger(load.blocks), load.blocks.owned),
            Cell.number(load.transfer_bytes, size(load.transfer_bytes)),
            Cell(worker.note),
        ]
    return rows


def process_of(worker: admin_pb2.WorkerStatus) -> str:
    """Return a worker's name and incarnation."""
    incarnation = worker.info.ref.incarnation
    return f"{worker.info.ref.worker_id}@{incarnation.epoch}.{incarnation.counter}"


def _bar_cell(share: float, style: str) -> Cell:
    cell = Cell("", share)
    cell.append_text(bar(share, style))
    return cell


def _kv(blocks: common_pb2.BlockCounts) -> Cell:
    """Draw the share of blocks in use. Cached blocks count as free, because requests can evict them."""
    used = (blocks.total - blocks.free - blocks.cached) / blocks.total if blocks.total else 0.0
    cell = _bar_cell(used, "red" if used > 0.9 else "green")
    cell.append(f" {used:4.0%}")
    return cell


def counts(blocks: common_pb2.BlockCounts) -> dict[str, int]:
    """Return block counts by state."""
    numbers = (blocks.free, blocks.reserved, blocks.owned, blocks.cached, blocks.quarantined)
    return dict(zip(STATES, numbers, strict=True))


def ledger(blocks: common_pb2.BlockCounts) -> str:
    """Format the states with nonzero counts."""
    states = ", ".join(f"{count} {state}" for state, count in counts(blocks).items() if count)
    return f"{states or '-'} of {blocks.total}"


def ledger_sum(live: admin_pb2.Live) -> Text:
    """Format the sum of all workers' blocks, and the difference to their total, because each block has one state."""
    totals, total = dict.fromkeys(STATES, 0), 0
    for worker in live.status.workers:
        total += worker.load.blocks.total
        for state, count in counts(worker.load.blocks).items():
            totals[state] += count
    text = Text.assemble(("KV blocks: ", "dim"))
    text.append(", ".join(f"{count:,} {state}" for state, count in totals.items() if count or state == "free"), "bold")
    missing = total - sum(totals.values())
    text.append(f" = {total:,}" if not missing else f": {abs(missing):,} {'missing' if missing > 0 else 'too many'}")
    return text


def requests(live: admin_pb2.Live) -> dict[str, list[Cell]]:
    """Return a row for each choice of a running request."""
    rows = {}
    for view in live.requests:
        key = f"{view.request_id}.{view.choice}" if view.choice else view.request_id
        rows[key] = [
            Cell(f"{short_id(view.request_id)}{key.removeprefix(view.request_id)}", key),
            Cell(view.stage, style=STAGE_STYLES.get(view.stage, "")),
            Cell(view.prefill_worker or "-"),
            Cell(view.decode_worker or "-"),
            Cell.number(view.prompt_tokens),
            Cell.number(view.tokens),
            Cell.number(view.age_s, seconds(view.age_s)),
            Cell.number(view.attempt, f"{view.attempt}{' det' if view.deterministic else ''}"),
        ]
    return rows


def head(live: admin_pb2.Live, *, paused: bool) -> Text:
    """Format the cluster's name and its totals."""
    status = live.status
    text = Text()
    text.append(f"{status.name} ", "bold")
    text.append(f"{status.model}  router {status.router_id} {status.version}, up {seconds(status.uptime_s)}", "dim")
    if paused:
        text.append("  PAUSED", "bold yellow")
    text.append(f"\n{status.running} running", "bold")
    text.append(f", {status.queued} queued", "bold yellow" if status.queued else "bold")
    window = live.window
    if window.slo_share >= 0:
        text.append(f"  {window.slo_share:.0%} in SLO", "green" if window.slo_share > 0.95 else "red")
    if window.recoveries:
        text.append(f"  {window.recoveries} recovered", "yellow")
    others = {"failed": status.failed, "refused": status.refused, "cancelled": status.cancelled}
    ended = [f"{status.finished:,} finished", *(f"{count:,} {name}" for name, count in others.items() if count)]
    return text.append(f"  {', '.join(ended)}")


def quantiles(name: str, found: admin_pb2.Quantiles, *, wide: bool) -> Text:
    """Format quantiles of the last minute. A narrow text has at most 25 characters."""
    if not found.count:
        return Text.assemble((name, "bold"), "  -")
    p50, p99 = seconds(found.p50), seconds(found.p99)
    if not wide:
        return Text.assemble((name, "bold"), f" {p50}, p99 {p99}".replace(" ms", "ms").replace(" s", "s"))
    return Text.assemble((name, "bold"), f"  p50 {p50}  p99 {p99}", ("  last minute", "dim"))


def rates(window: admin_pb2.Window, *, wide: bool) -> Text:
    """Format rates of the last minute. A narrow text has at most 25 characters."""
    out, requests = f"{window.tokens_per_s:,.0f}", f"{window.requests_per_s:.3g}"
    if not wide:
        return Text.assemble(("tok/s", "bold"), f" {out}, {requests} req/s")
    text = f"  {out} out, {window.prompt_tokens_per_s:,.0f} in, {requests} req/s"
    return Text.assemble(("tokens/s", "bold"), text)


def folded(items: Sequence[admin_pb2.Happening]) -> list[admin_pb2.Happening]:
    """Return events by time. Rejections with equal reasons, but for numbers, are one event at the time of the last."""
    found: dict[str, admin_pb2.Happening] = {}
    for number, item in enumerate(sorted(items, key=lambda item: item.time_s)):
        text, times = _TIMES.sub("", item.text), _times(item)
        key = _NUMBERS.sub("#", text) if item.kind == "refused" else str(number)
        merged = admin_pb2.Happening()
        merged.CopyFrom(item)
        if (before := found.pop(key, None)) is not None:
            times += _times(before)
            merged.request_id = ""
        merged.text = f"{text} ({times} times)" if times > 1 else text
        found[key] = merged
    return list(found.values())


def _times(item: admin_pb2.Happening) -> int:
    found = _TIMES.search(item.text)
    return int(found[1]) if found else 1


def happening(item: admin_pb2.Happening) -> Text:
    """Format an event as a line."""
    moment = time.strftime("%H:%M:%S", time.localtime(item.time_s))
    text = Text.assemble((f"{moment} ", "dim"), (f"{item.kind:<9} ", KIND_STYLES.get(item.kind, "green")))
    names = [name for name in (item.worker_id, short_id(item.request_id)) if name and name not in item.text]
    return text.append("".join(f"{name} " for name in names), "bold").append(first_line(item.text))


def control(report: admin_pb2.Control | None) -> Text:
    """Format the plan, and the workers that deviate from it. Decisions are events."""
    if report is None:
        return Text("no controller: the roles were started by hand", "dim")
    plan = report.plan
    text = Text.assemble((f"plan {plan.number}: {plan.prefill} prefill, {plan.decode} decode, by {plan.by}", "bold"))
    text.append(f": {plan.reason}" if plan.reason else "", "dim")
    if report.outlook:
        text.append(f"\nautoscaler: {report.outlook}", "dim")
    for slot in report.slots:
        if slot.state != "ready":
            text.append(f"\n{slot.worker_id}: ", "bold").append(slot.state, "yellow")
            text.append(f": {first_line(slot.note)}" if slot.note else "", "dim")
    return text


def spans(reply: admin_pb2.TraceReply, width: int) -> Iterator[Text]:
    """Yield the spans of a request over time, each with its process and duration."""
    begin = min((span.start_s for span in reply.spans), default=0.0)
    whole = max((span.start_s + span.duration_s - begin for span in reply.spans), default=0.0)
    yield Text.assemble((reply.request_id, "bold"), f"  {reply.outcome}, {seconds(whole)}  trace {reply.trace_id}\n")
    for span in reply.spans:
        style = ROLE_STYLES.get(span.role, "white")
        text = Text.assemble((f"{span.process:<14.14} ", style), f"{span.name:<9.9} ", no_wrap=True)
        left = round((span.start_s - begin) / whole * width) if whole else 0
        long = max(1, round(span.duration_s / whole * width)) if whole else 1
        left = min(left, width - 1)
        text.append("·" * left, "dim").append("█" * min(long, width - left), style)
        text.append("·" * max(0, width - left - long), "dim").append(f" {seconds(span.duration_s):>8} ")
        yield text.append(_attributes(span), "dim")


def _attributes(span: common_pb2.Span) -> str:
    tried = [("attempt", str(span.attempt))] if span.attempt > 1 else []
    pairs: Sequence[tuple[str, str]] = [*tried, *sorted(span.attributes.items())]
    return " ".join(f"{key}={value if ' ' not in value else json.dumps(value)}" for key, value in pairs)
