"""Each value survives the wire byte by byte. Invalid ones are rejected by field name, or not sent."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton import core
from baton.core import Constraint
from baton.errors import InvalidRequest
from baton.limits import INTERNAL_RECEIVE_BYTES, MAX_LOGPROBS, MAX_PRIORITY, MAX_PROMPT_IDS
from baton.rpc import convert
from baton.rpc.convert import constraint_from_pb, constraint_to_pb
from baton.rpc.v1 import common_pb2 as common
from baton.rpc.v1 import inference_pb2 as inference
from baton.rpc.v1 import worker_pb2 as worker

u32 = st.integers(0, 2**32 - 1)
i31 = st.integers(0, 2**31 - 1)
u64 = st.integers(0, 2**64 - 1)
ids = st.lists(u32, max_size=4).map(tuple)
text = st.text(st.characters(codec="utf-8"), max_size=20)
name = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)


def f32(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32)


POSITIVE = 2.0**-20
incarnations = st.builds(core.Incarnation, u64, u64)
refs = st.builds(core.WorkerRef, name, incarnations, name)
handoffs = st.builds(core.HandoffId, name, st.integers(1, 2**32 - 1))
logprobs = st.builds(core.TokenLogprobs, f32(-100, 0), st.lists(st.tuples(u32, f32(-100, 0)), max_size=3).map(tuple))
samplings = st.builds(
    core.Sampling,
    max_tokens=st.integers(1000, 2**31 - 1), min_tokens=st.integers(0, 1000), top_k=i31, seed=u64,
    ignore_eos=st.booleans(), temperature=f32(0, 100), top_p=f32(POSITIVE, 1), min_p=f32(0, 1),
    repetition_penalty=f32(POSITIVE, 100), presence_penalty=f32(-2, 2), frequency_penalty=f32(-2, 2),
    stop=st.lists(name, max_size=3).map(tuple), stop_token_ids=st.lists(u32, max_size=3).map(tuple),
    logit_bias=st.dictionaries(u32, f32(-100, 100), max_size=3).map(lambda bias: tuple(sorted(bias.items()))),
    logprobs=st.none() | st.integers(0, MAX_LOGPROBS),
)  # fmt: skip
constraints = st.one_of(
    st.builds(Constraint, st.just("regex"), st.tuples(name)),
    st.builds(Constraint, st.just("json_schema"), st.tuples(name)),
    st.builds(Constraint, st.just("choices"), st.lists(name, min_size=1, max_size=3).map(tuple)),
)
specs = st.builds(
    core.SequenceSpec,
    prompt=st.lists(u32, min_size=1, max_size=5).map(tuple),
    sampling=samplings,
    known=st.lists(u32, max_size=3).map(tuple),
    priority=st.integers(-MAX_PRIORITY, MAX_PRIORITY),
    cache_scope=text,
    constraint=st.none() | constraints,
    deterministic=st.booleans(),
    think_while_decoding=st.booleans(),
    prompt_logprobs=st.none() | st.integers(0, MAX_LOGPROBS),
)
prompt_tokens = st.builds(core.PromptToken, u32, st.integers(1, 2**32 - 1), logprobs) | st.builds(core.PromptToken, u32)
prompt_parts = st.builds(core.PromptPart, u32, st.lists(prompt_tokens, max_size=3).map(tuple))
finishes = st.builds(core.Finish, st.sampled_from(core.FinishReason), text, text, st.none() | logprobs)
layouts = st.builds(
    core.KVLayout,
    *[st.integers(1, 2**32 - 1)] * 4,
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.lists(name, min_size=1, max_size=3).map(tuple),
)
some_bytes = st.binary(min_size=1, max_size=64)
thought_ids = st.lists(ids, max_size=3).map(tuple)
thinking_states = st.builds(
    core.ThinkingState, name, st.integers(3, 2**32 - 1), u32, some_bytes, some_bytes, thought_ids
)
thoughts = st.tuples(st.integers(0, 2**31), st.lists(ids, min_size=1, max_size=5)).map(
    lambda drawn: [core.Thought(chunk, each) for chunk, each in enumerate(drawn[1], drawn[0])]
)
counts = st.tuples(*[st.integers(0, 2**28)] * 5).map(lambda states: core.BlockCounts(sum(states), *states))
paces = st.builds(core.Pace, u64, u64, u64, st.floats(0, 1e9))
left_out = st.lists(st.builds(core.LeftOut, text, st.sampled_from(list(core.LEFT_OUT)), text), max_size=2).map(tuple)
channels = st.lists(st.builds(core.Channel, text, text, st.floats(0, 1e9), left_out), max_size=2).map(tuple)
LOADS = {
    text: ("transport",),
    u32: ("running", "waiting"),
    u64: ("step", "queued_tokens", "prefill_tokens", "cached_tokens", "decode_steps", "decode_tokens", "transfer_bytes",
          "verify_passes", "rollbacks", "recomputed_tokens", "speculated_tokens", "accepted_tokens"),
    paces: ("prefill_pace", "decode_pace", "joint_pace", "beside_pace"),
    counts: ("blocks",),
    channels: ("channels",),
}  # fmt: skip
INFOS = {
    text: ("fingerprint", "model", "host", "metrics", "determinism", "nondeterminism"),
    u32: ("max_model_len", "total_blocks", "pid", "protocol_version", "thinking_chunk"),
    refs: ("ref",), st.sampled_from(core.Role): ("role",), layouts: ("layout",),
}  # fmt: skip


def any_of(kind: Any, fields: dict[st.SearchStrategy[Any], tuple[str, ...]]) -> st.SearchStrategy[Any]:
    return st.builds(kind, **{field: values for values, named in fields.items() for field in named})


loads, infos = any_of(core.Load, LOADS), any_of(core.WorkerInfo, INFOS)


@st.composite
def token_lists(draw: st.DrawFn) -> list[core.Token]:
    first, count, with_logprobs = draw(i31), draw(st.integers(1, 4)), draw(st.booleans())
    return [
        core.Token(first + offset, draw(u32), draw(text), draw(logprobs) if with_logprobs else None)
        for offset in range(count)
    ]


ROUND_TRIPS: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "incarnation": (incarnations, convert.incarnation_to_pb, convert.incarnation_from_pb),
    "ref": (refs, convert.ref_to_pb, convert.ref_from_pb),
    "handoff": (handoffs, convert.handoff_to_pb, convert.handoff_from_pb),
    "constraint": (constraints, constraint_to_pb, constraint_from_pb),
    "spec": (specs, convert.spec_to_pb, convert.spec_from_pb),
    "token_logprobs": (logprobs, convert.token_logprobs_to_pb, convert.token_logprobs_from_pb),
    "tokens": (token_lists(), convert.tokens_to_pb, convert.tokens_from_pb),
    "finish": (finishes, convert.finish_to_pb, convert.finish_from_pb),
    "layout": (layouts, convert.layout_to_pb, convert.layout_from_pb),
    "counts": (counts, convert.counts_to_pb, convert.counts_from_pb),
    "load": (loads, convert.load_to_pb, convert.load_from_pb),
    "info": (infos, convert.info_to_pb, convert.info_from_pb),
    "thinking": (thinking_states, convert.thinking_to_pb, convert.thinking_from_pb),
    "prompt_part": (prompt_parts, convert.prompt_part_to_pb, convert.prompt_part_from_pb),
    "thoughts": (thoughts, convert.thoughts_to_pb, convert.thoughts_from_pb),
}


@pytest.mark.parametrize("kind", ROUND_TRIPS)
@given(data=st.data())
@settings(max_examples=50)
def test_round_trip(kind: str, data: st.DataObject):
    values, to_pb, from_pb = ROUND_TRIPS[kind]
    value = data.draw(values)
    message = to_pb(value)
    assert from_pb(type(message).FromString(message.SerializeToString())) == value


def test_each_converter_is_tested():
    defined = vars(convert)
    pairs = {name.removesuffix("_from_pb") for name in defined if name.endswith("_from_pb")}
    assert pairs - {"sampling", "finish_reason", "span", "left_out"} == set(ROUND_TRIPS)


@pytest.mark.parametrize(
    "kind", [core.Sampling, core.KVLayout, core.BlockCounts, core.Load, core.WorkerInfo, core.WorkerRef, core.HandoffId]
)
def test_fields_have_the_same_names_on_the_wire(kind: Any):
    ours = {field.name for field in dataclasses.fields(kind)} - ({"logprobs"} if kind is core.Sampling else set())
    assert ours == set(getattr(common, kind.__name__).DESCRIPTOR.fields_by_name)


def test_a_field_that_is_set_to_zero_is_not_unset():
    given_zero = convert.sampling_from_pb(common.Sampling(temperature=0, seed=0, ignore_eos=False), logprobs=0)
    assert (given_zero.temperature, given_zero.seed, given_zero.logprobs) == (0.0, 0, 0)
    assert convert.sampling_from_pb(common.Sampling()) == core.Sampling()
    assert not convert.sampling_to_pb(core.Sampling()).HasField("seed")


REF = core.WorkerRef("d0", core.Incarnation(1, 2), "127.0.0.1:1")
LAYOUT = core.KVLayout(2, 2, 8, 16, "float32")
INFO = core.WorkerInfo(REF, core.Role.DECODE, "f", "m", 64, 8, LAYOUT)
SPEC = core.SequenceSpec((1, 2), core.Sampling(seed=1))
TWO_TOKENS = worker.OutputTokens(ids=[1, 2], texts=["a", "b"])
THOUGHT, STATE = common.TokenIds(), worker.ThinkingState(thinker="t", chunk=2, state=b"s")


def changed(message: Any, **fields: Any) -> Any:
    copy = type(message)()
    copy.CopyFrom(message)
    for field, value in fields.items():
        copy.ClearField(field)
        copy.MergeFrom(type(message)(**{field: value}))
    return copy


@pytest.mark.parametrize(
    ("read", "message", "field"),
    [
        (convert.ref_from_pb, changed(convert.ref_to_pb(REF), worker_id=""), "ref.worker_id"),
        (convert.ref_from_pb, changed(convert.ref_to_pb(REF), incarnation=None), "ref.incarnation"),
        (convert.ref_from_pb, changed(convert.ref_to_pb(REF), address=""), "ref.address"),
        (convert.handoff_from_pb, common.HandoffId(attempt=1), "handoff.request_id"),
        (convert.handoff_from_pb, common.HandoffId(request_id="r"), "handoff.attempt"),
        (convert.spec_from_pb, changed(convert.spec_to_pb(SPEC), prompt=[]), "spec.prompt"),
        (convert.spec_from_pb, changed(convert.spec_to_pb(SPEC), sampling=None), "spec.sampling.seed"),
        (convert.spec_from_pb, changed(convert.spec_to_pb(SPEC), logprobs=21), "sampling.logprobs"),
        (convert.spec_from_pb, changed(convert.spec_to_pb(SPEC), priority=-101), "spec.priority"),
        (convert.spec_from_pb, changed(convert.spec_to_pb(SPEC), constraint=inference.Constraint()), "constraint"),
        (convert.tokens_from_pb, worker.OutputTokens(ids=[1, 2], texts=["a"]), "tokens.texts"),
        (convert.tokens_from_pb, worker.OutputTokens(ids=[1], texts=["a", "b"]), "tokens.texts"),
        (convert.tokens_from_pb, changed(TWO_TOKENS, logprobs=[common.TokenLogprobs()]), "tokens.logprobs"),
        (convert.finish_from_pb, worker.OutputFinish(), "finish.reason"),
        (convert.layout_from_pb, changed(convert.layout_to_pb(LAYOUT), layers=0), "layout.layers"),
        (convert.layout_from_pb, changed(convert.layout_to_pb(LAYOUT), block_size=0), "layout.block_size"),
        (convert.layout_from_pb, changed(convert.layout_to_pb(LAYOUT), dtype="int7"), "layout.dtype"),
        (convert.layout_from_pb, changed(convert.layout_to_pb(LAYOUT), tensors=[]), "layout.tensors"),
        (convert.counts_from_pb, common.BlockCounts(total=5, free=3, owned=1), "load.blocks"),
        (convert.load_from_pb, common.Load(blocks=common.BlockCounts(total=1)), "load.blocks"),
        (convert.load_from_pb, common.Load(decode_pace=common.Pace(seconds=-1.0)), "load.decode_pace.seconds"),
        (convert.load_from_pb, common.Load(prefill_pace=common.Pace(seconds=math.nan)), "load.prefill_pace.seconds"),
        (convert.load_from_pb, common.Load(joint_pace=common.Pace(seconds=math.inf)), "load.joint_pace.seconds"),
        (convert.thinking_from_pb, changed(STATE, thinker=""), "thinking.thinker"),
        (convert.thinking_from_pb, changed(STATE, state=b""), "thinking.state"),
        (convert.thinking_from_pb, changed(STATE, thoughts=[THOUGHT] * 3), "thinking.thoughts"),
        (convert.thinking_from_pb, changed(STATE, chunk=0, thoughts=[THOUGHT]), "thinking.thoughts"),
        (convert.info_from_pb, changed(convert.info_to_pb(INFO), role="cook"), "info.role"),
        (convert.info_from_pb, changed(convert.info_to_pb(INFO), ref=None), "info.ref.worker_id"),
        (convert.info_from_pb, changed(convert.info_to_pb(INFO), layout=None), "layout.layers"),
    ],
)
def test_what_is_not_valid_is_refused_by_name(read: Callable[[Any], Any], message: Any, field: str):
    with pytest.raises(InvalidRequest) as caught:
        read(message)
    assert [violation.field for violation in caught.value.violations] == [field]


def test_tokens_with_a_gap_or_logprobs_on_some_only_are_not_sent():
    with pytest.raises(ValueError, match="not consecutive"):
        convert.tokens_to_pb([core.Token(0, 1, "a"), core.Token(2, 1, "b")])
    with pytest.raises(ValueError, match="every token"):
        convert.tokens_to_pb([core.Token(0, 1, "a", core.TokenLogprobs(-1.0)), core.Token(1, 1, "b")])
    assert convert.tokens_from_pb(convert.tokens_to_pb([])) == []


def test_public_tokens_have_one_text():
    message = convert.tokens_to_public_pb([core.Token(3, 7, "a"), core.Token(4, 8, "b")], choice=1)
    assert (message.choice, getattr(message, "from"), list(message.ids), message.text) == (1, 3, [7, 8], "ab")


@pytest.mark.parametrize("chunks", [[], [1, 0], [0, 2], [3, 3], [-1, 0]])
def test_thoughts_with_a_gap_are_not_sent(chunks: list[int]):
    with pytest.raises(ValueError, match="not consecutive"):
        convert.thoughts_to_pb([core.Thought(chunk, (1,)) for chunk in chunks])


@pytest.mark.parametrize(("chunk", "most"), [(4, 4), (16, 16), (16, 64)])
def test_the_longest_prompt_and_all_thoughts_of_it_are_one_message(chunk: int, most: int):
    """Thoughts are larger than even a large state: 64 rows of 16384 float32, twice. Large ids take 3 bytes each."""
    one, rows = tuple(200_000 + n for n in range(most)), bytes(64 * 16384 * 4)

    def size(count: int) -> int:
        state = core.ThinkingState("t" * 64, MAX_PROMPT_IDS // chunk, 0, rows, rows, (one,) * count)
        return convert.thinking_to_pb(state).ByteSize()  # type: ignore[union-attr]

    all_thoughts = (size(1000) - size(0)) / 1000 * (MAX_PROMPT_IDS // chunk)
    assert size(0) + all_thoughts + 3 * MAX_PROMPT_IDS < INTERNAL_RECEIVE_BYTES
