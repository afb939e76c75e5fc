"""`baton trace`: the time of a recent request by stage, as bars in the terminal and as a file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from baton.cli.options import AdminTarget, ClusterName, Json, Tls
from baton.errors import BatonError, ConfigError, InvalidRequest, UnknownModel
from baton.tracing.chrome import chrome_trace
from baton.tracing.trace import Span, processes, typed

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
    request: Annotated[
        str, typer.Argument(metavar="REQUEST", help="a request id (default: the request that ended last)")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="write a file for ui.perfetto.dev")] = None,
    name: ClusterName = None,
    target: AdminTarget = None,
    tls: Tls = None,
    as_json: Json = False,
) -> None:
    """Show the time spent in each stage of a recent request, in the router and in its workers."""
    found = find(request, name, target, tls)
    if out is not None:
        write(out, found.spans, found.request_id, found.trace_id)
    if as_json:
        typer.echo(json.dumps({**dataclasses.asdict(found), "spans": plain(found.spans)}))
    else:
        show(found)


def find(request: str, name: str | None, target: str | None, tls: Path | None) -> FoundTrace:
    """Return the trace from any router that has it; without a request id, the one that ended last."""
    from baton.cli.target import Admins
    from baton.rpc.convert import span_from_pb
    from baton.rpc.v1 import admin_pb2

    admins = Admins.find(name, target, tls)
    message = admin_pb2.TraceRequest(request_id=request)
    found: list[FoundTrace] = []
    failures: list[BatonError] = []
    for admin in admins.started:
        try:
            reply = admins.call(admin, lambda stub, **how: stub.Trace(message, **how))
            spans = tuple(map(span_from_pb, reply.spans))
            found.append(FoundTrace(reply.request_id, reply.trace_id, reply.outcome, spans))
        except UnknownModel as error:  # the status for a trace that is not there
            failures.append(InvalidRequest.of("REQUEST", str(error)))
        except BatonError as error:
            failures.append(error)
    if not found:
        raise next((one for one in failures if not isinstance(one, InvalidRequest)), failures[0])
    return max(found, key=lambda one: max((span.start_s + span.duration_s for span in one.spans), default=0.0))


def plain(spans: Sequence[Span]) -> list[dict[str, object]]:
    """Return spans for JSON."""
    return [dataclasses.asdict(span) | {"attributes": typed(span.attributes)} for span in spans]


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
