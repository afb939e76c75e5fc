"""Stand-in for `torch.distributed.ProcessGroupNCCL` that answers as torch 2.13's source does, in main memory.

Read in ProcessGroupNCCL.cpp (the text around the error of `isSuccess`) and ProcessGroupNCCL.hpp of torch 2.13:
- `WorkNCCL::isSuccess` always raises NotImplementedError. `isCompleted` is `exception() || finished on the GPU`.
- `WorkNCCL::wait` without a timeout does not block the host. If the work has an exception, it aborts the communicator
  and raises it.
- `eagerConnectSingleDevice` stores the communicator under `getKeyFromDevice`, which is `to_string(device.index())`, and
  sends its unique id through the store. From then on `pointToPoint` looks up the key of the tensor's device, which
  always has an index, and asserts that it is there.
- The first send of a pair connects to its peer: `ncclTransportP2pSetup` of NCCL 2.27 sends to it and receives from it,
  and the peer does so in its own first receive. `pointToPoint` polls until then, also if communicators do not block, at
  most for TORCH_NCCL_NONBLOCKING_TIMEOUT seconds.
- `abort` ends the kernels of this rank. The kernels of the peer go on spinning.
Kernels of one GPU and direction start in the order of their launch, as in one launch queue of a GPU: a kernel that
spins blocks later ones. That is the worst case.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict, deque
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from kvtransfer.transports.base import Side


class Machine:
    """GPUs with one launch queue for each direction. `worst` is the largest number of channels with kernels under way
    in one queue.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.queues: dict[tuple[int, Side], deque[Work]] = defaultdict(deque)
        self.worst = 0
        self._starting: dict[bytes, set[Side]] = defaultdict(set)
        self._started = threading.Condition()

    def connect(self, group: Group) -> None:
        """Wait until both ends of a pair have started their first operation."""
        timeout_s = float(os.environ.get("TORCH_NCCL_NONBLOCKING_TIMEOUT", "1800"))
        with self._started:
            sides = self._starting[group.pair]
            sides.add(group.side)
            self._started.notify_all()
            if not self._started.wait_for(lambda: len(sides) == len(Side), timeout_s):
                raise RuntimeError("NCCL timeout in: pointToPoint")

    def launch(self, work: Work) -> None:
        with self.lock:
            queue = self.queues[work.group.gpu, work.group.side]
            queue.append(work)
            self.worst = max(self.worst, len({each.group.pair for each in queue}))
            self.run()

    def drop(self, group: Group) -> None:
        with self.lock:
            for queue in self.queues.values():
                for work in [work for work in queue if work.group is group]:
                    queue.remove(work)
            self.run()

    def run(self) -> None:
        """Run pairs of kernels that are both first in their queues, until there is none."""
        heads = {(queue[0].group.pair, queue[0].group.side): queue for queue in self.queues.values() if queue}
        for (pair, side), queue in heads.items():
            if side is Side.SENDER and (other := heads.get((pair, Side.RECEIVER))):
                sent, received = queue.popleft(), other.popleft()
                received.tensor.copy_(sent.tensor)
                sent.done = received.done = True
                return self.run()


class Work:
    def __init__(self, group: Group, tensor: Tensor) -> None:
        self.group, self.tensor, self.done = group, tensor, False
        self.error: RuntimeError | None = None

    def is_completed(self) -> bool:
        return self.error is not None or self.done

    def is_success(self) -> bool:
        raise NotImplementedError("WorkNCCL::isSuccess() is deprecated")

    def wait(self) -> bool:
        if self.error is not None:
            self.group.abort()
            raise self.error
        return True


class Group:
    """One rank. Its tensors are in main memory and stand for tensors of GPU `gpu`."""

    def __init__(self, machine: Machine, gpu: int, store: Any, rank: int, options: Any) -> None:
        self.machine, self.gpu, self.side, self.options = machine, gpu, Side(rank), options
        self.communicators: dict[str, bytes] = {}
        self.works: list[Work] = []
        self.aborted, self._store = False, store

    def eager_connect_single_device(self, device: Any) -> None:
        if self.side is Side.SENDER:
            self._store.set("0", f"unique id {id(self)}")
        self.pair = self._store.get("0")
        self.communicators[str(-1 if device.index is None else device.index)] = self.pair

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        if str(self.gpu) not in self.communicators:
            raise RuntimeError("INTERNAL ASSERT: Parent communicator missing in eager initialization mode")
        self.machine.connect(self)
        self.works.append(Work(self, tensors[0]))
        self.machine.launch(self.works[-1])
        return self.works[-1]

    recv = send

    def allreduce(self, tensors: list[Tensor]) -> Work:
        """A sum of one rank is its part: no peer is needed."""
        if str(self.gpu) not in self.communicators:
            raise RuntimeError("INTERNAL ASSERT: Parent communicator missing in eager initialization mode")
        self.works.append(Work(self, tensors[0]))
        self.works[-1].done = True
        return self.works[-1]

    def abort(self) -> None:
        self.aborted = True
        self.machine.drop(self)


def make_module(machine: Machine, gpu_of: Any, made: list[Group]) -> Any:
    """Return a stand-in for the class `ProcessGroupNCCL`; `gpu_of()` is the GPU of the calling thread."""

    def build(store: Any, rank: int, size: int, options: Any) -> Group:
        made.append(Group(machine, gpu_of(), store, rank, options))
        return made[-1]

    options = lambda: SimpleNamespace(config=SimpleNamespace())  # noqa: E731
    build.Options = options  # type: ignore[attr-defined]
    return build
