"""What the processes of a cluster note of themselves while workers are killed under load, checked when it is down."""

import os
import signal
import threading

import pytest

from baton.cli.census import look
from baton.errors import BatonError
from tests.support.cluster_process import HANDED_OVER
from tests.support.waiting import eventually
from tools.history_check import check

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
AT_LEAST = 24  # requests before the first kill
LONG = 1700  # tokens: still under way when all twelve requests are
WORDS = " ".join(f"word{number}" for number in range(40))


def ask(cluster, number, max_tokens):
    """Some beginnings are shared, some requests are left before their end; an error is an outcome, too."""
    prompt, options = f"{WORDS} {number % 3} and {number}", {"temperature": 0, "ignore_eos": True}
    try:
        with (
            cluster.client(max_retries=0) as client,
            client.stream(prompt, max_tokens=max_tokens, **options) as stream,
        ):
            while len(stream.tokens) < max_tokens - (number % 4 == 0):
                next(stream)
            return len(stream.tokens)
    except BatonError as error:
        return type(error)


def load(cluster, requests, max_tokens):
    outcomes: list[int | type[BatonError]] = []
    threads = [
        threading.Thread(target=lambda n=n: outcomes.append(ask(cluster, n, max_tokens))) for n in range(requests)
    ]
    for thread in threads:
        thread.start()
    return threads, outcomes


def end(threads):
    for thread in threads:
        thread.join(60)
    assert ended(threads)


def connected(cluster):
    with cluster.client() as client:
        workers = [worker for worker in client.cluster().workers if worker.state == "connected"]
        return {worker.info.ref.worker_id: worker.info.ref.incarnation for worker in workers}


def busy(cluster):
    """A look that finds more than four handoffs somewhere, with what it has no account of; None: not so now."""
    censuses, problems = look(cluster.state().admin)
    return (censuses, problems) if sum(len(census.held) for census in censuses) > 4 else None


def under_load(cluster):
    """Twelve long requests, and what was found while they were busy. On a machine with other work they may all have
    ended before anybody looks: then once more.
    """
    outcomes: list[int | type[BatonError]] = []
    for _ in range(5):
        threads, outcomes = load(cluster, 12, LONG)
        found = eventually(lambda running=threads: busy(cluster) or ended(running), within_s=60)
        if found is not True:
            return threads, found[1]
    raise AssertionError(f"never busy; the last ones ended as {outcomes}")


def ended(threads):
    return not any(thread.is_alive() for thread in threads)


def kill(cluster, name):
    """Returns what waits until the place is taken again."""
    before = connected(cluster)[name]
    os.kill(cluster.pid(name), signal.SIGKILL)
    return lambda: eventually(lambda: connected(cluster).get(name, before) != before, within_s=30)


def test_a_history_under_load_and_kills_is_as_it_should_be(home, tmp_path):
    folder = tmp_path / "history"
    sets = (HANDED_OVER, "model.path=oracle", f"history={folder}", "prefill.replicas=2", "decode.replicas=2")
    with home.cluster("configs/no-ray.yaml", *sets, "decode.kv_memory=4MiB") as cluster:
        threads, outcomes = load(cluster, AT_LEAST, 40)
        end(threads)
        assert len(outcomes) == AT_LEAST
        for name in ("prefill-0", "decode-1"):
            threads, problems = under_load(cluster)
            assert [problem for problem in problems if problem.handoff is None] == []  # the others may be on their way
            replaced = kill(cluster, name)
            end(threads)
            replaced()
        assert ask(cluster, 1, 8) == 8
        said = cluster.home.baton("status", "--census", "--name", cluster.name, check=True).stdout
        assert said.count("held: by nobody") == 4
    report = check([folder])
    assert [str(violation) for violation in report.violations] == []
    assert report.outcomes["accepted"] >= AT_LEAST
    ends = [(journal.process, journal.end) for journal in sorted(report.journals, key=lambda journal: journal.life)]
    cut = [process for process, how in ends if how == ""]
    assert (sorted(cut), len(ends)) == (["decode-1", "prefill-0"], 7)
    assert set(dict(ends).values()) == {"stopped"}  # of each place, the last one
