"""Histories that a cluster's processes write while workers are killed under load, checked after its end."""

import random

import pytest

from baton.cli.inspect.block_census import look
from baton.cli.target import Admins
from tests.support.cluster_process import HANDED_OVER
from tests.support.load import Load, Streams, draw_jobs
from tests.support.waiting import eventually
from tools.history_check import check

pytestmark = pytest.mark.slow
AT_LEAST = 24  # requests before the first kill
LONG = {"max_tokens": 500, "temperature": 0, "ignore_eos": True}


def under_load(cluster):
    """Start twelve long streams and return them with the census's problems. Tries again if the streams ended before."""
    for _ in range(5):
        streams = Streams(cluster, [f"{number % 3} {'word ' * 40} {number}" for number in range(12)], **LONG)
        censuses, problems = look(Admins([cluster.state().admin]))
        if sum(len(census.held) for census in censuses) > 4:
            return streams, problems
        streams.join()
    raise AssertionError("never busy")


def test_a_history_under_load_and_kills_is_as_it_should_be(home, tmp_path):
    folder = tmp_path / "history"
    sets = (HANDED_OVER, "model.path=oracle", f"history={folder}", "prefill.replicas=2", "decode.replicas=2")
    with home.cluster("configs/no-ray.yaml", *sets, "decode.kv_memory=4MiB") as cluster:
        with Load(cluster, draw_jobs(random.Random(1)), 1) as load:  # some share beginnings; clients leave some
            load.settle(AT_LEAST)
        for name in ("prefill-0", "decode-1"):
            streams, problems = under_load(cluster)
            assert [problem for problem in problems if problem.handoff is None] == []  # others may be in transit
            pid = cluster.kill(name)
            streams.join()
            cluster.wait_replaced(name, pid)
            eventually(lambda: len(cluster.connected()) == 4, within_s=60)
        said = cluster.home.baton("status", "--census", "--name", cluster.name, check=True).stdout
        assert said.count("held: no handoff") == 4
    report = check([folder])
    assert [str(violation) for violation in report.violations] == []
    assert report.outcomes["accepted"] >= AT_LEAST
    ends = [(journal.process, journal.end) for journal in sorted(report.journals, key=lambda journal: journal.life)]
    cut = [process for process, how in ends if how == ""]
    assert (sorted(cut), len(ends)) == (["decode-1", "prefill-0"], 7)
    assert set(dict(ends).values()) == {"stopped"}  # the last process of each place
