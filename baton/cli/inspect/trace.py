"""`baton trace`: the time of a recent request by stage, as bars in the terminal and as a file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from baton.cli.credentials import Target, find_reach
from baton.cli.operate import TIMEOUT_S
from baton.cli.up import find_cluster
from baton.errors import BatonError, ConfigError, InvalidRequest, NoWorker
from baton.rpc.channel import from_here
from baton.rpc.convert import span_from_pb
from baton.rpc.status import from_rpc_error
from baton.rpc.v1 import admin_pb2
from baton.rpc.v1.admin_pb2_grpc import AdminStub
from baton.tracing.chrome import chrome_trace
from baton.tracing.trace import Span, processes

COLOURS = {"router": "cyan", "prefill": "yellow", "decode": "green"}
LEAST, MOST = 16, 60  # limits of the bars' width in characters
NUMBER, FIGURES = 9, 30  # widths of a number and of a span's facts, with column gaps
EIGHTHS = " ▏▎▍▌▋▊▉█"
SHOWN = ("tokens", "cached_tokens", "chunks", "kv_bytes", "transport", "steps", "passes", "rollbacks", "ended", "error")


@dataclasses.dataclass(frozen=True, slots=True)
class FoundTrace:
    """A router's trace of a request."""

    request_id: str
    trace_id: str
    outcome: str
    spans: tuple[Span, ...]


def trace(
    request: str, name: str | None, target: str | None, tls: Path | None, out: Path | None, *, as_json: bool
) -> None:
    """Print a trace and write it to `out`. Raises InvalidRequest if no router keeps it, NoWorker without a router."""
    running = None if target else find_cluster(name)
    admins = [from_here(admin) for admin in (running.admin, *running.admins[1:])] if running else [str(target)]
    found = find(request, admins, find_reach(running, tls))
    if out is not None:
        write(out, found.spans, found.request_id, found.trace_id)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found)))
    else:
        show(found)


def find(request: str, admins: Sequence[str], reach: Target) -> FoundTrace:
    """Return the trace from any router that has it. Without a request id, return the trace that began last."""
    asked = [_ask(request, admin, reach) for admin in admins]
    found = [one for one in asked if isinstance(one, FoundTrace)]
    if found:
        return max(found, key=lambda one: one.spans[0].start_s if one.spans else 0.0)
    failure = next((one for one in asked if isinstance(one, BatonError) and not isinstance(one, InvalidRequest)), None)
    raise failure or next((one for one in asked if isinstance(one, BatonError)), NoWorker("no router is there"))


def _ask(request: str, admin: str, reach: Target) -> FoundTrace | BatonError:
    with reach.channel(admin) as channel:
        try:
            call = AdminStub(channel).Trace
            reply = call(admin_pb2.TraceRequest(request_id=request), timeout=TIMEOUT_S, metadata=reach.metadata)
        except grpc.RpcError as error:
            if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.NOT_FOUND:
                return InvalidRequest.of("REQUEST", str(error.details()))
            return from_rpc_error(error, admin)
    return FoundTrace(reply.request_id, reply.trace_id, reply.outcome, tuple(map(span_from_pb, reply.spans)))


def write(out: Path, spans: Sequence[Span], request_id: str, trace_id: str) -> None:
    """Write a file for ui.perfetto.dev. Raises ConfigError if it cannot be written."""
    try:
        out.write_text(json.dumps(chrome_trace(spans, request_id, trace_id)))
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}") from error
    typer.echo(f"trace written to {out}: open it at https://ui.perfetto.dev", err=True)


def show(found: FoundTrace, console: Console | None = None) -> None:
    """Print bars on one axis, grouped by process."""
    console = console or Console(highlight=False)
    console.print(f"request   {found.request_id}, {found.outcome}\ntrace     {found.trace_id}", markup=False)
    if not found.spans:
        console.print("it ended before its first stage: there are no spans")
        return
    began = min(span.start_s for span in found.spans)
    whole = max(max(span.end_s for span in found.spans) - began, 1e-9)
    titles = [process for _, process in processes(found.spans)] + [f"  {_title(span)}" for span in found.spans]
    first = max(map(len, titles))
    width = max(LEAST, min(MOST, console.width - first - 2 * NUMBER - FIGURES))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    table.add_column("", min_width=first, no_wrap=True)
    table.add_column("at ms", justify="right", min_width=NUMBER - 2, no_wrap=True)
    table.add_column("took", justify="right", min_width=NUMBER - 2, no_wrap=True)
    table.add_column("", min_width=width, no_wrap=True)
    table.add_column("", overflow="fold")
    for row in rows(found.spans, began, whole, width):
        table.add_row(*row)
    console.print(table)


def rows(spans: Sequence[Span], began: float, whole: float, width: int) -> Iterator[tuple[Text, str, str, Text, str]]:
    """Yield a row for each process, followed by one for each of its spans. Times are seconds, `width` characters."""
    for role, process in processes(spans):
        yield Text(process, style=f"bold {COLOURS.get(role, '')}".strip()), "", "", Text(), ""
        for span in spans:
            if (span.role, span.process) == (role, process):
                at, took = f"{(span.start_s - began) * 1e3:.1f}", f"{span.duration_s * 1e3:.1f}"
                yield Text(f"  {_title(span)}"), at, took, bar(span, began, whole, width), _figures(span)


def bar(span: Span, began: float, whole: float, width: int) -> Text:
    """Draw a span in eighths of a character, at least one, so that short spans are visible."""
    most = width * 8
    begin = min(round((span.start_s - began) / whole * most), most - 1)
    end = min(max(round((span.end_s - began) / whole * most), begin + 1), most)
    full, rest = divmod(end - begin // 8 * 8, 8)
    text = " " * (begin // 8) + EIGHTHS[8] * full + EIGHTHS[rest].strip()
    return Text(text.ljust(width), style=COLOURS.get(span.role, ""))


def _title(span: Span) -> str:
    attempt = f" #{span.attempt}" if span.attempt > 1 else ""
    return f"{span.name}{attempt}" + (f" ({span.choice})" if span.choice else "")


def _figures(span: Span) -> str:
    facts = {name: span.attributes.get(name, "0") for name in SHOWN}
    return ", ".join(f"{name.replace('_', ' ')} {fact}" for name, fact in facts.items() if fact != "0")
