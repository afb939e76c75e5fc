"""Step 3: a communicator of one rank, built, polled and aborted as a KV channel does it.

It finds errors of the group's interface on one GPU. Two ranks on one GPU need NCCL 2.30 or newer.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from benchmarks.gpu_first.at import At, Outcome, require
from benchmarks.gpu_first.doubles import nccl_in_main_memory
from kvtransfer.transports import torch_dist
from kvtransfer.transports.torch_dist import NcclTransport

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

DEADLINE_S = 20.0


def run(at: At) -> Outcome:
    """Open the group, run one operation, poll it with the channel's own function, and abort it."""
    double: AbstractContextManager[None] = nccl_in_main_memory() if at.dry else nullcontext()
    with double:
        device = torch.device("cuda", 0)
        NcclTransport(device)  # sets the variables of NCCL
        store, options = HashStore(), dist.ProcessGroupNCCL.Options()
        options.config.blocking = 0
        options._timeout = timedelta(seconds=DEADLINE_S)
        began = time.monotonic()
        with torch.cuda.device(device):
            group = dist.ProcessGroupNCCL(store, 0, 1, options)
            group.eager_connect_single_device(device)
            connected_s = time.monotonic() - began
            seconds = _operation(group, at)
            began = time.monotonic()
            group.abort()
            aborted_s = time.monotonic() - began
    figures = {"connect_s": connected_s, "operation_s": seconds, "abort_s": aborted_s}
    text = f"connected in {connected_s:.2f} s, operation {seconds * 1e3:.1f} ms, aborted in {aborted_s:.2f} s"
    return Outcome(text, {name: round(value, 4) for name, value in figures.items()})


def _operation(group: dist.ProcessGroupNCCL, at: At) -> float:
    """Run one operation until `_poll` accepts it, and return its seconds."""
    tensor = torch.arange(1 << 20, device=at.device, dtype=torch.float32)
    expected, began = tensor.clone(), time.monotonic()
    work = group.allreduce([tensor])  # type: ignore[attr-defined]  # not in the stub
    torch_dist._poll(work, DEADLINE_S)
    seconds = time.monotonic() - began
    require(torch.equal(tensor, expected), "the sum of one rank is not its part")
    return seconds
