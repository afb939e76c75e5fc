"""Weights: their placement, their equality to the file, and the memory that loading needs."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from baton.engine.memory.huge_pages import CACHE_LINE, CHUNK, HUGE_PAGE, SMALL, Arena
from baton.engine.models.checkpoint import Checkpoint, LoadProgress, Weights
from baton.engine.models.loading import load_model
from tests.unit.model.checkpoints import random_checkpoint

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")


def stored(folder: Path, **tensors: torch.Tensor) -> Checkpoint:
    save_file(tensors, folder / "model.safetensors")
    return Checkpoint(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("on_disk", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_stacked_in_the_order_of_names(on_disk: torch.dtype, dtype: torch.dtype, tmp_path: Path, seed: int):
    torch.manual_seed(seed)
    parts = {name: torch.randn(rows, 24).to(on_disk) for name, rows in (("v", 3), ("q", 700), ("k", 5))}
    biases = {f"{name}_bias": part[:, 0].contiguous() for name, part in parts.items()}
    weights = Weights(stored(tmp_path, **parts, **biases), dtype, CPU)
    assert torch.equal(
        weights.joined(("q", "k", "v"), (700, 5, 3), 24), torch.cat([parts["q"], parts["k"], parts["v"]]).to(dtype)
    )
    assert torch.equal(
        weights.joined(("k_bias", "v_bias"), (5, 3)), torch.cat([biases["k_bias"], biases["v_bias"]]).to(dtype)
    )
    assert torch.equal(weights.tensor("q_bias", 700), biases["q_bias"].to(dtype))
    assert weights.checkpoint.finish()


@pytest.mark.parametrize(("rows", "direct"), [([0, 1, 2, 3], True), ([1, 2], True), ([2, 1], False), ([0, 2], False)])
def test_consecutive_rows_are_copied_directly_from_the_file(rows, direct, tmp_path, monkeypatch) -> None:
    value, seen, copy = torch.arange(20.0).view(4, 5), list[bool](), Weights._copy

    def noted(weights: Weights, place: torch.Tensor, source: torch.Tensor, taken: torch.Tensor) -> None:
        seen.append(taken.data_ptr() in weights.checkpoint._views)
        copy(weights, place, source, taken)

    monkeypatch.setattr(Weights, "_copy", noted)
    weights = Weights(stored(tmp_path, a=value), torch.float32, CPU)
    assert torch.equal(weights.picked(["a"], [4], [torch.tensor(rows)], 5), value[rows])
    assert (seen, weights.checkpoint._views) == ([direct], set())


def test_pieces_cover_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("baton.engine.models.checkpoint.PIECE", 7)
    value = torch.arange(60.0).view(5, 4, 3)
    assert torch.equal(Weights(stored(tmp_path, a=value), torch.float32, CPU).tensor("a", 5, 4, 3), value)


@pytest.mark.parametrize("rows", [1, 3, 511, 515, 2048, 16385, 20001])
def test_matrices_are_aligned(rows: int, tmp_path: Path):
    matrix = Weights(stored(tmp_path, a=torch.ones(rows, 512)), torch.float32, CPU).joined(("a",), (rows,), 512)
    assert matrix.data_ptr() % (HUGE_PAGE if matrix.nbytes >= CHUNK // 2 else CACHE_LINE) == 0
    assert matrix.is_contiguous()


def test_tensors_of_one_mapping_do_not_overlap(seed: int):
    sizes = torch.randint(SMALL, CHUNK // 2, (12,), generator=torch.Generator().manual_seed(seed)).tolist()
    arena = Arena()
    places = [arena.empty((size,), torch.uint8) for size in sizes]
    for number, place in enumerate(places):
        place.fill_(number)
    assert [(int(place.min()), int(place.max())) for place in places] == [(n, n) for n in range(len(sizes))]
    assert {place.data_ptr() % CACHE_LINE for place in places} == {0}
    assert len({place.untyped_storage().data_ptr() for place in places}) < len(places)


def test_progress_is_told(tmp_path: Path):
    seen: list[LoadProgress] = []
    load_model(ROOT / "models/demo", progress=seen.append)
    size = (ROOT / "models/demo/model.safetensors").stat().st_size
    assert (seen[0].bytes_done, seen[0].tensors) == (0, 0)
    assert {progress.bytes_total for progress in seen} == {size}
    assert 0 <= size - seen[-1].bytes_done < 2**16  # the file's header
    assert seen[-1].tensors == len(seen) - 1
    for values in ([p.bytes_done for p in seen], [p.seconds for p in seen]):
        assert values == sorted(values)


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """A model of about 110 MB, most of it in one stacked matrix."""
    folder: Path = tmp_path_factory.mktemp("large")
    shape: dict[str, Any] = {"vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 12288}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64}
    options: dict[str, Any] = {"num_hidden_layers": 1, "tie_word_embeddings": True, "dtype": torch.bfloat16}
    random_checkpoint(folder, "llama", **shape, **heads, **options)
    return folder


MEASURE = """
import sys, threading, torch
from baton.engine.models.loading import load_model
def resident():
    lines = (line.split() for line in open("/proc/self/status"))
    return {line[0]: int(line[1]) * 1024 for line in lines if line[0] in ("RssAnon:", "RssFile:")}
def note(_=None):
    for key, value in resident().items():
        peak[key] = max(peak[key], value)
def sample():
    while not done.wait(0.004):
        note()
torch.set_num_threads(1)
load_model(sys.argv[3])  # what only the first one needs
before = resident()
peak, done = dict(before), threading.Event()
sampler = threading.Thread(target=sample)
sampler.start()
model = load_model(sys.argv[1], dtype=sys.argv[2], progress=note)
done.set()
sampler.join()
print(*(peak[key] - before[key] for key in ("RssAnon:", "RssFile:")))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "times"), [("bfloat16", 1), ("float32", 2)])
def test_there_is_no_second_copy(dtype: str, times: int, large: Path):
    """There is no second copy in process memory or, after copying, in mapped pages of the file."""
    command = [sys.executable, "-c", MEASURE, str(large), dtype, str(ROOT / "models/demo")]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    anonymous, mapped = map(int, done.stdout.split())
    size = (large / "model.safetensors").stat().st_size
    assert 0.95 * size * times < anonymous < 1.1 * size * times
    assert mapped < 0.4 * size  # the largest tensor is 0.26 of it
