"""The kernels as machine code for GPUs that are not here: triton compiles for any of them.

What is checked: that they compile as they are launched, use tensor cores, spill next to nothing, and fit the memory of
a processor.
"""

from __future__ import annotations

from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="no triton here (the dev extra has it on Linux)")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from baton.engine.kernels.gpu import triton_decode, triton_prefill, triton_rotary, triton_rows  # noqa: E402
from baton.engine.kernels.gpu.plan import MAX_SPLITS, decode_tiles, prefill_tiles  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}
FLOATS = {"scale", "unified", "safe", "eps"}
INDICES = {"tables": "*i32", "starts": "*i32", "lengths": "*i32", "slots": "*i64"}
WIDE = {"bases", "sums", "parts"}
OTHERS = {"query", "keys", "values", "out", "qkv", "cos", "sin", "query_norm", "key_norm", "x", "delta", "weight"}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    if triton.knobs.runtime.interpret:
        pytest.skip("the interpreter is on: nothing is compiled")


def type_of(name: str) -> str:
    if name in FLOATS:
        return "fp32"
    if name in WIDE:
        return "*fp32"
    return INDICES.get(name, "*bf16" if name in OTHERS | {"gate_up"} else "i32")


def compiled(kernel: Any, constants: dict[str, Any], capability: int, warps: int = 4, stages: int = 3) -> Any:
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else type_of(name) for name in names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name].startswith("*") or name.endswith(("_row", "_head", "_slot", "_block", "block_size"))
    }
    source = ASTSource(kernel, signature, constants, aligned)
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("dim", "group"), [(64, 8), (128, 4)])
def test_attention(capability: int, dim: int, group: int):
    sizes = {"GROUP": group, "DIM": dim, "VALUE_DIM": dim, "WIDTH": dim, "VALUE_WIDTH": dim, "WINDOW": 0}
    tiles = decode_tiles(group, dim, dim, 2)
    split = sizes | {"ROWS": tiles.rows, "TILE": tiles.keys, "UNIFIED": True}
    kernels = [compiled(triton_decode.split_kernel, split, capability, tiles.warps, tiles.stages)]
    tiles = prefill_tiles(dim, dim, 2)
    chunk = sizes | {"ROWS": tiles.rows, "TILE": tiles.keys}
    kernels.append(compiled(triton_prefill.prefill_kernel, chunk, capability, tiles.warps, tiles.stages))
    for kernel in kernels:
        assert kernel.metadata.shared <= SHARED_BYTES[capability]
        assert "mma" in kernel.asm["ptx"]
    assert ("wgmma" in kernels[1].asm["ptx"]) == (capability == 90)


@pytest.mark.parametrize("capability", [80, 90])
def test_the_others(capability: int):
    compiled(triton_decode.combine_kernel, {"SPLITS": MAX_SPLITS, "DIM": 128, "WIDTH": 128}, capability)
    rotate = {"HALF": 64, "NORMS": True, "HEADS": triton_rotary.HEADS_AT_ONCE, "BLOCK": 64}
    compiled(triton_rotary.rotate_and_store_kernel, rotate, capability)
    compiled(triton_rows.rms_norm_kernel, {"ADD": True, "BLOCK": 4096}, capability, 8)
    for activation in ("silu", "gelu", "gelu_tanh"):
        compiled(triton_rows.gate_kernel, {"ACTIVATION": activation, "BLOCK": triton_rows.GATE_COLUMNS}, capability)
