"""The work of `baton plan`: simulates layouts to find the cheapest pools for a load, or to evaluate one layout, which
`--what-if` describes, such as `prefill=2,decode=1,fault=death:prefill-0@10`.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from baton.bench.lengths import Lengths
from baton.bench.traces import read_trace
from baton.bench.workload import Times
from baton.config import ClusterConfig, load_config
from baton.config.schema import PoolConfig
from baton.engine.kernels.cpu.compiler import LEVEL_VARIABLE
from baton.errors import ConfigError
from baton.logs import configure_logging
from baton.planner.profile import Profile, load_profile
from baton.planner.search import OWN, Answer, Planner, Shape, Site, Tried, Workload, kind
from baton.planner.sim.cluster import simulate
from baton.planner.sim.scenario import Death, Fault, Pool, Router, Slo, Slow, SlowLink

COLUMNS = ("pools", "GPUs", "requests/s", "good", "TTFT p50", "p99 ms", "ITL p50", "p99 ms", "busy P", "D", "tried as")
BUSY = "busy: share of the time in which a worker computes, which a decode worker does whenever it has one request"
POISSON = "poisson"  # default arrivals


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options. `rate` and the goals are None if the trace or the cluster file gives them."""

    profile: str
    rate: float | None
    prompt_tokens: str
    max_tokens: str | None
    trace: Path | None
    scale: float
    every: int
    times: str
    requests: int
    ttft_ms: float | None
    itl_ms: float | None
    attainment: float
    gpus: int
    what_if: str | None
    seed: int
    config: Path | None
    sets: tuple[str, ...]


def print_plan(options: PlanOptions, *, as_json: bool) -> None:
    """Print the plan, or one layout's report. Raises ConfigError."""
    configure_logging("error", "auto")  # because logs of simulated workers are useless
    if not 0 < options.attainment <= 1:
        raise ConfigError(f"--attainment: must be a share above 0 and at most 1, got {options.attainment:g}")
    if options.sets and options.config is None:
        raise ConfigError(f"--set: must be left out without -c, whose file it changes, got {options.sets[0]!r}")
    config = load_config(options.config, options.sets, os.environ) if options.config else None
    site, workload = _site(options, config), _workload(options)
    rate = _rate(options, workload)
    if options.what_if is not None:
        _what_if(options, site, workload, rate, _own_shape(config), as_json=as_json)
        return
    progress = Console(stderr=True)
    planner = Planner(simulate, site, workload, options.attainment, options.gpus)
    if not as_json and progress.is_terminal:
        planner = replace(planner, on_tried=lambda tried: progress.print(f"simulated {tried.shape}", style="dim"))
    if config is not None:
        _try_own(planner, _own_shape(config), rate)
    answer = planner.plan(rate)
    if as_json:
        typer.echo(json.dumps(_plain(answer, site)))
        return
    profile = site.profile
    hardware = f"{profile.hardware}, {profile.kind}" if profile.kind else profile.hardware
    typer.echo("\n".join(verdict(answer, options.gpus, options.attainment)) + "\n")
    _show(answer)
    typer.echo(f"{BUSY}\n\n{profile.name}: {profile.model} on {hardware}\nsource: {profile.source}")


def _try_own(planner: Planner, own: Shape, rate: float) -> None:
    profile = planner.site.profile
    sizes = {own.prefill_tp, own.decode_tp} if own.prefill else {own.decode_tp}
    if sizes <= set(profile.sizes):
        planner.attempt(own, rate, OWN)
        return
    known = ", ".join(map(str, profile.sizes))
    typer.echo(f"not tried: the file's layout {own}, because profile {profile.name} has only tp {known}", err=True)


def _what_if(options: PlanOptions, site: Site, workload: Workload, rate: float, own: Shape, *, as_json: bool) -> None:
    what = parse_what_if(options.what_if or "", own)
    site = replace(site, faults=what.faults)
    shape = what.shape
    if not (shape.prefill or shape.chunk):
        shape = replace(shape, chunk=site.decode.max_batched_tokens)  # the simulation's default
    planner = Planner(simulate, site, workload, options.attainment)
    tried = planner.attempt(shape, rate * what.scale, "what if")
    if as_json:
        found = {"shape": asdict(shape), "gpus": shape.gpus, "rate": tried.rate, "met": tried.met}
        typer.echo(json.dumps(found | {"report": tried.report.as_dict()}))
        return
    typer.echo(f"{shape}: {shape.gpus} GPUs, {tried.rate:g} requests/s\n")
    typer.echo(tried.report.table())


def _workload(options: PlanOptions) -> Workload:
    if options.trace is None and options.scale != 1:
        raise ConfigError(f"--scale: must be left out without a trace, whose lengths it divides, got {options.scale:g}")
    if options.trace is None and options.every != 1:
        raise ConfigError(f"--every: must be left out without a trace, got {options.every}")
    trace = read_trace(options.trace, scale=options.scale, every=options.every) if options.trace else None
    if trace is not None and any(isinstance(one.prompt, str) for one in trace.arrivals):
        allowed = "prompt_tokens or token ids in all requests, because the tokenizer is unknown"
        raise ConfigError(f"--trace: must have {allowed}, got text in {options.trace}")
    lengths = Lengths.parse(options.prompt_tokens, options.max_tokens)
    Times.parse(options.times, 1.0)  # invalid values are rejected even if they are not used
    workload = Workload(lengths, options.times, trace, options.requests, options.seed)
    if workload.own_rate is not None and options.times != POISSON:
        raise ConfigError(f"--arrivals: must be left out with a trace that has times, got {options.times!r}")
    return workload


def _rate(options: PlanOptions, workload: Workload) -> float:
    rate = options.rate if options.rate is not None else workload.own_rate
    if rate is None:
        raise ConfigError("--rate: must be given, in requests per second, without a trace that has times")
    if not 0 < rate < math.inf:
        raise ConfigError(f"--rate: must be requests per second, a number above 0, got {rate:g}")
    return rate


def _site(options: PlanOptions, config: ClusterConfig | None) -> Site:
    """Combine the workers, router and goals of the cluster file with the options, which take precedence."""
    site = Site(load_profile(options.profile), seed=options.seed)
    if config is not None:
        _check_kind(site.profile, config, os.environ)
    goals = Slo(config.slo.ttft_ms / 1e3, config.slo.itl_ms / 1e3) if config is not None else site.slo
    if config is not None:
        decode = _pool(config.decode)
        prefill = replace(_pool(config.prefill), block_size=decode.block_size)  # simulated pools have equal blocks
        site = replace(site, prefill=prefill, decode=decode, router=_router(config))
    for name, value in (("ttft_ms", options.ttft_ms), ("itl_ms", options.itl_ms)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')}: must be milliseconds, a number above 0, got {value:g}")
    ttft_s = options.ttft_ms / 1e3 if options.ttft_ms is not None else goals.ttft_s
    itl_s = options.itl_ms / 1e3 if options.itl_ms is not None else goals.itl_s
    return replace(site, slo=replace(goals, ttft_s=ttft_s, itl_s=itl_s))


def _check_kind(profile: Profile, config: ClusterConfig, environ: Mapping[str, str]) -> None:
    """Raise ConfigError for a profile of workers with other kernels or weights than those of the cluster file. `auto`
    and a level that is not forced fit any profile, because another machine may resolve them.
    """
    level = environ.get(LEVEL_VARIABLE) or "native"
    wanted = {"level": level, "dtype": config.model.dtype, "quantize": config.model.quantize}
    measured = {"level": profile.level, "dtype": profile.dtype, "quantize": profile.quantize}
    for key, value in wanted.items():
        if measured[key] and value not in {measured[key], "auto", "native"}:
            has = f"{profile.name} has {key} {measured[key]}"
            raise ConfigError(f"--profile: {has}, but workers of the file have {key} {value}; measure them anew")


def _pool(config: PoolConfig) -> Pool:
    block_size = 16 if config.block_size == "auto" else config.block_size
    return Pool(
        0, block_size=block_size, max_batched_tokens=config.max_batched_tokens,
        max_running=config.max_running, prefix_cache=config.prefix_cache,
    )  # fmt: skip


def _router(config: ClusterConfig) -> Router:
    router, queue = config.router, config.router.queue
    limits = (queue.max_requests, queue.max_tokens, queue.max_wait_s)
    return Router(router.policy, router.local_prefill == "auto", *limits, attempts=config.retry.attempts)


def _own_shape(config: ClusterConfig | None) -> Shape:
    if config is None:
        return Shape(1, 1)
    decode, prefill = config.decode, config.prefill
    if config.mode == "colocated":
        return Shape(decode.replicas, decode_tp=decode.tensor_parallel, chunk=decode.max_batched_tokens)
    return Shape(decode.replicas, prefill.replicas, decode.tensor_parallel, prefill.tensor_parallel)


def _show(answer: Answer) -> None:
    table = Table(*COLUMNS, box=None, pad_edge=False)
    for tried in answer.tried:
        if tried.why != "goodput":
            chosen = tried is answer.disaggregated or tried is answer.colocated
            table.add_row(*_row(tried), style="bold" if chosen else None)
    Console(width=None if Console().is_terminal else 200).print(table)


def _row(tried: Tried) -> tuple[str, ...]:
    report = tried.report
    times = (report.ttft.p50, report.ttft.p99, report.itl.p50, report.itl.p99)
    busy = f"{report.prefill.busy:.0%}" if tried.shape.prefill else "-"
    return (
        str(tried.shape),
        str(tried.shape.gpus),
        f"{tried.rate:g}",
        f"{report.attainment:.1%}{' met' if tried.met else ''}",
        *(f"{value * 1e3:.1f}" for value in times),
        busy,
        f"{report.decode.busy:.0%}",
        tried.why,
    )


def verdict(answer: Answer, gpus: int, attainment: float) -> list[str]:
    """Return whether disaggregation pays, and then the best layout of each kind."""
    lines = []
    for one in (answer.disaggregated, answer.colocated):
        if one is not None:
            each, most = answer.goodput[kind(one.shape)], "up to"
            if kind(one.shape) in answer.at_least:
                most = "with so few requests no limit was found, at least"
            lines.append(f"{one.shape}: {one.shape.gpus} GPUs; {most} {each:.3g} requests/s for each GPU")
    best, apart, together = answer.best, answer.disaggregated, answer.colocated
    if best is None:
        return [f"no layout of up to {gpus} GPUs keeps {attainment:.0%} of requests within the goal", *lines]
    if together is None:
        return ["disaggregation pays: colocated workers do not meet the goal within these GPUs", *lines]
    if apart is None:
        return ["disaggregation does not pay: it does not meet the goal within these GPUs", *lines]
    pays = "disaggregation pays" if best is apart else "disaggregation does not pay here"
    lines.insert(0, f"{pays}: {apart.shape.gpus} GPUs against {together.shape.gpus}")
    if answer.at_least:
        return lines
    ratio = answer.goodput["disaggregated"] / answer.goodput["colocated"]
    but = " (at this load it is still cheaper)" if ratio < 1 and best is apart else ""
    return [*lines, f"at full load, it has {ratio:.2f} times the goodput of colocated workers for each GPU{but}"]


def _plain(answer: Answer, site: Site) -> dict[str, object]:
    def of(tried: Tried | None) -> dict[str, object] | None:
        if tried is None:
            return None
        shape = asdict(tried.shape) | {"gpus": tried.shape.gpus, "kind": kind(tried.shape)}
        return shape | {"rate": tried.rate, "met": tried.met, "why": tried.why, "report": tried.report.as_dict()}

    return {
        "profile": site.profile.name,
        "source": site.profile.source,
        "rate": answer.rate,
        "slo": asdict(site.slo),
        "best": of(answer.best),
        "disaggregated": of(answer.disaggregated),
        "colocated": of(answer.colocated),
        "goodput_per_gpu": answer.goodput,
        "goodput_at_least": sorted(answer.at_least),
        "tried": [of(tried) for tried in answer.tried],
    }


KEYS = ("prefill", "decode", "colocated", "prefill_tp", "decode_tp", "tp", "chunk", "workers", "fault")
_FAULT = re.compile(r"(death|slow|link):([a-z0-9-]*)@([0-9.]+)(?:-([0-9.]+)x([0-9.]+))?")
_ALLOWED = "death:WORKER@SECONDS, slow:WORKER@FROM-UNTILxFACTOR or link:WORKER@FROM-UNTILxFACTOR"


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One layout with faults. `scale`: factor of the load, if `workers` scaled the pools."""

    shape: Shape
    faults: tuple[Fault, ...] = ()
    scale: float = 1.0


def parse_what_if(text: str, like: Shape) -> WhatIf:
    """Parse a layout; missing keys come from `like`. Raises ConfigError with key, value and allowed values."""
    numbers: dict[str, int] = {}
    faults = []
    for part in text.split(","):
        key, found, value = part.strip().partition("=")
        if not found or key not in KEYS:
            raise ConfigError(f"--what-if: must be KEY=VALUE,... with {', '.join(KEYS)}, got {part!r}")
        if key == "fault":
            faults.append(_fault(value))
        else:
            numbers[key] = _whole(key, value)
    if "colocated" in numbers and numbers.keys() & {"prefill", "decode", "prefill_tp"}:
        raise ConfigError(f"--what-if: colocated: must be given without prefill, decode and prefill_tp, got {text!r}")
    shape = _shape(numbers, like)
    _check(numbers, shape)
    if "workers" not in numbers:
        return WhatIf(shape, tuple(faults))
    large = shape.of(numbers["workers"])
    return WhatIf(large, tuple(faults), (large.prefill + large.decode) / (shape.prefill + shape.decode))


def _shape(numbers: dict[str, int], like: Shape) -> Shape:
    tp = numbers.get("tp")
    decode_tp = numbers.get("decode_tp", tp or like.decode_tp)
    if "colocated" in numbers or (not like.prefill and "prefill" not in numbers):
        workers = numbers.get("colocated", numbers.get("decode", like.decode))
        return Shape(workers, decode_tp=decode_tp, chunk=numbers.get("chunk", like.chunk))
    prefill = numbers.get("prefill", like.prefill)
    prefill_tp = numbers.get("prefill_tp", tp or like.prefill_tp)
    return Shape(numbers.get("decode", like.decode), prefill, decode_tp, prefill_tp)


def _check(numbers: dict[str, int], shape: Shape) -> None:
    """Raise ConfigError for a key that such a layout does not have."""
    if shape.prefill and "chunk" in numbers:
        chunk = numbers["chunk"]
        raise ConfigError(f"--what-if: chunk: must be left out without colocated workers, got {chunk}")
    if not shape.prefill and "prefill_tp" in numbers:
        tp = numbers["prefill_tp"]
        raise ConfigError(f"--what-if: prefill_tp: must be left out, colocated workers have decode_tp, got {tp}")
    if shape.prefill and numbers.get("workers") == 1:
        raise ConfigError("--what-if: workers: must be 2 or more, one that prefills and one that decodes, got 1")


def _whole(key: str, value: str) -> int:
    if not (value.isascii() and value.isdigit()) or int(value) < 1:
        raise ConfigError(f"--what-if: {key}: must be a whole number above 0, got {value!r}")
    return int(value)


def _fault(text: str) -> Fault:
    match = _FAULT.fullmatch(text)
    try:
        kind, worker, *times = match.groups() if match else ("", "", "", "", "")
        at_s, until_s, factor = (float(time) if time else math.nan for time in times)
    except ValueError:
        kind = ""
    if kind == "death" and worker and math.isnan(until_s):
        return Death(at_s, worker)
    if kind not in {"slow", "link"} or not at_s < until_s or not factor > 0 or (kind == "slow" and not worker):
        raise ConfigError(f"--what-if: fault: must be {_ALLOWED}, got {text!r}")
    return Slow(at_s, until_s, worker, factor) if kind == "slow" else SlowLink(at_s, until_s, worker, factor)
