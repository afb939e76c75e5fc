"""A case too rare for random schedules: a decode worker's last events cross a Fence, and all are read together."""

from unittest.mock import MagicMock

import pytest

from baton.core import Finish, FinishReason, HandoffId, Role, Sampling, SequenceSpec, Token
from baton.errors import WorkerLost
from baton.worker import events
from router.request.attempt import Attempt

H = HandoffId("r", 1)
FIRST, SECOND = Token(0, 5, ""), Token(1, 6, "")
LAST_WORDS = {"finish": events.finished(H, Finish(FinishReason.LENGTH)), "preempted": events.preempted(H, "full")}


@pytest.mark.parametrize("last", LAST_WORDS)
async def test_a_fence_that_meets_a_handoff_which_has_ended_is_no_failure(last):
    """D commits, ends, and forgets the handoff before the Fence comes, so D can only reply FENCED."""
    placement = MagicMock()
    placement.decode.info.thinking_chunk = 0
    attempt = Attempt(H, placement, SequenceSpec((1, 2), Sampling(max_tokens=4)), MagicMock(), MagicMock())
    attempt._mailbox.put(Role.PREFILL, events.tokens(H, [FIRST]))
    attempt._mailbox.put(Role.PREFILL, WorkerLost("it died"))
    heard = attempt.outputs()
    assert await anext(heard) == [FIRST]
    said = (events.tokens(H, [FIRST]), events.tokens(H, [SECOND]), LAST_WORDS[last])
    for event in (events.committed(H), *said, events.fenced(H)):
        attempt._mailbox.put(Role.DECODE, event)
    assert [tokens async for tokens in heard] == [[FIRST, SECOND]]
    assert attempt.lost is None
    ended = (attempt.finish is not None, attempt.retry_reason)
    assert ended == ((True, "") if last == "finish" else (False, "preempted"))
