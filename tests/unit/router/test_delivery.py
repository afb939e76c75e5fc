"""Each token and thought is delivered once and in order, and messages reach a client as fast as it reads. The
end of an attempt whose fence comes late.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
from grpc import aio
from hypothesis import given
from hypothesis import strategies as st

from baton.core import Finish, FinishReason, HandoffId, Role, Sampling, SequenceSpec, Thought, Token
from baton.errors import Cancelled, EngineFault, WorkerLost
from baton.worker import events
from router.request.attempt import Attempt, most_events
from router.request.delivery import Delivery, EventStream, StallTimeout, Thoughts
from router.request.lifecycle import fitted
from router.request.prompt_logprobs import PromptScores
from tests.unit.router import fakes
from tests.unit.router.fakes import turns, virtual


def token(index: int, token_id: int | None = None) -> Token:
    return Token(index, 100 + index if token_id is None else token_id, f"<{index}>")


@given(st.integers(1, 12), st.integers(0, 2**32), st.integers(0, 12))
def test_any_order_and_any_number_of_witnesses_give_each_index_once(count, seed, repeats):
    rng = random.Random(seed)
    said = [token(i) for i in range(count)] + [token(rng.randrange(count)) for _ in range(repeats)]
    rng.shuffle(said)
    delivery, heard, came = Delivery(), [], set()
    while said:
        batch, said = said[: (size := rng.randint(1, 4))], said[size:]
        heard += delivery.merge(batch)
        came |= {t.index for t in batch}
        assert [t.index for t in heard] == list(takewhile(came.__contains__, range(count)))
    assert delivery.ids == [100 + i for i in range(count)]
    delivery.complete()


@pytest.mark.parametrize(
    ("before", "index"),
    [([token(0)], 0), ([token(1), token(0)], 0), ([token(1)], 1)],
    ids=["delivered", "late", "early"],
)
def test_a_token_that_contradicts_one_that_came_before(before, index):
    delivery = Delivery()
    delivery.merge(before)
    with pytest.raises(EngineFault, match=f"index {index}: {100 + index} and 7"):
        delivery.merge([token(index, 7)])


def test_an_end_before_an_earlier_token_is_a_fault_and_a_new_attempt_starts_from_what_was_delivered():
    delivery = Delivery()
    delivery.merge([token(0), token(2, 5)])
    with pytest.raises(EngineFault, match="token 1 is missing, but token 2 was received"):
        delivery.complete()
    delivery.drop_pending()
    assert [t.token_id for t in delivery.merge([token(0), token(1), token(2, 6)])] == [101, 6]


# --- on the way to a client


class Client:
    """A client's end of a stream, and gRPC in between. `takes` delivers the sent message."""

    def __init__(self):
        self.sent = []
        self.under_way = []

    async def send_initial_metadata(self, metadata):
        await self.put(dict(metadata))

    async def write(self, message):
        await self.put(message)

    async def put(self, what):
        assert all(each.done() for each in self.under_way), "gRPC takes one thing at a time"
        self.sent.append(what)
        self.under_way.append(asyncio.get_running_loop().create_future())
        await self.under_way[-1]

    def takes(self):
        self.under_way[-1].set_result(None)

    def fails(self, error):
        self.under_way[-1].set_exception(error)

    @property
    def said(self):
        return [(each.seq, each.WhichOneof("event")) for each in self.sent[1:]]


async def opened(patience=None, *, begun=False):
    """Open a stream. Also returns the reasons for which its request was ended. `begun`: deliver its metadata."""
    client, reasons = Client(), list[BaseException]()
    stream = EventStream(cast("Any", client), "a", patience or StallTimeout(30.0), reasons.append)
    stream.open(("baton-request-id", "a"), within_s=0)
    await turns()
    if begun:
        client.takes()
    return client, stream, reasons


def writing_to(stream, choice=0):
    return asyncio.create_task(stream.tokens(choice, [Token(0, 7, "x")]))


async def test_what_comes_first_is_not_waited_for_and_keeps_its_order():
    client, stream, _ = await opened()
    assert client.sent == [{"baton-request-id": "a"}]
    accepting = asyncio.create_task(stream.accepted(3, 0))
    await turns()
    assert not client.said, "the metadata are under way"
    client.takes()
    await accepting
    await turns()
    assert client.said == [(0, "accepted")], "in flight, and no reader waits"
    telling = [writing_to(stream, choice) for choice in range(2)]
    await turns()
    assert client.said == [(0, "accepted")]
    for _ in range(3):
        client.takes()
        await turns()
    await asyncio.gather(*telling)
    assert client.said == [(0, "accepted"), (1, "tokens"), (2, "tokens")]
    assert [each.tokens.choice for each in client.sent[2:]] == [0, 1]


async def test_a_tail_is_of_its_choice():
    client, stream, _ = await opened(begun=True)
    ending = asyncio.create_task(stream.finished(1, Finish(FinishReason.LENGTH, tail="!"), 4))
    for _ in range(2):
        await turns()
        client.takes()
    await ending
    tail, finished = client.sent[1:]
    assert (tail.tokens.choice, tail.tokens.text, list(tail.tokens.ids)) == (1, "!", [])
    assert getattr(tail.tokens, "from") == 4
    assert finished.finished.choice == 1


async def test_what_was_begun_and_failed_is_told_by_the_next():
    client, stream, _ = await opened(begun=True)
    await stream.accepted(3, 0)
    await turns()
    client.fails(ConnectionError("gone"))
    with pytest.raises(ConnectionError, match="gone"):
        await stream.tokens(0, [Token(0, 7, "x")])


async def test_the_status_waits_for_the_metadata_even_of_a_call_that_was_cancelled():
    client, stream, _ = await opened()
    writing = asyncio.create_task(stream.accepted(3, 0))
    await turns()
    writing.cancel()
    await asyncio.wait([writing])
    closing = asyncio.create_task(stream.close())
    await turns()
    assert not closing.done()
    client.takes()
    await closing


@pytest.mark.parametrize("message", [None, "accepted", "tokens"])
async def test_a_client_that_has_gone_does_not_keep_the_status(message):
    """A choice writes in its own task, which gRPC does not cancel with the call's task."""
    client, stream, _ = await opened(begun=message == "tokens")
    writing = {"accepted": lambda: asyncio.create_task(stream.accepted(3, 0)), "tokens": lambda: writing_to(stream)}
    task = writing[message]() if message else None
    await turns()
    client.fails(aio.InternalError("the call is over"))
    if task:
        with pytest.raises(Cancelled, match="the client has left"):
            await task
    await stream.close()


@virtual
async def test_nor_does_one_that_takes_nothing():
    _, stream, _ = await opened(StallTimeout(0.01))
    await asyncio.wait_for(stream.close(), 5.0)


@virtual
async def test_choices_that_wait_for_each_other_are_not_stalled():
    """Each message is taken in time, but the last one later than one message may take."""
    client, stream, reasons = await opened(StallTimeout(1.0), begun=True)
    writing = [writing_to(stream, choice) for choice in range(4)]
    for _ in writing:
        await asyncio.sleep(0.6)
        client.takes()
    await asyncio.gather(*writing)
    assert [(each.seq, each.tokens.choice) for each in client.sent[1:]] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert not reasons


@virtual
async def test_those_who_take_nothing_are_given_up_one_by_one_and_no_others():
    patience = StallTimeout(0.05)
    silent, quick = [await opened(patience, begun=True) for _ in range(2)], await opened(patience, begun=True)
    writing = [writing_to(stream) for _, stream, _ in (*silent, quick)]
    await turns()
    quick[0].takes()
    await asyncio.sleep(1.0)
    for _, _, [reason] in silent:
        assert isinstance(reason, Cancelled)
        assert "did not read for 0.05 s" in str(reason)
    assert not quick[2]
    for task in writing:
        task.cancel()
    await asyncio.wait(writing)


# --- thoughts: each once, in order and without gaps, whichever workers send it and however often


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


# --- an attempt: a decode worker's last events cross a Fence, and all are read together

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


async def test_an_end_that_comes_with_the_loss_of_a_worker_whose_scores_are_missing_is_no_end():
    """D decoded all from KV that P sent early. Only the next attempt can report the scores."""
    placement, spec = MagicMock(), SequenceSpec((1, 2), Sampling(max_tokens=1), prompt_logprobs=0)
    placement.decode.info.thinking_chunk = 0
    attempt = Attempt(H, placement, spec, MagicMock(), MagicMock(), scores=PromptScores(spec))
    attempt._mailbox.put(Role.PREFILL, WorkerLost("it died"))
    for event in (events.committed(H), events.tokens(H, [FIRST]), LAST_WORDS["finish"]):
        attempt._mailbox.put(Role.DECODE, event)
    assert not any([tokens async for tokens in attempt.outputs()])
    assert (attempt.finish, attempt.retry_reason) == (None, "prefill_lost")
