"""Limits of concurrent parsing."""

from contextlib import suppress

import pytest

from baton.errors import Overloaded
from baton.rpc.v1 import inference_pb2 as pb
from router.parsing.generate_request import SMALL_BYTES, ParseLimiter

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
