"""A controller in an external Ray, as its clients see it. The Ray is a fake."""

import sys
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest
from structlog.testing import capture_logs

from baton.cluster import controller_ray
from baton.cluster.backend_process import StartError
from baton.cluster.controller_ray import (
    ControllerProgress,
    FoundCluster,
    RemoteControl,
    check_ledger,
    end,
    ensure,
    follow,
    join,
)
from baton.cluster.signals import Stop
from baton.config import ClusterConfig
from baton.errors import Cancelled, ConfigError, LedgerError, NoWorker
from baton.testing import FakeClock
from tests.support.ray import Actor, ActorDiedError, FakeRay, RayError

LOCAL = ("embedded", "unix:///tmp/r.sock", "redis://:secret@127.0.0.1:6379", "rediss://localhost")
PARTS = controller_ray.Parts(object, {})
FILE = {"name": "test", "ray": {"address": "10.0.0.1:6379"}, "redis": {"url": "redis://redis.example:6379"}}
CONFIG = ClusterConfig.model_validate(FILE)


class Controller(Actor):
    """An actor that returns the test's answers in order and repeats the last. An exception is raised."""

    def __init__(self, options, args):
        super().__init__(options, args)
        self.said = []

    def answer(self, name, *args):
        if not self.said:
            return name == "serves" and args == self.args[:1]
        return self.said.pop(0) if len(self.said) > 1 else self.said[0]


@pytest.fixture
def ray():
    return FakeRay(Controller)


@pytest.fixture
def clock(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr("baton.cluster.controller_ray.time.sleep", clock.advance)
    return clock


@pytest.fixture
def ensured(ray, clock):
    def get(config=CONFIG, stop=None, *, detached=True):
        return ensure(ray, config, PARTS, stop or Stop(), detached=detached, clock=clock)

    return get


@pytest.fixture
def one(ensured):
    return ensured()


def test_a_controller_is_made_once_and_stays_on_whatever_head_there_is(ray, ensured, one):
    other_ports = CONFIG.model_copy(update={"router": CONFIG.router.model_copy(update={"grpc": "127.0.0.1:7"})})
    assert ensured(other_ports) is one
    wanted = {"lifetime": "detached", "max_restarts": -1, "max_task_retries": 0, "num_cpus": 0}
    assert (wanted | {"name": controller_ray.ACTOR}).items() <= one.options.items()
    assert one.options["resources"] == {"node:__internal_head__": 0.001}
    assert one.args[2] is True
    two = ensured(CONFIG.model_copy(update={"slo": CONFIG.slo.model_copy(update={"itl_ms": 7.0})}))
    assert ray.actors == {controller_ray.ACTOR: two}
    assert two is not one, "with another config it is replaced"


@pytest.mark.parametrize("ends", [False, True])
def test_the_controller_of_an_earlier_release_is_ended(ray, ensured, ends):
    options = {"name": "controller"}
    ray.actors["controller"] = former = Controller(options, ())
    if ends:
        end(ray, CONFIG, 1.0)
    else:
        assert ensured() is not former
    assert ray.killed == ["controller"]
    assert set(ray.actors) == (set() if ends else {controller_ray.ACTOR})


def test_a_frozen_controller_is_replaced_and_one_that_is_being_started_is_waited_for(ensured, one, clock):
    one.said = [RayError("unavailable"), RayError("unavailable"), True]
    assert ensured() is one
    one.said = [RayError("no answer")]
    began = clock.monotonic()
    assert ensured() is not one
    assert clock.monotonic() - began == pytest.approx(controller_ray.STARTS_S, abs=2 * controller_ray.POLL_S)
    ended = ensured()
    ended.said = [ActorDiedError("killed from outside")]
    began = clock.monotonic()
    assert ensured() is not ended
    assert clock.monotonic() - began == pytest.approx(controller_ray.POLL_S), "its end is not waited for"


def test_who_is_told_to_end_has_none_made(ray, ensured, one, monkeypatch):
    stop = Stop()
    one.said = [RayError("it is being ended")]

    def told_meanwhile(question, timeout, get=ray.get):
        stop.drain.set()
        ray.actors.clear()
        return get(question, timeout)

    monkeypatch.setattr(ray, "get", told_meanwhile)
    with pytest.raises(Cancelled):
        ensured(stop=stop)
    assert ray.made == [one]


def test_the_handle_of_who_made_a_controller_is_kept(ray, ensured, monkeypatch):
    """Ray ends an actor that is not detached with its first handle; other handles do not count."""

    def made(options, args, make=ray.make):
        controller = make(options, args)
        controller.said = [RayError("slow"), RayError("slow"), True]
        ray.actors.clear()  # a lookup would return another handle
        return controller

    monkeypatch.setattr(ray, "make", made)
    assert [ensured(detached=False)] == ray.made


def test_a_controller_that_never_starts_is_an_error_with_rays_own_words(ray, ensured, clock):
    ray.silent = True
    with pytest.raises(StartError, match="it does not answer"):
        ensured()
    assert clock.monotonic() > controller_ray.ENSURE_S


def test_controllers_that_all_die_are_an_error_after_a_minute(ray, ensured, clock, monkeypatch):
    def made(options, args, make=ray.make):
        controller = make(options, args)
        controller.said = [ActorDiedError("no such package")]
        return controller

    monkeypatch.setattr(ray, "make", made)
    began = clock.monotonic()
    with pytest.raises(StartError, match="no such package"):
        ensured()
    assert controller_ray.DYING_S < clock.monotonic() - began < controller_ray.ENSURE_S / 2


def waits(clock, times=1000):
    """Return a stop that is requested after so many waits, which advance the clock."""
    left = iter([False] * times)

    def wait(timeout):
        clock.advance(timeout)
        return next(left, True)

    return Stop(drain=Mock(wait=wait, is_set=lambda: False))


def never(state):
    pytest.fail(f"told of {state}")


def test_who_follows_is_told_once_when_all_are_ready(ray, one, clock):
    late = ControllerProgress(ready=False, workers=2, error=ConfigError("of a worker that was started later"))
    ready = ControllerProgress(ready=True, workers=2)
    one.said = [ControllerProgress(ready=False, workers=2), ready, late, ready]
    told: list[ControllerProgress] = []
    follow(ray, one, waits(clock, 20), told.append, clock)
    assert [state.workers for state in told] == [2]


def test_who_attaches_to_a_cluster_that_serves_does_not_wait_for_a_worker_that_fails(ray, one, clock):
    one.said = [ControllerProgress(ready=False, workers=2, error=StartError("no such model"))]
    told: list[ControllerProgress] = []
    follow(ray, one, waits(clock, 20), told.append, clock, attach=True)
    assert told == one.said


def test_who_follows_renews_its_lease_and_ends_if_another_host_has_it(ray, one, clock):
    one.said = [ControllerProgress(ready=True, workers=2)]
    renew = Mock(side_effect=[None, LedgerError("Redis is away"), None, ConfigError("another host")])
    with pytest.raises(ConfigError, match="another host"):
        follow(ray, one, waits(clock, 20), lambda state: None, clock, renew=renew)
    assert renew.call_count == 4
    ray.silent, renew = True, Mock()
    with pytest.raises(NoWorker):
        follow(ray, one, waits(clock), never, clock, renew=renew)
    assert renew.call_count > 4, "also while the controller does not answer"


def test_a_lease_is_renewed_while_a_controller_starts(ray, clock):
    renew = Mock(side_effect=[LedgerError("Redis is away"), *[None] * 4, ConfigError("another host")])
    ray.silent = True
    with pytest.raises(ConfigError, match="another host"):
        ensure(ray, CONFIG, PARTS, Stop(), detached=True, clock=clock, renew=renew)
    assert len(ray.made) == 1


def test_who_follows_learns_why_a_worker_did_not_start(ray, one, clock):
    one.said = [ControllerProgress(ready=False, workers=2, error=LedgerError("Redis is away"))]
    with pytest.raises(LedgerError, match="Redis is away"):
        follow(ray, one, waits(clock), never, clock)


def test_who_follows_ends_when_the_controller_is_lost(ray, one, clock):
    ready = ControllerProgress(ready=True, workers=2)
    one.said = [ready, RayError("unavailable"), ready]
    follow(ray, one, waits(clock, 20), lambda state: None, clock)
    ray.silent = True
    began = clock.monotonic()
    with pytest.raises(NoWorker, match="does not answer"):
        follow(ray, one, waits(clock), never, clock)
    assert clock.monotonic() - began > controller_ray.LOST_S


@pytest.mark.parametrize("url", LOCAL)
def test_a_ledger_that_only_this_machine_reaches_is_refused_with_hosts_elsewhere(url):
    check_ledger(url, ["127.0.0.1", "127.0.0.3"])
    check_ledger("redis://redis.example:6379", ["192.0.2.77"])
    with pytest.raises(ConfigError, match=r"redis\.url: .*192\.0\.2\.77") as refused:
        check_ledger(url, ["127.0.0.1", "192.0.2.77"])
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("address", ["local", "none"])
def test_without_a_ray_of_others_there_is_nothing_to_join(address):
    config = ClusterConfig.model_validate(FILE | {"ray": {"address": address}})
    with pytest.raises(ConfigError, match=r"ray\.address: .*'" + address):
        join(config, 0.0, Stop())


def test_a_ray_that_is_not_there_yet_is_waited_for(ray, clock, monkeypatch):
    connect = Mock(side_effect=[*[NoWorker("not yet")] * 3, ray])
    nodes = [{"NodeManagerAddress": "192.0.2.77", "Alive": True}]
    monkeypatch.setattr(ray, "nodes", lambda: nodes, raising=False)
    monkeypatch.setattr(controller_ray, "connect", connect)
    assert join(CONFIG, 60.0, waits(clock), clock) is ray
    assert connect.call_count == 4
    connect.side_effect = NoWorker("not yet")
    with pytest.raises(NoWorker, match="not yet"):
        join(CONFIG, 0.5, waits(clock), clock)


CHILD = """
import json, os, signal, sys

def say(*words):
    with open(sys.argv[1], "a") as log:
        print(*words, file=log)

say(*sys.argv[2:])
if "--stop" in sys.argv:
    sys.exit()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # a signal just before a sleep would not end it
os.write(int(os.environ["BATON_READY_FD"]), json.dumps({"workers": 5}).encode() + b"\\n")
signal.sigwait({signal.SIGTERM})
say("lets go")
"""


NOTHING, LOADING, SERVING = FoundCluster(False, False, 0), FoundCluster(True, False, 0), FoundCluster(True, True, 3)


@pytest.fixture(autouse=True)
def ledger(monkeypatch):
    """The cluster before a start, as the ledger has it, and the lease of `baton up`."""
    found, lease = AsyncMock(return_value=NOTHING), Mock()
    monkeypatch.setattr(controller_ray, "found_cluster", found)
    monkeypatch.setattr(controller_ray, "FollowerLease", lease)
    return SimpleNamespace(found=found, lease=lease)


@pytest.mark.parametrize(
    ("before", "serving", "lease", "ends"),
    [
        (NOTHING, False, None, True),
        (NOTHING, True, None, True),
        (NOTHING, True, LedgerError("Redis is away"), True),
        (NOTHING, True, ConfigError("another host"), False),
        (LOADING, False, None, False),
        (LOADING, True, None, True),
        (SERVING, False, None, False),
        (SERVING, True, None, True),
        (SERVING, True, ConfigError("another host"), False),
    ],
)
def test_a_cluster_ends_only_with_a_start_that_it_serves_for(
    tmp_path, monkeypatch, ledger, before, serving, lease, ends
):
    """Neither a start that fails ends a cluster that ran before it, nor one that another `baton up` has taken over."""
    monkeypatch.setattr(controller_ray, "check_reachable", lambda address: None)
    ledger.found.return_value, ledger.lease.return_value.take.side_effect = before, lease
    said, stop = tmp_path / "said", Stop()
    control = RemoteControl(CONFIG, [sys.executable, "-c", CHILD, str(said)], tmp_path)
    control.start("redis://somewhere")
    ledger.found.assert_awaited_once_with("redis://somewhere", "test")
    control.wait_ready(stop)
    assert control.size == (1 if before.serves else 5)
    if serving:
        stop.serving.set()
    control.stop(1.0)
    lines = said.read_text().splitlines()
    assert lines[0] == "--wait=5 --follow" + " --attach" * before.serves
    assert ("--wait=5 --stop" in lines) == ends


def test_a_child_that_never_was_ready_ends_no_cluster_that_ran(tmp_path, monkeypatch, ledger):
    monkeypatch.setattr(controller_ray, "check_reachable", lambda address: None)
    ledger.found.return_value = LOADING
    said = tmp_path / "said"
    refused = CHILD.replace("signal.pthread_sigmask", "sys.exit(3)\nsignal.pthread_sigmask")
    control = RemoteControl(CONFIG, [sys.executable, "-c", refused, str(said)], tmp_path)
    control.start("redis://somewhere")
    with pytest.raises(ConfigError):
        control.wait_ready(Stop())
    control.stop(1.0)
    assert said.read_text().splitlines() == ["--wait=5 --follow"]


@pytest.mark.parametrize("log", ["logs", "logs/none"])
def test_a_stop_that_fails_or_cannot_be_logged_is_tried_and_said(tmp_path, monkeypatch, log):
    monkeypatch.setattr(controller_ray, "check_reachable", lambda address: None)
    (tmp_path / "logs").mkdir()
    child = CHILD.replace("sys.exit()", "sys.exit(4)")
    control = RemoteControl(CONFIG, [sys.executable, "-c", child, str(tmp_path / "said")], tmp_path / "logs")
    control.start("redis://somewhere")
    control.wait_ready(Stop())
    if log == "logs/none":
        control._log = tmp_path / log / "controller.log"
    with capture_logs() as logs:
        control.stop(1.0)
    assert (tmp_path / "said").read_text().splitlines()[-1] == "--wait=5 --stop"
    [found] = [each for each in logs if each["event"] == "controller_did_not_stop"]
    assert "ended with exit code 4" in found["error"]


@pytest.mark.parametrize(("url", "bound"), [("embedded", " --bound"), ("redis://127.0.0.1:7", "")])
def test_the_children_of_a_remote_control(tmp_path, monkeypatch, url, bound):
    """The follower ends last if the controller would end with it, else first, because it may create another one."""
    monkeypatch.setattr(controller_ray, "check_reachable", lambda address: None)
    config = ClusterConfig.model_validate(FILE | {"redis": {"url": url}})
    said = tmp_path / "said"
    control = RemoteControl(config, [sys.executable, "-c", CHILD, str(said)], tmp_path)
    control.stop(1.0)
    assert not said.exists(), "it was not begun"
    control.start("redis://somewhere")
    control.wait_ready(Stop())
    assert control.size == 5
    assert control.pids().keys() == {"controller"}
    control.poll()
    control.stop(1.0)
    begun, ends, lets_go = f"--wait=5 --follow{bound}", "--wait=5 --stop", "lets go"
    assert said.read_text().splitlines() == ([begun, ends, lets_go] if bound else [begun, lets_go, ends])
    assert control.pids() == {}
