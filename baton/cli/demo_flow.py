"""The end of `baton demo` on a terminal: requests come until it is stopped, for whoever opens the live page."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import typer

from baton.cli.access import Reach
from baton.client import Client
from baton.cluster.signals import Stop
from baton.cluster.state_dir import ClusterState
from baton.errors import BatonError
from baton.rpc.channel import from_here

STREAMS = 3
PAUSE_S = 0.3  # between two requests of a stream, on average
LONGEST = 200  # new tokens
PROMPTS = ("The color of dog", "What is the largest ocean?", "The capital of France is", "Mia has a red ball.")


def flow(state: ClusterState, reach: Reach, stop: Stop) -> None:
    """Say where the page is, and send requests until `stop`. What becomes of them, the page shows."""
    typer.echo(f"\nthe live page: http://{from_here(state.http)}/  requests flow until Ctrl-C")
    with ThreadPoolExecutor(STREAMS) as streams:
        for number in range(STREAMS):
            streams.submit(_stream, state, reach, stop, random.Random(number))


def _stream(state: ClusterState, reach: Reach, stop: Stop, draw: random.Random) -> None:
    with Client(from_here(state.grpc), timeout=30.0, token=reach.token, tls=reach.wire) as client:
        while not stop.drain.wait(draw.expovariate(1 / PAUSE_S)):
            try:
                client.generate(draw.choice(PROMPTS), max_tokens=draw.randrange(8, LONGEST), ignore_eos=True)
            except BatonError:
                stop.drain.wait(1.0)
