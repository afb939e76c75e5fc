"""The shape of a worker's verify passes: from the cluster file, else from measurements here, else 2 x 32."""

import asyncio
from pathlib import Path
from unittest.mock import Mock

import pytest
from structlog.testing import capture_logs

from baton.core import Role
from baton.engine.determinism.checks import VerifyShapeTimes, save_passes
from baton.engine.determinism.shapes import FixedShapes
from baton.engine.oracle import OracleBackend, oracle_layout
from baton.errors import ConfigError
from baton.worker import process
from baton.worker.engine_factory import passes_path, settled

PRESET = FixedShapes().rows
MEASURED = VerifyShapeTimes({32: 8.0, 64: 8.0, 128: 8.0, 256: 8.0}, steady=128)


@pytest.fixture
def demo(settings, tmp_path, monkeypatch):
    monkeypatch.setenv("BATON_HOME", str(tmp_path / "home"))
    return lambda *sets: settings(f"model.path={DEMO}", "decode.device=cpu", *sets)


def chosen(found):
    """Return rows, tokens, and their source in the log."""
    with capture_logs() as logs:
        shapes = settled(found).shapes
    (line,) = [line for line in logs if line["event"] == "verify_passes"]
    assert (line["rows"], line["tokens"]) == (shapes.rows, shapes.tokens)
    return shapes.rows, shapes.tokens, line["source"]


def test_without_a_measurement_it_is_the_preset(demo):
    assert chosen(demo()) == (PRESET, 32, "preset")
    path = passes_path(demo())
    path.parent.mkdir(parents=True)
    path.write_text("{")
    assert chosen(demo()) == (PRESET, 32, "preset"), "a broken file"
    assert settled(demo()).shapes.exact_rows == demo().shapes.exact_rows > 0


def test_the_cluster_file_comes_first(demo, tmp_path):
    save_passes(passes_path(demo()), MEASURED)
    assert settled(demo()).shapes.exact_rows == demo().shapes.exact_rows
    for sets, expected in {
        (): (4, 32, "profile"),  # steps are exact with it
        ("determinism.rows=1",): (1, 32, "config"),
        ("determinism.rows=1", "determinism.window=64"): (1, 64, "config"),
        ("determinism.window=64",): (PRESET, 64, "preset"),  # nothing was measured for it
        ("determinism.window=32",): (4, 32, "profile"),
        ("determinism.verify=always",): (8, 32, "profile"),
        (f"model.path={tmp_path}",): (PRESET, 32, "preset"),  # loading reports the missing model
        ("model.path=oracle",): (PRESET, 32, "preset"),
    }.items():
        assert chosen(demo(*sets)) == expected, sets


@pytest.mark.slow
async def test_a_worker_starts_with_it(demo, monkeypatch):
    build_engine, no_engine = Mock(side_effect=ConfigError("enough")), Mock()
    save_passes(passes_path(demo()), MEASURED)
    monkeypatch.setattr(process, "build_engine", build_engine)
    monkeypatch.setattr(process, "load_backend", lambda found: OracleBackend(oracle_layout(4)))
    with pytest.raises(ConfigError, match="enough"):
        await process.serve({Role.DECODE: demo()}, {Role.DECODE: no_engine}, Role.DECODE, asyncio.Event(), print)
    (found, _), _ = build_engine.call_args
    assert found.shapes.rows == 4
    no_engine.assert_not_called()


def test_workers_of_one_kind_and_models_of_one_shape_have_one_place(demo, tmp_path):
    """Two workers of one kind with different numbers of rows would be incompatible."""
    here = passes_path(demo())
    same = ("decode.max_running=3", "decode.block_size=32", "decode.kv_memory=1MiB", "decode.max_batched_tokens=999")
    assert {passes_path(demo(each)) for each in same} == {here}
    others = ("decode.threads=7", "model.dtype=float32", "decode.tensor_parallel=2")
    assert len({passes_path(demo(each)) for each in others} | {here}) == 4
    another = demo(f"model.path={tmp_path}")
    (tmp_path / "config.json").write_bytes((DEMO / "config.json").read_bytes())
    assert passes_path(another) == here
    (tmp_path / "config.json").write_text("{}")
    assert passes_path(another) != here
