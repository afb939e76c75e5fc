"""What `--what-if` says."""

from __future__ import annotations

import pytest

from baton.errors import ConfigError
from simulator.plan_shape import Shape
from simulator.plan_text import parse_what_if
from simulator.scenario import Death, Slow, SlowLink

OWN = Shape(3, 2, 4, 1)


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("prefill=5", Shape(3, 5, 4, 1)),
        ("decode=7,decode_tp=2", Shape(7, 2, 2, 1)),
        ("prefill=1,decode=1,tp=2", Shape(1, 1, 2, 2)),
        ("colocated=4,chunk=512", Shape(4, 0, 4, 1, 512)),
        ("colocated=4,tp=1", Shape(4)),
    ],
)
def test_a_layout_differs_from_the_files_in_what_is_named(text, shape):
    assert parse_what_if(text, OWN).shape == shape


def test_so_many_workers_keep_the_shares_and_get_as_much_more_load():
    found = parse_what_if("prefill=1,decode=3,workers=10000", Shape(1, 1))
    assert (found.shape, found.scale) == (Shape(7500, 2500), 2500)
    assert Shape(1, 9).of(2) == Shape(1, 1)
    assert parse_what_if("prefill=2,prefill_tp=2", Shape(3, chunk=256)).shape == Shape(3, 2, 1, 2)


def test_faults_are_of_three_kinds():
    found = parse_what_if("fault=death:prefill-0@10,fault=slow:decode-2@5-9.5x3,fault=link:@1-2x0.1", OWN)
    assert found.faults == (Death(10, "prefill-0"), Slow(5, 9.5, "decode-2", 3), SlowLink(1, 2, "", 0.1))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prefil=2", r"--what-if: must be KEY=VALUE,\.\.\. with prefill, .* got 'prefil=2'"),
        ("prefill", r"got 'prefill'"),
        ("prefill=0", r"--what-if: prefill: must be a whole number above 0, got '0'"),
        ("decode=x", r"decode: must be a whole number"),
        ("prefill=2,chunk=256", r"chunk: must be left out without colocated workers, got 256"),
        ("prefill_tp=2", r"prefill_tp: must be left out, colocated workers have decode_tp, got 2"),
        ("prefill=2,workers=1", r"workers: must be 2 or more, .* got 1"),
        ("colocated=1,prefill=2", r"colocated: there are no prefill and decode workers"),
        ("fault=death:@1", r"fault: must be death:WORKER@SECONDS.* got 'death:@1'"),
        ("fault=death:decode-0@1-2x3", r"fault: must be"),
        ("fault=slow:decode-0@5", r"fault: must be"),
        ("fault=slow:decode-0@5-4x2", r"fault: must be"),
        ("fault=slow:decode-0@5-..x2", r"fault: must be"),
        ("fault=link:@1-2x0", r"fault: must be"),
        ("fault=crash:decode-0@5", r"fault: must be"),
    ],
)
def test_what_cannot_be_is_refused_by_key(text, says):
    with pytest.raises(ConfigError, match=says):
        parse_what_if(text, Shape(3, chunk=256) if text == "prefill_tp=2" else OWN)
