"""Log of loading a model: limited progress, and one line at the end with the time and memory it took."""

import json
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from baton.engine.models.checkpoint import LoadProgress
from baton.errors import ConfigError
from baton.worker.engine_factory import LoadingLog, load_backend

def test_progress_is_logged_at_most_every_two_seconds():
    with capture_logs() as events:
        loading = LoadingLog("hf:org/tiny")
        for seconds in (0.0, 0.1, 1.9, 2.1, 2.2, 4.0, 4.2):
            loading(LoadProgress(int(seconds * 1e9), 5_000_000_000, 3, seconds))
    assert [(event["percent"], event["gb"]) for event in events] == [(0, 0.0), (42, 2.1), (84, 4.2)]
    assert {(event["event"], event["model"], event["of_gb"]) for event in events} == {
        ("model_loading", "hf:org/tiny", 5.0)
    }


def test_the_end_is_logged_once(settings):
    with capture_logs() as logged:
        load_backend(settings())  # the oracle loads nothing
        backend = load_backend(settings(f"model.path={DEMO}"))
    events = [event for event in logged if event["event"] != "kernels_torch"]  # logged where no kernels are compiled
    assert [event["event"] for event in events] == ["model_loading", "model_loaded"]
    loaded = events[-1]
    assert (loaded["model"], loaded["dtype"], loaded["device"]) == (str(DEMO), backend.layout.dtype, "cpu")
    assert loaded["gb"] == round((DEMO / "model.safetensors").stat().st_size / 1e9, 3)
    assert loaded["tensors"] > 10
    assert loaded["seconds"] >= 0
    assert loaded["gb_per_s"] > 0
    assert loaded["resident_gb"] > loaded["gb"]


def test_a_length_for_which_positions_are_not_right_is_refused_before_weights_are_read(settings):
    limit = json.loads((DEMO / "config.json").read_text())["max_position_embeddings"]
    with capture_logs() as events, pytest.raises(ConfigError, match=f"between 1 and {limit}, .*got {limit + 1}"):
        load_backend(settings(f"model.path={DEMO}", f"model.max_model_len={limit + 1}"))
    assert events == []
    assert load_backend(settings(f"model.path={DEMO}", "model.max_model_len=60")).max_model_len == 60
