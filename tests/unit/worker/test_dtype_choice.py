"""The dtype of a bfloat16 checkpoint on CPUs: by measurement, once, and the same for all workers of a cluster."""

import json
from dataclasses import replace
from unittest.mock import Mock

import pytest

from baton.cli.cluster.dtype import with_dtype
from baton.config import ClusterConfig
from baton.engine.models.config import read_config
from baton.worker import dtype_choice
from baton.worker.dtype_choice import chosen, faster, measured, path_of
from tests.unit.worker.test_build import DEMO


@pytest.mark.parametrize(
    ("bfloat16", "float32", "expected"), [(1.0, 1.0, "bfloat16"), (1.0, 0.92, "bfloat16"), (1.0, 0.9, "float32")]
)
def test_float32_must_be_clearly_faster(bfloat16, float32, expected):
    assert faster({"bfloat16": bfloat16, "float32": float32}) == expected


@pytest.mark.parametrize("text", ["{", "[]", '{"bfloat16": 1}', '{"bfloat16": 0, "float32": 0}', '{"bfloat16": []}'])
def test_it_is_measured_once_and_again_if_the_file_is_damaged(tmp_path, text):
    path, measure = tmp_path / "deep" / "x.json", Mock(return_value={"bfloat16": 3.0, "float32": 1.0})
    assert [chosen(path, measure) for _ in range(3)] == ["float32"] * 3
    measure.assert_called_once()
    path.write_text(text)
    measure.return_value = {"bfloat16": 1.0, "float32": 1.0}
    assert [chosen(path, measure) for _ in range(2)] == ["bfloat16"] * 2
    assert measure.call_count == 2


def test_a_result_that_cannot_be_kept_is_used(tmp_path):
    (tmp_path / "file").write_text("")
    assert chosen(tmp_path / "file" / "x.json", Mock(return_value={"bfloat16": 3.0, "float32": 1.0})) == "float32"


def test_another_level_thread_count_or_model_shape_is_measured_again(tmp_path, monkeypatch):
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    monkeypatch.setenv("BATON_CPU_LEVEL", "none")
    config = read_config(DEMO)
    paths = [path_of(config, 1), path_of(config, 2), path_of(replace(config, vocab_size=9), 1)]
    monkeypatch.setattr(dtype_choice, "level_here", lambda: "avx2")
    assert len({*paths, path_of(config, 1)}) == 4


def test_each_product_counts_with_its_weight(monkeypatch):
    monkeypatch.setenv("BATON_CPU_LEVEL", "none")
    monkeypatch.setattr(dtype_choice, "alternate", lambda candidates: [candidate() or 1.0 for candidate in candidates])
    monkeypatch.setattr(dtype_choice, "MOST_COPIES", 1)
    config = replace(read_config(DEMO), layers=5)
    assert measured(config) == dict.fromkeys(("bfloat16", "float32"), (64 + 32 + 2) * (3 * 5 + 1))


@pytest.fixture
def config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    pool = {"replicas": 2, "threads": 3, "device": "cpu"}
    tree = {"model": {"path": str(tmp_path)}, "ray": {"address": "none"}, "prefill": pool, "decode": pool}
    return lambda **model: ClusterConfig.model_validate(tree | {"model": tree["model"] | model})


def test_one_process_resolves_auto_for_all_workers(config, tmp_path):
    output = Mock(return_value="float32\n")
    assert with_dtype(config(), (), output).model.dtype == "float32"
    output.assert_called_once_with(("-m", "baton.worker.dtype_choice", str(tmp_path), "3"))
    output.return_value = None  # it failed
    assert with_dtype(config(), (), output).model.dtype == "auto"


def test_nothing_is_measured_where_there_is_no_choice(config, tmp_path, monkeypatch):
    output = Mock(side_effect=AssertionError)
    remote = config().model_copy(update={"ray": config().ray.model_copy(update={"address": "ray://h:1"})})
    quantised = config(quantize="int8")
    for one in (config(dtype="bfloat16"), config(path="oracle"), quantised, remote):
        assert with_dtype(one, (), output) is one
    monkeypatch.setattr("baton.cli.cluster.dtype.total_bytes", lambda: 2 * 100 * 4 * 2 - 1)  # or a container's
    assert with_dtype(config(), (), output).model.dtype == "auto", "float32 does not fit"
    monkeypatch.undo()
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "float16"}))
    assert with_dtype(config(), (), output).model.dtype == "auto"
