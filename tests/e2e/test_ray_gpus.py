"""Which GPUs the actors of a local Ray see. Ray is real, and its GPUs are made up: it does not look for them."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from baton.cluster import backend_ray
from baton.cluster.backend_ray import RayPlacement, start_local
from baton.cluster.gpus import VISIBLE, GpuAssignment, with_devices
from baton.config import ClusterConfig
from baton.core import Role
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]
GPUS = ("GPU-a", "GPU-b", "GPU-c")


class Shows:
    """A worker that writes what it sees into its log."""

    def __init__(self, config: str, role: str, worker_id: str, log_file: str, factories: object) -> None:
        Path(log_file).write_text(os.environ.get(VISIBLE, "all"))

    def pid(self) -> int:
        return os.getpid()

    def ready(self) -> dict[str, object]:
        return {}

    def stop(self) -> None: ...


@pytest.fixture(scope="module")
def ray():
    """A local Ray with `GPUS`. There is one, because Ray keeps the token of a process."""
    scratch = Path(tempfile.mkdtemp(dir="/tmp"))  # short, for unix sockets
    with pytest.MonkeyPatch.context() as patch:
        for name in (*backend_ray.LOCAL_ENVIRONMENT, "RAY_AUTH_TOKEN"):
            patch.setenv(name, "")
        patch.setenv(VISIBLE, ",".join(GPUS))
        module = start_local(lambda: scratch, "test", len(GPUS))
        yield module
        module.shutdown()
    shutil.rmtree(scratch, ignore_errors=True)


@pytest.fixture
def seen(ray, tmp_path):
    """A function that starts a prefill and a decode worker of cluster `name`, and returns the GPUs that each sees."""
    workers = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}
    placements = []

    def look(name, **pools):
        config = ClusterConfig.model_validate({"model": {"path": "models/demo"}, "name": name, **pools})
        given, named = with_devices(config, GPUS), GpuAssignment(config, GPUS)
        placements.append(RayPlacement(lambda: given, Shows, {}, lambda: ray, tmp_path, named=named))
        placements[-1].open()
        for worker_id, role in workers.items():
            placements[-1].start(worker_id, role)
        eventually(lambda: all(one.state == "ready" for one in placements[-1].look().values()), within_s=60)
        return [(tmp_path / f"{worker_id}.log").read_text().split(",") for worker_id in workers]

    yield look
    for placement in placements:
        for worker_id in workers:
            placement.kill(worker_id)


def test_ray_gives_each_worker_its_own(seen):
    prefill, decode = seen("own", prefill={"device": "cuda", "tensor_parallel": 2}, decode={"device": "auto"})
    assert (len(prefill), len(decode)) == (2, 1)
    assert sorted(prefill + decode) == sorted(GPUS)


def test_named_gpus_are_those_of_the_file_and_may_be_shared(seen):
    named = {"device": "cuda:1", "tensor_parallel": 2}
    assert seen("named", prefill=named, decode={"device": "cuda:2"}) == [["GPU-b", "GPU-c"], ["GPU-c"]]
