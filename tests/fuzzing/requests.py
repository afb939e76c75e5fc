"""The public service, and OpenAI's API in front of it."""

import asyncio
import re
from typing import Any

import orjson
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InvalidRequest, UnknownModel
from baton.rpc import convert
from baton.rpc.status import to_rpc_status
from baton.rpc.v1 import inference_pb2 as pb
from baton.rpc.v1 import worker_pb2
from baton.tokenizer import OracleTokenizer, load_tokenizer
from router.openai.errors import problem_of
from router.openai.job import chat_job, completion_job
from router.openai.messages_api.chat import messages_job
from router.openai.messages_api.schema import MessagesBody
from router.openai.parsing import checked
from router.openai.responses_api.chat import responses_job
from router.openai.responses_api.schema import ResponsesBody
from router.openai.schema import ChatBody, CompletionBody
from router.parsing.chat import Chats
from router.parsing.chat_template import Template
from router.parsing.generate_request import RequestParser, check_resumes
from tests.fuzzing.common import FREELY, ROOT, Target, messages, outcome

LOOP = asyncio.new_event_loop()
MODEL_LEN = 256
INVALID_ARGUMENT = 3
DEMO = load_tokenizer(ROOT / "models" / "demo")
_TOOLS = Template((ROOT / "tests/unit/router/templates/qwen.jinja").read_text())
MODELS = [
    (OracleTokenizer(), Chats.of(OracleTokenizer())),
    (DEMO, Chats.of(DEMO)),
    (OracleTokenizer(), Chats({"default": _TOOLS}, {})),
]
PARSERS = [RequestParser(tokenizer, "demo") for tokenizer, _ in MODELS]
for parser, (_, templates) in zip(PARSERS, MODELS, strict=True):
    parser.chats = templates


def parsed(message: pb.ResumeRequest, number: int):
    return LOOP.run_until_complete(PARSERS[number % len(MODELS)].parse(message, "r", MODEL_LEN)).spec


def requested(message: pb.GenerateRequest, number: int = 0) -> list[str]:
    """Workers parse every request that the router accepts. Otherwise the error names fields, which are returned."""
    asked = pb.ResumeRequest(request=message)
    spec, error = outcome(lambda: parsed(asked, number), InvalidRequest, UnknownModel)
    if error is not None:
        return refused(error)
    sent = convert.spec_to_pb(spec).SerializeToString()
    assert convert.spec_from_pb(worker_pb2.SequenceSpec.FromString(sent)) == spec
    assert len(spec.prompt) + spec.sampling.max_tokens <= MODEL_LEN
    assert all(0 <= token_id < MODELS[number % len(MODELS)][0].vocab_size for token_id in spec.prompt)
    return []


def refused(error: InvalidRequest | UnknownModel) -> list[str]:
    status = to_rpc_status(error)
    assert status.message
    if isinstance(error, UnknownModel):
        return []
    assert status.code == INVALID_ARGUMENT
    assert error.violations, "an error without a field"
    assert all(each.field and each.description for each in error.violations)
    return [each.field for each in error.violations]


def resumed(message: pb.ResumeRequest) -> None:
    """Check a request like `requested`, with the client's tokens."""
    _, error = outcome(lambda: _received(message), InvalidRequest, UnknownModel)
    if error is not None:
        refused(error)


def _received(message: pb.ResumeRequest) -> None:
    check_resumes(message)
    parsed(message, 1)


def generate_bytes(data: bytes) -> None:
    """Test raw bytes, for the model that the first byte names; every fourth kind resumes."""
    kind, number = divmod(data[0] if data else 0, len(MODELS))
    try:
        if kind % 4:
            requested(pb.GenerateRequest.FromString(data[1:]), number)
        else:
            resumed(pb.ResumeRequest.FromString(data[1:]))
    except DecodeError:
        pass  # gRPC's own answer


def _for_here(message: Any) -> Any:
    """Let the message pass the first check. Most random messages fail at the model's name."""
    message.model = ""
    return message


_SAMPLING = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.integers(1, MODEL_LEN + 1),
        "min_tokens": st.integers(0, 9),
        "temperature": st.sampled_from([0.0, 0.5, 100.0, 101.0]),
        "top_p": st.sampled_from([0.0, 1e-9, 1.0]),
        "seed": st.integers(0, 9),
        "stop": st.lists(st.text(max_size=3), max_size=2),
        "stop_token_ids": st.lists(st.sampled_from([0, 256, 257, 2047, 2048]), max_size=2),
        "logit_bias": st.dictionaries(st.sampled_from(["0", "256", "257", "2048"]), st.sampled_from([0.0, 101.0])),
    },
)
_TURN = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", ""]), "content": st.text(max_size=9)},
    optional={"tool_calls": st.just([{"name": "f", "arguments": "{}"}]), "name": st.just("x")},
)
_TOOLED = {"tools": st.sampled_from(["[]", '[{"name": "f"}]', "{", "[1]"]), "template_kwargs": st.just('{"a": 1}')}
_PROMPTS = st.one_of(
    st.builds(lambda text: {"text": text}, st.text(max_size=300)),
    st.builds(lambda ids: {"token_ids": {"ids": ids}}, st.lists(st.sampled_from([0, 256, 257, 2048]), max_size=300)),
    st.builds(
        lambda turns, more: {"chat": {"messages": turns, **more}},
        st.lists(_TURN, max_size=3),
        st.fixed_dictionaries({}, optional=_TOOLED),
    ),
)
_NEARLY = st.builds(  # nearly right, because most random requests are far from it
    lambda prompt, sampling: ParseDict({**prompt, "sampling": sampling}, pb.GenerateRequest()), _PROMPTS, _SAMPLING
)
_REQUESTS = messages(pb.GenerateRequest.DESCRIPTOR)


@FREELY
@given(st.one_of(_NEARLY, _REQUESTS.map(_for_here), _REQUESTS), st.integers(0, len(MODELS) - 1))
def generate_drawn(message, number):
    requested(message, number)


KINDS: dict[Any, Any] = {
    CompletionBody: completion_job,
    ChatBody: chat_job,
    MessagesBody: lambda body: messages_job(body, "hermes", "think"),
    ResponsesBody: lambda body: responses_job(body, "hermes", "think"),
}
_FIELDS = sorted({name for kind in KINDS for name in kind.model_fields} | {"echo", "schema"})
_INNER = ["type", "text", "role", "content", "json_schema", "schema", "include_usage", "1", "4294967296", "name", "x"]
_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.integers(-2, 20),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["", "x", "user", "json_object", "json_schema", "object", "text", "\n", "\U0001f600"]),
    st.text(max_size=9),
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(_INNER), inner, max_size=4),
    max_leaves=8,
)
_CHAT = {"messages": [{"role": "user", "content": "x"}]}
_BASES = st.sampled_from([{"prompt": "x"}, _CHAT, {**_CHAT, "max_tokens": 1}, {"input": "x"}, {}])


def http_bytes(data: bytes) -> None:
    """All endpoints give requests that the router reads, or a 400 that names a field of the body."""
    for kind, job_of in KINDS.items():
        job, error = outcome(lambda k=kind, j=job_of: j(checked(data, k)), InvalidRequest)  # type: ignore[misc]
        if error is not None:
            refused(error)
            answer = problem_of(error).response()
            assert (answer.status_code, bool(orjson.loads(answer.body)["error"]["message"])) == (400, True)
            continue
        for number, request in enumerate(job.requests):
            for field in requested(pb.GenerateRequest.FromString(request.SerializeToString()), 1):
                first = re.split(r"[.\[]", job.rename(number, field))[0]
                assert first in kind.model_fields, f"{field} has no name in HTTP"


@FREELY
@given(_BASES, st.dictionaries(st.sampled_from(_FIELDS), _VALUES, max_size=5))
def http_drawn(base, fields):
    http_bytes(orjson.dumps(base | fields))


def _seeds() -> list[bytes]:
    sampling = {"max_tokens": 4, "temperature": 0.5, "stop": ["x"], "logit_bias": {"5": 1.0}, "stop_token_ids": [3]}
    full = {"text": "The color", "sampling": sampling, "n": 2, "logprobs": 1}
    turn = {"role": "user", "content": "x"}
    asked: list[dict[str, Any]] = [
        full,
        {"chat": {"messages": [turn], "tools": '[{"name": "f"}]'}},
        {"text": "x", "constraint": {"regex": "(a|b)+"}},
        {"text": "x", "constraint": {"json_schema": '{"type": "object"}'}},
        {"token_ids": {"ids": [1, 2**32 - 1]}},
        {"token_ids": {"ids": [1] * MODEL_LEN}},
        {"text": "x", "sampling": {"max_tokens": MODEL_LEN}},
    ]
    requests = [ParseDict(each, pb.GenerateRequest()).SerializeToString() for each in asked]
    again = ParseDict({"request_id": "r", "request": full, "received": [{"ids": [1, 2]}]}, pb.ResumeRequest())
    firsts = [bytes((len(MODELS) + number,)) for number in range(len(MODELS))]
    return [first + each for each in requests for first in firsts] + [b"\0" + again.SerializeToString()]


_BODIES = [
    {"prompt": ["x", "y"], "logprobs": 2, "stream": True, "stream_options": {"include_usage": True}},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "max_completion_tokens": 3},
    {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}, "logprobs": True},
    {"max_tokens": 3, "system": "s", "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
    {"input": [{"role": "user", "content": "x"}], "text": {"format": {"type": "json_object"}}, "stream": True},
]
GENERATE = Target(generate_bytes, generate_drawn, _seeds())
_WRONG = [b"[]", b'{"prompt":[]}', b'{"prompt":"x","seed":-1}', b'{"prompt":"x","logit_bias":{"-1":1}}']
HTTP = Target(http_bytes, http_drawn, [orjson.dumps(body) for body in _BODIES] + _WRONG)
