"""Each architecture in a cluster: a prefill and a decode worker, a real router over gRPC, and the KV handed over.

Ten prompts of 1 to 300 tokens get 64 tokens each, in chunks of a random size, from caches full of NaN. Each token must
be the likeliest one of transformers in float32 after the tokens before it. `make models` runs all architectures, and
`make test` a drawn share.
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import models

from baton.cli.cluster.serve import role_factories
from baton.clock import SystemClock
from baton.config import load_config
from baton.core import Role, WorkerRef
from baton.engine.engine import Engine
from baton.engine.kernels.kv_levels import to_levels
from baton.engine.models.families import FAMILIES
from baton.ledger.embedded_redis import EmbeddedRedis
from baton.ledger.registry import Ledger
from baton.rpc.channel import aio_channel
from baton.rpc.v1.inference_pb2_grpc import InferenceStub
from baton.tokenizer import load_tokenizer
from baton.worker import engine_factory, process
from baton.worker.process import serve
from baton.worker.settings import of_both_roles
from router import server as routers
from router.context import RouterSettings
from tests.support.routers import asked, ids_of
from tests.support.time_factor import scaled
from tests.support.waiting import until
from tests.unit.model.checkpoints import DENSE, LATENT, NATIVE, RECURRENT, SPARSE, VOCAB
from tests.unit.model.harness import prompts
from tools import fallback_models

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
VARIANTS = DENSE | SPARSE | LATENT | NATIVE | RECURRENT
FIRST = {variant.family: name for name, variant in reversed(VARIANTS.items())}
OTHERS = [
    name
    for name, (_, result, _) in json.loads(fallback_models.RESULTS.read_text())["models"].items()
    if result == "exact" and name not in FAMILIES and not any(name in family.also for family in FAMILIES.values())
]
LENGTHS, NEW = (1, 2, 15, 16, 33, 64, 100, 128, 210, 300), 64
CONFIG = """
name: models
model: {{path: {folder}, max_model_len: auto, dtype: float32}}
redis: {{url: '{redis}'}}
prefill: {{device: cpu, threads: 1, kv_memory: 32MiB, max_batched_tokens: {chunk}}}
decode: {{device: cpu, threads: 1, kv_memory: 32MiB}}
transfer: {{transport: shm}}
ledger: {{lease_s: 60}}
"""


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis.start(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill the caches of all engines with NaN, so that reading a slot of another sequence gives NaN logits."""
    build = engine_factory.build_engine

    def with_nan(*args: Any) -> Engine:
        engine = build(*args)
        nan = torch.full((engine.kv.layout.head_dim,), torch.nan)
        for tensor in engine.kv.tensors:
            tensor[:] = to_levels(nan) if tensor.dtype is torch.int8 else nan
        return engine

    monkeypatch.setattr(process, "build_engine", with_nan)


@asynccontextmanager
async def cluster(folder: Path, redis: EmbeddedRedis, chunk: int) -> AsyncIterator[Any]:
    """Run both workers and a router on this loop, and yield a client."""
    (folder / "cluster.yaml").write_text(CONFIG.format(folder=folder, redis=redis.url, chunk=chunk))
    config = load_config(folder / "cluster.yaml")
    ledger = await Ledger.connect(redis.url, f"baton:{config.name}", config.ledger.lease_s, SystemClock())
    stop, ready = asyncio.Event(), list[WorkerRef]()
    workers = list[asyncio.Task[None]]()
    for role in Role:  # one after the other, because transformers cannot load two models at the same time
        both = of_both_roles(config, f"{role}-0", role)
        workers.append(asyncio.create_task(serve(both, role_factories(), role, stop, ready.append)))
        await until(lambda: _alive(workers) and len(ready) == len(workers), f"{role} is ready", within_s=scaled(120))
    anywhere = "127.0.0.1:0"
    settings = RouterSettings("models", "m", grpc=anywhere, admin=anywhere, metrics=anywhere)
    router = await routers.serve(settings, ledger.workers, load_tokenizer(folder))
    try:
        await until(lambda: sum(link.usable for link in router.context.pool.links) == 2, "connected")
        async with aio_channel(router.grpc) as channel:
            yield InferenceStub(channel)
    finally:
        await router.stop(grace_s=0.0)
        stop.set()
        await asyncio.gather(*workers)
        await ledger.close()


def _alive(workers: list[asyncio.Task[None]]) -> bool:
    for worker in workers:
        if worker.done():
            worker.result()
    return True


def with_tokenizer(folder: Path) -> None:
    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizers.Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))


def written(name: str, folder: Path) -> Any:
    """Write a checkpoint of an architecture, and return the model of transformers."""
    made = VARIANTS[FIRST[name]].write(folder) if name in FIRST else fallback_models.write(name, folder)
    with_tokenizer(folder)
    return made.eval().requires_grad_(False)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [*FIRST, *OTHERS])
async def test_tokens_of_a_cluster_are_those_of_transformers(
    name: str, tmp_path: Path, redis: EmbeddedRedis, seed: int, capsys: pytest.CaptureFixture[str]
):
    reference, some = written(name, tmp_path), prompts(LENGTHS)
    chunk = random.Random(seed).randint(16, 150)
    async with cluster(tmp_path, redis, chunk) as client:
        sampling = {"temperature": 0.0, "ignore_eos": True}
        calls = [client.Generate(asked(prompt, NEW, sampling=sampling)) for prompt in some]
        answers = [ids_of([event async for event in call]) for call in calls]
    for prompt, answer in zip(some, answers, strict=True):
        tokens = torch.tensor([[*prompt, *answer]])
        logits = reference(input_ids=tokens, use_cache=False).logits[0]
        assert answer == logits[len(prompt) - 1 : -1].argmax(-1).tolist(), f"{len(prompt)} tokens, chunks of {chunk}"
