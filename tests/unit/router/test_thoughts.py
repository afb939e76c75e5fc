"""Each chunk's thought is delivered once, in order and without gaps, whichever workers send it and however often."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core import Sampling, SequenceSpec, Thought
from baton.errors import EngineFault
from router.request.attempt import most_events
from router.request.delivery import Thoughts
from router.request.lifecycle import fitted
from tests.unit.router import fakes


def spell(ids: Sequence[int]) -> str:
    return "".join(map(str, ids))


def about(*chunks: int) -> list[Thought]:
    return [Thought(chunk, (chunk,) * (chunk % 3)) for chunk in chunks]


def said(most: int):
    """Draw some consecutive chunks, as one message has them."""
    return st.tuples(st.integers(0, most), st.integers(0, most)).map(lambda pair: about(*range(*sorted(pair))))


@given(st.integers(0, 12), st.data())
def test_any_messages_of_any_attempts(most, data):
    """The last attempt sends all thoughts, the earlier ones some."""
    thoughts, found = Thoughts(spell=spell), []
    for _ in range(data.draw(st.integers(0, 3))):
        thoughts.begin(0, 1, detached=False)
        for message in data.draw(st.lists(said(most), max_size=4)):
            found += thoughts.merge(message)
    thoughts.begin(0, 1, detached=False)
    cut = data.draw(st.integers(0, most))
    for message in data.draw(st.permutations([about(*range(cut)), about(*range(cut, most))])):
        found += thoughts.merge(message)
    thoughts.complete()
    assert found == about(*range(most))
    assert thoughts.tokens == sum(chunk % 3 for chunk in range(most))


def test_what_was_told_first_counts():
    thoughts = Thoughts()
    assert thoughts.merge([Thought(0, (1,))]) == [Thought(0, (1,))]
    thoughts.begin(9, 4, detached=False)
    assert thoughts.merge([Thought(0, (2, 3)), Thought(1, (4,))]) == [Thought(1, (4,))]
    assert thoughts.tokens == 2


def chunks(thoughts: Thoughts, *said: int) -> list[int]:
    """Return the chunks that are delivered when a worker sends these."""
    return [thought.chunk for thought in thoughts.merge(about(*said))]


def test_other_choices_begin_behind_the_prompt():
    first, second = Thoughts(0), Thoughts(1)
    for each in (first, second):
        each.begin(9, 4, detached=False)
    assert chunks(first, 0, 1, 2) == [0, 1, 2]
    assert chunks(second, 0, 1, 2) == [2]
    second.begin(9, 4, detached=False)
    assert chunks(second, 0, 1, 2) == []


def test_what_another_router_began_may_begin_anywhere():
    thoughts, other = Thoughts(), Thoughts(1)
    thoughts.begin(9, 4, detached=True)
    assert (chunks(thoughts, 3, 4), chunks(thoughts, 6)) == ([3, 4], [])
    thoughts.begin(9, 4, detached=False)
    assert chunks(thoughts, *range(7)) == [5, 6]
    other.begin(9, 4, detached=True)
    assert chunks(other, 0, 1, 2) == [2]


def test_a_gap_is_a_fault_if_somebody_asked():
    asked, unasked = Thoughts(spell=spell), Thoughts()
    assert (chunks(asked, 2), chunks(unasked, 2)) == ([], [])
    with pytest.raises(EngineFault, match="the thought about chunk 0 is missing, but one about chunk 2 was received"):
        asked.complete()
    unasked.complete()
    assert unasked.tokens == 2


def test_a_model_that_does_not_think_is_told_nothing_of_it():
    plain = fakes.decode().info
    thinker = replace(plain, thinking_chunk=4)
    spec = SequenceSpec(tuple(range(10)), Sampling(max_tokens=6), think_while_decoding=True)
    assert not fitted(spec, plain).think_while_decoding
    assert fitted(spec, thinker) is spec
    assert (most_events(spec, plain), most_events(spec, thinker)) == (0, 8)
