"""How much is read at once."""

import pytest

from baton.errors import Overloaded
from baton.rpc.v1 import inference_pb2 as pb
from router.reading import SMALL_BYTES, Reading

SMALL = pb.TokenizeRequest(text="x" * (SMALL_BYTES - 8))
LARGE = pb.TokenizeRequest(text="x" * 5000)
CONSTRAINED = pb.ResumeRequest(request=pb.GenerateRequest(text="x", constraint=pb.Constraint(regex="a")))


def refused(reading, message):
    with pytest.raises(Overloaded) as caught, reading.one_more(message):
        pass
    return caught.value.retry_after_s > 0


def test_as_many_as_allowed_and_then_again():
    reading = Reading(at_once=2)
    for _ in range(2):
        with reading.one_more(LARGE), reading.one_more(CONSTRAINED):
            assert refused(reading, LARGE)
            assert refused(reading, CONSTRAINED)


def test_small_ones_are_always_welcome_and_take_no_place():
    reading = Reading(at_once=1)
    with reading.one_more(SMALL), reading.one_more(LARGE), reading.one_more(SMALL):
        assert refused(reading, LARGE)


def test_bytes_count_too_but_one_alone_is_read_whatever_its_size():
    reading = Reading(most_bytes=4999)
    with reading.one_more(LARGE):
        assert refused(reading, LARGE)
        assert refused(reading, CONSTRAINED)
    with reading.one_more(LARGE):
        pass


def test_one_that_fails_gives_its_place_back():
    reading = Reading(at_once=1)
    with pytest.raises(ValueError, match="broken"), reading.one_more(LARGE):
        raise ValueError("broken")
    with reading.one_more(LARGE):
        pass
