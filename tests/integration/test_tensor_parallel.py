"""One model on several processes gives the tokens of one process. Its processes end together."""

import os
import random
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from typing import Any

import psutil
import pytest
import torch

from baton.engine.determinism.checks import check_fixed
from baton.engine.determinism.shapes import FixedShapes
from baton.engine.models.loading import load_model
from baton.engine.tp.backend import Ranking, load_sharded
from baton.engine.tp.group import memory_is_ordered
from baton.errors import CheckpointError, RankLost
from baton.worker.engine_factory import generate
from tests.support.engines import engine_of, key_of, numbers, run, spec_of
from tests.support.time_factor import scaled
from tests.unit.model.checkpoints import RECURRENT, random_checkpoint
from tests.unit.model.harness import greedy

pytestmark = pytest.mark.slow
BLOCK = 8
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 12, "attention_bias": True},
    "qwen3_5_text": RECURRENT["qwen3_5"].settings,
}
HEADS: dict[str, Any] = {"vocab_size": 259, "num_attention_heads": 8}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    @cache
    def folder(family, kv_heads=4):
        made = tmp_path_factory.mktemp(family)
        random_checkpoint(made, family, **HEADS, **SHAPES[family], num_key_value_heads=kv_heads)
        return made

    return folder


@contextmanager
def ranks(folder, size, **options):
    """Yield a backend on `size` processes. Check that all have ended afterwards."""
    backend = load_sharded(folder, Ranking(size, threads=1, **options), block_size=BLOCK)
    pids = backend.pids
    assert len(pids) == size - 1
    try:
        yield backend
    finally:
        backend.close()
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


@pytest.fixture(scope="module")
def ranks_of(folder_of):
    """Backends that several tests use in turn."""
    with ExitStack() as stack:

        @cache
        def running(family, size, shared_memory=None, kv_heads=4):
            return stack.enter_context(ranks(folder_of(family, kv_heads), size, shared_memory=shared_memory))

        yield running


def answers(backend, seed, *, hits=True):
    """Return the tokens of nine concurrent requests that share prefixes, are chunked, and exceed the pool. `hits`:
    whether each draw finds a prefix in the cache. One of recurrent layers must have a checkpoint left.
    """
    rng = random.Random(seed)
    engine = engine_of(backend, 18, max_batched_tokens=48, max_running=6)
    shared = numbers(rng, 20)
    prompts = [(() if number % 3 else shared) + numbers(rng, rng.randint(10, 50)) for number in range(9)]
    tokens = run(engine, [spec_of(prompt, max_tokens=rng.randint(20, 40)) for prompt in prompts]).tokens
    assert engine.counters.preemptions > 0
    assert engine.counters.cached_tokens > 0 or not hits
    return tokens


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("family", "kv_heads", "size", "shared_memory"),
    [
        ("llama", 4, 4, None),
        ("qwen3", 4, 2, False),
        ("qwen3", 1, 2, None),
        ("llama", 1, 4, False),
        ("qwen3", 2, 4, None),
        ("llama", 4, 8, None),
        ("qwen3_5_text", 2, 4, None),
    ],
)
def test_tokens_are_those_of_one_process(folder_of, ranks_of, family, kv_heads, size, shared_memory, seed):
    """Some ranks hold the same KV head if there are fewer heads than ranks."""
    whole = load_model(folder_of(family, kv_heads), block_size=BLOCK)
    backend = ranks_of(family, size, shared_memory, kv_heads)
    assert (backend.layout, backend.fingerprint) == (whole.layout, whole.fingerprint)
    first, *others = (answers(each, seed, hits=family in {"llama", "qwen3"}) for each in (backend, whole, backend))
    assert others == [first, first]


def logits_of(backend, seed):
    rng = random.Random(seed)
    prompts = [[rng.randrange(1, 250) for _ in range(rng.randint(1, 70))] for _ in range(4)]
    return [row.logits for row in greedy(backend, prompts, 6, rng)]


@pytest.mark.skipif(not memory_is_ordered(), reason="gloo is all there is")
def test_the_bits_do_not_depend_on_how_parts_travel(folder_of, ranks_of, seed):
    """Two runs give equal bits, close to the logits of one process, which begins with a cache of NaN."""
    memory, gloo = ranks_of("qwen3", 2), ranks_of("qwen3", 2, False)
    found = [logits_of(backend, seed) for backend in (memory, memory, gloo)]
    for rows in zip(*found, logits_of(load_model(folder_of("qwen3"), block_size=BLOCK), seed), strict=True):
        *divided, whole = rows
        for position, logits in whole.items():
            assert all(torch.equal(divided[0][position], other[position]) for other in divided)
            torch.testing.assert_close(divided[0][position], logits, rtol=1e-4, atol=1e-4)


def test_a_new_engine_may_have_another_cache(ranks_of):
    found = [generate(engine_of(ranks_of("qwen3", 2), n), spec_of((5, 6, 7))).tokens for n in (4, 40, 8)]
    assert found[0] == found[1] == found[2]


@pytest.mark.sample(1)
@pytest.mark.parametrize("shared_memory", [None, False])
def test_fixed_forwards_of_ranks_are_steady_and_a_killed_rank_is_noticed_by_looking(folder_of, shared_memory):
    """`Batch.fixed` reaches the other ranks: torch's ordinary attention is not steady for these head sizes."""
    with ranks(folder_of("qwen3"), 2, shared_memory=shared_memory) as backend:  # its memory is zero, as required
        assert check_fixed(backend, FixedShapes(2, 32)) == ""
        backend.check()
        os.kill(backend.pids[0], signal.SIGKILL)  # between two steps
        os.waitid(os.P_PID, backend.pids[0], os.WEXITED | os.WNOWAIT)
        with pytest.raises(RankLost, match=r"rank 1 .* SIGKILL"):
            backend.check()


def busy(backend):
    engine = engine_of(backend, 64)
    engine.submit(key_of(), spec_of((1, 2, 3), max_tokens=400))
    steps(engine, 3)
    return engine


def steps(engine, count):
    for _ in range(count):
        engine.step()


@pytest.mark.sample(1)
@pytest.mark.parametrize(("size", "shared_memory"), [(4, None), (2, False)])
def test_a_killed_rank_ends_the_step_and_the_others(folder_of, size, shared_memory):
    with ranks(folder_of("llama"), size, shared_memory=shared_memory, timeout_s=3600) as backend:
        engine = busy(backend)
        os.kill(backend.pids[-1], signal.SIGKILL)
        with pytest.raises(RankLost, match=rf"rank {size - 1} of this worker .* was ended by SIGKILL"):
            steps(engine, 50)
        assert not [pid for pid in backend.pids if psutil.pid_exists(pid)]
        with pytest.raises(RankLost, match="have ended"):
            engine.step()


@pytest.mark.sample(1)
@pytest.mark.parametrize("shared_memory", [None, False])
def test_a_frozen_rank_is_lost_by_its_silence(folder_of, shared_memory):
    with ranks(folder_of("llama"), 2, shared_memory=shared_memory, timeout_s=scaled(5.0)) as backend:
        engine = busy(backend)
        os.kill(backend.pids[0], signal.SIGSTOP)
        with pytest.raises(RankLost):
            steps(engine, 50)


STARTED = """
import sys, time
from baton.engine.tp.backend import Ranking, load_sharded
backend = load_sharded(sys.argv[1], Ranking(2, threads=1))  # without a reference, the other rank ends
print(*backend.pids, flush=True)
time.sleep(600)
"""


def test_nobody_outlives_a_killed_rank_0(folder_of):
    command = [sys.executable, "-c", STARTED, str(folder_of("llama"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            follower = psutil.Process(int(process.stdout.readline()))
            follower.suspend()
        finally:
            process.kill()
    try:
        psutil.wait_procs([follower], timeout=scaled(5.0))
        assert not follower.is_running() or follower.status() == psutil.STATUS_ZOMBIE
    finally:
        with suppress(psutil.NoSuchProcess):
            follower.kill()


def test_a_model_that_cannot_be_loaded_leaves_nobody(folder_of, tmp_path):
    before = psutil.Process().children()
    for file in folder_of("llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes()[: None if file.suffix == ".json" else -4])
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        load_sharded(tmp_path, Ranking(2, threads=1))
    assert psutil.Process().children() == before
