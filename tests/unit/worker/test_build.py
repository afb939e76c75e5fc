"""From settings to an engine: devices that are not there, and counters that start at zero."""

import pytest

from baton.config import load_config
from baton.core import Role
from baton.errors import ConfigError
from baton.worker.build import build_engine, pick_device
from baton.worker.settings import from_config


def settings(tmp_path, *sets):
    file = tmp_path / "c.yaml"
    file.write_text("model: {path: oracle}\nredis: {url: 'redis://127.0.0.1:1/0'}\n")
    return from_config(load_config(file, sets), Role.DECODE, 0)


def test_a_gpu_that_is_not_there_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert (pick_device("auto"), pick_device("cuda"), pick_device("cpu")) == ("cuda:0", "cuda", "cpu")
    with pytest.raises(ConfigError, match=r"device: cuda:1 is not here \(1 GPUs"):
        pick_device("cuda:1")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert pick_device("auto") == "cpu"
    with pytest.raises(ConfigError, match="cuda"):
        build_engine(settings(tmp_path, "decode.device=cuda"))


def test_a_new_engine_has_been_warmed_and_counts_from_zero(tmp_path):
    engine = build_engine(settings(tmp_path, "decode.kv_memory=1MiB", "decode.block_size=16"))
    load = engine.load()
    assert (load.step, load.prefill_tokens, load.decode_tokens) == (0, 0, 0)
    assert load.blocks.free == load.blocks.total


def test_too_little_memory_says_how_much_would_do(tmp_path):
    with pytest.raises(ConfigError, match=r"give at least \d+ bytes"):
        build_engine(settings(tmp_path, "decode.kv_memory=64KiB", "model.max_model_len=2048"))
