"""Decode graphs without a GPU: they own the memory of their forwards, and a step is one launch and few small copies."""

import gc
from unittest.mock import Mock, patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from baton.engine.block_pool import BlockPool
from baton.engine.kernels.gpu.cuda_graphs import Captured, DecodeGraphs, graphed
from baton.engine.model_runner import Inputs
from baton.engine.sequence import ScheduledSequence, Sequence
from benchmarks.gpu_first.doubles import NoAttention
from benchmarks.lib import random_weights
from benchmarks.lib.random_weights import random_model
from tests.support.engines import allocated, key_of
from tests.support.graphs import ExternalMemory

CPU = torch.device("cpu")
SHAPE = {"architectures": ["LlamaForCausalLM"], "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80}
SHAPE |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}


class StandIn:
    """Runs a forward once before the capture and once in it, as `CudaCapture` does."""

    def __init__(self):
        self.memory: list[ExternalMemory] = []

    def __call__(self, forward):
        forward()
        with ExternalMemory() as memory:
            logits = forward()
        self.memory.append(memory)
        return Captured(lambda: None, logits)


@pytest.mark.slow
def test_the_graphs_own_the_memory_that_their_forwards_use():
    model = random_model(SHAPE, device=CPU, dtype="float32", block_size=4, kernels=NoAttention())
    graphs, capture = DecodeGraphs(model, model.make_cache(8), Inputs(model, 6, 6, 4).widest()), StandIn()
    graphs.capture(capture)
    gc.collect()
    assert len(capture.memory) == len(graphs.sizes)
    for memory in capture.memory:
        assert len(memory.external) > 20
        assert not [at for at, storage in memory.external.items() if storage.expired()]


EIGHT_B = SHAPE | {"vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32}
EIGHT_B |= {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192}
ROWS, BLOCK = 64, 16


class MetaCheckpoint(random_weights.RandomCheckpoint):
    """Weights with shapes and no memory."""

    def __init__(self, device, seed, missing):
        self._device, self._missing = device, missing

    def take(self, name, shape):
        return torch.empty(shape, device=self._device)


class Launches(TorchDispatchMode):
    """Counts operations on the device (here `meta`) that are no views, and the bytes that they copy from the host."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []
        self.host_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_iter((args, kwargs, out)) if isinstance(each, torch.Tensor)]
        views = all(returned.alias_info and not returned.alias_info.is_write for returned in func._schema.returns)
        if any(each.is_meta for each in tensors) and not views:
            self.names.append(func._schema.name)
            self.host_bytes += sum(each.nbytes for each in tensors if not each.is_meta)
        return out


def decode_steps(inputs, backend, kv, sequences, steps):
    """Run decode steps of the sequences, which take a block when they need one. Returns the launches of each."""
    counted = []
    for _ in range(steps):
        tokens = [[7] * each.known for each in sequences]
        with Launches() as launches:
            backend.forward(inputs.build([ScheduledSequence(each, 1) for each in sequences], tokens), kv)
        counted.append(launches)
        for each in sequences:
            each.computed, each.known = each.known, each.known + 1
            assert each.known <= len(each.allocation.blocks) * BLOCK or each.allocation.grow(1)
    return counted


@pytest.mark.slow
def test_a_step_of_an_8b_model_is_one_graph_launch_and_at_most_8_small_copies():
    meta, pool = torch.device("meta"), BlockPool(ROWS * 80)
    with patch.object(random_weights, "RandomCheckpoint", MetaCheckpoint):
        model = random_model(EIGHT_B, device=meta, dtype="bfloat16", block_size=BLOCK, kernels=NoAttention())
    kv, inputs, replay = model.make_cache(8), Inputs(model, 2048, ROWS, 512), Mock()
    graphs = DecodeGraphs(model, kv, inputs.widest())
    graphs.sizes = [ROWS]
    with Launches() as eager:
        graphs.capture(lambda forward: Captured(replay, forward()))
    sequences = [Sequence(key_of(i), i, 1000 + i, 1000 + i, 999 + i, allocated(pool, 67)) for i in range(ROWS)]
    first, *rest = decode_steps(inputs, graphed(model, graphs), kv, sequences, 1 + 2 * BLOCK)
    assert len(eager.names) > 32 * 9, "the graphs hold the other launches"
    assert replay.call_count == 2 + 2 * BLOCK - 1
    assert len(first.names) <= 8
    grown = [launches for launches in rest if "aten::index_copy_" in launches.names]
    assert len(grown) > BLOCK, "in most steps some sequences take a block"
    for launches in rest:
        assert len(launches.names) <= 3, launches.names
        assert launches.names.count("aten::copy_") <= 2
        assert launches.host_bytes < 100_000, "of a table with 131,072 bytes"
