"""benchmarks/transfer.py as a user runs it, on toy models, and the bare transfers that it compares with."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from benchmarks.lib.protocol import ROOT, ChildFailed, Setup
from benchmarks.lib.transfer_bare import SharedRing, ring_bytes
from benchmarks.lib.transfer_partner import Partner

KEYS = {
    "gloo_vs_raw_64mb",
    "shm_vs_memcpy_64mb",
    "exposed_share_512",
    "exposed_share_2048",
    "small_handoff_ms_over_raw",
}
PARTNER = """
from benchmarks.lib.protocol import serve

def load(setup):
    return {"model": setup.model}, {"double": lambda value: {"value": 2 * value}, "fail": lambda: {}["missing"]}

serve(load)
"""


def run(tmp_path: Path, *options: str) -> tuple[str, dict[str, float | None]]:
    command = [sys.executable, "benchmarks/transfer.py", "--quick", "--tiny", "--rounds", "2", *options]
    folders = ["--out", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]
    done = subprocess.run([*command, *folders], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["benchmark"] == "transfer"
    assert set(last["ratios"]) == KEYS
    return done.stdout, last["ratios"]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_quick_run_ends_with_all_figures(tmp_path: Path) -> None:
    text, ratios = run(tmp_path, "--sizes", "1,64", "--prompts", "512,2048")
    assert None not in ratios.values()
    assert (ratios["gloo_vs_raw_64mb"] or 0) > 0
    assert 0 < (ratios["shm_vs_memcpy_64mb"] or 0) < 1
    assert "the figures mean nothing" in text
    assert "### What is left to send" in text
    raw = json.loads((tmp_path / "out" / "transfer.json").read_text())
    assert {result["streams"] for result in raw["results"] if "tokens" in result} == {True, False}
    timeline = (tmp_path / "out" / "transfer-timeline.txt").read_text().splitlines()
    assert len(timeline) > 2
    times = [[float(cell) for cell in line.split("|")[4:7]] for line in timeline[2:]]
    assert all(ready <= sent <= landed for ready, sent, landed in times), times


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_what_is_not_asked_for_is_null(tmp_path: Path) -> None:
    text, ratios = run(tmp_path, "--sizes", "1", "--prompts", "0", "--transports", "shm")
    assert {key for key, value in ratios.items() if value is not None} == {"small_handoff_ms_over_raw"}
    assert "was not measured" in text


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_on_a_machine_without_gpus_that_is_said(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    text, ratios = run(tmp_path, "--gpu", "--sizes", "1")
    assert set(ratios.values()) == {None}
    assert "- not measured: cuda_ipc, Baton: " in text
    assert "- not measured: nccl, Baton: " in text


def test_a_ring_moves_bytes_between_two_maps() -> None:
    """Two maps of one file, in two threads: as between two processes."""
    slots, size = 3, 4096
    file = os.memfd_create("test-ring")
    os.ftruncate(file, ring_bytes(slots, size))
    writer, reader = SharedRing(file, slots, size), SharedRing(file, slots, size)
    os.close(file)
    sent = torch.arange(10 * size + 100, dtype=torch.int64).to(torch.uint8)
    writer.reset()
    for _ in range(2):
        received = torch.zeros_like(sent)
        reading = threading.Thread(target=reader.read, args=(received,))
        reading.start()
        writer.wait_reader()
        writer.write(sent)
        reading.join(10)
        assert torch.equal(sent, received)


def test_a_partner_answers_fails_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "partner_under_test.py").write_text(PARTNER)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{tmp_path}")
    partner = Partner("partner_under_test", Setup("some model", "bf16", 1, 1, "c"))
    try:
        assert partner.about == {"model": "some model"}
        assert partner.ask("double", value=21) == {"value": 42}
        with pytest.raises(ChildFailed, match="KeyError"):
            partner.ask("fail")
        assert partner.ask("double", value=1) == {"value": 2}
    finally:
        partner.close()
    with pytest.raises((ChildFailed, ValueError, BrokenPipeError)):
        partner.ask("double", value=1)
