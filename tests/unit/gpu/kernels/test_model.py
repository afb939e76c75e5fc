"""The same engine on the GPU kernels: a whole model against the reference kernels, and decode steps with graphs."""

import gc
import inspect
import random
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import Mock, patch

import pytest
import torch

from baton.engine.batch import Batch
from baton.engine.determinism.checks import FixedRow, check_fixed, fixed_batch
from baton.engine.determinism.shapes import FixedShapes
from baton.engine.kernels.gpu import cuda_graphs
from baton.engine.kernels.gpu.cuda_graphs import Captured, CudaCapture, DecodeGraphs, graphed
from baton.engine.kernels.gpu.flash_attention import VarlenAttention
from baton.engine.kernels.gpu.ops import GpuAttention, GpuKernels
from baton.engine.kernels.torch_reference import TorchKernels
from baton.engine.model_runner import Inputs
from baton.engine.models.loading import load_model
from benchmarks.lib.device import moved
from benchmarks.lib.random_weights import random_model
from tests.unit.model import harness
from tests.unit.model.checkpoints import random_checkpoint, thinking_checkpoint
from tests.unit.model.harness import greedy

if TYPE_CHECKING:
    from baton.engine.model_backend import ModelBackend

SHAPE: dict[str, Any] = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "max_position_embeddings": 256}
SHAPE |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
ONE_GROUP = {"num_attention_heads": 2, "num_key_value_heads": 1}
SMALLEST = ONE_GROUP | {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "vocab_size": 17}
SMALLEST |= {"max_position_embeddings": 100}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 7, **ONE_GROUP},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], **ONE_GROUP},
}


def both(family, device, **changed):
    kernels = GpuKernels.on(device) if device.type == "cuda" else GpuKernels(4)
    options = {"device": device, "dtype": "float32", "block_size": 4}
    return [
        random_model(SHAPE | FAMILIES[family] | changed, kernels=each, **options) for each in (TorchKernels(), kernels)
    ]


def eager(forward):
    """Replace a graph by the forward, which runs again and writes to the same logits."""
    logits = forward()
    return Captured(torch.inference_mode()(lambda: logits.copy_(forward())), logits)


@pytest.fixture(autouse=True)
def batches_on_the_device(device, monkeypatch):
    make = harness.make_batch

    def moved(*args):
        batch = make(*args)
        named: dict[str, Any] = {name: getattr(batch, name) for name in batch.__slots__}
        named |= {name: value.to(device) for name, value in named.items() if isinstance(value, torch.Tensor)}
        return Batch(**named)

    monkeypatch.setattr(harness, "make_batch", moved)


def assert_equal_runs(found, expected, tolerance):
    for a, b in zip(expected, found, strict=True):
        assert a.tokens == b.tokens
        assert a.logits.keys() == b.logits.keys()
        for position, logits in a.logits.items():
            torch.testing.assert_close(b.logits[position], logits, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_model(family, device, seed):
    prompts = [list(range(3, 3 + n)) for n in (1, 4, 9)]
    expected, found = (greedy(model, prompts, 2, random.Random(seed)) for model in both(family, device))
    assert_equal_runs(found, expected, 1e-4)


class Graphed:
    """The model with graphs over each new cache. `buckets` are the replayed ones."""

    def __init__(self, model):
        self.model, self.layout = model, model.layout
        self.buckets: list[int | None] = []

    def make_cache(self, total_blocks):
        kv, scratch = self.model.make_cache(total_blocks), self.model.model.scratch
        self.widest = Inputs(self.model, 6, 6, 8).widest()
        self.graphs = DecodeGraphs(self.model, kv, self.widest)
        capture = CudaCapture(kv.device) if kv.device.type == "cuda" else eager
        checks = "check_input_liveness" in inspect.signature(torch.cuda.graph.__init__).parameters  # torch 2.13
        # A replay raises if memory that it uses is freed.
        checked = partial(torch.cuda.graph, check_input_liveness=True) if checks else torch.cuda.graph

        def watched(forward):
            assert self.model.model.scratch is not scratch
            return capture(forward)

        with patch.object(torch.cuda, "graph", checked):
            self.graphs.capture(watched)
        gc.collect()
        assert self.model.model.scratch is scratch
        assert bool((kv.k == 0).all())  # capturing stores nothing
        self.kv, self.backend = kv, graphed(self.model, self.graphs)
        return kv

    def forward(self, batch, kv):
        assert self.graphs.bucket(batch, kv) is None, "graphs read other memory"
        if max(batch.query_lens) == 1:
            batch = moved(batch, self.widest)
        self.buckets.append(self.graphs.bucket(batch, kv))
        return self.backend.forward(batch, kv)


@pytest.mark.parametrize("sequences", [1, 3])
def test_decode_steps_by_graphs(sequences, device, seed):
    """Batches that fill no bucket, in any order. A padded row would show as a NaN, or in another row's KV."""
    _, model = both("llama", device, **SMALLEST)
    prompts = [[7 + i] * (2 + 3 * i) for i in range(sequences)]
    with_graphs = Graphed(model)
    expected = greedy(model, prompts, 3, random.Random(seed))
    found = greedy(cast("ModelBackend", with_graphs), prompts, 3, random.Random(seed))
    assert set(with_graphs.buckets) & {1, 2, 4, 6}
    assert_equal_runs(found, expected, 1e-5)
    batch = moved(fixed_batch([FixedRow([1], 0, [0])], [0], 4, device), with_graphs.widest)
    assert with_graphs.graphs.bucket(batch, with_graphs.kv) is None, "a fixed batch takes no graph"
    object.__setattr__(batch, "fixed", False)
    assert with_graphs.graphs.bucket(batch, with_graphs.kv) == 1


@pytest.mark.parametrize(("write", "captured"), [(random_checkpoint, True), (thinking_checkpoint, False)])
def test_a_model_that_thinks_is_not_captured(tmp_path, monkeypatch, write, captured):
    """A replayed forward would omit the states that come with a batch."""
    write(tmp_path, "llama")
    model, made = load_model(tmp_path, block_size=8), Mock(return_value=Mock(sizes=()))
    kv, widest = model.make_cache(2), Inputs(model, 2, 2, 1).widest()
    assert cuda_graphs.with_graphs(model, kv, widest) is model, "not on a CPU"
    monkeypatch.setattr(model, "device", torch.device("cuda"))
    monkeypatch.setattr(type(model.model.kernels), "name", "triton")
    monkeypatch.setattr(cuda_graphs, "DecodeGraphs", made)
    monkeypatch.setattr(cuda_graphs, "CudaCapture", Mock())
    assert (cuda_graphs.with_graphs(model, kv, widest) is not model) == made.called == captured


@pytest.mark.sample(1, of="long under the interpreter")
@pytest.mark.usefixtures("products_by_row")
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_fixed_forwards_are_steady(family, device):
    """A worker runs this check on its GPU at the start. The interpreter checks that masks and tiles are right."""
    _, model = both(family, device, **SMALLEST)
    assert check_fixed(model, FixedShapes(2, 16)) == ""


@pytest.mark.parametrize("window", [None, 5])
def test_what_attention_fixed_batches_take(window, device):
    """The Triton kernel, whose bits do not depend on the block size."""
    batch = fixed_batch([FixedRow([1] * 32, 0, [0])], [], 256, device)
    kernels = GpuKernels(4, varlen=lambda *_, **__: None)
    attention = GpuAttention(kernels, batch, 256, window, 1.0)
    keys = torch.zeros(1, 256, 2, 64, dtype=torch.bfloat16, device=device)
    chosen = attention._choose(keys, keys)
    assert chosen == attention._by_triton
    ordinary = GpuAttention(kernels, replace(batch, fixed=False), 256, window, 1.0)
    assert isinstance(ordinary._choose(keys, keys), VarlenAttention)
