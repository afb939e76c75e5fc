"""CUDA IPC on a real GPU, and a model that thinks: `python -m pytest tests/unit/gpu/test_one_gpu.py`.

Needs a machine with one GPU. It passed on an H100 (docs/measurements/gpu.md). Handoffs between processes over CUDA IPC:
`python -m pytest tests/integration/test_kvtransfer_processes.py -k cuda_ipc`.
`tests/unit/kvtransfer/transports/test_cuda_ipc.py` tests the protocol without a GPU.
"""

import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.core import ThinkingState
from baton.engine.engine import Engine
from baton.engine.kernels.gpu.cuda_memory import CudaDevice, _CudaCopies
from baton.engine.kv_cache import KVCache, exposed_memory
from baton.engine.models.loading import load_model
from baton.tokenizer import load_tokenizer
from kvtransfer.handoff import TransferSettings
from kvtransfer.transports.select import make_transports
from tests.integration.kvtransfer_peer import Prefill, Receiver, kv_digest
from tests.support.engines import key_of, kv_of, run, spec_of
from tests.unit.kvtransfer.support import LAYOUT, hand_over, make_job

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and torch built for CUDA")
GPU = torch.device("cuda", 0)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    process = Receiver(over="cuda_ipc")
    yield process
    process.kill()


def test_a_handoff_waits_for_the_work_that_computes_it(receiver: Receiver) -> None:
    """The kernel that writes the KV runs long. The other process must not read before its end."""
    prefill = Prefill(over="cuda_ipc")
    receiver.ask(reserve={"r": [3, 4]})
    values = [torch.randn_like(tensor) for tensor in prefill.kv.tensors]
    torch.cuda._sleep(2_000_000_000)  # cycles: about a second
    for tensor, value in zip(prefill.kv.tensors, values, strict=True):
        tensor.copy_(value)  # queued behind the sleep
    prefill.reports.done(hand_over(prefill.sender, make_job("r", 8, receiver.ref), [5, 6]))
    assert receiver.ask(digest={"r": [[3, 4], 8]})["digests"]["r"] == kv_digest(prefill.kv, [5, 6], 8)
    prefill.sender.close()


@pytest.mark.parametrize("batched", [True, False])
def test_copies_between_addresses(batched: bool) -> None:
    device = CudaDevice(GPU)
    copies, source = _CudaCopies(device), torch.arange(1 << 20, dtype=torch.int32, device=GPU)
    copies._batched, target = batched and copies._batched, torch.zeros_like(source)
    offsets = np.random.default_rng(0).permutation(1 << 10).astype(np.uint64) * np.uint64(4 << 10)
    copies.follow()
    begins = [np.uint64(each.data_ptr()) for each in (source, target)]
    copies.copy(offsets + begins[0], offsets + begins[1], np.full_like(offsets, 4 << 10))
    copies.wait()
    assert torch.equal(source, target)


def test_memory_is_freed_with_its_last_tensor() -> None:
    exposed_memory(LAYOUT, 1, GPU)  # creates CUDA's per-process state
    gc.collect()
    before = torch.cuda.mem_get_info(0)[0]
    blocks = (1 << 30) // LAYOUT.block_bytes
    cache = KVCache(LAYOUT, blocks, GPU, exposed=exposed_memory(LAYOUT, blocks, GPU))
    kept = cache.k[1]
    del cache
    gc.collect()
    assert before - torch.cuda.mem_get_info(0)[0] > 1 << 29
    assert not kept.any()
    del kept
    gc.collect()
    assert before - torch.cuda.mem_get_info(0)[0] < 1 << 29


def test_auto_takes_cuda_ipc_first() -> None:
    transports = make_transports(TransferSettings(), KVCache(LAYOUT, 1, GPU)).transports
    assert [transport.name for transport in transports] == ["cuda_ipc", "nccl"]


COIN = Path(__file__).parents[3] / "models" / "coin"
SENTENCE = "A coin's state is heads. Alice flips, then Bob flips. What's the state? A:"


def answer(mode, device):
    """Return text and thoughts, and, as numbers, the state of a handoff with one token fewer."""
    tokenizer = load_tokenizer(COIN)
    engine = Engine(load_model(COIN, device=device, thinking=mode), tokenizer, total_blocks=64)
    prompt = tokenizer.encode(SENTENCE)
    kv_of(engine, spec_of(prompt[:-1]))
    carried = engine.state_of(key_of())
    assert isinstance(carried, ThinkingState)
    engine.release(key_of())
    found = run(engine, [spec_of(prompt, max_tokens=6, ignore_eos=False)])
    text = "".join(token.text for token in found.tokens[key_of(0)])
    return text, found.thoughts[key_of(0)], torch.frombuffer(bytearray(carried.state), dtype=torch.float32)


@pytest.mark.parametrize("mode", ["auto", "fast", "sequential"])
def test_a_model_thinks_on_a_gpu_as_on_a_cpu(mode):
    text, thoughts, state = answer("sequential", "cpu")
    there = answer(mode, "cuda:0")
    assert there[:2] == (text, thoughts)
    torch.testing.assert_close(there[2], state, atol=1e-3, rtol=1e-3)
