"""Gates whose queues must be empty at the end."""

from collections.abc import AsyncIterator, Callable

import pytest

from tests.unit.router.fakes import Gate


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., Gate]]:
    """A function that creates a `Gate`."""
    made: list[Gate] = []

    def build(*args, **kwargs) -> Gate:
        made.append(Gate(*args, **kwargs))
        return made[-1]

    yield build
    for gate in made:
        await gate.cleared()
