"""Decode steps of tensor-parallel ranks by graphs: real processes, whose kernels are those of GPUs."""

import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, cast

import pytest
import torch

from baton.engine.kernels.base import Scratch
from baton.engine.kernels.gpu.cuda_graphs import Captured
from baton.engine.model_runner import Inputs
from baton.engine.models.loading import load_model
from baton.engine.tp import rank_process
from baton.engine.tp.backend import Ranking, ShardedBackend, load_sharded
from baton.errors import RankLost
from benchmarks.lib.device import moved
from tests.support.time_factor import scaled
from tests.unit.gpu.kernels import rank_with_graphs
from tests.unit.gpu.kernels.conftest import INTERPRETED
from tests.unit.gpu.kernels.rank_with_graphs import DIES, eager
from tests.unit.model.checkpoints import random_checkpoint
from tests.unit.model.harness import greedy

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="tests/unit/gpu/test_ranks.py is for GPUs"),
    pytest.mark.sample(1, of="long under the interpreter"),
]
SHAPE: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 17}
SHAPE |= {"max_position_embeddings": 100, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
PROMPTS = [[7] * 2, [8] * 5, [9] * 3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("m")
    random_checkpoint(made, "llama", **SHAPE)
    return made


@pytest.fixture(autouse=True)
def kernels_of_gpus(monkeypatch):
    torch.set_num_threads(1)
    rank_with_graphs.install(monkeypatch.setattr)
    monkeypatch.setattr(rank_process, "PROGRAM", rank_with_graphs.__name__)


@contextmanager
def ranks(folder, size: int) -> Iterator[ShardedBackend]:
    with closing(load_sharded(folder, Ranking(size, threads=1, timeout_s=scaled(60.0)), block_size=4)) as backend:
        yield backend


class Graphed:
    """The ranks with graphs over each new cache. `buckets` are the replayed ones."""

    def __init__(self, backend: ShardedBackend) -> None:
        self.backend, self.layout, self.buckets = backend, backend.layout, list[int]()
        self.widest = Inputs(backend, 6, 6, 8).widest()

    def make_cache(self, total_blocks: int) -> Any:
        kv = self.backend.make_cache(total_blocks)
        assert self.backend.capture(self.widest) == [1, 2, 4, 6]
        assert not any(tensor.any() for tensor in kv.tensors), "capturing stores nothing"
        return kv

    def forward(self, batch: Any, kv: Any) -> torch.Tensor:
        if max(batch.query_lens) == 1:
            batch = moved(batch, self.widest)
        self.buckets.append(self.backend._model.bucket(batch))
        return self.backend.forward(batch, kv)


def test_all_ranks_replay_and_give_the_tokens_of_one_process(folder, seed) -> None:
    """Batches that fill no bucket, in any order, among prompts, which are not replayed."""
    expected = greedy(load_model(folder, block_size=4), PROMPTS, 4, random.Random(seed))
    with ranks(folder, 2) as backend:
        graphed = Graphed(backend)
        found = greedy(cast("Any", graphed), PROMPTS, 4, random.Random(seed))
    assert {0} < set(graphed.buckets)
    for row, wanted in zip(found, expected, strict=True):
        assert row.tokens == wanted.tokens
        for position, logits in wanted.logits.items():
            torch.testing.assert_close(row.logits[position], logits, rtol=1e-5, atol=1e-5)


def test_a_rank_that_dies_in_a_replay_ends_the_worker(folder, monkeypatch) -> None:
    monkeypatch.setenv(DIES, "1:3")
    with ranks(folder, 2) as backend, pytest.raises(RankLost, match=r"rank 1 .* was ended by SIGKILL"):
        greedy(cast("Any", Graphed(backend)), PROMPTS, 20, random.Random(0))
    with pytest.raises(RankLost, match="have ended"):
        backend.make_cache(4)


def test_a_rank_that_cannot_capture_leaves_all_without_graphs(folder, monkeypatch) -> None:
    """The ranks stay in step: later forwards are those of one process."""

    def one_fails(device: torch.device) -> Any:
        capture = eager(device)

        def captured(forward: Any) -> Captured:
            made = capture(forward)
            if len(made.logits) == 2:
                raise RuntimeError("no graph for you")
            return made

        return captured

    monkeypatch.setattr("baton.engine.tp.rank_model.CudaCapture", one_fails)
    expected = greedy(load_model(folder, block_size=4), PROMPTS, 3, random.Random(1))
    with ranks(folder, 2) as backend:
        scratch = backend.local.model.scratch
        backend.make_cache(4)
        with pytest.raises(RuntimeError, match=r"^rank 0: no graph for you$"):
            backend.capture(Inputs(backend, 6, 6, 8).widest())
        assert isinstance(scratch, Scratch)
        assert backend.local.model.scratch is scratch
        found = greedy(backend, PROMPTS, 3, random.Random(1))
    assert [row.tokens for row in found] == [row.tokens for row in expected]
