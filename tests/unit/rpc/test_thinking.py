"""Thoughts and thinking states survive the wire; what is not valid is refused by name, or not sent."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core import ThinkingState, Thought
from baton.errors import InvalidRequest
from baton.limits import INTERNAL_RECEIVE_BYTES, MAX_PROMPT_IDS
from baton.rpc.thinking import thinking_from_pb, thinking_to_pb, thoughts_from_pb, thoughts_to_pb
from baton.rpc.v1 import common_pb2 as common
from baton.rpc.v1 import worker_pb2 as worker

u32 = st.integers(0, 2**32 - 1)
ids = st.lists(u32, max_size=4).map(tuple)
states = st.builds(
    ThinkingState,
    thinker=st.text(st.characters(codec="utf-8"), min_size=1, max_size=20),
    chunk=st.integers(3, 2**32 - 1),
    offset=u32,
    state=st.binary(min_size=1, max_size=64),
    rows=st.binary(max_size=64),
    thoughts=st.lists(ids, max_size=3).map(tuple),
)


def over_the_wire(message):
    return type(message).FromString(message.SerializeToString())


@given(states)
@settings(max_examples=50)
def test_a_state_survives(state):
    message = thinking_to_pb(state)
    assert message is not None
    assert thinking_from_pb(over_the_wire(message)) == state
    assert thinking_to_pb(None) is None


@given(st.integers(0, 2**31), st.lists(ids, min_size=1, max_size=5))
@settings(max_examples=50)
def test_thoughts_survive(first, made):
    thoughts = [Thought(chunk, each) for chunk, each in enumerate(made, first)]
    assert thoughts_from_pb(over_the_wire(thoughts_to_pb(thoughts))) == thoughts


@pytest.mark.parametrize("chunks", [[], [1, 0], [0, 2], [3, 3], [-1, 0]])
def test_thoughts_with_a_gap_are_not_sent(chunks):
    with pytest.raises(ValueError, match="not consecutive"):
        thoughts_to_pb([Thought(chunk, (1,)) for chunk in chunks])


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"thinker": ""}, "thinking.thinker"),
        ({"state": b""}, "thinking.state"),
        ({"thoughts": [common.TokenIds(ids=[1])] * 3}, "thinking.thoughts"),
        ({"chunk": 0, "thoughts": [common.TokenIds()]}, "thinking.thoughts"),
    ],
)
def test_a_state_that_is_none_is_refused_by_name(change, field):
    fields = {"thinker": "t", "chunk": 2, "state": b"s", **change}
    with pytest.raises(InvalidRequest) as caught:
        thinking_from_pb(worker.ThinkingState(**fields))
    assert [violation.field for violation in caught.value.violations] == [field]


@pytest.mark.parametrize(("chunk", "most"), [(4, 4), (16, 16), (16, 64)])
def test_the_longest_prompt_and_all_thoughts_of_it_are_one_message(chunk, most):
    """A large state is the smaller part: 64 rows of 16384 float32, twice. Thoughts of large ids take 3 bytes each."""
    one, rows = tuple(200_000 + n for n in range(most)), bytes(64 * 16384 * 4)

    def size(thoughts):
        message = thinking_to_pb(ThinkingState("t" * 64, MAX_PROMPT_IDS // chunk, 0, rows, rows, (one,) * thoughts))
        assert message is not None
        return message.ByteSize()

    state = size(0)
    thoughts = (size(1000) - state) / 1000 * (MAX_PROMPT_IDS // chunk)
    assert state + thoughts + 3 * MAX_PROMPT_IDS < INTERNAL_RECEIVE_BYTES
