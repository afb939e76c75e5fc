"""`baton demo`: a cluster on free ports that answers two prompts, and on a terminal a live page with requests."""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import typer

from baton.cli.cluster.launch import host_gpus, prepared, run_cluster
from baton.cli.cluster.phases import shown_phases
from baton.cli.cluster.ports import check_ports
from baton.cli.options import or_shipped
from baton.cli.requests.generate import latency, placed
from baton.cli.target import Credentials
from baton.client import Client
from baton.cluster.signals import Stop
from baton.cluster.state_dir import ClusterState, StateFolder
from baton.config import load_config, located
from baton.core import sizes_text
from baton.engine.kernels.cpu.compiler import cpu_level
from baton.errors import BatonError
from baton.logs import configure_logging
from baton.rpc.channel import from_here

STREAMS = 3
PAUSE_S = 0.3  # between two requests of a stream, on average
LONGEST = 200  # new tokens
PROMPTS = ("The color of dog", "What is the largest ocean?", "The capital of France is", "Mia has a red ball.")
SETS = ("name=demo", "router.local_prefill=never")  # never, because the demo shows the handoff
FREE_PORTS = tuple(f"router.{listener}=127.0.0.1:0" for listener in ("grpc", "admin", "metrics"))


def run_demo(file: Path, sets: Sequence[str], stop: Stop, *, stay: bool) -> None:
    """Run the demo. `stay` adds the live page, with requests until `stop`. Raises BatonError if a part fails."""
    configure_logging("warning", "auto")
    file, model = or_shipped(file)
    http = "router.http=127.0.0.1:0" if stay else "router.http=null"
    sets = [*SETS, *FREE_PORTS, http, *model, *sets]
    config = load_config(file, sets, os.environ)
    cpu_level()  # reject a wrong level now, because each worker would reject it later
    started = time.monotonic()
    asking: list[Future[None]] = []
    credentials = Credentials.of(config)
    parts = "Redis, one router" if config.ray.address == "none" else "Redis, Ray, one router"
    sizes = sizes_text(config.prefill.replicas, config.decode.replicas)
    typer.echo(f"starting {parts}, workers: {sizes}, with {config.model.path} ...", err=True)

    def ready(state: ClusterState) -> None:
        shown()
        typer.echo(f"ready after {time.monotonic() - started:.1f} s\n")
        asking.append(asker.submit(_ask, state, credentials, stop, stay=stay))

    with (
        located(file, sets, os.environ),
        ThreadPoolExecutor(1) as asker,
        tempfile.TemporaryDirectory(prefix="baton-demo-") as home,
    ):
        check_ports(config)
        config = prepared(config, host_gpus(config), stop)  # its output must not meet the phases
        workers = config.prefill.replicas + config.decode.replicas
        folder = StateFolder(config.name, Path(home))
        with shown_phases(folder.logs, workers) as shown:
            run_cluster(config, stop, ready, folder)
    for answered in asking:
        answered.result()


def _ask(state: ClusterState, credentials: Credentials, stop: Stop, *, stay: bool) -> None:
    token, tls = credentials.token, credentials.wire
    try:
        with Client(from_here(state.grpc), admin=from_here(state.admin), timeout=30.0, token=token, tls=tls) as client:
            for prompt in PROMPTS[:2]:
                _show(prompt, client)
            for worker in client.cluster().workers:
                done = f"{worker.load.prefill_tokens} prefill tokens, {worker.load.decode_steps} decode steps"
                typer.echo(f"{worker.info.ref.worker_id:<10} pid {worker.info.pid:<7} {done}")
        if stay:
            _send_until(stop, state, credentials)
    except BatonError:
        stop.check()  # after a stop, the error is not the cluster's
        raise
    finally:
        stop.drain.set()


def _show(prompt: str, client: Client) -> None:
    typer.echo(f"> {prompt}")
    with client.stream(prompt, max_tokens=16, temperature=0.0) as stream:
        for delta in stream:
            typer.echo(delta.text, nl=False)
            sys.stdout.flush()
        done = stream.collect()
    reason = done.finish_reason.value if done.finish_reason else "nothing"
    tokens = f"{done.usage.prompt_tokens} prompt tokens, {len(done.tokens)} new ones, ended by {reason}"
    typer.echo(f"\n  {tokens}\n  {placed(done)}\n  {latency(done)}\n")


def _send_until(stop: Stop, state: ClusterState, credentials: Credentials) -> None:
    """Print the page's address, and send requests until `stop`. Only the page shows their results."""
    typer.echo(f"\nthe live page: http://{from_here(state.http)}/  requests flow until Ctrl-C")
    with ThreadPoolExecutor(STREAMS) as streams:
        for number in range(STREAMS):
            streams.submit(_stream, state, credentials, stop, random.Random(number))


def _stream(state: ClusterState, credentials: Credentials, stop: Stop, draw: random.Random) -> None:
    with Client(from_here(state.grpc), timeout=30.0, token=credentials.token, tls=credentials.wire) as client:
        while not stop.drain.wait(draw.expovariate(1 / PAUSE_S)):
            try:
                client.generate(draw.choice(PROMPTS), max_tokens=draw.randrange(8, LONGEST), ignore_eos=True)
            except BatonError:
                stop.drain.wait(1.0)
