"""Latency of short prompts with `router.local_prefill` never and auto.

    python benchmarks/local_prefill.py --quick         about a minute on 2 cores
    python benchmarks/local_prefill.py                 more rounds: about 3 minutes
    python benchmarks/local_prefill.py --write-docs    the section in docs/measurements/local-prefill.md from it

Two clusters of plain processes on the demo model, each with one prefill and one decode worker, differ only in that
setting. They take turns in a random order, and the other one is idle. While a few long streams run, requests arrive
with 8 to 512 uncached tokens: whole prompts (*new*), and continuations of an answered prompt of 256 tokens (*turn*).
They arrive one at a time and in bursts. Figures are medians over the rounds: of the median TTFT, and of the 95th
percentile gap of the long streams. The machine is noisy, so the result is the ratio of the two modes within a round:
its median, and its 95 % confidence interval by the sign test, which assumes only independent rounds and needs six of
them. A case is slower beyond the noise if its whole interval is above 1.05. The output ends with these cases. The last
line of stdout is one JSON object with the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/local_prefill.py`

from baton.cluster.state_dir import ClusterState
from baton.rpc.channel import PUBLIC, aio_channel
from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import inference_pb2 as pb
from baton.rpc.v1.inference_pb2_grpc import InferenceStub
from benchmarks.lib.cluster import cluster
from benchmarks.lib.machine import machine
from benchmarks.lib.protocol import ROOT
from benchmarks.lib.report import fill, markdown

NAME = "local-prefill"
MODES = ("never", "auto")
SIZES = (8, 32, 128, 512)  # uncached tokens
EARLIER, ANSWER = 256, 8  # tokens
STREAMS, BURST = 4, 6
SLOWER = 1.05  # times as long; smaller ratios are negligible
VOCAB = 2048
SETS = (
    "model.path=models/demo",
    "decode.kv_memory=256MiB",
    "prefill.kv_memory=256MiB",
)


class Case(NamedTuple):
    """`new` uncached tokens, after a cached turn or not, in `at_once` concurrent requests."""

    turn: bool
    new: int
    at_once: int

    def __str__(self) -> str:
        how = "one" if self.at_once == 1 else f"{self.at_once} at once"
        return f"{'turn' if self.turn else 'new'}, {self.new} tokens, {how}"


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds of a request to its first token, and from there to the second. `alone`: one worker did both phases."""

    ttft_s: float
    second_s: float
    alone: bool


@dataclass(slots=True)
class Round:
    """One round of one mode: samples by case, and the gaps of the long streams in seconds."""

    samples: dict[Case, list[Sample]]
    gaps: dict[Case, list[float]]


def cases(at_once: Sequence[int] = (1, BURST)) -> list[Case]:
    """Return the cases in the order of the table."""
    return [Case(turn, new, count) for count in at_once for turn in (False, True) for new in SIZES]


class Client:
    """Requests to one cluster. `rng` draws prompts that never repeat."""

    def __init__(self, stub: Any, rng: random.Random) -> None:
        self._stub, self._rng = stub, rng

    def draw(self, tokens: int) -> list[int]:
        return [self._rng.randrange(1, VOCAB) for _ in range(tokens)]

    async def ask(self, ids: Sequence[int], tokens: int) -> tuple[Sample, list[int]]:
        """Send one request. Returns its sample and the tokens of its answer."""
        began, times, answer, alone = time.perf_counter(), list[float](), list[int](), False
        async for event in self._stub.Generate(_request(ids, tokens)):
            times += [time.perf_counter()] * len(event.tokens.ids)
            answer += event.tokens.ids
            placement = event.completed.placement
            alone = alone or (event.HasField("completed") and placement.prefill_worker == placement.decode_worker)
        return Sample(times[0] - began, times[1] - times[0], alone), answer

    async def prompt(self, case: Case) -> list[int]:
        """Return a prompt for `case`. The earlier part of a turn is sent first."""
        if not case.turn:
            return self.draw(case.new)
        earlier = self.draw(EARLIER)
        _, answer = await self.ask(earlier, ANSWER)
        return earlier + answer + self.draw(case.new)

    async def measure(self, case: Case) -> list[Sample]:
        prompts = [await self.prompt(case) for _ in range(case.at_once)]
        return [sample for sample, _ in await asyncio.gather(*(self.ask(ids, 4) for ids in prompts))]

    async def stream(self, gaps: list[tuple[float, float]]) -> None:
        """Request long answers until cancelled, and record the time of each token and its gap."""
        while True:
            last = None
            async for event in self._stub.Generate(_request(self.draw(32), 1024)):
                now = time.perf_counter()
                if last is not None and event.tokens.ids:
                    gaps.append((now, (now - last) / len(event.tokens.ids)))
                last = now if event.tokens.ids else last


def _request(ids: Sequence[int], tokens: int) -> pb.GenerateRequest:
    sampling = common_pb2.Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True, seed=1)
    return pb.GenerateRequest(token_ids=common_pb2.TokenIds(ids=ids), sampling=sampling)


@contextlib.asynccontextmanager
async def streaming(client: Client, gaps: list[tuple[float, float]]) -> AsyncIterator[None]:
    """Run long streams. Enters when all have begun."""
    tasks = [asyncio.create_task(client.stream(gaps)) for _ in range(STREAMS)]
    while len(gaps) < 16 * STREAMS:  # noqa: ASYNC110  (nothing to wait for: they run in this loop)
        await asyncio.sleep(0.05)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def one_round(state: ClusterState, seed: int, repeats: int) -> Round:
    """Measure all cases in a random order."""
    found = Round(defaultdict(list), defaultdict(list))
    rng = random.Random(seed)
    gaps: list[tuple[float, float]] = []
    async with aio_channel(state.grpc, link=PUBLIC) as channel:
        client = Client(InferenceStub(channel), rng)
        async with streaming(client, gaps):
            for case in rng.sample([case for case in cases() for _ in range(repeats)], repeats * len(cases())):
                began = time.perf_counter()
                found.samples[case] += await client.measure(case)
                found.gaps[case] += [gap for at, gap in gaps if at >= began]
    return found


@contextlib.contextmanager
def clusters() -> Iterator[dict[str, ClusterState]]:
    """Run one cluster per mode."""
    with contextlib.ExitStack() as stack:
        yield {
            mode: stack.enter_context(cluster(f"{NAME}-{mode}", *SETS, f"router.local_prefill={mode}"))
            for mode in MODES
        }


def measure(rounds: int, repeats: int) -> dict[str, list[Round]]:
    """Return the rounds of each mode, without the first, in which the router learns costs."""
    found: dict[str, list[Round]] = {mode: [] for mode in MODES}
    order = random.Random(0)
    with clusters() as states:
        for number in range(rounds + 1):
            for mode in order.sample(MODES, len(MODES)):
                found[mode].append(asyncio.run(one_round(states[mode], seed=number, repeats=repeats)))
                print(f"round {number} of {rounds}: {mode}", file=sys.stderr, flush=True)
    return {mode: kept[1:] for mode, kept in found.items()}


def row(case: Case, rounds: Sequence[Round]) -> dict[str, float]:
    """Return times in milliseconds, and the share of prompts computed at the decode worker."""
    samples = [one.samples[case] for one in rounds]
    return {
        "ttft_p50_ms": median(median(sample.ttft_s for sample in part) for part in samples) * 1e3,
        "second_p50_ms": median(median(sample.second_s for sample in part) for part in samples) * 1e3,
        "itl_p95_ms": median(quantiles(one.gaps[case], n=20)[18] for one in rounds if len(one.gaps[case]) > 1) * 1e3,
        "alone": sum(sample.alone for part in samples for sample in part) / sum(map(len, samples)),
    }


def ratio(case: Case, found: dict[str, list[Round]]) -> dict[str, float]:
    """Return the TTFT ratio of `auto` to `never` within rounds: the median and its interval."""
    never, auto = ([median(sample.ttft_s for sample in one.samples[case]) for one in found[mode]] for mode in MODES)
    ratios = sorted(right / left for left, right in zip(never, auto, strict=True))
    outside = sign_interval(len(ratios))
    return {"ratio": median(ratios), "ratio_low": ratios[outside], "ratio_high": ratios[-1 - outside]}


def sign_interval(count: int, risk: float = 0.05) -> int:
    """Return how many of `count` sorted values to drop per end for a confidence interval. 0 may mean too few."""
    tail, outside = 0.5**count, 0
    while tail + math.comb(count, outside + 1) * 0.5**count <= risk / 2:
        outside += 1
        tail += math.comb(count, outside) * 0.5**count
    return outside


def slower(figures: dict[str, dict[str, float]]) -> list[str]:
    """Return the cases that are slower with `auto` beyond the noise."""
    return [case for case, value in figures.items() if value["ratio_low"] > SLOWER]


def table(found: dict[str, list[Round]]) -> tuple[str, dict[str, dict[str, float]]]:
    """Return the table and the figures."""
    rows, figures = [], {}
    for case in cases():
        never, auto = (row(case, found[mode]) for mode in MODES)
        both = ("never", never), ("auto", auto)
        figures[str(case)] = {f"{name}_{mode}": round(value[name], 3) for mode, value in both for name in value}
        compared = ratio(case, found)
        figures[str(case)] |= {name: round(value, 3) for name, value in compared.items()}
        pairs = [f"{never[name]:.1f} / {auto[name]:.1f}" for name in ("ttft_p50_ms", "second_p50_ms", "itl_p95_ms")]
        pairs.insert(1, "{ratio:.2f} ({ratio_low:.2f} to {ratio_high:.2f})".format(**compared))
        rows.append([str(case), *pairs, f"{auto['alone']:.0%}"])
    header = ["never / auto, ms", "TTFT p50", "ratio", "first to second token p50", "ITL p95 of the long streams"]
    return markdown([*header, "computed at the decode worker (auto)"], rows), figures


def main(argv: list[str]) -> None:
    """Measure, print, and fill the section of the page if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: about a minute")
    parser.add_argument("--rounds", type=int, help="of both modes, after one that is thrown away")
    parser.add_argument("--repeats", type=int, default=2, help="of each case in a round")
    parser.add_argument("--write-docs", action="store_true", help="put the table into docs/measurements/")
    args = parser.parse_args(argv)
    loads = [os.getloadavg()[0]]
    found = measure(args.rounds or (6 if args.quick else 20), args.repeats)
    shown, figures = table(found)
    shown += f"\n\nslower with `auto` beyond the noise: {', '.join(slower(figures)) or 'none'}"
    print(shown)
    if args.write_docs:
        page = ROOT / "docs" / "measurements" / "local-prefill.md"
        date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        facts = [f"- date: {date}", f"- command: python benchmarks/local_prefill.py {shlex.join(argv)}"]
        facts += [f"- load before: {loads[0]:.1f}"]
        facts += [f"- {name}: {value}" for name, value in machine().items()]
        page.write_text(fill(page.read_text(), "\n".join([*facts, "", shown]), NAME))
    print(json.dumps({"benchmark": NAME, "figures": figures}))


if __name__ == "__main__":
    main(sys.argv[1:])
