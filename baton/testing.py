"""Stand-ins for tests, without imports."""


class FakeClock:
    """A clock that moves only by `advance`; monotonic and wall time are equal."""

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start

    def monotonic(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move time forward. Raises ValueError if `seconds` is negative."""
        if seconds < 0:
            raise ValueError(f"time does not go back ({seconds} s)")
        self._now += seconds
