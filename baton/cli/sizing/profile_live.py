"""`baton profile --live FILE`: measures steps, links and the router of a running cluster, for `baton plan`.

The cluster should have no other load. Measurements are repeated in rounds, so that drift affects all of them equally:
single prompts of several lengths, groups of decoding requests, and prompts during decoding. Prompt times come from
workers' reports (`Pace`), decode times from the gaps between tokens at the client.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random

import typer
from rich.console import Console

from baton.cli.target import Credentials, Router, find_cluster
from baton.client import AsyncClient
from baton.clock import Clock, SystemClock
from baton.cluster.state_dir import StateFolder
from baton.config import ClusterConfig, load_config
from baton.core import Load, Pace
from baton.errors import ConfigError, NoWorker
from baton.planner.live_fit import BESIDE, SHORT, Gaps, Measured, Prompts, Seen, decodes, fitted, summed, together
from baton.planner.profile import Profile
from baton.rpc.channel import from_here

LENGTHS = (16, 64, 256, 1024, 4096)
ROWS = (1, 2, 4, 8, 16, 32)
DECODED = 48  # tokens of each request that decodes with others
LONG = 512
DECODED_LONG = 192  # after a long prompt, so that the first requests still decode when the last prompt is computed
TRIES = 3  # in each round, to have prompts computed while another worker decodes
LEAST_MODEL_LEN = SHORT + 4 * DECODED  # prompt and tokens of a request that decodes during prompts
SETTLE_S = 10.0


def profile_live(
    router: Router, admin: str | None, out: Path, seconds: float, tensor_parallel: int | None, *, as_json: bool
) -> None:
    """Measure for about `seconds`, and write the profile to `out`. `admin` and `tensor_parallel` are those of a cluster
    at `router.target`. Raises NoWorker, ConfigError.
    """
    running = None if router.target else find_cluster(router.name)
    if running is None and admin is None:
        raise ConfigError("--admin: must be a router's admin address where --target is given")
    if (running is None) != (tensor_parallel is not None):
        text = "the devices of each worker where --target is given, because the plan counts them, and else left out"
        raise ConfigError(f"--tensor-parallel: must be {text}")
    given, address = Credentials.find(running, router.tls), from_here(running.admin) if running else str(admin)
    status = AsyncClient(address, admin=address, token=given.token, tls=given.wire, timeout=10.0)
    size = tensor_parallel or one_size(load_config(StateFolder(str(running and running.name)).config))
    live = Live(router.async_client(max_retries=0), status, SystemClock(), Console(stderr=True))
    found = asyncio.run(live.whole(seconds, size, out.stem))
    try:
        out.write_text(found.model_dump_json(indent=1, exclude_defaults=True) + "\n")
    except OSError as error:
        raise ConfigError(f"--live: cannot write {out}: {error}") from error
    typer.echo(json.dumps(found.model_dump()) if as_json else f"kept in {out}; use it: baton plan --profile {out} ...")


def one_size(config: ClusterConfig) -> int:
    """Return the number of devices of each worker. Raises ConfigError if pools differ."""
    prefill, decode = config.prefill.tensor_parallel, config.decode.tensor_parallel
    if config.mode != "colocated" and prefill != decode:
        allowed = f"that of decode workers, which is {decode}: one profile is of one size"
        raise ConfigError(f"--live: prefill.tensor_parallel: must be {allowed}, got {prefill}")
    return decode


class Live:
    """Loads a cluster and reads its workers' reports."""

    def __init__(self, client: AsyncClient, status: AsyncClient, clock: Clock, console: Console) -> None:
        self._client, self._status, self._clock, self._console = client, status, clock, console
        self._draw = Random()  # unseeded, so that no cache has the prompts of an earlier run
        self._vocab = 0
        self._several = False  # several workers, each with both roles
        self.seen = Measured()

    async def whole(self, seconds: float, tensor_parallel: int, name: str) -> Profile:
        """Run rounds for `seconds`, at least two, and return the fitted profile."""
        async with self._client, self._status:
            model = (await self._client.models())[0]
            if model.max_model_len < LEAST_MODEL_LEN:
                allowed = f"at least {LEAST_MODEL_LEN} for --live, which decodes that far"
                raise ConfigError(f"max_model_len: must be {allowed}, got {model.max_model_len} of {model.id}")
            self._vocab = model.vocab_size
            lengths = [length for length in LENGTHS if length + DECODED <= model.max_model_len]
            cluster = await self._status.cluster()
            workers = sum(decodes(worker.info.role, cluster) for worker in cluster.workers)
            if not workers:
                raise NoWorker("no worker is connected")
            self._several = 1 < workers == len(cluster.workers)
            await self._round(lengths[:2], ROWS[:2], workers)  # warmup
            self.seen = Measured()
            end, rounds = self._clock.monotonic() + seconds, 0
            while rounds < 2 or self._clock.monotonic() < end:
                await self._round(lengths, ROWS, workers)
                rounds += 1
                self._console.print(f"round {rounds}", style="dim")
            kept = self.seen.undisturbed()
            self._warn(kept)
            return fitted(kept, await self._status.cluster(), tensor_parallel, name)

    def _warn(self, kept: Measured) -> None:
        if left := self.seen.parts - kept.parts:
            text = f"left out {left} of {self.seen.parts} measurements: they took longer than in the other rounds"
            self._console.print(f"{text}; the machine may have had other work", style="yellow")
        if self._several and not kept.busy:
            text = "no prompt was computed by an idle worker next to one that decodes"
            self._console.print(f"{text}; beside_prompts equals beside_decode", style="yellow")

    async def _round(self, lengths: Sequence[int], rows: Sequence[int], workers: int) -> None:
        for length in lengths:
            before = (await self._paces())[0]
            seen = [await self._request(length, 3) for _ in range(3)]
            computed = (await self._paces())[0].since(before)
            self.seen.single.setdefault(length, []).append(Prompts(length, tuple(seen), computed))
        for count in rows:
            for length in (SHORT, LONG) if count in {rows[0], BESIDE} and lengths[-1] >= LONG else (SHORT,):
                self.seen.together.setdefault((count, length), []).append(await self._rows(count, length, workers))
        await self._both(min(lengths[-1], LONG), workers)
        if self._several:
            self.seen.alone.append(await self._rows(1, SHORT, 1))
            await self._apart(min(lengths[-1], LONG))

    async def _rows(self, count: int, length: int, workers: int) -> Gaps:
        tokens = DECODED if length == SHORT else DECODED_LONG
        requests = [self._request(length, tokens) for _ in range(count * workers)]
        return together(await asyncio.gather(*requests), count, length)

    async def _both(self, length: int, workers: int) -> None:
        before = await self._paces()
        decoding = asyncio.gather(*(self._request(SHORT, 4 * DECODED) for _ in range(BESIDE * workers)))
        while not decoding.done():
            await self._request(length, 1)
        gaps = together(await decoding, BESIDE, SHORT)
        prompts, joint, beside = await self._paces()
        if not self._several:
            self.seen.busy.append(gaps)
            self.seen.busy_prompts.append(prompts.since(before[0]))
        self.seen.joint = summed(self.seen.joint, joint.since(before[1]))
        self.seen.beside = summed(self.seen.beside, beside.since(before[2]))

    async def _apart(self, length: int) -> None:
        """Send prompts while another worker decodes one sequence. The router prefers an idle worker unless it expects
        it to exceed the SLO's ITL. Prompts on the decoding worker are discarded: they show no effect between workers.
        """
        for _ in range(TRIES):
            before, prompts = (await self._paces())[0], list[Seen]()
            decoding = asyncio.ensure_future(self._request(SHORT, 4 * DECODED))
            while not decoding.done():
                prompts.append(await self._request(length, 1))
            row = await decoding
            computed = (await self._paces())[0].since(before)
            if prompts and row.worker not in {one.worker for one in prompts}:
                self.seen.busy.append(together([row], 1, SHORT))
                self.seen.busy_prompts.append(computed)
                return

    async def _request(self, length: int, tokens: int) -> Seen:
        prompt = [self._draw.randrange(self._vocab) for _ in range(length)]
        seen = Seen(self._clock.monotonic())
        async with self._client.stream(prompt, max_tokens=tokens, temperature=0, ignore_eos=True) as stream:
            async for delta in stream:
                if delta.tokens:
                    seen.times.append(self._clock.monotonic())
            done = await stream.collect()
        seen.worker = done.placement.prefill_worker
        return seen

    async def _paces(self) -> tuple[Pace, Pace, Pace]:
        """Wait for idle workers, and return their totals: prompts alone, mixed steps, and the decoding in these."""
        end, before = self._clock.monotonic() + SETTLE_S, None
        while True:
            cluster = await self._status.cluster()
            loads = [worker.load for worker in cluster.workers]
            if loads == before and not any(load.running for load in loads):
                return _all(loads)
            if self._clock.monotonic() > end:
                raise NoWorker("the cluster has other work, so the time of a step cannot be measured")
            before = loads
            await asyncio.sleep(0.05)


def _all(loads: Sequence[Load]) -> tuple[Pace, Pace, Pace]:
    prompts = joint = beside = Pace()
    for load in loads:
        prompts = summed(prompts, load.prefill_pace)
        joint, beside = summed(joint, load.joint_pace), summed(beside, load.beside_pace)
    return prompts, joint, beside
