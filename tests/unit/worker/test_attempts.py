"""Which attempts a worker has seen, up to a limit."""

from __future__ import annotations

import pytest

from baton.core import HandoffId
from baton.errors import StaleAttempt
from baton.worker.attempts import Attempts


def test_the_latest_requests_are_remembered_up_to_the_limit():
    attempts = Attempts(limit=2)
    for request in ("a", "b", "c"):
        attempts.saw(HandoffId(request, 2))
    for request in ("b", "c"):
        for attempt in (1, 2):
            with pytest.raises(StaleAttempt, match="attempt 2 was seen here already"):
                attempts.check_new(HandoffId(request, attempt))
        attempts.check_new(HandoffId(request, 3))
    attempts.check_new(HandoffId("a", 1))  # forgotten
    attempts.saw(HandoffId("b", 1))  # an older attempt takes nothing back, and the request was seen last
    attempts.saw(HandoffId("d", 1))
    attempts.check_new(HandoffId("c", 1))
    with pytest.raises(StaleAttempt, match="attempt 2"):
        attempts.check_new(HandoffId("b", 2))
