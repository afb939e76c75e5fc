"""Log-probabilities of a prompt at a router: each position once, in order and before the tokens, whatever dies."""

import pytest

from baton.core import PromptPart, PromptToken, TokenLogprobs
from baton.errors import InvalidRequest
from baton.rpc import convert
from baton.rpc.v1 import common_pb2, worker_pb2
from baton.rpc.v1 import inference_pb2 as pb
from tests.support.in_process_router import InProcessCluster
from tests.support.routers import asked, ids_of, kinds, recovered, right
from tests.support.waiting import until

PROMPT = list(range(1, 10))
ANSWER = right(PROMPT)
SCORES = [PromptToken(1), *(PromptToken(i, 1, TokenLogprobs(-0.5 * i)) for i in PROMPT[1:])]
HELD = worker_pb2.Failed(kind="ChannelBroken", message="cut", held=True)


def scores(events: list[pb.GenerateEvent], begin: int = 0) -> list[PromptToken]:
    """Return the scored tokens after the first `begin`. Checks their order, and that no token comes before the last."""
    found: list[PromptToken] = []
    for item in events:
        if item.HasField("prompt_logprobs"):
            part = convert.prompt_part_from_pb(item.prompt_logprobs)
            assert part.start == begin + len(found)
            found += part.tokens
        elif item.HasField("tokens"):
            assert begin + len(found) == len(PROMPT)
    return found


async def begun(cluster: InProcessCluster, positions: int, **fields):
    """Start a call whose prefill worker stops after so many positions. Return it with its events until then."""
    for worker in cluster.workers:
        worker.scores_first = positions
        worker.close("score")
    call, events = cluster.call(PROMPT, prompt_logprobs=0, **fields), list[pb.GenerateEvent]()
    async for item in call:
        events.append(item)
        if len(scores(events)) == 1 + positions:
            break
    return call, events


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("alone", [False, True])
async def test_they_precede_the_tokens_and_come_once_for_all_choices(make, n, alone):
    cluster = await make(prefill=0 if alone else 1)
    events = await cluster.generate(PROMPT, prompt_logprobs=2, n=n)
    assert scores(events) == SCORES
    assert [ids_of(events, choice=choice) for choice in range(n)] == [ANSWER] * n
    specs = (cluster.decode if alone else cluster.prefill)[0].specs
    assert [spec.prompt_logprobs for spec in specs if spec.HasField("prompt_logprobs")] == [2]
    await cluster.nothing_is_left()


async def test_tokens_of_the_decode_worker_wait_for_them(make):
    """The streams of two workers have no common order."""
    cluster = await make()
    cluster.prefill[0].commit_first = True
    call, events = await begun(cluster, 4)
    await until(lambda: cluster.decode[0].decoded and cluster.decode[0].holds_nothing, "decoded completely")
    cluster.prefill[0].open("score")
    events += await cluster.answer(call)
    assert (scores(events), ids_of(events)) == (SCORES, ANSWER)
    await cluster.nothing_is_left()


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("positions", [0, 4])
async def test_a_lost_prefill_worker_is_replaced_and_nothing_is_repeated(make, positions, committed):
    """A decode worker that has the KV does not help, because it has no log-probabilities."""
    cluster = await make(prefill=2)
    for worker in cluster.prefill:
        worker.commit_first = committed
    call, events = await begun(cluster, positions)
    if committed:
        await until(lambda: cluster.decode[0].decoded and cluster.decode[0].holds_nothing, "decoded completely")
    await cluster.prefill[0].kill()
    cluster.prefill[1].open("score")
    events += await cluster.answer(call)
    assert (scores(events), ids_of(events)) == (SCORES, ANSWER)
    assert recovered(events) == [(2, "prefill_lost")]
    assert [spec.HasField("prompt_logprobs") for spec in cluster.prefill[1].specs] == [True]
    await cluster.nothing_is_left()


async def test_held_kv_repeats_them_under_the_new_handoff(make):
    cluster = await make(decode=2)
    cluster.prefill[0].fail_push.append(HELD)
    events = await cluster.generate(PROMPT, prompt_logprobs=0)
    assert (scores(events), ids_of(events)) == (SCORES, ANSWER)
    assert cluster.prefill[0].count("repush") == 1
    await cluster.nothing_is_left()


async def test_after_them_a_lost_decode_worker_costs_no_second_scoring(make):
    cluster = await make(decode=2)
    cluster.decode[0].hold(3)
    call, events = cluster.call(PROMPT, prompt_logprobs=0), list[pb.GenerateEvent]()
    async for item in call:
        events.append(item)
        if len(ids_of(events)) == 3 and cluster.decode[0].alive:
            await cluster.decode[0].kill()
    assert (scores(events), ids_of(events)) == (SCORES, ANSWER)
    assert [spec.HasField("prompt_logprobs") for spec in cluster.prefill[0].specs] == [True, False]


@pytest.mark.parametrize(("had", "tokens"), [(0, 0), (1, 0), (5, 0), (9, 0), (9, 3)])
async def test_another_router_continues_after_the_positions_that_the_client_has(cluster, had, tokens):
    request = asked(PROMPT, prompt_logprobs=1)
    message = pb.ResumeRequest(request_id="earlier", request=request, prompt_logprobs_received=had)
    message.received.append(common_pb2.TokenIds(ids=ANSWER[:tokens]))
    events = await cluster.answer(cluster.stub.Resume(message))
    assert scores(events, had) == SCORES[had:]
    assert ids_of(events, tokens) == ANSWER[tokens:]
    assert [spec.HasField("prompt_logprobs") for spec in cluster.prefill[0].specs] == [had < len(PROMPT)]
    await cluster.nothing_is_left()


@pytest.mark.parametrize(
    ("had", "fields", "words"),
    [
        (10, {}, "must be at most 9, got 10"),
        (4, {"received": [common_pb2.TokenIds(ids=ANSWER[:1])]}, "must be 9, got 4"),
        (4, {"exact": True}, "must be 9, got 4"),
    ],
)
async def test_impossible_positions_are_refused_by_name(cluster, had, fields, words):
    request = asked(PROMPT, prompt_logprobs=1)
    message = pb.ResumeRequest(request_id="earlier", request=request, prompt_logprobs_received=had, **fields)
    with pytest.raises(InvalidRequest, match=f"prompt_logprobs_received: {words}"):
        await cluster.answer(cluster.stub.Resume(message))


@pytest.mark.parametrize("prompt", [PROMPT[:1], PROMPT])
async def test_without_new_tokens_the_request_ends_with_the_prompt(cluster, prompt):
    events = await cluster.generate(prompt, 0, prompt_logprobs=0)
    parts = [convert.prompt_part_from_pb(e.prompt_logprobs) for e in events if e.HasField("prompt_logprobs")]
    assert [token for part in parts for token in part.tokens] == SCORES[: len(prompt)]
    assert parts[0] == PromptPart(0, (SCORES[0],))
    assert ids_of(events) == []
    assert kinds(events)[-2:] == ["finished", "completed"]
    assert events[-2].finished.reason == common_pb2.FINISH_REASON_LENGTH
    assert events[-1].completed.usage.completion_tokens == 0
    assert events[-1].completed.placement.decode_worker == ""
    assert (await cluster.generate(prompt, 0))[-1].completed.usage.prompt_tokens == len(prompt)
    await cluster.nothing_is_left()
