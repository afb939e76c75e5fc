"""What a role is to the host that runs it, and what it is built from. The host knows no role: it is given makers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from baton.rpc.channel import IN_THE_CLEAR, Wire
from baton.worker.service import RoleBehaviour

if TYPE_CHECKING:
    import grpc

    from baton.clock import Clock
    from baton.core import Load, Role, WorkerInfo
    from baton.engine.engine import Engine
    from baton.engine.step_result import StepResult
    from baton.ledger.registry import Ledger
    from baton.metrics.worker import Counts
    from baton.worker.engine_loop import EngineLoop
    from baton.worker.settings import WorkerSettings


class WorkerRole(RoleBehaviour, Protocol):
    """A role as the host sees it."""

    counts: Counts

    def stepped(self, result: StepResult) -> None: ...

    def tick(self) -> None: ...

    def load(self, load: Load) -> Load:
        """Complete the engine's load report with what the role knows. On the engine thread."""

    def drain(self) -> None:
        """Take nothing new; what is under way goes on to its end. On the engine thread."""

    @property
    def idle(self) -> bool:
        """Whether nothing is under way: nobody would miss this worker. On the engine thread."""

    def leave(self) -> None:
        """Take nothing new, and give back to routers what this worker will not end. On the engine thread."""

    @property
    def busy(self) -> bool:
        """Whether something is left that will end soon."""

    async def close(self) -> None:
        """Stop transfers and background writers."""


@dataclass(frozen=True, slots=True)
class RoleDeps:
    """What a role is built from."""

    settings: WorkerSettings
    info: WorkerInfo
    engine: Engine
    loop: EngineLoop
    ledger: Ledger
    server: grpc.aio.Server
    clock: Clock
    wire: Wire = IN_THE_CLEAR


RoleFactory = Callable[[RoleDeps], WorkerRole]
Factories = Mapping["Role", RoleFactory]
