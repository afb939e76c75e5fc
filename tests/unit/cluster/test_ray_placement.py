"""Failures of Ray at start and later, with a fake Ray. tests/e2e/test_ray_cluster.py uses the real one."""

import os
import shutil
import signal
import subprocess
import sys

import psutil
import pytest

from baton.cluster import backend_ray
from baton.cluster.backend_process import StartError
from baton.cluster.backend_ray import ASK_S, SERVER, SILENT_S, START_ATTEMPTS, RayPlacement, connect, start_local
from baton.cluster.gpus import GpuAssignment, with_devices
from baton.cluster.signals import Stop
from baton.config import ClusterConfig, config_from_json
from baton.core import Role
from baton.errors import Cancelled, ConfigError, NoWorker
from baton.testing import FakeClock
from tests.support.ray import ActorDiedError, FakeRay, RayTaskError
from tests.support.time_factor import scaled

CONFIG = """{"name": "test", "ray": {"address": "auto", "node_labels": {"rack": "r1"}},
 "prefill": {"device": "cuda", "tensor_parallel": 2, "replicas": 1, "threads": 3, "node_labels": {"pool": "p"}},
 "decode": {"device": "cuda", "replicas": 1}}"""


# A handler could run too late: a signal just before time.sleep does not end the sleep.
ENDS = """
import signal, time
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print(flush=True)
signal.sigwait({signal.SIGTERM})
time.sleep(0.2)
print("ends")
"""
IGNORES = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"


class PlacingRay(FakeRay):
    """A Ray that also has the modules `ray.util` and `ray.util.scheduling_strategies`."""

    def __init__(self):
        super().__init__()
        self.failures, self.gpus = [], 0
        self.options, self.groups = {}, {}
        self.util = self.scheduling_strategies = self

    def PlacementGroupSchedulingStrategy(self, group):
        return "in", group

    def init(self, **options):
        self.options = options
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))  # as the real one does
        if self.failures:
            raise self.failures.pop(0)

    def make(self, options, args):
        actor = super().make(options, args)
        actor.answers = {"pid": None, "ready": None}
        return actor

    def placement_group(self, bundles, *, name, **options):
        self.head()
        self.groups[name] = {"name": name, "state": "PENDING", "bundles": dict(enumerate(bundles)), **options}
        return name

    def placement_group_table(self, name=None):
        self.head()
        return self.groups[name] if name else dict(enumerate(self.groups.values()))

    def get_placement_group(self, name):
        self.head()
        if name not in self.groups:
            raise ValueError("no such group")
        return name

    def remove_placement_group(self, name):
        self.head()
        del self.groups[name]

    def cluster_resources(self):
        return {"GPU": self.gpus}

    def wait(self, questions, num_returns, timeout):
        self.head()
        return [(actor, name, args) for actor, name, args in questions if actor.answers.get(name, "") is not None], []


@pytest.fixture
def ray(monkeypatch):
    fake = PlacingRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    for name in (*backend_ray.LOCAL_ENVIRONMENT, "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "")
    before = signal.getsignal(signal.SIGTERM)
    yield fake
    signal.signal(signal.SIGTERM, before)


class Place:
    def __init__(self, ray, logs=None):
        self.ray, self.clock = ray, FakeClock()
        given = (lambda: config_from_json(CONFIG), object, {Role.DECODE: "a factory"}, lambda: ray, logs)
        self.it = RayPlacement(*given, detached=logs is None, clock=self.clock)
        self.it.open()

    def start(self, worker_id="decode-0", role=Role.DECODE):
        self.it.start(worker_id, role)
        return self.ray.actors[worker_id]

    def ready(self, pid=7):
        actor = self.start()
        actor.answers = {"pid": pid, "ready": {}}
        self.look()
        assert self.look().state == "ready"
        return actor

    def look(self, worker_id="decode-0"):
        self.clock.advance(ASK_S)
        return self.it.look()[worker_id]


@pytest.fixture
def place(ray):
    return Place(ray)


@pytest.fixture
def here(ray, tmp_path):
    (tmp_path / "decode-0.log").write_text("a line of the log")
    return Place(ray, tmp_path)


def test_a_worker_of_another_host_has_a_place_of_its_own(ray, place):
    actor = place.start("prefill-0", Role.PREFILL)
    group = ray.groups["baton:test:prefill-0:prefill"]
    assert group["bundles"] == {0: {"CPU": 6, "GPU": 2}}
    assert group["bundle_label_selector"] == [{"rack": "r1", "pool": "p"}]
    assert (group["strategy"], group["lifetime"]) == ("STRICT_PACK", "detached")
    wanted = {"name": "prefill-0", "namespace": "baton-test", "lifetime": "detached", "num_cpus": 6, "num_gpus": 2}
    wanted |= {"max_restarts": 0, "max_task_retries": 0, "scheduling_strategy": ("in", group["name"])}
    assert wanted.items() <= actor.options.items()
    assert actor.args[1:4] == ("prefill", "prefill-0", "")


def test_ray_assigns_the_gpus_of_workers_of_one_machine(ray, here):
    assert here.start("prefill-0", Role.PREFILL).options["num_gpus"] == 2
    assert here.start().options["num_gpus"] == 1
    assert not ray.groups


def test_workers_on_named_gpus_of_one_machine_see_these(ray, tmp_path):
    """Ray 2.60 leaves CUDA_VISIBLE_DEVICES to an actor without GPUs (`set_visible_accelerator_ids`)."""
    file = {"prefill": {"device": "cuda:1", "tensor_parallel": 2}, "decode": {"device": "cuda:2"}}
    config = ClusterConfig.model_validate(file | {"name": "test"})
    given = with_devices(config, "abcd")
    named = GpuAssignment(config, "abcd")
    placement = RayPlacement(lambda: given, object, {}, lambda: ray, tmp_path, named=named)
    placement.open()
    placement.start("prefill-0", Role.PREFILL)
    placement.start("decode-0", Role.DECODE)
    options = [ray.actors[name].options for name in ("prefill-0", "decode-0")]
    visible = [one["runtime_env"]["env_vars"]["CUDA_VISIBLE_DEVICES"] for one in options]
    assert (visible, [one["num_gpus"] for one in options]) == (["b,c", "c"], [0, 0])
    assert config_from_json(ray.actors["prefill-0"].args[0]).prefill.device == "cuda"


@pytest.mark.parametrize(("model", "gpus", "asked"), [("a", 0, 0), ("a", 8, 3), ("oracle", 8, 0)])
def test_auto_asks_a_ray_of_many_hosts_for_the_gpus_that_it_has(ray, model, gpus, asked):
    ray.gpus = gpus
    file = {"model": {"path": model}, "decode": {"device": "auto", "tensor_parallel": 3}, "name": "test"}
    placement = RayPlacement(lambda: ClusterConfig.model_validate(file), object, {}, lambda: ray, None)
    placement.open()
    placement.start("decode-0", Role.DECODE)
    assert ray.actors["decode-0"].options["num_gpus"] == asked
    assert ray.groups["baton:test:decode-0:decode"]["bundles"][0].get("GPU", 0) == asked


def test_a_worker_is_seen_from_its_place_to_its_end(ray, place):
    actor = place.start()
    place.look()
    waits = place.look()
    said = "decode-0 waits for a Ray node with {'CPU': 1, 'GPU': 1} and the labels {'rack': 'r1'}"
    assert (waits.state, waits.pid, said in str(waits.error)) == ("starting", None, True)
    ray.groups["baton:test:decode-0:decode"]["state"] = "CREATED"
    assert place.look().error is None
    actor.answers["pid"] = 7
    seen = place.look()
    assert (seen.state, seen.pid, seen.error) == ("starting", 7, None)
    actor.answers["ready"] = {}
    place.look()
    assert place.look().state == "ready"
    actor.answers["ready"] = ActorDiedError("words\nthe last of them")
    place.look()
    seen = place.look()
    assert seen.state == "ended"
    assert "decode-0 ended (ActorDiedError): the last of them" in str(seen.error)
    assert not ray.groups, "its place is given back"
    place.it.forget("decode-0")
    assert not place.it.look()


def test_an_actor_that_does_not_answer_is_asked_once_and_has_not_ended(place):
    actor = place.ready()
    actor.answers["ready"] = None
    actor.asked.clear()
    for _ in range(50):
        assert place.look().state == "ready"
    assert actor.asked == ["ready"]


def test_a_head_that_is_away_ends_nobody_and_raises_nothing(ray, place):
    place.ready()
    ray.away = True
    assert place.look().state == "ready"
    place.it.kill("decode-0")
    assert place.look().state == "ready"
    assert not ray.killed
    ray.away = False
    place.look()
    assert ray.killed, "told again what it did not hear"
    assert place.look().state == "ended"
    ray.away = True
    place.it.start("decode-1", Role.DECODE)
    seen = place.look("decode-1")
    assert seen.state == "ended"
    assert "the head is away" in str(seen.error)


def test_a_worker_whose_process_lives_but_did_not_start_is_ended(ray, place):
    actor = place.start()
    actor.answers = {"pid": 7, "ready": RayTaskError(ConfigError("kv_memory: too small"))}
    place.look()
    place.look()
    seen = place.look()
    assert (seen.state, str(seen.error)) == ("ended", "kv_memory: too small")
    assert isinstance(seen.error, ConfigError)
    assert ray.killed == ["decode-0"]


def test_a_frozen_process_of_this_machine_is_killed_and_the_log_explains_its_end(here):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as frozen:
        frozen.send_signal(signal.SIGSTOP)
        here.ready(pid=frozen.pid).answers["ready"] = None
        here.it.kill("decode-0")
        try:
            assert frozen.wait(scaled(10)) == -signal.SIGKILL
        finally:
            frozen.kill()  # otherwise the block waits for a stopped process
    here.look()
    ended = here.look()
    assert (ended.state, "a line of the log" in str(ended.error)) == ("ended", True)


def test_another_process_that_has_the_id_of_an_ended_one_is_not_killed(here, monkeypatch):
    signals = []
    monkeypatch.setattr(os, "kill", lambda *sent: signals.append(sent))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as worker:
        here.ready(pid=worker.pid)
        monkeypatch.setattr(psutil.Process, "__ne__", lambda *_: True)  # the process with this id is another one
        here.it.kill("decode-0")
        worker.communicate(b"\n")
    assert not signals


def test_what_an_earlier_one_left_is_found_by_its_places(ray, place):
    for name, role in (("decode-0", Role.DECODE), ("prefill-3", Role.PREFILL), ("decode-9", Role.DECODE)):
        place.start(name, role)
    ray.groups["baton:test-2:decode-0:decode"] = {"name": "baton:test-2:decode-0:decode", "state": "CREATED"}
    ray.groups["baton:test:decode-8:decode"] = {"name": "baton:test:decode-8:decode", "state": "REMOVED"}
    del ray.actors["decode-9"]
    ray.actors["decode-0"].answers = {"pid": 7, "ready": {}}
    later = Place(ray)
    assert later.it.found() == {"decode-0": Role.DECODE, "prefill-3": Role.PREFILL}
    assert "baton:test:decode-9:decode" not in ray.groups, "a place without an actor is given back"
    assert "baton:test-2:decode-0:decode" in ray.groups, "another cluster's"
    later.look()
    assert later.look().state == "ready"
    assert later.look("prefill-3").state == "starting"
    later.clock.advance(SILENT_S)
    assert later.look("prefill-3").state == "ready", "who says nothing at all is judged by its lease"


@pytest.mark.parametrize("away", [False, True])
def test_at_the_end_all_are_asked_and_then_killed_and_ray_ends_though_its_head_died(ray, here, away):
    actor = here.ready(pid=2**22 + 7)
    ray.away = away
    here.it.stop(0.1)
    assert ray.shut
    if not away:
        assert "stop" in actor.asked
        assert ray.killed == ["decode-0", "decode-0"]  # a second time in case the first was not enough


@pytest.mark.parametrize(
    ("program", "patience_s", "said", "code"),
    [(ENDS, 30.0, b"ends\n", 0), (IGNORES, 0.05, b"", -signal.SIGKILL)],
    ids=["it ends", "it is frozen"],
)
def test_a_local_worker_is_killed_only_if_ray_does_not_end_it(ray, here, monkeypatch, program, patience_s, said, code):
    """Ray prints an error about each worker that is killed."""
    monkeypatch.setattr("baton.cluster.backend_ray.KIND_S", patience_s)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        here.ready(worker.pid)
        ray.on_kill = worker.terminate
        here.it.stop(0.1)
        assert (worker.stdout.read(), worker.wait()) == (said, code)


def test_a_local_ray_keeps_to_itself(ray, tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    assert start_local(lambda: tmp_path, "test", 2) is ray
    assert (ray.options["_temp_dir"], ray.options["num_gpus"]) == (str(tmp_path), 2)
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] == "0"
    assert os.environ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "0"
    assert len(os.environ["RAY_AUTH_TOKEN"]) == 64
    assert signal.getsignal(signal.SIGTERM) is before, "our handler is put back"


def test_a_local_ray_that_fails_to_start_is_started_again(ray, tmp_path):
    """Ray 2.60 waits for its first server by a file alone (`wait_for_persisted_port`), even if it is dead."""
    ray.failures = [RuntimeError("Timed out waiting for file gcs_server_port")] * (backend_ray.START_ATTEMPTS - 1)
    program = tmp_path / SERVER
    program.symlink_to(shutil.which("sleep"))
    folders = iter([tmp_path])
    with subprocess.Popen([program, "60"]) as partial:
        assert start_local(lambda: next(folders), "test", 0) is ray
        assert not psutil.pid_exists(partial.pid)
    assert ray.shut


def test_a_stop_ends_the_attempts_to_start_a_local_ray(ray, tmp_path, monkeypatch):
    ray.failures, stop = [RuntimeError("no shared memory")], Stop()
    monkeypatch.setattr(backend_ray, "_end_partial_start", stop.drain.set)
    with pytest.raises(Cancelled):
        start_local(lambda: tmp_path, "test", 0, stop.check)


@pytest.mark.parametrize(
    ("begin", "failure", "error"),
    [
        (lambda folder: start_local(lambda: folder, "test", 0), RuntimeError("no shared memory"), StartError),
        (lambda folder: connect("auto", "test"), ConnectionError("no Ray here"), NoWorker),
        (lambda folder: start_local(lambda: folder, "test", 0), SystemExit(15), Cancelled),  # Ray's reaction to SIGTERM
    ],
)
def test_a_ray_that_does_not_start_is_an_error_that_names_the_key(ray, tmp_path, begin, failure, error):
    ray.failures = [failure] * START_ATTEMPTS
    with pytest.raises(error, match=r"ray\.address|Ray was starting"):
        begin(tmp_path)
