"""KV of ranks with a GPU each: `python -m pytest tests/unit/gpu/test_ranks.py` on a machine with two GPUs.

Not run yet, because no GPU was available. Without GPUs, `tests/unit/tp/test_kv_memory.py` tests the protocol and
the copies. The first test needs only one GPU.
"""

import os
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from baton.engine.engine import Engine
from baton.engine.kernels.gpu.cuda_graphs import with_graphs
from baton.engine.kv_cache import KVCache
from baton.engine.models.loading import load_model
from baton.engine.tp.backend import Ranking, ShardedBackend, load_sharded
from baton.engine.tp.kv_memory import ShardedCache, rank_layout
from baton.errors import RankLost
from baton.tokenizer import load_tokenizer
from baton.worker.engine_factory import generate
from tests.support.engines import hand_over, ids, key_of, run, spec_of
from tests.support.time_factor import scaled
from tests.unit.tp.support import GQA, LATENT, poisoned, put, whole, wire_of

GPUS = torch.cuda.device_count()
DEMO = Path(__file__).parents[3] / "models" / "demo"
PROMPTS = ("The color of dog", "What is the largest ocean?", "The days of the week are " * 30)
TOKENS = 24
one_gpu = pytest.mark.skipif(GPUS < 1, reason="needs an NVIDIA GPU and torch built for CUDA")
two_gpus = pytest.mark.skipif(GPUS < 2, reason=f"needs two NVIDIA GPUs and torch built for CUDA; {GPUS} here")


@one_gpu
@pytest.mark.parametrize("layout", [GQA, replace(GQA, kv_heads=2), LATENT], ids=["gqa8", "gqa2", "latent"])
@pytest.mark.parametrize("staging", ["cuda:0", "cpu"])
def test_ranks_caches_on_gpus_are_one(layout, staging: str, seed: int) -> None:
    model, kv = poisoned(layout, 4, 9), whole(layout, 23, seed)
    put(model, [7, 1, 4, 0, 8, 2], kv)
    own = rank_layout(layout, 4)
    ranks = [KVCache(own, 9, f"cuda:{rank % GPUS}") for rank in range(4)]
    for cache, filled in zip(ranks, model.ranks, strict=True):
        for tensor, values in zip(cache.tensors, filled.tensors, strict=True):
            tensor.copy_(values)
    source, target = ShardedCache(layout, ranks), KVCache(layout, 9)
    mark = source.mark()
    assert mark is not None
    out = torch.empty(layout.layers * 21 * layout.layer_token_bytes, dtype=torch.uint8, device=staging)
    mark.wait()
    source.gather(range(layout.layers), [7, 1, 4, 0, 8, 2], 2, 23, out)
    wire = wire_of(kv, range(layout.layers), 2, 23)
    assert torch.equal(out.cpu(), wire)
    back = ShardedCache(layout, [KVCache(own, 9, cache.device) for cache in ranks])
    back.scatter(range(layout.layers), [0, 1, 2, 3, 4, 5], 2, 23, out)
    back.settle()
    again = torch.empty_like(wire)
    back.gather(range(layout.layers), [0, 1, 2, 3, 4, 5], 2, 23, again)
    assert torch.equal(again, wire)
    target.scatter(range(layout.layers), [0, 1, 2, 3, 4, 5], 2, 23, again)
    assert target.k.any()


def sharded() -> closing[ShardedBackend]:
    return closing(load_sharded(DEMO, Ranking(2), device="cuda:0", dtype="float32"))


def engine(backend) -> Engine:
    return Engine(backend, load_tokenizer(DEMO), total_blocks=96, prefix_cache=False)


@two_gpus
def test_two_gpus_hand_over_to_one_process_and_take_over_from_it() -> None:
    """The tokens equal those of one process on the CPU. Rank 1's heads are transferred through its own memory."""
    one = engine(load_model(DEMO, dtype="float32"))
    with sharded() as backend:
        many = engine(backend)
        assert isinstance(many.kv, ShardedCache)
        assert [cache.device.index for cache in many.kv.ranks] == [0, 1]
        assert backend.layout == one.layout
        for prompt in PROMPTS:
            spec = spec_of(load_tokenizer(DEMO).encode(prompt), max_tokens=TOKENS)
            expected = ids(generate(one, spec).tokens)
            assert ids(generate(many, spec).tokens) == expected
            for giver, taker in ((many, one), (one, many), (many, many)):
                assert hand_over(giver, taker, spec).ids(key_of()) == expected


@two_gpus
def test_memory_of_a_cache_comes_back() -> None:
    def used(index: int) -> int:
        torch.cuda.synchronize(index)
        free, total = torch.cuda.mem_get_info(index)
        return total - free

    with sharded() as backend:
        backend.make_cache(8)
        blocks = (256 << 20) // rank_layout(backend.layout, 2).block_bytes
        before = used(1)
        for _ in range(3):
            cache = backend.make_cache(blocks)
            assert used(1) - before < (256 + 64) << 20
        del cache
        backend.make_cache(8)
        assert used(1) - before < 64 << 20


@two_gpus
def test_decode_steps_of_ranks_by_graphs() -> None:
    """All ranks replay, with NCCL's sums in the graphs. The tokens are those without graphs."""
    specs = [spec_of(load_tokenizer(DEMO).encode(prompt), max_tokens=TOKENS) for prompt in PROMPTS]
    with sharded() as backend:
        many = engine(backend)
        expected = run(many, specs).tokens
        assert with_graphs(backend, many.kv, many.inputs.widest()) is backend
        replayed = Mock(wraps=backend._model.bucket)
        backend._model.bucket = replayed  # type: ignore[method-assign]
        assert run(many, specs).tokens == expected
        assert replayed.called
        assert backend._model._graphs is not None


DECODING = """
import sys
from tests.unit.gpu.test_ranks import engine, key_of, sharded, spec_of, with_graphs
with sharded() as backend:
    busy = engine(backend)
    if sys.argv[1] == "graphs":
        with_graphs(backend, busy.kv, busy.inputs.widest())
    print(*backend.pids, flush=True)
    busy.submit(key_of(), spec_of((7,), max_tokens=900))
    while True:
        busy.step()
"""


@two_gpus
@pytest.mark.parametrize("steps", ["graphs", "forwards"])
def test_a_rank_killed_in_a_step_ends_the_process_that_waits_for_its_gpu(steps: str) -> None:
    command = [sys.executable, "-c", DECODING, steps]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=DEMO.parents[1]) as process:
        assert process.stdout is not None
        os.kill(int(process.stdout.readline()), signal.SIGKILL)
        assert process.wait(scaled(60)) == 1


@two_gpus
def test_a_killed_rank_ends_the_worker() -> None:
    with sharded() as backend:
        busy = engine(backend)
        busy.submit(key_of(), spec_of((7,), max_tokens=400))
        busy.step()
        os.kill(backend.pids[0], signal.SIGKILL)
        os.waitid(os.P_PID, backend.pids[0], os.WEXITED | os.WNOWAIT)
        with pytest.raises(RankLost, match="SIGKILL"):
            backend.check()
