"""Each of Baton's errors has a status, a body and headers."""

import orjson
import pytest

from baton import errors
from baton.errors import BatonError, InvalidRequest, Overloaded, Violation
from baton.rpc.status import CODES
from router.openai.errors import problem_of


def every(kind):
    return [kind, *(below for child in kind.__subclasses__() for below in every(child))]


@pytest.mark.parametrize("kind", [kind for kind in every(BatonError) if kind.__module__ == "baton.errors"])
def test_every_error_has_a_body(kind):
    error = InvalidRequest.of("n", "wrong") if kind is InvalidRequest else kind("s3cret")
    problem = problem_of(error)
    body = orjson.loads(problem.body())["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert 400 <= problem.status < 600
    assert ("s3cret" in problem.message) == (kind in CODES and kind is not InvalidRequest)
    assert (problem.headers.get("www-authenticate") == "Bearer") == (kind is errors.Unauthenticated)
    assert problem.headers["x-should-retry"] == str(kind in CODES and kind.retryable).lower()


@pytest.mark.parametrize(("wait_s", "seconds"), [(0.0, "1"), (0.3, "1"), (1.0, "1"), (1.1, "2"), (-3.0, "1")])
def test_retry_after_is_whole_seconds_and_never_too_early(wait_s, seconds):
    assert problem_of(Overloaded("full", wait_s)).headers["retry-after"] == seconds


def test_the_first_field_is_the_parameter():
    problem = problem_of(InvalidRequest(Violation("a", "unknown field"), Violation("b", "not supported")))
    assert (problem.param, problem.code) == ("a", "unknown_parameter")
    assert problem.message == "a: unknown field; b: not supported"
