"""The memory of a CUDA graph, recorded without a GPU."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class ExternalMemory(TorchDispatchMode):
    """Records the storages that a capture uses and did not allocate itself, as `_TensorTrackingMode` and
    `_CUDAGraphInputLivenessTracker` of torch.utils._cuda_debug (torch 2.13) do with `check_input_liveness`.
    Memory that is allocated during a capture belongs to the graph's pool.
    """

    def __init__(self) -> None:
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
