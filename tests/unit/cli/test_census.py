"""What `baton status --census` calls unaccounted for."""

from baton.cli.census import Problem, problems
from baton.core import HandoffId, Incarnation, WorkerRef
from baton.load import BlockCounts
from baton.worker.census import Census, Held

D = WorkerRef("decode-0", Incarnation(7, 2), "127.0.0.1:2")
RUNNING = {"router-a": {"a", "b"}}


def census(*held, free=10):
    owned = sum(entry.counted for entry in held)
    return Census(D, BlockCounts(owned + free, free=free, owned=owned), held)


def held(request, state="decoding", router="router-a", blocks=3):
    return Held(HandoffId(request, 1), state, router, blocks, blocks)


def found(*censuses):
    return [str(problem) for problem in problems(censuses, RUNNING)]


def test_what_runs_is_accounted_for():
    assert found(census(held("a"), held("b", "reserved")), census()) == []


def test_an_unknown_request_is_leaked():
    assert found(census(held("a"), held("x", "pushing"))) == [
        "decode-0@7.2: x/1 is pushing with 3 blocks, and router-a does not run it"
    ]


def test_a_handoff_without_blocks_is_leaked_too():
    """It would answer for ever, and take a place in the tables."""
    assert found(census(held("x", "queued", blocks=0))) == [
        "decode-0@7.2: x/1 is queued with 0 blocks, and router-a does not run it"
    ]


def test_whose_router_is_gone():
    assert found(census(held("a", router="router-b", blocks=1), held("b", router=""))) == [
        "decode-0@7.2: a/1 is decoding with 1 block, and router-b is not the router that was asked",
        "decode-0@7.2: b/1 is decoding with 3 blocks, and nobody wants it",
    ]


def test_blocks_that_nobody_holds():
    lost = Census(D, BlockCounts(10, free=7, owned=2, reserved=1), (held("a", blocks=2),))
    twice = Census(D, BlockCounts(10, free=9, owned=1), (held("a", blocks=2),))
    assert found(lost, twice) == [
        "decode-0@7.2: 1 block that no handoff holds",
        "decode-0@7.2: 1 block that a handoff holds and the ledger calls free",
    ]


def test_problems_are_the_same_if_they_are_about_the_same():
    """So that what was only on its way is not reported: it is gone by the second look."""
    assert Problem("w", HandoffId("a", 1), "with 3 blocks") == Problem("w", HandoffId("a", 1), "with 4 blocks")
    assert Problem("w", HandoffId("a", 1), "") != Problem("w", HandoffId("a", 2), "")
    assert Problem("w", None, "") != Problem("v", None, "")
