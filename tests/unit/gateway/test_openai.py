"""OpenAI's API without a server: bodies, errors, their documentation, and the measured times.

Bodies are read, or rejected by name. For any body, tests/fuzzing/requests.py checks that. Each of Baton's errors has a
status, a body and headers. docs/reference/openai.md has each accepted field, each rejected field and each error code.
"""

import re
import time
from pathlib import Path
from types import SimpleNamespace

import orjson
import pytest

from baton.errors import BatonError, InvalidRequest, NoWorker, Overloaded, Unauthenticated, Violation
from baton.metrics import Metrics
from baton.rpc.status import CODES
from baton.rpc.v1 import common_pb2
from baton.testing import FakeClock
from router.openai import errors, parsing
from router.openai.job import chat_job, completion_job
from router.openai.parsing import checked
from router.openai.responses import RequestMetrics
from router.openai.schema import ChatBody, CompletionBody, StreamOptions
from tests.support.time_factor import scaled

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs/reference/openai.md").read_text()


def read(**fields):
    return checked(orjson.dumps({"prompt": "x", **fields}), CompletionBody)


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


# --- errors


def every(kind):
    return [kind, *(below for child in kind.__subclasses__() for below in every(child))]


@pytest.mark.parametrize("kind", [kind for kind in every(BatonError) if kind.__module__ == "baton.errors"])
def test_every_error_has_a_body(kind):
    error = InvalidRequest.of("n", "wrong") if kind is InvalidRequest else kind("s3cret")
    problem = errors.problem_of(error)
    body = orjson.loads(problem.body())["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert 400 <= problem.status < 600
    assert ("s3cret" in problem.message) == (kind in CODES and kind is not InvalidRequest)
    assert (problem.headers.get("www-authenticate") == "Bearer") == (kind is Unauthenticated)
    assert problem.headers["x-should-retry"] == str(kind in CODES and kind.retryable).lower()


@pytest.mark.parametrize(("wait_s", "seconds"), [(0.0, "1"), (0.3, "1"), (1.0, "1"), (1.1, "2"), (-3.0, "1")])
def test_retry_after_is_whole_seconds_and_never_too_early(wait_s, seconds):
    assert errors.problem_of(Overloaded("full", wait_s)).headers["retry-after"] == seconds


def test_the_first_field_is_the_parameter():
    problem = errors.problem_of(InvalidRequest(Violation("a", "unknown field"), Violation("b", "not supported")))
    assert (problem.param, problem.code) == ("a", "unknown_parameter")
    assert problem.message == "a: unknown field; b: not supported"


# --- docs/reference/openai.md


def first_cells(title: str) -> set[str]:
    """Return the names in the first column of a chapter's tables."""
    chapter = TEXT[TEXT.index(f"\n## {title}\n") :].partition("\n## ")[2].partition("\n## ")[0]
    rows = [line for line in chapter.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([\w.\[\]]+)`", row.split("|")[1])}


FIELDS = first_cells("Request fields")


@pytest.mark.parametrize("body", [CompletionBody, ChatBody])
def test_each_field_has_a_row(body):
    assert set(body.model_fields) - {"stream_options"} <= FIELDS
    assert {f"stream_options.{name}" for name in StreamOptions.model_fields} <= FIELDS
    assert set(parsing._REFUSED[body]) <= FIELDS


def test_each_row_is_of_a_field():
    known = {name for body in (CompletionBody, ChatBody) for name in (*body.model_fields, *parsing._REFUSED[body])}
    assert {re.split(r"[.\[]", name)[0] for name in FIELDS} <= known


def test_each_error_has_a_row_with_its_status_type_and_code():
    rows = [line for line in TEXT.splitlines() if re.match(r"\| \d{3}", line)]
    for status, kind, code in errors.ANSWERS.values():
        if status != 499:
            assert any(line.startswith(f"| {status}") and f"`{kind}`" in line and f"`{code}`" in line for line in rows)
    assert any(line.startswith("| 405") and "`method_not_allowed`" in line for line in rows)
    source = "".join(file.read_text() for file in (ROOT / "router/openai").glob("*.py"))
    for status, code in re.findall(r'HttpError\((\d+), "(\w+)"', source):
        assert code == "internal" or any(status in line and f"`{code}`" in line for line in rows), code


# --- the times of a request as a gateway measures them


@pytest.fixture
def world():
    made = SimpleNamespace(clock=FakeClock(), metrics=Metrics("here", "1"))
    made.measured = RequestMetrics(made.clock, made.metrics)
    made.value = lambda name, **labels: made.metrics.registry.get_sample_value(f"baton_{name}", labels)
    return made


def test_where_the_time_goes(world):
    for wait, choice, count in ((8, 0, 1), (1, 1, 1), (2, 0, 1), (4, 0, 2), (16, 1, 0)):
        world.clock.advance(wait)
        world.measured.tokens(choice, count)
    world.measured.completed(common_pb2.Timings(queue_s=1, prefill_s=2, e2e_s=20))
    world.measured.completed(common_pb2.Timings(queue_s=5, prefill_s=6, e2e_s=19))
    world.clock.advance(1)
    world.measured.finished()
    sums = {name: world.value(f"{name}_seconds_sum") for name in ("ttft", "itl", "e2e", "queue", "prefill")}
    assert sums == {"ttft": 8, "itl": 3 + 4, "e2e": 32, "queue": 1, "prefill": 2}
    assert world.value("itl_seconds_count") == 1 + 2


def test_it_ends_once(world):
    def visiting():
        with world.measured:
            world.measured.tokens(0, 1)
            world.measured.failed(NoWorker("gone"))
            world.measured.finished()
            raise NoWorker("again")

    with pytest.raises(BatonError, match="again"):
        visiting()
    counts = {outcome: world.value("requests_total", outcome=outcome) for outcome in ("failed", "refused", "finished")}
    assert counts == {"failed": 1, "refused": 0, "finished": 0}


def test_nobody_counts_without_metrics():
    with RequestMetrics(FakeClock(), None) as measured:
        measured.tokens(0, 1)
        measured.tokens(0, 1)
        measured.finished()
