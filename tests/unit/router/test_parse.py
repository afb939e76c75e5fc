"""Parsing of requests, and its limits."""

import json
import threading
from contextlib import suppress
from dataclasses import FrozenInstanceError, replace
from operator import attrgetter
from typing import Any

import pytest

from baton.core import Constraint, Sampling, SequenceSpec
from baton.errors import CheckpointError, InvalidRequest, Overloaded, UnknownModel
from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import inference_pb2 as pb
from baton.tokenizer import OracleTokenizer, load_tokenizer
from router.parsing import generate_request
from router.parsing.chat import Chats
from router.parsing.generate_request import DEFAULT_MAX_TOKENS, SMALL_BYTES, ParsedRequest, ParseLimiter, RequestParser
from router.parsing.model_defaults import sampling_defaults
from tests.unit.test_tokenizer import save_bpe

LIMITS = ("demo", 100)


def message(**fields) -> pb.GenerateRequest:
    """Return a valid request with `fields` changed. `sampling` has keyword arguments."""
    sampling = common_pb2.Sampling(**fields.pop("sampling", {}))
    if not {"token_ids", "chat"} & set(fields):
        fields.setdefault("text", "Hello")
    return pb.GenerateRequest(sampling=sampling, **fields)


def ids(*values: int) -> common_pb2.TokenIds:
    return common_pb2.TokenIds(ids=values)


async def parsed(request: pb.GenerateRequest, limits: tuple[str, int | None] = LIMITS, **defaults):
    parser = RequestParser(OracleTokenizer(), limits[0], **defaults)
    parser.chats = Chats({}, {})
    return (await parser.parse(pb.ResumeRequest(request=request), "r", limits[1])).spec


@pytest.mark.parametrize(
    ("by_file", "fields", "thinks_on"),
    [
        (False, {}, False),
        (True, {}, True),
        (True, {"deterministic": True}, False),
        (True, {"think_while_decoding": False}, False),
        (False, {"think_while_decoding": True}, True),
        (True, {"think_while_decoding": False, "deterministic": True}, False),
    ],
)
async def test_thinking_while_decoding(by_file, fields, thinks_on):
    spec = await parsed(message(**fields), think_while_decoding=by_file)
    assert spec.think_while_decoding is thinks_on


def checkpoint(folder, **files):
    """Save a tokenizer of 300 ids with these JSON files, and load it."""
    save_bpe(folder)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return load_tokenizer(folder)


MODELS = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.2, "min_p": None}


@pytest.mark.parametrize(
    ("config", "sampling", "wanted"),
    [
        ({}, {}, {}),
        (MODELS, {}, {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.2}),
        (MODELS, {"temperature": 1.0, "top_k": 0}, {"top_p": 0.95, "repetition_penalty": 1.2}),
        ({"do_sample": False, "temperature": 0.7, "top_k": -1}, {}, {"temperature": 0.0}),
        ({"do_sample": False}, {"temperature": 0.5}, {"temperature": 0.5}),
        ({"temperature": 1, "min_p": 0.25, "max_new_tokens": 5}, {}, {"min_p": 0.25}),
    ],
)
async def test_sampling_defaults_are_the_models_and_resumed_requests_keep_them(tmp_path, config, sampling, wanted):
    tokenizer = checkpoint(tmp_path, generation_config=config)
    parser = RequestParser(tokenizer, "demo", defaults=sampling_defaults(tokenizer))
    asked = pb.ResumeRequest(request=message(sampling=sampling))
    found = await parser.parse(asked, "r", 100)
    given = found.spec.sampling
    assert given == replace(Sampling(max_tokens=given.max_tokens, seed=given.seed), **as_sent(wanted))
    asked.request.sampling.MergeFrom(found.defaults or common_pb2.Sampling())
    assert (await RequestParser(tokenizer, "demo").parse(asked, "r", 100)).spec.sampling == given


@pytest.mark.parametrize("later", [60, 90, 400, None])
@pytest.mark.parametrize("limit", [2**31, 20])
async def test_a_resumed_chat_keeps_its_max_tokens_although_the_context_of_the_workers_has_changed(later, limit):
    """`limit` is that of the caller's token."""

    def limited(spec: SequenceSpec) -> SequenceSpec:
        return replace(spec, sampling=replace(spec.sampling, max_tokens=min(limit, spec.sampling.max_tokens)))

    parser, chat = (
        RequestParser(OracleTokenizer(), "demo"),
        pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")]),
    )
    asked = pb.ResumeRequest(request=message(chat=chat))
    began = await parser.parse(asked, "r", 80, limited)
    assert began.spec.sampling.max_tokens == min(limit, 80 - len(began.spec.prompt))
    asked.request.sampling.MergeFrom(began.defaults or common_pb2.Sampling())
    asked.request_id = "r"
    assert (await parser.parse(asked, "r", later, limited)).spec == began.spec


def as_sent(values: dict[str, Any]) -> dict[str, Any]:
    return {field.name: value for field, value in common_pb2.Sampling(**values).ListFields()}


@pytest.mark.parametrize("wrong", [{"temperature": "hot"}, {"top_p": 2.0}, {"top_k": 1.5}, {"min_p": [1]}])
def test_wrong_defaults_are_named(tmp_path, wrong):
    with pytest.raises(
        CheckpointError, match=f"generation_config.json: .*{next(iter(wrong))}.*model.generation_defaults to"
    ):
        sampling_defaults(checkpoint(tmp_path, generation_config=wrong))


async def test_ids_that_the_model_gave_are_valid_when_they_come_back(tmp_path):
    parser = RequestParser(checkpoint(tmp_path, config={"vocab_size": 326}), "demo")
    request = message(token_ids=ids(5, 325), sampling={"stop_token_ids": [310], "logit_bias": {311: 1.0}})
    asked = pb.ResumeRequest(request=request, received=[ids(256, 325)])
    assert (await parser.parse(asked, "r", 100)).received == ((256, 325),)
    parser.check_tokenize(pb.TokenizeRequest(text="x"))
    parser.check_detokenize(pb.DetokenizeRequest(ids=[325]))
    asked.received[0].ids.append(326)
    with pytest.raises(InvalidRequest, match="received: token id 326 is outside the vocabulary of 326"):
        await parser.parse(asked, "r", 100)


async def test_every_name_of_the_model_is_accepted():
    parser = RequestParser(OracleTokenizer(), "small", aliases=("gpt-4",))
    for name in ("", "small", "gpt-4"):
        assert (await parser.parse(pb.ResumeRequest(request=message(model=name)), "r", 100)).spec.prompt
        parser.check_detokenize(pb.DetokenizeRequest(model=name, ids=[1]))
    with pytest.raises(UnknownModel, match="model 'gpt' is not served; this router serves 'small' or 'gpt-4'"):
        parser.check_tokenize(pb.TokenizeRequest(model="gpt"))


NOTHING = {"n": 1, "priority": 0, "cache_scope": "", "resumable_s": 0.0, "idempotency_key": ""}
WORDS = pb.Constraint(choices=pb.Choices(texts=["in", "into"]))


@pytest.mark.parametrize(
    ("request_pb", "field", "words"),
    [
        (message(n=17), "n", "at most 16 choices, got 17"),
        (message(deterministic=True, think_while_decoding=True), "think_while_decoding", "cannot be combined"),
        (message(n=0), "n", "at least 1, got 0"),
        (
            message(constraint=pb.Constraint()),
            "constraint",
            "one of json_schema, regex, choices and grammar must be set",
        ),
        (message(constraint=pb.Constraint(regex="a(")), "constraint.regex", "unclosed group"),
        (message(constraint=pb.Constraint(json_schema='{"type": "x"}')), "constraint.json_schema", "Invalid type: x"),
        (message(constraint=pb.Constraint(choices=pb.Choices())), "constraint.choices", "1 to 256, got 0"),
        (message(constraint=WORDS, sampling={"min_tokens": 1}), "sampling.min_tokens", "with a constraint"),
        (message(constraint=WORDS, sampling={"ignore_eos": True}), "sampling.ignore_eos", "with a constraint"),
        (message(constraint=WORDS, sampling={"bad_words": ["x"]}), "sampling.bad_words", "may allow no other token"),
        (message(chat=pb.ChatMessages()), "chat", "the model has no chat template"),
        (message(priority=-101), "priority", "between -100 and 100, got -101"),
        (message(cache_scope="x" * 257), "cache_scope", "at most 256 characters, got 257"),
        (message(resumable_s=600.1), "resumable_s", "between 0 and 600 seconds, got 600.1"),
        (message(ttft_ms=0.0), "ttft_ms", "between 1 and 3600000 milliseconds, got 0"),
        (message(ttft_ms=-5.0), "ttft_ms", "between 1 and 3600000"),
        (message(itl_ms=float("nan")), "itl_ms", "between 1 and 3600000 milliseconds, got nan"),
        (message(itl_ms=3600000.5), "itl_ms", "between 1 and 3600000"),
        (message(ttft_ms=500.0, n=2), "ttft_ms", "must be left out with n above 1, got n 2"),
        (message(resumable_s=-1.0), "resumable_s", "between 0 and 600"),
        (message(resumable_s=float("nan")), "resumable_s", "between 0 and 600"),
        (message(idempotency_key="k" * 129), "idempotency_key", "at most 128 characters, got 129"),
        (pb.GenerateRequest(), "prompt", "must be set"),
        (message(text=""), "text", "must not be empty"),
        (message(token_ids=ids()), "token_ids", "must not be empty"),
        (message(token_ids=ids(256, 257)), "token_ids", "token id 257 is outside the vocabulary of 257"),
        (message(token_ids=ids(*[1] * 100)), "token_ids", "maximum context length is 100 tokens; the prompt has 100"),
        (message(text="x" * 1_000_001), "text", "at most 1000000 characters, got 1000001"),
        (message(client_tag="x" * 129), "client_tag", "at most 128 characters"),
        (message(logprobs=21), "sampling.logprobs", "between 0 and 20"),
        (message(prompt_logprobs=21), "prompt_logprobs", "between 0 and 20"),
        (message(sampling={"stop": ["x"] * 17}), "sampling.stop", "at most 16 stop strings, got 17"),
        (message(sampling={"stop": ["x" * 257]}), "sampling.stop", "1 to 256 characters"),
        (message(sampling={"bad_words": ["x"] * 257}), "sampling.bad_words", "at most 256 texts, got 257"),
        (message(sampling={"bad_words": ["x" * 257]}), "sampling.bad_words", "1 to 256 characters"),
        (
            message(sampling={"logit_bias": dict.fromkeys(range(1025), 1.0)}),
            "sampling.logit_bias",
            "1024 entries, got 1025",
        ),
        (message(sampling={"max_tokens": 96}), "sampling.max_tokens", "at most 95"),
        (message(sampling={"temperature": float("nan")}), "sampling.temperature", "between 0 and 100"),
        (message(sampling={"stop": [""]}), "sampling.stop", "1 to 256 characters"),
        (message(sampling={"stop_token_ids": [300]}), "sampling.stop_token_ids", "outside the vocabulary"),
        (message(sampling={"logit_bias": {300: 1.0}}), "sampling.logit_bias", "outside the vocabulary"),
        (message(sampling={"stop_token_ids": [1] * 1025}), "sampling.stop_token_ids", "at most 1024 ids"),
    ],
)
async def test_refused_by_name(request_pb, field, words):
    with pytest.raises(InvalidRequest) as caught:
        await parsed(request_pb)
    [violation] = caught.value.violations
    assert violation.field == field
    assert words in violation.description


@pytest.mark.parametrize(("tokens", "top", "fits"), [(90, 4, True), (90, 5, False), (91, 4, False), (91, None, True)])
async def test_the_scores_of_a_prompt_are_bounded_as_over_http(monkeypatch, tokens, top, fits):
    monkeypatch.setattr("baton.limits.MAX_PROMPT_SCORES", 450)
    request = message(token_ids=ids(*[1] * tokens), prompt_logprobs=top)
    if fits:
        assert (await parsed(request)).prompt_logprobs == top
        return
    with pytest.raises(InvalidRequest, match=r"prompt_logprobs: at most 450 log-probabilities of the prompt, got \d+"):
        await parsed(request)


async def test_every_wrong_field_is_named_at_once():
    wrong = message(n=17, priority=101, client_tag="x" * 200, sampling={"top_p": 2.0, "temperature": -1.0})
    with pytest.raises(InvalidRequest) as caught:
        await parsed(wrong)
    fields = {violation.field for violation in caught.value.violations}
    assert fields == {"n", "priority", "client_tag", "sampling.top_p", "sampling.temperature"}


async def test_an_unknown_model_is_told_which_one_is_served():
    with pytest.raises(UnknownModel, match="'other' is not served; this router serves 'demo'"):
        await parsed(message(model="other"))
    assert (await parsed(message(model="demo"))).prompt == tuple(b"Hello")


@pytest.mark.parametrize(
    ("fields", "taken", "unsaid"),
    [
        ({"priority": -100}, {"priority": -100}, {"priority": 0}),
        ({"cache_scope": "me"}, {"cache_scope": "me"}, {"cache_scope": ""}),
        ({"deterministic": True}, {"deterministic": True}, {"deterministic": False}),
        ({"deterministic": False}, {"deterministic": False}, {}),
        ({"constraint": WORDS}, {"constraint": Constraint("choices", ("in", "into"))}, {"constraint": None}),
        ({"logprobs": 0}, {"sampling.logprobs": 0}, {"sampling.logprobs": None}),
        ({"sampling": {"seed": 0}}, {"sampling.seed": 0}, {"sampling.seed": generate_request.seed_of("r")}),
        (NOTHING, {"prompt": tuple(b"Hello")}, {}),
    ],
)
async def test_what_is_asked_for_is_taken_over(fields, taken, unsaid):
    for request, expected in ((message(**fields), taken), (message(), unsaid)):
        spec = await parsed(request)
        assert {name: attrgetter(name)(spec) for name in expected} == expected


@pytest.mark.parametrize(
    ("prompt", "sampling", "limits", "wanted"),
    [
        (5, {}, LIMITS, DEFAULT_MAX_TOKENS),
        (90, {}, LIMITS, 10),
        (99, {}, LIMITS, 1),
        (5, {"max_tokens": 95}, LIMITS, 95),
        (5000, {"max_tokens": 9000}, ("demo", None), 9000),
        (5000, {}, ("demo", None), DEFAULT_MAX_TOKENS),
    ],
)
async def test_max_tokens(prompt, sampling, limits, wanted):
    request = await parsed(message(token_ids=ids(*[1] * prompt), sampling=sampling), limits)
    assert request.sampling.max_tokens == wanted


async def test_what_a_client_has_must_follow_the_constraint():
    parser = RequestParser(OracleTokenizer(), "demo")

    async def resumed(received: bytes, **fields):
        asked = pb.ResumeRequest(request=message(n=2, **fields), received=[ids(), ids(*received)])
        return (await parser.parse(asked, "r", 100)).received

    assert await resumed(b"int", constraint=WORDS) == ((), tuple(b"int"))
    with pytest.raises(InvalidRequest, match=r"constraint\.choices: does not allow the tokens"):
        await resumed(b"it", constraint=WORDS)
    assert await resumed(b"it") == ((), tuple(b"it"))


@pytest.mark.parametrize("deterministic", [False, True])
async def test_a_parsed_request_is_complete_and_frozen(deterministic):
    parser = RequestParser(OracleTokenizer(), "demo", resumable_s=7.0)
    asked = pb.ResumeRequest(
        request=message(n=2, thoughts=True, trace=True, deterministic=deterministic), system_fingerprint="f"
    )
    parsed = await parser.parse(asked, "r", 100, lambda spec: replace(spec, cache_scope="tenant"))
    assert (parsed.spec.cache_scope, parsed.received) == ("tenant", ((), ()))
    assert (parsed.determinism, parsed.resumable_s) == ("f" if deterministic else "", 7.0)
    assert (parsed.thinks, parsed.wants_spans) == (("thoughts",), True)
    assert parsed.spell is not None
    assert parsed.spell(tuple(b"so")) == "so"
    for field in ParsedRequest.__slots__:
        with pytest.raises(FrozenInstanceError):
            setattr(parsed, field, None)


async def test_a_request_may_set_how_long_it_is_resumable():
    parser = RequestParser(OracleTokenizer(), "demo", resumable_s=7.0)
    parsed = await parser.parse(pb.ResumeRequest(request=message(resumable_s=0.0)), "r", 100)
    assert (parsed.resumable_s, parsed.spell, parsed.thinks, parsed.wants_spans) == (0.0, None, (), False)


class WhichThread(OracleTokenizer):
    def encode(self, text: str) -> list[int]:
        self.thread = threading.current_thread()
        return [1]


@pytest.mark.parametrize(("length", "elsewhere"), [(10, False), (5000, True)])
@pytest.mark.parametrize("kind", ["text", "chat"])
async def test_long_texts_and_conversations_are_tokenized_in_a_thread(length, elsewhere, kind):
    encoder, text = WhichThread(), "x" * length
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content=text)])
    asked = message(text=text) if kind == "text" else message(chat=chat)
    await RequestParser(encoder, "demo").parse(pb.ResumeRequest(request=asked), "r", None)
    assert (encoder.thread is not threading.main_thread()) is elsewhere


# --- limits of concurrent parsing

SMALL = pb.TokenizeRequest(text="x" * (SMALL_BYTES - 8))
LARGE = pb.TokenizeRequest(text="x" * 5000)
CONSTRAINED = pb.ResumeRequest(request=pb.GenerateRequest(text="x", constraint=pb.Constraint(regex="a")))


def refused(reading, message):
    with pytest.raises(Overloaded) as caught, reading.one_more(message):
        pass
    return caught.value.retry_after_s > 0


def test_as_many_as_allowed_and_then_again_also_after_one_that_failed():
    reading = ParseLimiter(at_once=2)
    for _ in range(2):
        with suppress(ValueError), reading.one_more(LARGE), reading.one_more(CONSTRAINED):
            assert refused(reading, LARGE)
            assert refused(reading, CONSTRAINED)
            raise ValueError


def test_small_ones_are_always_welcome_and_take_no_place():
    reading = ParseLimiter(at_once=1)
    with reading.one_more(SMALL), reading.one_more(LARGE), reading.one_more(SMALL):
        assert refused(reading, LARGE)


def test_bytes_count_too_but_one_alone_is_read_whatever_its_size():
    reading = ParseLimiter(most_bytes=4999)
    with reading.one_more(LARGE):
        assert refused(reading, LARGE)
        assert refused(reading, CONSTRAINED)
    with reading.one_more(LARGE):
        pass
