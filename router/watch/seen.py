"""What requests tell as they live; called from where metrics are counted. Nothing here waits, or keeps a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton import errors
from baton.clock import Clock
from baton.core import Role
from baton.errors import BatonError
from router.watch.happenings import Happenings
from router.watch.recent import Recent

if TYPE_CHECKING:
    from collections.abc import Iterable

    from router.attempt import Attempt
    from router.call import Call
    from router.lifecycle import Life
    from router.link import WorkerLink

_OURS = (errors.Overloaded, errors.NoWorker, errors.WorkerLost, errors.DeadlineExceeded)  # texts without a caller's


class Seen:
    """One per router."""

    def __init__(self, clock: Clock) -> None:
        self.recent = Recent(clock)
        self.happenings = Happenings(clock)
        self._workers: dict[tuple[str, str], Role] = {}  # connected: by id and incarnation

    def tokens(self, life: Life, count: int, gap_s: float | None) -> None:
        """A client got `count` new tokens; `gap_s` None: its first ones."""
        if gap_s is None:
            self.recent.first_tokens(count, life.stages.age_s, 0 if life.choice else life.call.prompt_tokens)
        else:
            self.recent.tokens(count, gap_s)

    def recovered(self, life: Life, attempt: Attempt) -> None:
        """Another attempt follows this one."""
        prefill, decode = attempt.workers
        reason = attempt.handed_back
        self.recent.count("recovered")
        if attempt.fencing is not None and attempt.handed_back == "prefill_lost":
            self.happenings.add("fenced", "its decode worker takes nothing of a lost attempt", life.call.name, decode)
        worker = prefill if reason.startswith(Role.PREFILL) else decode
        self.happenings.add("recovered", f"goes on with another attempt: {reason}", life.call.name, worker)

    def ended(self, call: Call, outcome: str, error: BatonError | None) -> None:
        """As `Metrics.ended`."""
        self.recent.count("ended")
        if outcome in {"failed", "refused"}:
            self.recent.count(outcome)
            alike = type(error).__name__ if outcome == "refused" else ""  # how long each would wait tells them apart
            self.happenings.add(outcome, _shown(error), call.name, alike=alike)
        elif outcome == "finished":
            self.recent.finished(max(life.stages.age_s for life in call.lives))
            if not call.resumes:
                self.recent.count("judged")
                if all(life.met_slo() for life in call.lives):
                    self.recent.count("kept")

    def look(self, links: Iterable[WorkerLink]) -> None:
        """Who is connected that was not, and who is not any more. To be called each second."""
        self.recent.second()
        connected = {
            (link.info.ref.worker_id, str(link.info.ref.incarnation)): link.info.role
            for link in links
            if link.state == "connected"
        }
        for one, role in self._workers.items():
            if one not in connected:
                self.happenings.add("left", f"a {role} worker is gone", worker_id=one[0])
        for one, role in connected.items():
            if one not in self._workers:
                self.happenings.add("joined", f"a {role} worker is here", worker_id=one[0])
        self._workers = connected


def _shown(error: BatonError | None) -> str:
    """The error's name, and its text where no part of a request can be in it."""
    return f"{type(error).__name__}: {error}" if isinstance(error, _OURS) else type(error).__name__
