"""The interface between a role and its host. The host imports no role: it gets a factory for each."""

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
        """Add the role's figures to the engine's load report. On the engine thread."""

    def drain(self) -> None:
        """Accept nothing new; running work continues to its end. On the engine thread."""

    @property
    def idle(self) -> bool:
        """Whether no work is left, so that the worker can end. On the engine thread."""

    def leave(self) -> None:
        """Accept nothing new, and requeue at the routers all work that will not end here. On the engine thread."""

    @property
    def busy(self) -> bool:
        """Whether work is left that will end soon."""

    async def close(self) -> None:
        """Stop transfers and background writers."""


@dataclass(frozen=True, slots=True)
class RoleDeps:
    """The arguments of a role factory."""

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
