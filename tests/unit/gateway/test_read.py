"""Any body is read or rejected by name."""

import string
import time
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InvalidRequest
from router.openai.job import chat_job, completion_job
from router.openai.parsing import checked
from router.openai.schema import ChatBody, CompletionBody
from tests.support.time_factor import scaled

JOBS: dict[Any, Any] = {CompletionBody: completion_job, ChatBody: chat_job}
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=6
)
TURN = {"role": "user", "content": "x"}
BASE: dict[Any, dict[str, Any]] = {CompletionBody: {"prompt": "x"}, ChatBody: {"messages": [TURN]}}
KNOWN = sorted({*CompletionBody.model_fields, *ChatBody.model_fields, "functions", "echo"})


def read_or_refuse(data, kind):
    try:
        return JOBS[kind](checked(data, kind))
    except InvalidRequest as error:
        return error


@pytest.mark.parametrize("kind", JOBS)
@given(fields=st.dictionaries(st.sampled_from(KNOWN) | st.text(string.ascii_letters), VALUES, max_size=4))
def test_any_object(kind, fields):
    """The result is calls that protobuf can carry, or an error that names each wrong field."""
    job = read_or_refuse(orjson.dumps({**BASE[kind], **fields}), kind)
    if isinstance(job, InvalidRequest):
        assert job.violations
        assert all(violation.field and violation.description for violation in job.violations)
    else:
        assert all(request.SerializeToString() for request in job.requests)


@given(data=st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_bytes(data):
    found = read_or_refuse(data, CompletionBody)
    assert isinstance(found, InvalidRequest)
    assert [violation.field for violation in found.violations]


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (CompletionBody, {"prompt": {"s3cret": 1}}),
        (CompletionBody, {"prompt": "x", "stop": [["s3cret"]]}),
        (CompletionBody, {"prompt": "x", "user": ["s3cret"]}),
        (ChatBody, {"messages": "s3cret"}),
        (ChatBody, {"messages": [{"role": "s3cret", "content": "s3cret"}]}),
        (ChatBody, {"messages": [{"role": "user", "content": [{"type": "text", "text": ["s3cret"]}]}]}),
        (ChatBody, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "s3cret"}]}]}),
        (ChatBody, {"messages": [{"role": "user", "content": "x", "name": "s3cret"}]}),
    ],
)
def test_what_was_written_is_not_repeated(kind, wrong):
    """Errors must not contain values, because they are logged."""
    with pytest.raises(InvalidRequest) as refused:
        checked(orjson.dumps(wrong), kind)
    assert "s3cret" not in str(refused.value)


def test_a_megabyte_of_mistakes_is_refused_at_once():
    """Limited processor time, because the router's loop waits."""
    wrong = {f"temperature{number}": number for number in range(40_000)}
    started = time.process_time()
    with pytest.raises(InvalidRequest) as refused:
        read(**wrong)
    assert len(refused.value.violations) == 16
    assert time.process_time() - started < scaled(1.0)


@pytest.mark.parametrize(("levels", "fits"), [(200, True), (300, False)])
def test_a_schema_has_its_depth(levels, fits):
    """A schema that can be parsed but not serialized is the client's mistake."""
    schema = b'{"not":' * levels + b"{}" + b"}" * levels
    wanted = b'{"type":"json_schema","json_schema":{"schema":' + schema + b"}}"
    found = read_or_refuse(b'{"messages":[{"role":"user","content":"x"}],"response_format":' + wanted + b"}", ChatBody)
    if fits:
        assert found.requests[0].constraint.json_schema.encode() == schema
    else:
        (violation,) = found.violations
        assert violation.field == "response_format.json_schema.schema"
        assert "nested too deeply" in violation.description


def read(**fields):
    return checked(orjson.dumps({"prompt": "x", **fields}), CompletionBody)


def test_every_mistake_is_named():
    wrong = {"prompt": 1, "temperature": "x", "best_off": 2, "echo": True}
    with pytest.raises(InvalidRequest) as refused:
        read(**wrong)
    assert {violation.field for violation in refused.value.violations} == set(wrong)


def test_what_is_not_given_stays_unset():
    """Only the router sets defaults."""
    (request,) = completion_job(read()).requests
    assert SimpleNamespace(**{f.name: v for f, v in request.ListFields()}) == SimpleNamespace(
        text="x", sampling=type(request.sampling)(), resumable_s=0.0
    )


def test_types_are_strict_and_a_whole_number_is_a_number():
    for value in ("1", True, 1.5, [1]):
        with pytest.raises(InvalidRequest, match="max_tokens: must be a valid integer"):
            read(max_tokens=value)
    assert completion_job(read(temperature=1)).requests[0].sampling.temperature == 1.0
