"""The frames of a channel that are in flight: numbered, announced in batches, credited. No lock of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from baton.errors import ChannelBroken
from baton.rpc.v1 import peer_pb2 as pb
from kvtransfer.messages import announcement

if TYPE_CHECKING:
    from baton.core import HandoffId
    from kvtransfer.plan import FrameSpec


class Window:
    """`slots`: of the ring; 0 as long as they are not known. `batch`: announcements that may wait for each other."""

    def __init__(self, say: Callable[[pb.PeerCommand], None]) -> None:
        self.number = 0  # of the next frame
        self.slots = 0
        self.batch = 1
        self._say = say
        self._unsaid: list[pb.FrameAnnounce] = []
        self._credited = 0

    @property
    def room(self) -> bool:
        """Whether a slot is free."""
        return self.number - self._credited < self.slots

    def announce(self, handoff: HandoffId | None, frame: FrameSpec) -> None:
        """It enters the channel now; said at the latest with the next `flush`."""
        self._unsaid.append(announcement(handoff, self.number, frame))
        self.number += 1
        if len(self._unsaid) >= self.batch:
            self.flush()

    def flush(self) -> None:
        """Say what was announced."""
        said, self._unsaid = self._unsaid, []
        if said:
            self._say(pb.PeerCommand(frame=said[0], more=said[1:]))

    def credited(self, sequence: int) -> None:
        """The slots of all frames up to this one are free. Raises ChannelBroken if that cannot be."""
        if not self._credited <= sequence < self.number:
            raise ChannelBroken(f"credit for frame {sequence}, with {self.number} announced")
        self._credited = sequence + 1
