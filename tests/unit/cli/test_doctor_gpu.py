"""Each line of `baton doctor` about GPUs, from given facts. No GPU is here, so torch itself is asked only for none."""

import ctypes
import dataclasses
import resource
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from baton.cli.setup import doctor
from baton.cli.setup.doctor_gpu import GpuFacts, gpu_facts, planned_gpus
from baton.cli.setup.doctor_transport import own_gpu
from baton.cli.setup.findings import BAD, OK, WARN
from baton.cluster.gpus import VISIBLE
from baton.config import ClusterConfig
from baton.engine.kernels.gpu.driver import driver_version

BASE = "model: {path: oracle}\nray: {address: none}\nrouter: {grpc: '127.0.0.1:0', metrics: '127.0.0.1:0'}\n"
ROWS = ("driver", "compute capability", "peer access", "nccl", "locked memory")
EVERY = frozenset((one, other) for one in range(4) for other in range(4) if one != other)
FINE = GpuFacts("13.0", 4, "580.65.06", ("NVIDIA H100 80GB HBM3",) * 4, ((9, 0),) * 4, EVERY, (2, 28, 9))
BOTH = "prefill.device=cuda", "decode.device=cuda"


@pytest.fixture
def look(tmp_path, monkeypatch):
    """A function that returns the findings for changed facts and settings by their names."""
    monkeypatch.delenv(VISIBLE, raising=False)

    def look(*sets, **changed):
        (file := tmp_path / "c.yaml").write_text(BASE)
        facts = dataclasses.replace(FINE, **changed)
        return {finding.what: finding for finding in doctor.examine(file, sets, facts)}

    return look


def test_a_plan_without_gpus_is_one_line(look):
    found = look("prefill.device=cpu", "decode.device=cpu", driver=None, nccl=None)
    assert (found["gpu"].verdict, found["gpu"].found) == (OK, "none in the plan, 4 here (NVIDIA H100 80GB HBM3)")
    assert not found.keys() & set(ROWS)
    assert look(count=0, names=())["gpu"].found == "none in the plan, none here"


def test_a_host_that_is_fine(look):
    found = look(*BOTH)
    assert {found[row].verdict for row in ("gpu", *ROWS)} == {OK}
    assert found["driver"].found == "580.65.06; torch for CUDA 13.0 needs 580 or newer"
    assert found["peer access"].found == "between all 2 GPUs of the plan"
    assert (found["compute capability"].found, found["nccl"].found) == ("9.0", "2.28.9")
    assert look("prefill.device=cuda:3", "decode.device=cuda:3")["peer access"].found == "one GPU in the plan"


@pytest.mark.parametrize(
    ("cuda", "driver", "verdict", "text"),
    [
        ("13.0", "575.57.08", BAD, "575.57.08; torch for CUDA 13.0 needs 580 or newer"),
        ("13.2", "590.44.01", OK, "590.44.01; torch for CUDA 13.2 needs 580 or newer"),
        ("12.8", "570.26", OK, "570.26; torch for CUDA 12.8 needs 570 or newer"),
        ("12.8", "550.54.14", WARN, "needs 570 or newer (from 525 on in CUDA's minor version compatibility)"),
        ("12.8", "470.42.01", BAD, "470.42.01; torch for CUDA 12.8 needs 570 or newer"),
        ("13.0", None, BAD, "none; torch for CUDA 13.0 needs 580 or newer"),
        (None, "580.65.06", OK, "580.65.06; this torch has no CUDA and needs none"),
    ],
)
def test_the_driver_is_as_new_as_torch_needs(look, cuda, driver, verdict, text):
    finding = look(*BOTH, cuda=cuda, driver=driver)["driver"]
    assert (finding.verdict, text in finding.found, bool(finding.remedy)) == (verdict, True, verdict != OK)


def test_only_gpus_of_the_plan_are_judged(look):
    capabilities = ((9, 0), (9, 0), (9, 0), (7, 5))
    assert look(*BOTH, capabilities=capabilities)["compute capability"].verdict == OK
    found = look("prefill.device=cuda:2", "decode.device=cuda:2", "decode.replicas=2", capabilities=capabilities)
    finding = found["compute capability"]
    assert (finding.verdict, finding.found) == (WARN, "7.5, 9.0; below 8.0: GPU 3")
    assert "plain torch" in finding.remedy


def test_missing_links_are_shown_as_a_matrix(look):
    one_way = EVERY - {(0, 2), (2, 0), (1, 2)}
    finding = look(*BOTH, "decode.replicas=2", peers=one_way)["peer access"]
    assert (finding.verdict, finding.found) == (WARN, "GPU 0 to 1; 1 to 0; 2 to 1")
    assert "nvidia-smi topo -p2p r" in finding.remedy
    finding = look(*BOTH, peers=frozenset())["peer access"]
    assert finding.found == "GPU 0 to none; 1 to none"


@pytest.mark.parametrize(
    ("sets", "verdict"), [([], WARN), (["transfer.transport=nccl"], BAD), (["decode.tensor_parallel=2"], BAD)]
)
def test_nccl_is_needed_for_its_transport_and_for_ranks(look, sets, verdict):
    finding = look(*BOTH, *sets, nccl=None)["nccl"]
    assert (finding.verdict, bool(finding.remedy)) == (verdict, True)


def test_limits_of_memory(look, monkeypatch):
    finding = look(*BOTH, locked_bytes=8 * 2**20)["locked memory"]
    assert (finding.verdict, finding.found) == (WARN, "8192 KiB")
    assert "ulimit -l unlimited" in finding.remedy
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**29))
    assert look()["shared memory"].verdict == OK
    finding = look(*BOTH)["shared memory"]
    assert (finding.verdict, "--shm-size=1g" in finding.remedy) == (WARN, True)


@pytest.mark.parametrize(
    ("changed", "sets", "verdict", "text"),
    [
        ({"count": 1}, BOTH, BAD, "need 2 GPUs, and this host has 1 that torch can use"),
        ({"count": 0, "names": (), "cuda": None}, BOTH, BAD, "and this host has 0 that torch can use"),
        ({"names": ()}, BOTH, BAD, "4 here (torch opens none)"),  # NVML counts GPUs under a driver too old for torch
        ({"count": 0, "names": ()}, (*BOTH, "ray.address=h:1"), WARN, "none here; the plan uses GPUs of Ray nodes"),
    ],
    ids=["too few", "no torch for them", "not opened", "of other hosts"],
)
def test_gpus_that_the_plan_lacks(look, changed, sets, verdict, text):
    finding = look(*sets, **changed)["gpu"]
    assert (finding.verdict, text in finding.found) == (verdict, True), finding.found
    assert finding.remedy or changed == {"count": 1}, "that error contains what to do"


def test_gpus_of_the_plan_are_those_that_workers_get():
    def planned(prefill, decode, ray="none", **sizes):
        pools = {"prefill": {"device": prefill}, "decode": {"device": decode, **sizes}}
        tree = pools | {"model": {"path": "a"}, "ray": {"address": ray}}
        return planned_gpus(ClusterConfig.model_validate(tree), "01234567")

    assert planned("cuda", "auto", tensor_parallel=2) == [0, 1, 2]
    assert planned("cuda:1", "cuda:4", replicas=2) == [1, 4, 5]
    assert planned("cpu", "auto", autoscale={"min": 1, "max": 3}) == [0, 1, 2]
    assert planned("cuda", "cuda", ray="local") == list(range(8)), "Ray chooses"
    assert planned("cuda:0", "cuda:1", ray="local") == [0, 1]


class Nvml:
    """Imitates libnvidia-ml.so.1 (nvml.h of CUDA 13): `nvmlInit_v2(void)` and
    `nvmlSystemGetDriverVersion(char *version, unsigned int length)`. Both return an nvmlReturn_t: 0 for success, and 9
    for NVML_ERROR_DRIVER_NOT_LOADED.
    """

    def __init__(self, version: bytes, loaded: int = 0) -> None:
        self._version, self._loaded = version, loaded

    def nvmlInit_v2(self) -> int:
        return self._loaded

    def nvmlSystemGetDriverVersion(self, version: "ctypes.Array[ctypes.c_char]", length: int) -> int:
        assert len(version) == length == 80
        version.value = self._version
        return 0


def missing(name: str) -> Nvml:
    raise OSError(f"{name}: cannot open shared object file: No such file or directory")


PROC = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version:  11.4\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder@U22)\n"


@pytest.mark.parametrize(
    ("load", "proc", "version"),
    [
        (lambda name: Nvml(b"580.82.07"), PROC, "580.82.07"),
        (lambda name: Nvml(b"", loaded=9), PROC, "535.104.05"),
        (missing, OPEN, "580.65.06"),
        (lambda name: SimpleNamespace(), OPEN, "580.65.06"),
        (missing, None, None),
        (missing, "another text", None),
    ],
)
def test_the_version_of_the_driver_is_that_of_nvml_or_of_the_module(tmp_path, load, proc, version):
    file = tmp_path / "version"
    if proc is not None:
        file.write_text(proc)
    assert driver_version(load, file) == version


@pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="there is a GPU here")
def test_facts_of_a_host_without_a_gpu():
    facts = gpu_facts()
    assert (facts.count, facts.names, facts.peers, facts.driver) == (0, (), frozenset(), None)
    assert facts.locked_bytes == resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]


def test_a_probe_between_two_gpus_runs_as_workers_do():
    environ = {VISIBLE: "GPU-a,GPU-b"}
    assert (own_gpu("cuda:1", environ), environ) == ("cuda:0", {VISIBLE: "GPU-b"})
    assert own_gpu("cpu", environ) == "cpu"
