"""Each finding of `baton doctor` has the right verdict and a remedy."""

import importlib.metadata
import json
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import typer

from baton.cli.options import LOCAL
from baton.cli.setup import doctor
from baton.cli.setup.certs import certs
from baton.cli.setup.findings import BAD, OK, WARN
from baton.errors import NoWorker

BASE = "model: {path: oracle}\nrouter: {grpc: '127.0.0.1:0', metrics: '127.0.0.1:0'}\n"


@pytest.fixture
def examine(tmp_path):
    def look(text=BASE, *sets):
        (file := tmp_path / "c.yaml").write_text(text)
        return {finding.what: finding for finding in doctor.examine(file, sets)}

    return look


def test_certificates_and_tokens(examine, tmp_path):
    assert (examine()["tls"].verdict, examine()["tokens"].verdict) == (OK, OK)
    certs(tmp_path / "tls", ["worker.example"], 30)
    file = tmp_path / "tokens"
    file.write_text("tokens: [{token: alice-token-0123456789, tenant: alice}]")
    file.chmod(0o644)
    sets = f"security.tls={tmp_path / 'tls'}", f"security.tokens={file}"
    tls, tokens = (examine(BASE, *sets)[what] for what in ("tls", "tokens"))
    assert tls.verdict == OK
    assert "worker.example, until " in tls.found
    assert (tokens.verdict, tokens.remedy) == (WARN, f"chmod 600 {file}")
    file.chmod(0o600)
    tokens = examine(BASE, *sets)["tokens"]
    assert (tokens.verdict, tokens.found) == (OK, f"1 in {file}")
    assert examine(BASE, f"security.receipt_key={file}")["receipts"].verdict == BAD, "that is no key"
    file.write_text("tokens: [{token: alice-token-0123456789, tenant: Alice}]")
    tokens = examine(BASE, *sets)["tokens"]
    assert (tokens.verdict, "tokens.0.tenant" in tokens.found) == (BAD, True)
    certs(tmp_path / "tls", [], 3)
    assert examine(BASE, *sets)["tls"].verdict == WARN, "three days are few"


def test_a_machine_that_is_fine(examine):
    found = examine()
    assert not [finding for finding in found.values() if finding.verdict == BAD]
    assert {"python", "torch", "config", "model", "redis", "threads", "shared memory", "gpu", "clock"} <= set(found)
    assert "router.grpc" not in found  # port 0 is always free


def test_a_channel_is_probed_with_the_config_of_a_wheel_outside_of_a_repository(monkeypatch, tmp_path):
    monkeypatch.setattr("baton.cli.options.SHIPPED", Path(__file__).parents[3])
    monkeypatch.setattr("baton.cli.setup.doctor_transport.probe_pair", Mock(side_effect=NoWorker("closed")))
    monkeypatch.chdir(tmp_path)
    (finding,) = doctor._pair(LOCAL, [], "grpc")
    assert (finding.verdict, finding.found) == (BAD, "closed")


def test_transports_that_auto_leaves_out_here_are_listed(examine, monkeypatch):
    assert examine()["transports"].found.startswith("auto: shm, gloo, ")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    found = examine()
    assert (found["transports"].verdict, found["left out"].verdict) == (OK, WARN)
    assert found["transports"].found.startswith("auto: gloo, ")
    assert "shm: it does not work at the sender: shared KV memory needs Linux on x86-64" in found["left out"].found
    assert examine(BASE, "transfer.transport=nccl")["transports"].verdict == BAD


@pytest.mark.parametrize(
    ("sets", "what", "remedy"),
    [
        (["redis.url=redis://u:s3cret@127.0.0.1:1/0"], "redis", "redis.url=embedded"),
        (["decode.device=cuda"], "gpu", "decode.device to cpu"),
    ],
)
def test_what_is_wrong_has_a_remedy(examine, sets, what, remedy):
    finding = examine(BASE, *sets)[what]
    assert finding.verdict == BAD
    assert remedy in finding.remedy
    assert "s3cret" not in finding.found


@pytest.mark.parametrize("key", ["router", "prefill", "decode"])
@pytest.mark.parametrize(("ray", "wrong"), [("none", BAD), ("192.0.2.1:6379", WARN)])
def test_what_the_network_of_this_host_has(examine, key, ray, wrong):
    sets = f"ray.address={ray}", "security.allow_insecure=true"
    found = examine(BASE, f"{key}.interface=lo", f"{key}.advertise=localhost", *sets)
    assert (found[f"{key}.interface"].verdict, found[f"{key}.interface"].found) == (OK, "lo has 127.0.0.1")
    assert "localhost is " in found[f"{key}.advertise"].found
    found = examine(BASE, f"{key}.interface=nic77", f"{key}.advertise=no-such-host.invalid", *sets)
    assert (found[f"{key}.interface"].verdict, found[f"{key}.advertise"].verdict) == (wrong, wrong)
    assert "'nic77'; it has " in found[f"{key}.interface"].found
    assert ("baton doctor" in found[f"{key}.interface"].remedy) is (wrong == WARN)


@pytest.mark.parametrize("key", ["router.metrics", "router.http"])
def test_a_port_in_use(examine, key):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        finding = examine(BASE, f"{key}=127.0.0.1:{taken.getsockname()[1]}")[key]
    assert finding.verdict == BAD
    assert f"--set {key}=127.0.0.1:0" in finding.remedy


def test_a_config_that_is_none_ends_the_search_and_a_folder_may_be_no_model(examine, tmp_path):
    found = examine("decode: {replics: 2}")
    assert (found["config"].verdict, "decode.replicas" in found["config"].found) == (BAD, True)
    assert "model" not in found
    finding = examine(f"model: {{path: {tmp_path}}}")["model"]
    assert (finding.verdict, finding.remedy) == (BAD, "set model.path to a checkpoint folder")


def test_of_colocated_workers_only_their_own_section_is_named(examine):
    sets = "mode=colocated", "decode.interface=lo", "decode.threads=4096", "security.allow_insecure=true"
    found = examine(BASE, *sets)
    assert found["decode.interface"].verdict == OK
    assert "prefill.interface" not in found
    assert found["threads"].remedy == "lower decode.threads"


def test_what_is_only_worth_a_note(examine, monkeypatch):
    missing = Mock(side_effect=importlib.metadata.PackageNotFoundError)
    monkeypatch.setattr(importlib.metadata, "version", missing)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    found = examine(BASE, "prefill.threads=4096")
    for what in ("ray", "threads", "shared memory"):
        assert (found[what].verdict, bool(found[what].remedy)) == (WARN, True)
    assert found["config"].verdict == OK


def test_the_exit_code_and_json(tmp_path, capsys):
    (file := tmp_path / "c.yaml").write_text(BASE)
    doctor.doctor(file, [], as_json=True)
    assert {finding["verdict"] for finding in json.loads(capsys.readouterr().out)} <= {OK, WARN}
    with pytest.raises(typer.Exit) as ended:
        doctor.doctor(file, ["decode.device=cuda"], as_json=False)
    assert ended.value.exit_code == 1
    assert " wrong  gpu: " in capsys.readouterr().out
