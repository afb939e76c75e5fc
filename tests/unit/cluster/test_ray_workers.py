"""What Ray may do to us at start and later, played by a Ray of our own. The real one: tests/e2e/test_demo_model.py."""

import signal
import sys
from types import SimpleNamespace

import pytest

from baton.clock import FakeClock
from baton.cluster import ray_cluster
from baton.cluster.pool import WorkerPlan
from baton.cluster.processes import StartError
from baton.cluster.ray_cluster import RayWorkers
from baton.cluster.stop import Stop
from baton.core import Role
from baton.errors import Cancelled, ConfigError, LedgerError, NoWorker


class RayError(Exception):
    pass


class TaskError(RayError):
    def __init__(self, cause):
        self.cause = cause


class FakeRay:
    """Answers `ready` with the next of `answers` (an exception is raised; None: no answer yet)."""

    exceptions = SimpleNamespace(RayError=RayError)

    def __init__(self):
        self.answers = []
        self.failure = None
        self.options = {}
        self.killed = []
        self.shut = False

    def init(self, **options):
        self.options = options
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))  # as the real one does
        if self.failure:
            raise self.failure

    def remote(self, actor):
        method = SimpleNamespace(remote=lambda: self.answers.pop(0) if self.answers else None)
        handle = SimpleNamespace(ready=method, stop=SimpleNamespace(remote=lambda: "stopped"))
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: handle))

    def wait(self, answers, num_returns, timeout):
        return [answer for answer in answers if answer is not None], []

    def get(self, answer):
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self, handle, no_restart):
        self.killed.append(no_restart)

    def shutdown(self):
        self.shut = True


@pytest.fixture
def ray(monkeypatch):
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    for name in (*ray_cluster.LOCAL_ENVIRONMENT, "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "")
    before = signal.getsignal(signal.SIGTERM)
    yield fake
    signal.signal(signal.SIGTERM, before)


def workers(tmp_path, address="local", clock=None):
    return RayWorkers(address, "test", object, {}, lambda: tmp_path, clock)


def plans(tmp_path):
    (tmp_path / "d.log").write_text("a line of the log")
    (tmp_path / "c.yaml").write_text("model: {path: oracle}")
    return [WorkerPlan(Role.DECODE, 0, tmp_path / "c.yaml", tmp_path / "d.log")]


def started(ray, tmp_path, address="local", clock=None):
    it = workers(tmp_path, address, clock)
    it.start(plans(tmp_path))
    ray.answers = [{"pid": 7}]
    it.wait_ready(Stop())
    return it


def test_a_worker_is_ready_with_its_process_id(ray, tmp_path):
    it = started(ray, tmp_path)
    assert it.pids() == {"decode-0": 7}
    assert ray.options["_temp_dir"] == str(tmp_path)
    it.stop(0.1)
    assert ray.killed == [True]
    assert ray.shut


def test_process_ids_of_another_machine_are_not_told_as_ours(ray, tmp_path):
    assert started(ray, tmp_path, "auto").pids() == {}


def test_our_handler_of_sigterm_is_put_back(ray, tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    workers(tmp_path).start([])
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("address", "failure", "error"),
    [
        ("local", RuntimeError("no shared memory"), StartError),
        ("auto", ConnectionError("no Ray here"), NoWorker),
        ("local", SystemExit(15), Cancelled),  # what Ray makes of a SIGTERM
    ],
)
def test_a_ray_that_does_not_start_is_an_error_that_names_the_key(ray, tmp_path, address, failure, error):
    ray.failure, it = failure, workers(tmp_path, address)
    with pytest.raises(error, match=r"ray\.address|Ray was starting"):
        it.start(plans(tmp_path))
    it.stop(0.1)
    assert ray.shut


def test_a_ray_that_nobody_runs_is_named_at_once(ray, tmp_path):
    it = workers(tmp_path, "127.0.0.1:1")
    with pytest.raises(NoWorker, match=r"ray\.address: nothing answers at 127\.0\.0\.1:1"):
        it.start(plans(tmp_path))
    it.stop(0.1)


@pytest.mark.parametrize(
    ("answer", "error", "says"),
    [(TaskError(ConfigError("kv_memory: too small")), ConfigError, "kv_memory"), (RayError(), StartError, "a line of")],
)
def test_a_worker_that_does_not_start(ray, tmp_path, answer, error, says):
    it = workers(tmp_path)
    it.start(plans(tmp_path))
    ray.answers = [answer]
    with pytest.raises(error, match=says):
        it.wait_ready(Stop())


def test_told_to_stop_while_a_worker_loads(ray, tmp_path):
    it, stop = workers(tmp_path), Stop()
    it.start(plans(tmp_path))
    stop.drain.set()
    with pytest.raises(Cancelled):
        it.wait_ready(stop)


def test_a_replacement_that_cannot_start_is_replaced_again(ray, tmp_path):
    """Its process lives and answers; without this it would stand there for ever, and Ray would be content."""
    it = started(ray, tmp_path)
    ray.answers = [TaskError(LedgerError("Redis was away")), {"pid": 8}]
    it.poll()
    assert ray.killed == [False]
    it.poll()
    assert it.pids() == {"decode-0": 8}


def test_a_worker_that_ray_gives_up_ends_the_cluster(ray, tmp_path):
    clock = FakeClock()
    it = started(ray, tmp_path, clock=clock)
    ray.answers = [RayError(), RayError()]
    it.poll()
    clock.advance(ray_cluster.HOPELESS_S + 1)
    with pytest.raises(StartError, match="a line of the log"):
        it.poll()


def test_a_ray_that_died_does_not_keep_the_rest_from_ending(ray, tmp_path):
    it = started(ray, tmp_path)
    ray.wait = None
    it.stop(0.1)
    assert ray.shut
