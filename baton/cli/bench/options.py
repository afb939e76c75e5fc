"""The options of `baton bench` that no other command has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.cli.options import LENGTHS

TRACES = "Mooncake's JSON lines, Azure's CSV, or JSON lines: prompt or prompt_tokens, max_tokens, timestamp (ms)"

Concurrency = Annotated[int | None, typer.Option(min=1, help="closed loop: so many under way (default: 8)")]
Rate = Annotated[float | None, typer.Option(help="open loop: so many per second, answered or not")]
Arrivals = Annotated[
    str | None, typer.Option(help="poisson, constant, gamma:CV, or trace (default: poisson, with --rate)")
]
MaxInFlight = Annotated[int, typer.Option(min=1, help="open loop: not sent if so many are under way")]
Requests = Annotated[int | None, typer.Option(min=1, help="so many in all (default: 100, or the trace)")]
Duration = Annotated[float | None, typer.Option(min=0, help="begin no request after so many seconds")]
Warmup = Annotated[int, typer.Option(min=0, help="so many before, which do not count")]
PromptTokens = Annotated[str, typer.Option(help=f"of random prompts: {LENGTHS}")]
MaxTokens = Annotated[str | None, typer.Option(help="new tokens of each request, as above (default: 64)")]
Trace = Annotated[Path | None, typer.Option(help=TRACES)]
Scale = Annotated[float, typer.Option(help="divides all lengths of the trace")]
Speed = Annotated[float, typer.Option(help="replay the trace so many times as fast")]
Clip = Annotated[bool, typer.Option("--clip", help="cut prompts that are too long for the model")]
DeterministicShare = Annotated[float, typer.Option(min=0, max=1, help="of the requests")]
IgnoreEos = Annotated[bool, typer.Option(help="always all of the new tokens")]
VocabSize = Annotated[
    int | None, typer.Option(min=1, help="token ids are below this (default: the model's; 256 where unknown)")
]
Seed = Annotated[int, typer.Option(min=0, help="of times, lengths and prompts")]
TtftMs = Annotated[float | None, typer.Option(help="goodput: the first token within")]
ItlMs = Annotated[float | None, typer.Option(help="goodput: mean time between tokens within")]
GapMs = Annotated[float | None, typer.Option(help="goodput: each time between tokens within")]
GapPercentile = Annotated[
    float, typer.Option(min=0, max=100, help="not each of them, but this percentile of a request's own")
]
E2eMs = Annotated[float | None, typer.Option(help="goodput: the whole answer within")]
Http = Annotated[str | None, typer.Option(metavar="URL", help="ask OpenAI's HTTP API there, not gRPC")]
Out = Annotated[Path | None, typer.Option(help="write the report and all samples to this file")]
Plot = Annotated[Path | None, typer.Option(help="draw them: a .png, .svg or .pdf (needs matplotlib)")]
