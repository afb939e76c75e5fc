"""Selection of a worker's transports."""

import os
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from baton.core import LeftOut
from baton.errors import ConfigError
from kvtransfer.handoff import TransferSettings
from kvtransfer.transports import select
from kvtransfer.transports.grpc import GrpcTransport
from kvtransfer.transports.select import make_transports
from tests.support.nixl import Agents, Library
from tests.unit.kvtransfer.support import make_kv
from tests.unit.kvtransfer.transports.pairs import CPU

CUDA = torch.device("cuda", 0)


def kv_on(device: torch.device) -> Any:
    """Return a cache on this device that no process can read."""
    return SimpleNamespace(device=device, exposed=None)


def names(settings: TransferSettings, device: torch.device = CPU, grpc: GrpcTransport | None = None) -> list[str]:
    return [transport.name for transport in make_transports(settings, kv_on(device), grpc=grpc).transports]


def test_auto_is_shared_memory_and_then_gloo_or_grpc_where_kv_must_be_encrypted(monkeypatch) -> None:
    mine, settings = GrpcTransport("decode:1"), TransferSettings(encrypted=True)
    assert names(TransferSettings()) == names(TransferSettings(), grpc=mine) == ["shm", "gloo"]
    assert names(settings, grpc=mine) == ["shm", "grpc"]
    monkeypatch.setattr(select, "CudaIpcTransport", lambda kv: SimpleNamespace(name="cuda_ipc"))
    assert names(settings, CUDA, grpc=mine) == ["cuda_ipc", "grpc"]
    assert make_transports(settings, kv_on(CPU), grpc=mine).left_out == (LeftOut("gloo", "unencrypted"),)
    with pytest.raises(ConfigError, match="'grpc' is not available"):
        names(settings)


def test_auto_leaves_out_what_the_system_lacks_and_a_named_one_is_an_error(monkeypatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    found = make_transports(TransferSettings(), kv_on(CPU))
    assert [transport.name for transport in found.transports] == ["gloo"]
    assert [(one.transport, one.reason) for one in found.left_out] == [("shm", "unavailable")]
    assert "not linux on aarch64" in found.left_out[0].detail
    with pytest.raises(ConfigError, match=r"transfer\.transport: 'shm' is not available: .*not linux on aarch64"):
        make_transports(TransferSettings(transport="shm"), kv_on(CPU))


@pytest.mark.parametrize("lacks", [set(), {"cuda_ipc"}, {"nccl"}, {"cuda_ipc", "nccl"}])
def test_auto_on_a_gpu(monkeypatch, lacks: set[str]) -> None:
    for name, maker in (("cuda_ipc", "CudaIpcTransport"), ("nccl", "NcclTransport")):
        found = ConfigError("not on this machine") if name in lacks else [SimpleNamespace(name=name)]
        monkeypatch.setattr(select, maker, Mock(side_effect=found))
    if len(lacks) < 2:
        assert names(TransferSettings(), CUDA) == [name for name in ("cuda_ipc", "nccl") if name not in lacks]
    else:
        with pytest.raises(ConfigError, match=r"transfer\.transport: 'auto' .*cuda:0"):
            names(TransferSettings(), CUDA)


@pytest.mark.parametrize("name", ["shm", "gloo", "grpc", "nixl"])
def test_a_named_one_is_the_only_one(monkeypatch, name: str) -> None:
    monkeypatch.setattr("kvtransfer.transports.nixl.load", Mock(return_value=Library(agents := Agents())))
    monkeypatch.setattr("kvtransfer.transports.nixl.ServingProcess", agents.serve)
    mine = GrpcTransport("decode:1")
    made = make_transports(TransferSettings(transport=name), make_kv(None, exposed=True), grpc=mine).transports
    assert [transport.name for transport in made] == [name]
    if name == "grpc":
        assert made == (mine,)
    if name == "gloo":
        assert names(TransferSettings(transport=name), CUDA) == [name]  # staged in main memory


LACKING = {
    "nccl": "KV is on cpu",
    "cuda_ipc": "KV is on cpu",
    "grpc": "no address",
}
ERRORS = [
    *(
        (TransferSettings(name), rf"transfer\.transport: '{name}' is not available: .*{why}")
        for name, why in LACKING.items()
    ),
    (TransferSettings("carrier-pigeon"), r"'carrier-pigeon' is not one of auto, shm, nixl, .*grpc"),
    *((TransferSettings(name, bind_host="192.0.2.1"), r"192\.0\.2\.1") for name in ("auto", "gloo")),
]


@pytest.mark.parametrize(("settings", "error"), ERRORS)
def test_one_that_cannot_be_had_is_an_error_that_says_why(settings: TransferSettings, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        make_transports(settings, kv_on(CPU))


@pytest.mark.parametrize("given", [None, "ib1"])
def test_nccl_takes_the_interface_of_the_pool_unless_its_own_variable_says_another(monkeypatch, given) -> None:
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", given or "")
    if given is None:
        monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    make_transports(TransferSettings(transport="nccl", interface="ib0"), kv_on(CUDA))
    assert os.environ["NCCL_SOCKET_IFNAME"] == (given or "=ib0")
