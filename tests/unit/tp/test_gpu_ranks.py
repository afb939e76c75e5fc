"""Ranks with a GPU each, without GPUs: their environment, NCCL's sums and messages, and the end of a hung worker.

`Nccl` behaves as `ProcessGroupNCCL::collective` of torch 2.13 if `asyncOp` is False: a call does not wait, and later
work of the current stream sees the result. `tests/unit/gpu/test_ranks.py` runs on a machine with two GPUs.
"""

import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier, Event
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from structlog.testing import capture_logs

from baton.engine.determinism.checks import check_fixed
from baton.engine.determinism.shapes import FixedShapes
from baton.engine.kernels.gpu.cuda_graphs import with_graphs
from baton.engine.models.loading import load_model
from baton.engine.tp import backend, kv_memory, rank_process
from baton.engine.tp.backend import Ranking, ShardedBackend, load_sharded
from baton.engine.tp.group import NcclExchange, Ranks, TpLayout
from baton.engine.tp.rank_process import Followers
from baton.engine.tp.watchdog import Watchdog
from baton.errors import ConfigError, RankLost
from tests.support.engines import engine_of, numbers, run, spec_of
from tests.support.time_factor import scaled
from tests.unit.model.checkpoints import random_checkpoint
from tests.unit.tp.support import GQA, gpus, on_threads

VISIBLE = "CUDA_VISIBLE_DEVICES"
NAMES = "7, GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,MIG-GPU-e86/1/0,2"


@pytest.fixture
def gpu_plan(plan_of):
    def plan(size: int, device: str) -> TpLayout:
        return replace(plan_of(size), device=device)

    return plan


@pytest.mark.parametrize(
    ("device", "visible", "expected"),
    [
        ("cuda", None, ["1", "2", "3"]),
        ("cuda:0", NAMES, ["GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "MIG-GPU-e86/1/0", "2"]),
        ("cuda:1", "4,5,6,7", ["6", "7"]),
        ("cpu", "4,5", ["4,5", "4,5"]),
    ],
)
def test_each_rank_sees_its_own_gpu(gpu_plan, tmp_path, monkeypatch, device, visible, expected) -> None:
    """The processes are real. Each writes its environment instead of a model's part."""
    monkeypatch.setenv(VISIBLE, visible or "")
    if visible is None:
        monkeypatch.delenv(VISIBLE)
    monkeypatch.setattr(rank_process, "PROGRAM", "tests.unit.tp.report_environment")
    plan = gpu_plan(len(expected) + 1, device)
    followers = Followers(plan)
    followers.wait("environment", scaled(30.0))
    followers.close(0.0)
    found = [json.loads((tmp_path / f"environment-{rank}").read_text()) for rank in range(1, plan.size)]
    assert [each.get(VISIBLE) for each in found] == expected
    assert all(each["PATH"] == os.environ["PATH"] for each in found)


def test_rank_0_sees_all_gpus_and_the_others_name_theirs_alike(gpu_plan, monkeypatch) -> None:
    """Rank 0 opens the memory of each rank on that rank's GPU."""
    plan, opened = gpu_plan(3, "cuda:1"), Mock()
    monkeypatch.setattr(kv_memory, "CudaDevice", opened)
    used = []
    for rank in range(3):
        kv_memory.kv_memory(plan, Mock(rank=rank), replace(GQA, kv_heads=3))
        used.append([str(each.args[0]) for each in opened.call_args_list])
        opened.reset_mock()
    assert used == [["cuda:2", "cuda:3"], ["cuda:0"], ["cuda:0"]]
    assert [str(plan.device_of(rank, rank)) for rank in range(3)] == ["cuda:1", "cuda:0", "cuda:0"]


def test_fewer_gpus_than_ranks_are_refused_before_anything_starts(tmp_path, monkeypatch) -> None:
    random_checkpoint(tmp_path, "llama", num_attention_heads=4, num_key_value_heads=4)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(backend, "Followers", Mock(side_effect=AssertionError("started")))
    monkeypatch.setenv(VISIBLE, "4,5,6")
    ranking = Ranking(4, key="decode.tensor_parallel")
    with pytest.raises(ConfigError, match=r"^decode.tensor_parallel: 4 on cuda: .* sees 3 .*=4,5,6\); set at most 3$"):
        load_sharded(tmp_path, ranking, device="cuda")
    with pytest.raises(ConfigError, match=r"4 on cuda:2: .* sees 1 from cuda:2 on .* set at most 1$"):
        load_sharded(tmp_path, ranking, device="cuda:2")


class Nccl:
    """The groups of all ranks in one process. A sum begins at a rank that depends on its size, as in a ring."""

    def __init__(self, size: int) -> None:
        self.size, self.calls = size, list[str]()
        self._barrier, self._given = Barrier(size, timeout=scaled(30.0)), [torch.empty(0)] * size

    def of(self, rank: int) -> Any:
        def meet(name: str, own: torch.Tensor, options: Any) -> list[torch.Tensor]:
            assert options.asyncOp is False, "on a stream of NCCL's own, the host would have to wait for it"
            self._given[rank] = own.clone()
            self._barrier.wait()
            given = list(self._given)
            self._barrier.wait()
            if rank == 0:
                self.calls.append(name)
            return given

        def allreduce(tensors: list[torch.Tensor], options: Any) -> Any:
            (own,) = tensors
            given = meet("allreduce", own, options)
            first = own.numel() % self.size
            total = given[first].clone()
            for part in given[first + 1 :] + given[:first]:
                total += part
            own.copy_(total)
            return NOT_WAITED_FOR

        def gather(out: torch.Tensor, own: torch.Tensor, options: Any) -> Any:
            torch.cat([each.flatten() for each in meet("allgather", own, options)], out=out)
            return NOT_WAITED_FOR

        def broadcast(tensors: list[torch.Tensor], options: Any) -> Any:
            tensors[0].copy_(meet("broadcast", tensors[0], options)[options.rootRank])
            return NOT_WAITED_FOR

        return Mock(rank=lambda: rank, allreduce=allreduce, _allgather_base=gather, broadcast=broadcast)


NOT_WAITED_FOR = Mock(wait=Mock(side_effect=AssertionError("the host waits")))


@pytest.mark.parametrize("size", [2, 4])
def test_nccl_adds_ordinary_parts_and_ranks_add_fixed_ones_in_order(size: int, seed: int) -> None:
    """An ordinary sum may depend on its size; a fixed one may not. All ranks get the same bits."""
    nccl, generator = Nccl(size), torch.Generator().manual_seed(seed)
    parts = torch.randn(size, 5, 7, generator=generator) * 10.0 ** torch.randint(
        -3, 4, (size, 5, 7), generator=generator
    )

    def run(rank: int) -> list[torch.Tensor]:
        exchange = NcclExchange(nccl.of(rank), size, 64, torch.device("cpu"))
        found = []
        for fixed, rows in ((False, 5), (True, 5), (True, 2)):
            exchange.fixed = fixed
            exchange.place(rows, 7).copy_(parts[rank, :rows])
            found.append(torch.empty(rows, 7, dtype=torch.bfloat16 if not fixed else torch.float32))
            exchange.add(found[-1])
        return found

    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(run, range(size)))
    assert nccl.calls == ["allreduce", "allgather", "allgather"]
    assert all(torch.equal(own, first) for other in results for own, first in zip(other, results[0], strict=True))
    ordinary, fixed, fewer = results[0]
    torch.testing.assert_close(ordinary, parts.sum(0).bfloat16())
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    assert torch.equal(fixed, total)
    assert torch.equal(fewer, total[:2])


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_a_model_whose_ranks_exchange_over_nccl(plan_of, tmp_path, monkeypatch, size: int, seed: int) -> None:
    """Batches travel over NCCL too. Only the sums of fixed forwards are gathered, with the logits."""
    nccl = Nccl(size)

    def connected(plan: TpLayout, rank: int, alive: Any) -> Ranks:
        ranks = Ranks(plan, rank, alive)
        ranks._nccl = nccl.of(rank)
        ranks.exchange = NcclExchange(ranks._nccl, size, plan.capacity, torch.device("cpu"))
        return ranks

    monkeypatch.setattr(rank_process, "Ranks", connected)
    random_checkpoint(
        tmp_path / "m", "qwen3", vocab_size=259, num_attention_heads=8, num_key_value_heads=2, head_dim=12
    )
    plan, rng = plan_of(size, str(tmp_path / "m")), random.Random(seed)
    many, one = on_threads(plan, gpus(size)[0], connected), load_model(tmp_path / "m", block_size=8)
    specs = [spec_of(numbers(rng, rng.randint(3, 40), 250), max_tokens=8) for _ in range(5)]
    assert run(engine_of(many), specs).tokens == run(engine_of(one), specs).tokens
    assert nccl.calls.count("allreduce") == 4 * nccl.calls.count("allgather"), "two layers, and one head"
    del nccl.calls[:]
    assert check_fixed(many, FixedShapes(2, 32)) == ""
    assert "allreduce" not in nccl.calls
    many.close()


@pytest.mark.parametrize("fails", [False, True])
def test_graphs_of_ranks_are_those_of_all_ranks(plan_of, tmp_path, monkeypatch, fails: bool) -> None:
    """`with_graphs` keeps the backend, which replays on all ranks, or does not after a failure."""
    random_checkpoint(tmp_path / "m", "llama")
    local, widest = load_model(tmp_path / "m"), Mock()
    monkeypatch.setattr(local, "device", torch.device("cuda"))
    monkeypatch.setattr(type(local.model.kernels), "name", "triton")
    ranks = ShardedBackend(plan_of(2), Mock(local=local), Mock(), Mock(), Mock())
    capture = Mock(side_effect=RuntimeError("rank 1: out of memory") if fails else None, return_value=[1, 2])
    monkeypatch.setattr(ranks, "capture", capture)
    with capture_logs() as events:
        assert with_graphs(ranks, Mock(), widest) is ranks
    capture.assert_called_once_with(widest)
    assert [event["event"] for event in events] == [f"decode_graphs_{'unavailable' if fails else 'captured'}"]


class Gpu:
    """A stream whose work is done when a test sets `done`, and the exit codes of the process."""

    def __init__(self) -> None:
        self.done, self.ended, self.code = Event(), Event(), list[int]()

    def mark(self) -> Any:
        return self.done.is_set

    def end(self, code: int) -> None:
        self.code.append(code)
        self.ended.set()


def test_finished_work_ends_nothing_even_if_a_rank_ends_afterwards() -> None:
    gpu, alive = Gpu(), Mock(side_effect=RankLost("rank 1 has ended"))
    gpu.done.set()
    watchdog = Watchdog(alive, gpu.mark, 0.0, gpu.end)
    for _ in range(3):
        with watchdog.guard():
            pass
    gpu.done = Mock(is_set=Mock(side_effect=[False, True]))  # it ends while the watchdog looks at the ranks
    with watchdog.guard():
        pass
    gpu.done = Event()
    with watchdog.guard():
        assert not gpu.code
    assert gpu.ended.wait(scaled(10.0)), "only the last one hangs"


@pytest.mark.parametrize(
    ("alive", "timeout_s", "message"),
    [
        (Mock(side_effect=RankLost("rank 1 was ended by SIGKILL")), 3600.0, "rank 1 was ended by SIGKILL"),
        (Mock(), 0.1, "the GPUs of this worker made no progress for 0.1 s"),
    ],
)
def test_work_that_waits_in_vain_ends_the_process(alive, timeout_s, message) -> None:
    gpu = Gpu()
    with capture_logs() as events:
        watchdog = Watchdog(alive, gpu.mark, timeout_s, gpu.end)
        with pytest.raises(ValueError, match="mine"), watchdog.guard():
            raise ValueError("mine")  # what was issued before is watched all the same
        assert gpu.ended.wait(scaled(10.0))
    assert gpu.code == [1]
    assert [(event["event"], event["message"]) for event in events] == [("worker_failed", message)]


HUNG = """
import ctypes
from baton.engine.tp.watchdog import Watchdog
from baton.errors import RankLost

def check():
    raise RankLost("rank 1 was ended by SIGKILL")

with Watchdog(check, lambda: lambda: False, 3600.0).guard():
    pass
ctypes.CDLL(None).pause()  # like cudaStreamSynchronize behind a kernel that never ends
"""


@pytest.mark.slow
def test_a_process_whose_threads_all_wait_for_the_gpu_ends() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HUNG], capture_output=True, text=True, timeout=scaled(60.0), check=False
    )
    assert done.returncode == 1, done.stderr
    assert "rank 1 was ended by SIGKILL" in done.stdout + done.stderr
