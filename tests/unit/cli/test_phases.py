"""`baton up` shows the phases of a start."""

import io
import json
import sys

import pytest

from baton.cli.cluster import phases
from baton.cli.cluster.phases import StartDisplay, phase, shown_phases
from baton.testing import FakeClock
from tests.support.waiting import eventually

BEGIN, CONNECTS = ("starting Redis, the router and the workers", ""), ("the router connects to the workers", "")


def write_log(folder, name, *events):
    (folder / f"{name}.log").write_text("\n".join(json.dumps(event) for event in events))


def test_logs_show_the_phase_and_how_far_each_worker_is(tmp_path):
    assert phase(tmp_path / "none", 0, 2) == BEGIN
    write_log(tmp_path, "router", {"event": "worker_ready"})
    assert phase(tmp_path, 0, 2) == BEGIN
    write_log(tmp_path, "decode-0", {"event": "config"}, {"event": "model_loading", "percent": 40, "of_gb": 1.5})
    write_log(tmp_path, "decode-1", {"event": "worker_ready"}, {"event": "session_began"})
    write_log(tmp_path, "prefill-0", {"event": "model_loading", "percent": 40}, {"event": "model_loaded"})
    (tmp_path / "prefill-1.log").write_text('{"event": "model_lo')
    (tmp_path / "prefill-2.log").write_text("[1]")
    loads = "decode-0 [####      ] 40 % of 1.5 GB, prefill-0 [##########] 100 %"
    assert phase(tmp_path, 0, 2) == ("1 of 2 workers are ready", loads)
    assert phase(tmp_path, 2e10, 2) == BEGIN  # the logs are those of an earlier run
    assert phase(tmp_path, 0, 1) == CONNECTS


@pytest.mark.parametrize("live", [False, True])
def test_each_phase_has_its_time(live):
    stream, clock = io.StringIO(), FakeClock()
    display = StartDisplay(stream, clock, live=live)
    for seconds, now in [(0.0, BEGIN), (1.5, BEGIN), (2.0, ("0 of 1", "decode-0 7 %")), (3.0, ("0 of 1", ""))]:
        clock.advance(seconds)
        display.show(*now)
    display.clear()
    display.ready()
    if live:
        lines = ["0.0 s  " + BEGIN[0], "1.5 s  " + BEGIN[0], "3.5 s  0 of 1: decode-0 7 %", "6.5 s  0 of 1", ""]
        assert [line.strip() for line in stream.getvalue().split(phases.CLEAR)[1:]] == lines
    else:
        lines = ["0.0 s  " + BEGIN[0], "3.5 s  0 of 1", "6.5 s  ready"]
        assert [line.strip() for line in stream.getvalue().splitlines()] == lines


@pytest.mark.parametrize("live", [False, True])
def test_they_are_shown_until_the_cluster_is_ready(monkeypatch, tmp_path, live):
    monkeypatch.setattr(phases, "SHOWN_S", 0.01)
    stderr = io.StringIO()
    monkeypatch.setattr(stderr, "isatty", lambda: live)
    monkeypatch.setattr(sys, "stderr", stderr)
    with shown_phases(tmp_path, 1) as ready:
        eventually(lambda: BEGIN[0] in stderr.getvalue())
        write_log(tmp_path, "decode-0", {"event": "worker_ready"})
        eventually(lambda: CONNECTS[0] in stderr.getvalue())
        ready()
        before = stderr.getvalue()
    assert stderr.getvalue() == before  # it ends once
    assert before.endswith(phases.CLEAR) if live else before.endswith("ready\n")
