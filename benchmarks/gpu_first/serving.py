"""Step 9: a prefill and a decode worker on one GPU, and the gaps of a stream with and without other handoffs."""

from __future__ import annotations

import threading
import time
from statistics import median
from typing import TYPE_CHECKING, Any

from baton.client import Client
from benchmarks.gpu_first.at import At, Outcome, require
from benchmarks.gpu_first.clusters import PROMPT, TEXT, running

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKENS = 400  # of the measured stream
PATIENCE_S = 60.0


def run(at: At) -> Outcome:
    """Measure each transport in a cluster of its own."""
    figures: dict[str, Any] = {}
    for transport in at.size(("cuda_ipc", "gloo"), ("shm",)):
        with running(at, f"transfer.transport={transport}") as state, Client(state.grpc) as client:
            check_answer(client, transport)
            figures[transport] = measured(client, at.size(TOKENS, 100))
    parts = (f"{name}: gap {of['alone_ms']} ms, with handoffs {of['handoffs_ms']} ms" for name, of in figures.items())
    return Outcome("; ".join(parts), figures)


def check_answer(client: Client, transport: str) -> None:
    """Check that the expected text comes over the named transport."""
    answer = client.generate(PROMPT, max_tokens=8, temperature=0)
    require(answer.text == TEXT, f"the answer is {answer.text!r}, not {TEXT!r}")
    used = answer.placement.transport
    require(used == transport, f"the handoff went over {used!r}, not {transport!r}")


def measured(client: Client, tokens: int) -> dict[str, float]:
    """Return median and 99th percentile of the gaps of a stream, alone and while other requests are handed over."""
    alone = list(gaps(client, tokens))
    over, first = threading.Event(), threading.Event()
    count: list[int] = []
    others = threading.Thread(target=_hand_over_until, args=(client, over, first, count), daemon=True)
    others.start()
    require(first.wait(PATIENCE_S), "no other request was handed over")
    before = len(count)
    try:
        crowded = list(gaps(client, tokens))
    finally:
        over.set()
        others.join()
    figures = {"alone_ms": median(alone), "alone_p99_ms": high(alone), "handoffs_ms": median(crowded)}
    figures |= {"handoffs_p99_ms": high(crowded)}
    handoffs = float(len(count) - before)
    return {name: round(value * 1e3, 3) for name, value in figures.items()} | {"handoffs": handoffs}


def gaps(client: Client, tokens: int) -> Iterator[float]:
    """Yield the seconds between the messages of a stream, after its first one."""
    with client.stream(PROMPT, max_tokens=tokens, temperature=0, ignore_eos=True) as stream:
        before = None
        for _ in stream:
            now = time.perf_counter()
            if before is not None:
                yield now - before
            before = now
        require(len(stream.tokens) == tokens, f"{len(stream.tokens)} of {tokens} tokens came")


def high(values: list[float]) -> float:
    """Return the 99th percentile."""
    return sorted(values)[int(0.99 * (len(values) - 1))]


def _hand_over_until(client: Client, over: threading.Event, first: threading.Event, count: list[int]) -> None:
    while not over.is_set():
        number = len(count)
        prompt = [1 + (number * 31 + place * 7) % 2000 for place in range(200)]  # not cached
        client.generate(prompt, max_tokens=2, temperature=0, ignore_eos=True)
        count.append(number)
        first.set()
