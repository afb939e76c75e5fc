"""`baton profile`: measures, saves, reports, and explains if there is nothing to profile."""

import json
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from structlog.testing import capture_logs

from baton.cli.sizing import commands
from baton.cli.sizing import profile_kernels as command
from baton.config import load_config
from baton.core import Role
from baton.engine.determinism.checks import load_passes
from baton.engine.kernels.cpu.compiler import load_library
from baton.engine.kernels.cpu.kernel_choice import load_profile
from baton.engine.kernels.cpu.tuning import measure_attention, measure_linear
from baton.errors import ConfigError
from baton.worker.engine_factory import settled
from baton.worker.settings import from_config
from tests.support.compiled_kernels import compiled_or_skip, share_kernels

DEMO = Path(__file__).parents[3] / "models" / "demo"


@pytest.fixture
def cluster_file(tmp_path, monkeypatch):
    monkeypatch.setenv("BATON_HOME", str(share_kernels(tmp_path / "home")))
    monkeypatch.setattr(command, "measure_linear", partial(measure_linear, rows=(1, 8)))
    monkeypatch.setattr(command, "measure_attention", partial(measure_attention, context=40))
    monkeypatch.setattr(command, "configure_logging", lambda *_: None)  # would change other tests' logs
    file = tmp_path / "c.yaml"
    pool = "{threads: 1, max_running: 2}"
    file.write_text(f"model: {{path: {DEMO}}}\nprefill: {pool}\ndecode: {pool}\n")
    with capture_logs():
        yield file


@pytest.mark.slow
def test_every_shape_of_the_model_is_measured_and_kept(cluster_file, capsys):
    compiled_or_skip(lambda: load_library("f32"))
    command.profile_kernels(cluster_file, [], as_json=True)
    (report,) = json.loads(capsys.readouterr().out)  # both pools have one thread, so one profile
    shapes = {f"{p['width']}x{p['k']}" for p in report["points"]}
    assert shapes == set(report["choices"])
    assert len(shapes) == 5  # qkv, o, gate and up, down, head
    kept = load_profile(Path(report["path"]))
    assert {f"{n}x{k}": choice._asdict() for (n, k), choice in kept.choices.items()} == report["choices"]
    assert kept.unified_max == report["unified_max"]
    passes = report["verify_passes"]
    found = load_passes(Path(passes["path"]))
    assert found is not None
    assert {str(tokens): seconds for tokens, seconds in found.seconds.items()} == passes["seconds"]
    assert (passes["rows"], passes["window"]) == (found.best(exact=True) // 32, 32)
    settings = from_config(load_config(cluster_file, []), Role.DECODE, "decode-0")
    assert settled(settings).shapes.rows == passes["rows"]


@pytest.mark.parametrize("sets", [["model.path=oracle"], []], ids=["--set", "the environment"])
def test_the_oracle_has_nothing_to_profile(cluster_file, monkeypatch, sets):
    if not sets:
        monkeypatch.setenv("BATON__MODEL__PATH", "oracle")
    with pytest.raises(ConfigError, match=r"model\.path: oracle"):
        command.profile_kernels(cluster_file, sets, as_json=False)


def test_the_config_of_a_wheel_is_found_outside_of_a_repository(monkeypatch, tmp_path):
    monkeypatch.setattr("baton.cli.options.SHIPPED", DEMO.parents[1])
    monkeypatch.setattr(command, "profile_kernels", measured := Mock())
    monkeypatch.chdir(tmp_path)
    commands.profile(sets=["decode.threads=1"])
    sets = [f"model.path={DEMO}", "decode.threads=1"]
    measured.assert_called_once_with(DEMO.parents[1] / "configs" / "local.yaml", sets, as_json=False)
    with pytest.raises(ConfigError, match=r"--target, .* must be with --live FILE"):
        commands.profile(target="h:1")


def test_a_named_gpu_is_profiled_as_the_only_one(cluster_file, monkeypatch):
    """Kernels run on the current device of a thread, which is the first GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-none")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ConfigError, match=r"device: cuda:0 is not available .* CUDA_VISIBLE_DEVICES is GPU-none"):
        command.profile_kernels(cluster_file, ["prefill.device=cuda:1", "decode.device=cuda:1"], as_json=True)
