"""The construction of a fuzz target."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parents[2]
FREELY = settings(
    max_examples=40, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


@dataclass(frozen=True)
class Target:
    """A fuzz target. `drawn` is a hypothesis test; `seeds` are valid and slightly invalid bytes."""

    from_bytes: Callable[[bytes], None]
    drawn: Any
    seeds: list[bytes]

    def __call__(self, data: bytes) -> None:
        """Test any bytes. After an even first byte, the rest is the input; after an odd one, hypothesis draws by it."""
        if data[:1] and data[0] % 2:
            self.drawn.hypothesis.fuzz_one_input(data[1:])
        else:
            self.from_bytes(data[1:])


def outcome(call: Callable[[], Any], *errors: type[Exception]) -> tuple[Any, Any]:
    """Return `(result, None)`, or `(None, error)` if `call` raises one of these errors."""
    try:
        return call(), None
    except errors as error:
        return None, error
