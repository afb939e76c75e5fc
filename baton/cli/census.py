"""`baton status --census`: does each block that a worker holds belong to a request that runs?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from baton.core import HandoffId
from baton.worker.census import Census, Held


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is unaccounted for at a worker. Two are equal if they are about the same thing."""

    worker: str
    handoff: HandoffId | None
    text: str = field(compare=False)

    def __str__(self) -> str:
        return f"{self.worker}: {self.text}"


def problems(censuses: Sequence[Census], running: Mapping[str, Set[str]]) -> Iterator[Problem]:
    """What does not fit together. `running`: the requests of each router."""
    for census in censuses:
        worker = str(census.worker)
        if census.unaccounted > 0:
            yield Problem(worker, None, f"{_blocks(census.unaccounted)} that no handoff holds")
        elif census.unaccounted:
            yield Problem(
                worker, None, f"{_blocks(-census.unaccounted)} that a handoff holds and the ledger calls free"
            )
        for held in census.held:
            if held.handoff.request_id not in running.get(held.router_id, ()):
                yield Problem(worker, held.handoff, _leaked(held, known=held.router_id in running))


def _leaked(held: Held, *, known: bool) -> str:
    if not held.router_id:
        why = "nobody wants it"
    elif known:
        why = f"{held.router_id} does not run it"
    else:
        why = f"{held.router_id} is not the router that was asked"
    return f"{held.handoff} is {held.state} with {_blocks(held.blocks)}, and {why}"


def _blocks(number: int) -> str:
    return f"{number} block" if number == 1 else f"{number} blocks"
