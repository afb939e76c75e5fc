"""`baton profile --live FILE`: what steps, links and the router of a running cluster cost, for `baton plan`.

Nothing else should load the cluster meanwhile. In rounds, so that what drifts drifts for all alike: prompts of several
lengths one by one; requests of several numbers decoding together; and prompts while others decode. What steps of
prompts take is told by the workers (`Pace`), what decoding takes by the times between tokens, as a client sees them.
"""

from __future__ import annotations

import asyncio
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import typer
from rich.console import Console

from baton.cli.access import find_reach
from baton.cli.connect import Router
from baton.cli.profile_decoding import merged, of_pools, of_workers_alike, piece_of
from baton.cli.up import find_cluster
from baton.client import AsyncClient
from baton.client.types import ClusterStatus, Placement, Timings
from baton.clock import Clock, SystemClock
from baton.cluster.state import StateFolder
from baton.config import ClusterConfig, load_config
from baton.core import Role, WorkerInfo
from baton.errors import ConfigError, NoWorker
from baton.load import Load, Pace
from baton.rpc.channel import from_here
from simulator.profile import Beside, Layout, Line, Link, Profile
from simulator.profile_fit import Gaps, Slower, Steps, fit_joint, fit_line, seconds_of

LENGTHS = (16, 64, 256, 1024, 4096)
ROWS = (1, 2, 4, 8, 16, 32)
DECODED = 48  # tokens of each request that decodes with others
SHORT, LONG = 16, 512
DECODED_LONG = 192  # behind a long prompt: the first of them still decode when the last one is computed
BESIDE = 4  # rows that decode while prompts are computed
LEAST_MODEL_LEN = SHORT + 4 * DECODED  # what decodes beside prompts
SETTLE_S = 10.0
MEMORY_BYTES_PER_S = 25e9  # between workers that nobody has probed: of one process


@dataclass(slots=True)
class Seen:
    """One request: when its tokens came, of the clock that also says when it was `sent`."""

    sent: float
    times: list[float] = field(default_factory=list)
    timings: Timings | None = None
    placement: Placement | None = None


@dataclass(slots=True)
class Measured:
    """All that was seen, over all rounds."""

    prompts: dict[int, Pace] = field(default_factory=dict)
    single: dict[int, list[Seen]] = field(default_factory=dict)
    together: dict[tuple[int, int], list[Gaps]] = field(default_factory=dict)
    busy_prompts: Pace = field(default_factory=Pace)
    busy_gaps: list[Gaps] = field(default_factory=list)
    alone: list[Gaps] = field(default_factory=list)  # of one of several workers that do both; beside prompts: busy_gaps
    joint: Pace = field(default_factory=Pace)
    beside: Pace = field(default_factory=Pace)


def profile_live(router: Router, admin: str | None, out: Path, seconds: float, *, as_json: bool) -> None:
    """Measure for about so long, and write the profile to `out`. Raises NoWorker, ConfigError."""
    running = None if router.target else find_cluster(router.name)
    if running is None and admin is None:
        raise ConfigError("--admin: must be a router's admin address where --target is given")
    reach, address = find_reach(running, router.tls), from_here(running.admin) if running else str(admin)
    status = AsyncClient(address, admin=address, token=reach.token, tls=reach.wire, timeout=10.0)
    tensor_parallel = one_size(load_config(StateFolder(running.name).config)) if running else 1
    live = Live(router.async_client(max_retries=0), status, SystemClock(), Console(stderr=True))
    found = asyncio.run(live.whole(seconds, tensor_parallel, out.stem))
    try:
        out.write_text(found.model_dump_json(indent=1, exclude_defaults=True) + "\n")
    except OSError as error:
        raise ConfigError(f"--live: cannot write {out}: {error}") from error
    typer.echo(json.dumps(found.model_dump()) if as_json else f"kept in {out}; use it: baton plan --profile {out} ...")


def one_size(config: ClusterConfig) -> int:
    """Of all workers: devices of each. Raises ConfigError where pools differ."""
    prefill, decode = config.prefill.tensor_parallel, config.decode.tensor_parallel
    if config.mode != "colocated" and prefill != decode:
        allowed = f"that of decode workers, which is {decode}: one profile is of one size"
        raise ConfigError(f"--live: prefill.tensor_parallel: must be {allowed}, got {prefill}")
    return decode


class Live:
    """Loads one cluster, and reads what its workers report."""

    def __init__(self, client: AsyncClient, status: AsyncClient, clock: Clock, console: Console) -> None:
        self._client, self._status, self._clock, self._console = client, status, clock, console
        self._draw = Random()  # prompts that no cache has seen, in this run or the one before
        self._vocab = 0
        self._several = False  # workers that do both
        self.seen = Measured()

    async def whole(self, seconds: float, tensor_parallel: int, name: str) -> Profile:
        """Rounds for so long, two at least, and the fit."""
        async with self._client, self._status:
            model = (await self._client.models())[0]
            if model.max_model_len < LEAST_MODEL_LEN:
                allowed = f"at least {LEAST_MODEL_LEN} for --live, which decodes that far"
                raise ConfigError(f"max_model_len: must be {allowed}, got {model.max_model_len} of {model.id}")
            self._vocab = model.vocab_size
            lengths = [length for length in LENGTHS if length + DECODED <= model.max_model_len]
            cluster = await self._status.cluster()
            workers = sum(_decodes(worker.info.role, cluster) for worker in cluster.workers)
            if not workers:
                raise NoWorker("no worker is connected")
            self._several = 1 < workers == len(cluster.workers)
            await self._round(lengths[:2], ROWS[:2], workers)  # what is first is slow
            self.seen = Measured()
            end, rounds = self._clock.monotonic() + seconds, 0
            while rounds < 2 or self._clock.monotonic() < end:
                await self._round(lengths, ROWS, workers)
                rounds += 1
                self._console.print(f"round {rounds}", style="dim")
            return fitted(self.seen, await self._status.cluster(), tensor_parallel, name)

    async def _round(self, lengths: Sequence[int], rows: Sequence[int], workers: int) -> None:
        for length in lengths:
            before = await self._paces()
            self.seen.single.setdefault(length, []).extend([await self._request(length, 3) for _ in range(3)])
            self.seen.prompts[length] = _sum(self.seen.prompts.get(length, Pace()), (await self._paces())[0], before[0])
        for count in rows:
            for length in (SHORT, LONG) if count in {rows[0], BESIDE} and lengths[-1] >= LONG else (SHORT,):
                self.seen.together.setdefault((count, length), []).append(await self._rows(count, length, workers))
        await self._both(min(lengths[-1], LONG), workers)
        if self._several:
            self.seen.alone.append(await self._rows(1, SHORT, 1))
            await self._apart(min(lengths[-1], LONG))

    async def _rows(self, count: int, length: int, workers: int) -> Gaps:
        """So many for each decode worker."""
        tokens = DECODED if length == SHORT else DECODED_LONG
        requests = [self._request(length, tokens) for _ in range(count * workers)]
        return together(await asyncio.gather(*requests), count, length)

    async def _both(self, length: int, workers: int) -> None:
        """Prompts one after another for as long as some requests decode."""
        before = await self._paces()
        decoding = asyncio.gather(*(self._request(SHORT, 4 * DECODED) for _ in range(BESIDE * workers)))
        while not decoding.done():
            await self._request(length, 1)
        gaps = together(await decoding, BESIDE, SHORT)
        prompts, joint, beside = await self._paces()
        if not self._several:
            self.seen.busy_gaps.append(gaps)
            self.seen.busy_prompts = _sum(self.seen.busy_prompts, prompts, before[0])
        self.seen.joint = _sum(self.seen.joint, joint, before[1])
        self.seen.beside = _sum(self.seen.beside, beside, before[2])

    async def _apart(self, length: int) -> None:
        """Prompts while another worker decodes one row: the router gives them to one that has nothing to do."""
        before = await self._paces()
        decoding = asyncio.ensure_future(self._request(SHORT, 4 * DECODED))
        while not decoding.done():
            await self._request(length, 1)
        self.seen.busy_gaps.append(together([await decoding], 1, SHORT))
        self.seen.busy_prompts = _sum(self.seen.busy_prompts, (await self._paces())[0], before[0])

    async def _request(self, length: int, tokens: int) -> Seen:
        prompt = [self._draw.randrange(self._vocab) for _ in range(length)]
        seen = Seen(self._clock.monotonic())
        async with self._client.stream(prompt, max_tokens=tokens, temperature=0, ignore_eos=True) as stream:
            async for delta in stream:
                if delta.tokens:
                    seen.times.append(self._clock.monotonic())
            done = await stream.collect()
        seen.timings, seen.placement = done.timings, done.placement
        return seen

    async def _paces(self) -> tuple[Pace, Pace, Pace]:
        """Of all workers since they began: prompts alone, steps of both kinds, and what these decoded. When all is
        reported; requests that this object has sent have ended.
        """
        end, before = self._clock.monotonic() + SETTLE_S, None
        while True:
            cluster = await self._status.cluster()
            loads = [worker.load for worker in cluster.workers]
            if loads == before and not any(load.running for load in loads):
                return _all(loads)
            if self._clock.monotonic() > end:
                raise NoWorker("the cluster has other work: what a step takes cannot be measured beside it")
            before = loads
            await asyncio.sleep(0.05)


def together(seen: Sequence[Seen], rows: int, length: int) -> Gaps:
    """The gaps from when the last of them had begun until the first one ended."""
    begin, end = max(one.times[0] for one in seen), min(one.times[-1] for one in seen)
    kept = [
        later - earlier
        for one in seen
        for earlier, later in zip(one.times[1:], one.times[2:], strict=False)
        if begin <= earlier and later <= end
    ]
    every = kept or [later - earlier for one in seen for earlier, later in zip(one.times, one.times[1:], strict=False)]
    tokens = sum(len(one.times) for one in seen) / len(seen)
    return Gaps(rows, rows * (length + tokens / 2), tuple(every))


def fitted(seen: Measured, cluster: ClusterStatus, tensor_parallel: int, name: str) -> Profile:
    """The profile of what was seen."""
    prompt = fit_line([Steps.of(pace) for pace in seen.prompts.values() if pace.steps])
    points = [merged(gaps) for gaps in seen.together.values()]
    busy = merged(seen.busy_gaps)
    decoding = of_workers_alike(points, merged(seen.alone), busy) if seen.alone else of_pools(points, busy)
    busy_prompt = _busy_prompt(prompt, seen.busy_prompts)
    beside = Slower(busy_prompt, decoding.beside_decode.factor) if decoding.beside_decode else Slower()
    worker = _room(cluster)
    layout = Layout(
        tensor_parallel=tensor_parallel,
        kv_tokens=worker.total_blocks * worker.layout.block_size,
        prompt=prompt,
        decode=decoding.pieces,
        joint_extra_s=fit_joint(prompt, piece_of(decoding.pieces, BESIDE), seen.joint, seen.beside, beside),
        spread=decoding.spread,
        host_workers=len(cluster.workers),
        busy_prompt=busy_prompt,
        beside_prompts=decoding.beside_prompts,
        beside_decode=decoding.beside_decode,
    )
    speeds = [channel.bytes_per_s for one in cluster.workers for channel in one.load.channels]
    return Profile(
        name=name,
        model=cluster.model,
        hardware=f"{platform.processor() or platform.machine()}, {len(cluster.workers)} workers",
        source=f"baton profile --live, Baton {cluster.version}",
        token_bytes=worker.layout.layers * worker.layout.layer_token_bytes,  # of all ranks
        layers=worker.layout.layers,
        link=Link(bytes_per_s=max(speeds, default=MEMORY_BYTES_PER_S)),
        overheads=_overheads(seen, prompt, seconds_of(piece_of(decoding.pieces, 1), Steps(1, SHORT, 0.0))),
        layouts=(layout,),
    )


def _overheads(seen: Measured, prompt: Line, step_s: float) -> Beside:
    """What is left of the first token beside its step, and of the second beside a decode step: medians."""
    first, second = [], []
    for length, requests in seen.single.items():
        pace = seen.prompts[length]
        computed = pace.seconds / max(len(requests), 1) if pace.steps else seconds_of(prompt, Steps(length, 0.0, 0.0))
        first += [one.times[0] - one.sent - computed for one in requests if one.times]
        second += [one.times[1] - one.times[0] - step_s for one in requests if len(one.times) > 1]
    return Beside(admit_s=max(_median(first), 0.0), commit_s=max(_median(second), 0.0))


def _room(cluster: ClusterStatus) -> WorkerInfo:
    """A worker that decodes: how much KV it holds is what bounds a batch. Raises NoWorker."""
    for worker in cluster.workers:
        if _decodes(worker.info.role, cluster):
            return worker.info
    raise NoWorker("no worker is connected any more")


def _decodes(role: Role, cluster: ClusterStatus) -> bool:
    return role is Role.DECODE or all(worker.info.role is role for worker in cluster.workers)


def _all(loads: Sequence[Load]) -> tuple[Pace, Pace, Pace]:
    prompts = joint = beside = Pace()
    for load in loads:
        prompts = _sum(prompts, load.prefill_pace, Pace())
        joint, beside = _sum(joint, load.joint_pace, Pace()), _sum(beside, load.beside_pace, Pace())
    return prompts, joint, beside


def _sum(so_far: Pace, after: Pace, before: Pace) -> Pace:
    more = after.since(before)
    return Pace(
        so_far.steps + more.steps,
        so_far.tokens + more.tokens,
        so_far.context + more.context,
        so_far.seconds + more.seconds,
    )


def _busy_prompt(prompt: Line, pace: Pace) -> float:
    return max(1.0, pace.seconds / pace.steps / seconds_of(prompt, Steps.of(pace))) if pace.steps else 1.0


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0.0
