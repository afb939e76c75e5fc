"""What the ends of all transports share: staging, bounds, and the rule of failure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, TypeVar

from baton.errors import ChannelBroken

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from kvtransfer.transports.express import Express

T = TypeVar("T")


class RingEnd(ABC):
    """A `ChannelEnd` over `staging` (uint8 [slots, size]). What a transport raises in it closes it for good.

    A transport raises OSError or RuntimeError, as its libraries do; the end makes ChannelBroken of it, with the text
    alone: a kept exception would keep the connection, and its sockets.
    """

    express: Express | None = None

    def __init__(self, title: str, staging: Tensor) -> None:
        self._title = title
        self._staging: Tensor | None = staging

    def slot(self, number: int) -> Tensor:
        """See `ChannelEnd`. Raises ChannelBroken when the end is closed."""
        if self._staging is None:
            raise ChannelBroken(f"{self._title}: closed")
        return self._staging[number % len(self._staging)]

    def start(self, number: int, nbytes: int) -> None:
        """See `ChannelEnd`."""
        size = self.slot(number).numel()
        if not 0 < nbytes <= size:
            self.close()
            raise ChannelBroken(f"{self._title}: frame {number} of {nbytes} bytes, a slot has {size}")
        self._guard(lambda: self._start(number, nbytes))

    def finish(self, number: int) -> None:
        """See `ChannelEnd`."""
        self.slot(number)
        self._guard(lambda: self._finish(number))

    def close(self) -> None:
        """See `ChannelEnd`."""
        if self._staging is not None:
            self._staging = None
            self._release()

    @abstractmethod
    def _start(self, number: int, nbytes: int) -> None: ...

    @abstractmethod
    def _finish(self, number: int) -> None: ...

    @abstractmethod
    def _release(self) -> None:
        """Called once."""

    def _guard(self, call: Callable[[], None]) -> None:
        try:
            told(self._title, call)
        except ChannelBroken:
            self.close()
            raise


def told(what: str, call: Callable[[], T]) -> T:
    """What `call` returns. Raises ChannelBroken, with the text and nothing else, for what a library raises."""
    try:
        return call()
    except (OSError, RuntimeError) as error:
        failure = str(error) or type(error).__name__
    raise ChannelBroken(f"{what}: {failure}")
