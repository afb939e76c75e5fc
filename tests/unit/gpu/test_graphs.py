"""Decode graphs without a GPU: the memory that a captured forward uses is owned as long as the graphs."""

import gc

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from baton.engine.kernels.gpu.cuda_graphs import Captured, DecodeGraphs
from baton.engine.kernels.torch_reference import TorchKernels
from benchmarks.lib.random_weights import random_model

CPU = torch.device("cpu")
SHAPE = {"architectures": ["LlamaForCausalLM"], "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80}
SHAPE |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}


class ExternalMemory(TorchDispatchMode):
    """Records the storages that a capture uses and did not allocate itself, as `_TensorTrackingMode` and
    `_CUDAGraphInputLivenessTracker` of torch.utils._cuda_debug (torch 2.13) do with `check_input_liveness`.
    Memory that is allocated during a capture belongs to the graph's pool.
    """

    def __init__(self):
        super().__init__()
        self.external: dict[int, StorageWeakRef] = {}
        self._internal: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and (at := tensor.untyped_storage().data_ptr()) not in self._internal:
                self.external.setdefault(at, StorageWeakRef(tensor.untyped_storage()))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor) and (at := tensor.untyped_storage().data_ptr()) not in self.external:
                self._internal.add(at)
        return out


class NoAttention(TorchKernels):
    """Copies queries instead: the kernels of a GPU make no tensors from lists of the host, as plain torch does."""

    def attention(self, batch, block_size, window, scale):
        del batch, block_size, window, scale
        return lambda query, keys, values, out: out.copy_(query.flatten(1))


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


def test_the_graphs_own_the_memory_that_their_forwards_use():
    model = random_model(SHAPE, device=CPU, dtype="float32", block_size=4, kernels=NoAttention())
    graphs, capture = DecodeGraphs(model, model.make_cache(8), max_rows=6, max_blocks=4), StandIn()
    graphs.capture(capture)
    gc.collect()
    assert len(capture.memory) == len(graphs.sizes)
    for memory in capture.memory:
        assert len(memory.external) > 20
        assert not [at for at, storage in memory.external.items() if storage.expired()]
