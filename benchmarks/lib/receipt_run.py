"""Receipts of a cluster under deaths of its processes, and their replay by `baton replay`."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from baton.client import AsyncClient
from baton.errors import BatonError, EngineFault
from baton.receipts.form import with_prompt
from baton.tokenizer import load_tokenizer
from benchmarks.lib.protocol import ROOT
from tests.support.time_factor import scaled
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster_process import ClusterProcess

MODEL, PROMPTS = ROOT / "models/demo", ROOT / "models/heldout.jsonl"
SETS = ("model.path=models/demo", "decode.replicas=2", "router.policy=round_robin", "router.queue.max_wait_s=60")
VICTIMS = ("decode-0", "prefill-0", "decode-1", "router")
RUNNING = 6  # concurrent requests
TRIES = 20  # of a request that loses two workers, which ends it
READY_S = 120.0
EOS = 0


@dataclass
class Collected:
    """The receipts of a run as JSON lines, and counts of its deaths."""

    lines: list[str] = field(default_factory=list)
    killed: Counter[str] = field(default_factory=Counter)
    again: int = 0  # answers that another worker continued
    resumed: int = 0  # streams that were resumed at a router
    failed: int = 0  # requests that ended with an error, and were sent again
    undone: int = 0  # deaths after which all processes are back
    over: bool = False  # no more deaths


def options_of(rng: random.Random) -> dict[str, Any]:
    """Draw the parameters of a request: sampling, penalties, ends, choices and formats."""
    asked: dict[str, Any] = {"max_tokens": rng.randrange(4, 64), "temperature": rng.choice((0.0, 0.7, 1.0, 1.4))}
    asked |= rng.choice(({}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {"top_p": 0.95, "top_k": 50}))
    asked |= rng.choice(({}, {}, {"seed": rng.randrange(2**63)}))
    asked |= rng.choice(({}, {}, {"presence_penalty": 0.5}, {"repetition_penalty": 1.1}, {"frequency_penalty": 0.3}))
    asked |= rng.choice(({}, {"stop": ["."]}, {"logit_bias": {EOS: -100.0}}, {"n": 2}, {"regex": "[a-z ]{8,40}\\."}))
    return asked | rng.choice(({}, {"logprobs": 3}))


def collect(cluster: ClusterProcess, count: int, deaths: int, seed: int) -> Collected:
    """Take `count` receipts while `deaths` processes are killed, one after the other."""
    return asyncio.run(_collect(cluster, count, deaths, seed))


async def _collect(cluster: ClusterProcess, count: int, deaths: int, seed: int) -> Collected:
    found, rng, tokenizer = Collected(), random.Random(seed), load_tokenizer(MODEL)
    prompts = [str(json.loads(line)["prompt"]) for line in PROMPTS.read_text().splitlines()]
    jobs = iter([(tokenizer.encode(rng.choice(prompts)), options_of(rng)) for _ in range(count)])
    client = AsyncClient(cluster.state().grpc, timeout=scaled(120), max_retries=100)
    async with client, asyncio.TaskGroup() as group:
        for _ in range(RUNNING):
            group.create_task(_take(client, jobs, found, count // (deaths + 1)))
        group.create_task(asyncio.to_thread(_strike, cluster, found, count, deaths))
    return found


async def _take(client: AsyncClient, jobs: Any, found: Collected, share: int) -> None:
    """Take receipts, at most `share` more before the next death, so that all deaths meet requests."""
    for ids, asked in jobs:
        while len(found.lines) >= share * (found.undone + 2) and not found.over:  # noqa: ASYNC110 (a thread sets them)
            await asyncio.sleep(0.02)
        for _ in range(TRIES):
            if await _taken(client, ids, asked, found):
                break


async def _taken(client: AsyncClient, ids: list[int], asked: dict[str, Any], found: Collected) -> bool:
    """Take one receipt. Return False if the request failed and can be sent again."""
    try:
        async with client.stream(ids, receipt=True, **asked) as stream:
            answer = await stream.collect()
    except BatonError as error:
        if not (error.retryable or isinstance(error, EngineFault)):
            raise
        found.failed += 1
        return False
    found.lines.append(with_prompt(answer.receipt, ids))
    found.again += answer.placement.attempts > 1
    found.resumed += stream.resumed > 0
    return True


def _strike(cluster: ClusterProcess, found: Collected, count: int, deaths: int) -> None:
    """Kill a process each time that a share of the receipts is there, and wait until all are back."""
    for number, name in zip(range(deaths), itertools.cycle(VICTIMS), strict=False):
        due = count * (number + 1) // (deaths + 1)
        eventually(lambda due=due: len(found.lines) >= due, within_s=3600, every_s=0.01)
        pid = cluster.kill(name)
        found.killed[name.partition("-")[0]] += 1
        print(f"{len(found.lines)} receipts: killed {name}", file=sys.stderr, flush=True)
        cluster.wait_replaced(name, pid, within_s=READY_S)
        eventually(lambda: _all_back(cluster), within_s=READY_S)
        found.undone += 1
    found.over = True


def _all_back(cluster: ClusterProcess) -> bool:
    try:
        return len(cluster.connected()) == 3
    except BatonError:
        return False


def replay(cluster: ClusterProcess, file: Path, public_key: Path) -> dict[str, Any]:
    """Run `baton replay` and return its JSON."""
    options = ("--public-key", public_key, "--name", cluster.name, "--json")
    done = cluster.home.baton("replay", file, *options, timeout=7200)
    if not done.stdout:
        raise RuntimeError(done.stderr)
    return dict(json.loads(done.stdout))
