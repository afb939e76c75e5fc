"""The trace of a request: the caller's if it has exactly W3C's form, else a new one."""

import pytest

from baton.errors import Unauthenticated
from baton.tracing.trace import TraceContext
from router.openai.upstream import metadata_of

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{PARENT}-01"


@pytest.mark.parametrize(("flags", "sampled"), [("00", False), ("01", True), ("02", False), ("ff", True)])
def test_what_a_caller_says(flags, sampled):
    assert TraceContext.parse(f"00-{TRACE}-{PARENT}-{flags}") == TraceContext(TRACE, PARENT, sampled)


SHAPES = ["", "00", GOOD.upper(), f" {GOOD}", f"{GOOD}\n", f"{GOOD}-00", f"{GOOD}\r\nauthorization: Bearer x"]
VERSIONS = [GOOD.replace("00-", version, 1) for version in ("01-", "ff-")]
ZEROS = [f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01"]
LENGTHS_AND_DIGITS = [f"00-{TRACE[1:]}-{PARENT}-01", f"00-{TRACE}-{PARENT}-1", GOOD.replace("4", "٤", 1)]


@pytest.mark.parametrize("header", [*SHAPES, *VERSIONS, *ZEROS, *LENGTHS_AND_DIGITS])
def test_what_is_not_exactly_that_is_ignored(header):
    assert TraceContext.parse(header) is None
    assert metadata_of(None, header) == ()
    assert metadata_of("Bearer x", header) == (("authorization", "Bearer x"),)


def test_the_gateway_passes_on_what_is():
    assert metadata_of(None, GOOD) == (("traceparent", GOOD),)
    assert metadata_of("Bearer x", GOOD) == (("authorization", "Bearer x"), ("traceparent", GOOD))
    assert metadata_of(None, None) == ()
    with pytest.raises(Unauthenticated):
        metadata_of("Bearer \n", GOOD)


def test_new_ones_are_new():
    made = {TraceContext.new().trace_id for _ in range(50)}
    assert len(made) == 50
    assert all(len(one) == 32 and int(one, 16) for one in made)


def test_the_caller_decides_and_else_the_share_does():
    assert TraceContext(TRACE, PARENT, sampled=True).exported(0.0)
    assert not TraceContext(TRACE, PARENT, sampled=False).exported(1.0)
    low, high = TraceContext("f" * 16 + "1" + "0" * 15), TraceContext("0" * 16 + "f" * 16)
    for share, exported in ((0.0, [False, False]), (0.5, [True, False]), (1.0, [True, True])):
        assert [low.exported(share), high.exported(share)] == exported
