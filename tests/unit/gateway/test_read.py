"""Bodies are read, or rejected by name. For any body, tests/fuzzing/requests.py checks that."""

import time
from types import SimpleNamespace

import orjson
import pytest

from baton.errors import InvalidRequest
from router.openai.job import chat_job, completion_job
from router.openai.parsing import checked
from router.openai.schema import ChatBody, CompletionBody
from tests.support.time_factor import scaled


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
    data = b'{"messages":[{"role":"user","content":"x"}],"response_format":' + wanted + b"}"
    if fits:
        assert chat_job(checked(data, ChatBody)).requests[0].constraint.json_schema.encode() == schema
    else:
        with pytest.raises(InvalidRequest, match=r"^response_format\.json_schema\.schema: .*nested too deeply[^;]*$"):
            chat_job(checked(data, ChatBody))


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
