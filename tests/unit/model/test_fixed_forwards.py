"""Whole models in fixed forwards: a token's logits and KV have the same bits in every slot of every batch."""

import random
from typing import get_args

import pytest
import torch

from baton.engine.determinism.checks import FixedRow, check_fixed, checked_shapes, exact_rows, fixed_batch
from baton.engine.determinism.shapes import FixedShapes
from baton.engine.kernels import torch_reference
from baton.engine.kernels.cpu.compiler import LEVELS
from baton.engine.kernels.cpu.kernel_choice import Choice, Profile
from baton.engine.kernels.cpu.ops import CpuKernels
from baton.engine.kernels.quantized import Quantize
from baton.engine.kernels.torch_attention import PagedAttention
from baton.engine.kernels.torch_reference import TorchKernels
from baton.engine.models import loading
from baton.engine.models.deepseek import Indexer
from baton.engine.models.loading import load_model
from tests.support.compiled_kernels import compiled_or_skip
from tests.unit.model.checkpoints import DENSE, LATENT, NATIVE, SPARSE, VOCAB, Variant

pytestmark = pytest.mark.slow

SHAPES = FixedShapes(2, 32)
FIRST, LAST = 32, 180  # starts of passes
FAMILIES = {
    **{name: DENSE[name] for name in ("llama", "llama-one-kv-head", "mistral", "mistral-window-1", "qwen3")},
    "llama-wide-heads": Variant("llama", {"head_dim": 128, "num_key_value_heads": 1}),
    "llama-gelu": Variant("llama", {"head_dim": 16, "hidden_act": "gelu"}),
    "mistral-window-100": Variant("mistral", {"sliding_window": 100, "head_dim": 16}),
    "qwen3-window": DENSE["qwen3-layer-types"],
    **{name: SPARSE[name] for name in ("mixtral", "qwen3_moe-many")},
    **{name: LATENT[name] for name in ("v2", "v3", "v32")},
    **{name: NATIVE[name] for name in ("gemma2-caps", "gemma4", "gpt_oss", "glm4")},
}
PROFILES = {
    "flat": Profile(static=Choice(1 << 20, tall=True)),
    "tall": Profile(static=Choice(8, tall=True)),
    "torch product": Profile(static=Choice(8, tall=False)),
    "preset maximum": Profile(static=Choice(8, tall=True), unified_max=0.0),
}
CASES = [(family, kernels, 1) for family in FAMILIES for kernels in ("torch", *PROFILES)]
EXACT_ROWS = {"llama-wide-heads": 64, "llama-gelu": 64, "qwen3": 64, "qwen3-window": 64, "glm4": 64}
EXACT_ROWS |= {"mixtral": 0, "gpt_oss": 0}
TWO_THREADS = [pytest.param("llama", kernels, 2, marks=pytest.mark.slow) for kernels in ("torch", "flat", "tall")]


def model(folder, family: str, dtype: torch.dtype, kernels: str, monkeypatch, quantize: Quantize = "none"):
    FAMILIES[family]._replace(seed=5).write(folder, dtype=dtype)

    def choose(*_):
        return TorchKernels() if kernels == "torch" else CpuKernels(dtype, PROFILES[kernels])

    monkeypatch.setattr(loading, "choose_kernels", choose)
    return compiled_or_skip(lambda: load_model(folder, quantize=quantize))


def differing(backend, seed: int, rounds: int = 14) -> list[int]:
    """Return the positions whose logits or KV had different bits in one of the passes."""
    rng, layout, width = random.Random(seed), backend.layout, SHAPES.tokens
    tokens = [rng.randrange(VOCAB) for _ in range(LAST + 2 * width)]
    each = layout.blocks_for(len(tokens))
    kv = backend.make_cache(each * (SHAPES.rows + 1))
    blocks = rng.sample(range(each * (SHAPES.rows + 1)), each * (SHAPES.rows + 1))
    tables = [blocks[i * each : (i + 1) * each] for i in range(SHAPES.rows + 1)]
    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    found: set[int] = set()

    def verify(start: int, slot: int, known: int, most: int = LAST) -> None:
        rows = [
            FixedRow([rng.randrange(VOCAB) for _ in range(width)], rng.randrange(most), table) for table in tables[1:]
        ]
        rows[slot] = FixedRow(tokens[start : start + known] + rows[slot].tokens[known:], start, tables[0])
        batch = fixed_batch(rows, list(range(width * len(rows))), layout.block_size, backend.device)
        logits = backend.forward(batch, kv)[slot * width :][:known].clone()
        data = torch.empty(layout.layers * known * layout.layer_token_bytes, dtype=torch.uint8)
        kv.gather(range(layout.layers), tables[0], start, start + known, data)
        stored = data.view(layout.layers * len(layout.tensors), known, -1)
        for i in range(known):
            bits = logits[i].view(torch.int32), stored[:, i].clone()
            if not all(map(torch.equal, seen.setdefault(start + i, bits), bits)):
                found.add(start + i)

    for most in (1, LAST):  # with rows that begin too, and with others
        verify(0, 0, width, most)
    for start in range(width, LAST + width, width):
        verify(start, 0, width)
    before = [tensor.clone() for tensor in kv.tensors]
    for n in range(rounds):
        verify(rng.randrange(FIRST, LAST), rng.randrange(SHAPES.rows), width if n % 3 else rng.randrange(1, width))
        for tensor, old in zip(kv.tensors, before, strict=True):
            tensor.copy_(old)
    return sorted(found)


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("family", "kernels", "threads"), [*CASES, *TWO_THREADS], indirect=["threads"])
def test_bits_depend_on_the_position_alone(family, dtype, kernels, threads, tmp_path, monkeypatch, seed):
    backend = model(tmp_path, family, dtype, kernels, monkeypatch)
    assert differing(backend, seed) == []
    for shapes in (SHAPES, FixedShapes(1, 32), FixedShapes(4, 32)):
        assert check_fixed(backend, shapes) == ""


@pytest.mark.sample(5)
@pytest.mark.parametrize("quantize", get_args(Quantize))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", EXACT_ROWS)
@pytest.mark.parametrize("level", LEVELS, indirect=True)
@pytest.mark.usefixtures("level")
def test_bits_depend_on_the_position_alone_at_each_level(family, dtype, quantize, tmp_path, monkeypatch, seed):
    backend = model(tmp_path, family, dtype, "flat", monkeypatch, quantize)
    assert differing(backend, seed) == []
    assert check_fixed(backend, SHAPES) == ""
    assert exact_rows(backend, FixedShapes(exact_rows=64)) == EXACT_ROWS[family]


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_the_check_finds_attention_that_varies(family, tmp_path, monkeypatch, seed):
    backend = model(tmp_path, family, torch.float32, "torch", monkeypatch)
    assert check_fixed(backend, SHAPES) == ""
    monkeypatch.setattr(torch_reference, "SteadyAttention", PagedAttention)
    assert differing(backend, seed)
    assert "in a verify pass that begins" in check_fixed(backend, SHAPES)


@pytest.mark.parametrize(
    ("varied", "holds", "ragged"),
    [
        (lambda rows: slice(0), True, True),
        (lambda rows: slice(0, None, 2), False, False),  # bits depend on the place in the window
        (lambda rows: slice(0, None if rows == SHAPES.tokens else 0), True, False),  # and on its length
    ],
)
def test_the_check_finds_scores_of_an_indexer_that_vary(varied, holds, ragged, tmp_path, monkeypatch):
    """An indexer that selects more positions than the check has tokens decides nothing there."""
    variant = LATENT["v32"]
    variant._replace(settings=variant.settings | {"index_topk": 2048}).write(tmp_path, dtype=torch.float32)
    backend, ranks = load_model(tmp_path), Indexer._ranks

    def vary(self, query, *rest):
        found, part = ranks(self, query, *rest), varied(len(query))
        found[part] = found[part].nextafter(torch.tensor(torch.inf))
        return found

    monkeypatch.setattr(Indexer, "_ranks", vary)
    found = checked_shapes(backend, SHAPES)
    assert (found is not None, found is not None and found.ragged) == (holds, ragged)


@pytest.mark.parametrize("family", FAMILIES)
def test_fixed_forwards_are_right(family, tmp_path, monkeypatch):
    backend = model(tmp_path, family, torch.float32, "torch", monkeypatch)
    tokens = [random.Random(3).randrange(VOCAB) for _ in range(64)]
    results = []
    for fixed in (False, True):
        kv = backend.make_cache(8)
        batch = fixed_batch([FixedRow(tokens, 0, [3, 1, 7, 2])], list(range(64)), 16, backend.device)
        object.__setattr__(batch, "fixed", fixed)
        results.append(backend.forward(batch, kv).clone())
    torch.testing.assert_close(*results, atol=1e-4, rtol=0)
