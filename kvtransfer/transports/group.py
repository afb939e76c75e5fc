"""One end of a two-rank `torch.distributed` process group, gloo or NCCL: each frame is a send or a receive under way.

There is no world and no TCPStore: each side has a local `HashStore`, and the few keys of the rendezvous (with gloo
two, of about 170 bytes) travel over the Peer stream. Pools grow and shrink freely; nothing listens but the pair itself.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch.distributed as dist

from kvtransfer.transport import Side
from kvtransfer.transports.end import RingEnd

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Group = dist.ProcessGroupGloo | dist.ProcessGroupNCCL


class GroupEnd(RingEnd):
    """Has a ring of its own; operations of a pair match by order.

    `wait` blocks until a piece of work is done or the deadline is over; `end` gives back what a group holds on to.
    """

    def __init__(
        self,
        title: str,
        staging: Tensor,
        group: Group,
        side: Side,
        wait: Callable[[dist.Work], object],
        end: Callable[[Group], object] = lambda group: None,
    ) -> None:
        super().__init__(title, staging)
        self._group: Group | None = group
        self._post = group.recv if side is Side.RECEIVER else group.send  # type: ignore[union-attr]  # not in the stub
        self._peer = 1 - int(side)
        self._wait = wait
        self._end = end
        self._slots = len(staging)
        self._under_way: deque[tuple[int, dist.Work]] = deque()

    def _start(self, number: int, nbytes: int) -> None:
        # What used this slot before was taken by the other end, or has failed: that is not waited for, it is heard.
        while self._under_way and (
            self._under_way[0][0] <= number - self._slots or self._under_way[0][1].is_completed()
        ):
            self._wait(self._under_way.popleft()[1])
        self._under_way.append((number, self._post([self.slot(number)[:nbytes]], self._peer, 0)))

    def _finish(self, number: int) -> None:
        while self._under_way and self._under_way[0][0] <= number:
            self._wait(self._under_way[0][1])
            self._under_way.popleft()

    def _release(self) -> None:
        group, self._group = self._group, None
        del self._post
        if group is not None:
            self._end(group)
        self._under_way.clear()
