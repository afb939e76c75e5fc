"""Stand-ins of a dry run, from the tests: NCCL's process group in main memory, and a capture that records memory."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.engine.batch import Batch
    from baton.engine.kernels.base import Attention

from baton.engine.kernels.torch_reference import TorchKernels


@contextmanager
def nccl_in_main_memory() -> Iterator[None]:
    """While it runs, torch has a double of `ProcessGroupNCCL`. See `tests/support/nccl.py`."""
    from tests.support.nccl import Machine, make_module

    module: Any = make_module(Machine(), lambda: 0, [])
    with ExitStack() as stack:
        stack.enter_context(patch.object(dist, "ProcessGroupNCCL", module, create=True))
        stack.enter_context(patch.object(dist, "is_nccl_available", lambda: True))
        stack.enter_context(patch.object(torch.cuda, "device", lambda device: nullcontext()))
        yield


class NoAttention(TorchKernels):
    """Copies queries instead, because plain torch makes tensors from lists of the host, which no graph can hold."""

    def attention(self, batch: Batch, block_size: int, window: int | None, scale: float) -> Attention:
        """Return a copy of the queries."""
        del batch, block_size, window, scale
        return lambda query, keys, values, out: out.copy_(query.flatten(1))
