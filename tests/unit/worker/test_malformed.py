"""A malformed command of whatever kind changes nothing at either role, and is refused by the name of its field."""

import pytest

from baton.errors import InvalidRequest
from baton.rpc.v1 import worker_pb2 as pb
from tests.support.sessions import fence, malformed, prefill, repush, reserve
from tests.support.workers import DecodeSide, PrefillSide

FOREIGN = {PrefillSide: [reserve(), fence()], DecodeSide: [prefill(), repush()]}
CASES = [
    pytest.param(side, command, named, id=f"{side.__name__}: {name}")
    for side, foreign in FOREIGN.items()
    for name, command, named in (*malformed(), *(("of the other role", command, "command") for command in foreign))
]


@pytest.mark.parametrize(("make", "command", "named"), CASES)
def test_a_malformed_command_is_refused_and_changes_nothing(router, make, command, named):
    side, kind = make(), command.WhichOneof("command")
    if (make, kind) == (DecodeSide, "prefill"):
        named = f"{named}|to: a decode worker hands over to nobody"
    elif kind in {one.WhichOneof("command") for one in FOREIGN[make]}:
        named = "command"
    with pytest.raises(InvalidRequest, match=named):
        side.role.command(router, command)
    side.serve(router, command)
    assert (side.all_free, side.engine.has_work(), router.handoffs) == (True, False, set())
    if kind in {None, "hello", "release"}:
        assert router.events == [], "no request waits for an answer"
    else:
        (event,) = router.events
        assert event.handoff == getattr(command, kind).handoff
        assert event.refused.reason == pb.REFUSAL_REASON_INVALID
