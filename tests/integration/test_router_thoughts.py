"""Thoughts of a model that thinks, at a router: each chunk once, in order and before its tokens, from any worker."""

from dataclasses import replace

import pytest

from baton.core import Role
from baton.engine.prefix_cache import BlockHashChain, scope_key
from baton.errors import EngineFault, InvalidRequest
from baton.rpc.v1 import inference_pb2 as pb
from tests.integration.test_router_resume import moved, resumable
from tests.support.in_process_router import LAYOUT, InProcessCluster
from tests.support.routers import asked, ids_of, kinds, right, thought

C = 4
PROMPT = list(range(1, 15))  # 3 chunks and 2 more tokens
ANSWER = right(PROMPT)
BOTH = ["thoughts", "deterministic"]  # the workers lack both
ALL_X = dict.fromkeys(("prefill-0", "prefill-1", "decode-0", "decode-1"), "x")


def told(events: list[pb.GenerateEvent], choice: int = 0) -> list[int]:
    """Return the chunks of the thoughts that the client received, after a check of their content."""
    found = [item.thought for item in events if item.HasField("thought") and item.thought.choice == choice]
    for one in found:
        ids = thought(one.chunk)
        assert (tuple(one.ids), one.text) == (ids, bytes(ids).decode().strip())
    return [one.chunk for one in found]


def counted(*chunks: int) -> int:
    return sum(len(thought(chunk)) for chunk in chunks)


async def ask(cluster: InProcessCluster, **fields) -> list[pb.GenerateEvent]:
    return await cluster.generate(PROMPT, **{"thoughts": True, **fields})


async def begun(cluster: InProcessCluster, **fields):
    """Start a call. Return it with its events up to the last thought about the prompt."""
    call, events = cluster.call(PROMPT, thoughts=True, **fields), list[pb.GenerateEvent]()
    async for item in call:
        events.append(item)
        if len(told(events)) == 3:
            break
    return call, events


async def test_a_model_that_does_not_think_refuses_by_name(cluster):
    for fields in (["thoughts"], ["think_while_decoding"], ["thoughts", "think_while_decoding"], BOTH):
        with pytest.raises(InvalidRequest, match="the served model does not think") as caught:
            await cluster.generate(PROMPT, **dict.fromkeys(fields, True))
        assert [violation.field for violation in caught.value.violations] == fields
    assert ids_of(await cluster.generate(PROMPT, thoughts=False, think_while_decoding=False)) == ANSWER
    await cluster.nothing_is_left()


@pytest.mark.parametrize("by_file", [False, True])
async def test_the_file_sets_whether_it_thinks_while_decoding(make, by_file):
    cluster = await make(thinks=C, think_while_decoding=by_file)
    events = await ask(cluster)
    assert [spec.think_while_decoding for spec in cluster.prefill[0].specs] == [by_file]
    chunks = range(5 if by_file else 3)
    assert told(events) == list(chunks)
    assert events[-1].completed.usage.thinking_tokens == counted(*chunks)


@pytest.mark.parametrize(("thinks", "chunks"), [(C, [0, 1, 2]), (0, [])])
async def test_thoughts_are_counted_and_not_told_unless_asked_for(make, thinks, chunks):
    """The setting in the file means nothing to a model that does not think."""
    cluster = await make(thinks=thinks, think_while_decoding=not thinks)
    events = await cluster.generate(PROMPT)
    assert (ids_of(events), "thought" in kinds(events)) == (ANSWER, False)
    assert events[-1].completed.usage.thinking_tokens == counted(*chunks)
    assert [spec.think_while_decoding for spec in cluster.prefill[0].specs] == [False]
    (model,) = (await cluster.stub.ListModels(pb.ListModelsRequest())).models
    assert model.thinking_chunk == thinks


async def test_each_comes_before_what_follows_it(make):
    cluster = await make(thinks=C)
    events = await ask(cluster, think_while_decoding=True)
    assert ids_of(events) == ANSWER
    assert told(events) == [0, 1, 2, 3, 4]
    tokens = 0
    for item in events:
        tokens += len(item.tokens.ids)
        if item.HasField("thought"):
            behind = (item.thought.chunk + 1) * C - len(PROMPT)
            assert tokens == max(0, behind), f"chunk {item.thought.chunk}: behind what it is about, too"
    usage = events[-1].completed.usage
    assert (usage.completion_tokens, usage.thinking_tokens) == (8, counted(0, 1, 2, 3, 4))
    assert [spec.think_while_decoding for spec in cluster.prefill[0].specs] == [True]
    await cluster.nothing_is_left()


async def test_thoughts_do_not_wait_for_the_first_token(make):
    cluster = await make(thinks=C)
    cluster.prefill[0].close("first")
    call, events = await begun(cluster)
    assert kinds(events) == ["accepted", *["thought"] * 3]
    cluster.prefill[0].open("first")
    assert ids_of(await cluster.answer(call)) == ANSWER
    events = await ask(cluster, max_tokens=1)
    assert (told(events), ids_of(events)) == ([0, 1, 2], ANSWER[:1])


async def test_choices_have_the_thoughts_of_the_prompt_in_common(make):
    cluster = await make(thinks=C)
    events = await ask(cluster, n=2, think_while_decoding=True)
    assert told(events) == [0, 1, 2, 3, 4]
    assert told(events, 1) == [3, 4]
    usage = events[-1].completed.usage
    assert (usage.completion_tokens, usage.thinking_tokens) == (16, counted(0, 1, 2, 3, 4, 3, 4))


async def test_an_audit_digest_is_of_the_answer_alone(make):
    cluster = await make(thinks=C, bits=ALL_X)
    fields = {"deterministic": True, "sampling": {"seed": 5}}
    plain, aloud = await cluster.generate(PROMPT, **fields), await ask(cluster, **fields)
    assert told(aloud) == [0, 1, 2]
    assert plain[-1].completed.usage.audit_digest == aloud[-1].completed.usage.audit_digest != ""


@pytest.mark.parametrize("state", ["prefilling", "transferring"])
async def test_a_successor_says_them_again_and_the_client_hears_them_once(make, state):
    cluster = await make(prefill=2, thinks=C)
    gate = {"prefilling": "first", "transferring": "commit"}[state]
    cluster.prefill[0].close(gate)
    cluster.prefill[1].close("think")
    call, events = await begun(cluster, think_while_decoding=True)
    lost = next(worker for worker in cluster.prefill if worker.specs)
    lost.close(gate)
    await lost.kill()
    for worker in cluster.prefill:
        worker.open("think")
    events += await cluster.answer(call)
    assert ids_of(events) == ANSWER
    assert told(events) == [0, 1, 2, 3, 4]
    assert kinds(events).count("recovered") == 1
    assert events[-1].completed.usage.thinking_tokens == counted(0, 1, 2, 3, 4)
    await cluster.nothing_is_left()


async def test_who_was_accepted_is_not_refused_when_another_model_comes(make):
    cluster = await make(prefill=2, thinks=C)
    for worker in cluster.prefill:
        worker.close("first")
    call, events = await begun(cluster)
    lost = next(worker for worker in cluster.prefill if worker.specs)
    for link in cluster.links:
        if link.info.role is Role.PREFILL and link.info.ref != lost.info.ref:
            link.view.info = replace(link.info, thinking_chunk=0)
    await lost.kill()
    for worker in cluster.prefill:
        worker.open("first")
    events += await cluster.answer(call)
    assert (told(events), ids_of(events)) == ([0, 1, 2], ANSWER)
    with pytest.raises(InvalidRequest):
        await ask(cluster)


async def test_one_that_never_came_is_a_fault_for_whoever_asked(make):
    cluster = await make(thinks=C)
    for worker in cluster.workers:
        worker._think = lambda *_: None
    with pytest.raises(EngineFault, match="the thought about chunk 0 is missing, but one about chunk 3 was received"):
        await ask(cluster, think_while_decoding=True)
    events = await cluster.generate(PROMPT, think_while_decoding=True)
    assert events[-1].completed.usage.thinking_tokens == counted(3, 4)


@pytest.mark.parametrize("repeats", [True, False])
async def test_what_is_resumed_elsewhere_begins_with_what_its_worker_says(make, repeats):
    cluster = await make(thinks=1)
    cluster.decode[0].repeats_thoughts = repeats
    answer = right([1, 2, 3], 12)
    events = await moved(cluster, resumable(thoughts=True, think_while_decoding=True), answer[:4])
    assert cluster.decode[0].count("attach") == 1
    assert ids_of(events, 4) == answer[4:]
    chunks = range(0 if repeats else 3, 14)  # another worker sent the prompt's thoughts, to another router
    assert told(events) == list(chunks)
    assert events[-1].completed.usage.thinking_tokens == counted(*chunks)


async def test_what_is_computed_again_is_told_from_the_beginning(make):
    cluster = await make(thinks=C)
    events = await cluster.resume(asked(PROMPT, thoughts=True), ANSWER[:5])
    assert (told(events), ids_of(events, 5)) == ([0, 1, 2], ANSWER[5:])


@pytest.mark.parametrize(("thinks", "while_decoding", "named"), [(C, False, 2), (C, True, 4), (0, False, 4)])
async def test_only_blocks_of_the_prompt_have_names_unless_it_thinks_on(make, thinks, while_decoding, named):
    cluster = await make(thinks=thinks)
    prompt = list(range(1, 41))
    await cluster.resume(asked(prompt, 64, think_while_decoding=while_decoding), [1] * 40)
    (reserve,) = cluster.decode[0].reserves
    chain = BlockHashChain(scope_key("fp", ""), prompt + [1] * 40, LAYOUT.block_size)
    assert list(reserve.prefix) == [chain.digest(block) for block in range(named)]
