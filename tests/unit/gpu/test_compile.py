"""The kernels as machine code for absent GPUs, because triton compiles for any GPU, and under Triton's interpreter.

Checks that they compile with the launch parameters, use tensor cores, spill almost nothing, and fit the memory of a
processor.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="no triton here (the dev extra has it on Linux)")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from baton.engine.kernels.gpu import triton_attention, triton_rows, triton_sampling  # noqa: E402
from baton.engine.kernels.gpu.shapes import SPLIT_TOKENS, decode_tiles, prefill_tiles  # noqa: E402

pytestmark = pytest.mark.slow
SPILLED_BYTES = 128
SHARED_BYTES = 99 << 10  # the limit for a kernel on the smaller GPUs of these generations
FLOATS = {"scale", "unified", "safe", "eps"}
INDICES = {"tables": "*i32", "starts": "*i32", "lengths": "*i32", "slots": "*i64"}
INDICES |= {"tokens": "*i64"} | dict.fromkeys(("parameters", "places", "noisy_places", "edges"), "*i32")
WIDE = {"bases", "sums", "parts", "logits", "peaks", "noisy"}
OTHERS = set("query keys values out qkv cos sin query_norm key_norm x delta weight gate_up".split())


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    if triton.knobs.runtime.interpret:
        pytest.skip("the interpreter is on: nothing is compiled")


def type_of(name: str, element: str) -> str:
    if name in FLOATS:
        return "fp32"
    if name in WIDE:
        return "*fp32"
    return INDICES.get(name, f"*{element}" if name in OTHERS else "i32")


def compiled(
    kernel: Any, constants: dict[str, Any], capability: int, warps: int = 4, stages: int = 3, element: str = "bf16"
) -> Any:
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else type_of(name, element) for name in names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name].startswith("*") or name.endswith(("_row", "_head", "_slot", "_block", "block_size"))
    }
    source = ASTSource(kernel, signature, constants, aligned)
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def stack_bytes(kernel: Any, folder: Path) -> int:
    """Return the stack bytes of a thread, for values without a register."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    file = folder / "kernel.cubin"
    file.write_bytes(kernel.asm["cubin"])
    command = [str(tool), "--dump-resource-usage", str(file)]
    told = subprocess.run(command, text=True, capture_output=True, check=True).stdout
    return max(int(size) for size in re.findall(r"STACK:(\d+)", told))


def attention(capability: int, dim: int, group: int, element: str) -> list[Any]:
    """Compile the decode and the prefill kernel as the engine launches them."""
    sizes = {"GROUP": group, "DIM": dim, "VALUE_DIM": dim, "WIDTH": dim, "VALUE_WIDTH": dim, "WINDOW": 0}
    shape = dim, dim, {"bf16": 2, "fp32": 4}[element]
    made = []
    for kernel, tiles, more in (
        (triton_attention.split_kernel, decode_tiles(group, *shape), {"UNIFIED": True, "SPLIT": SPLIT_TOKENS}),
        (triton_attention.prefill_kernel, prefill_tiles(*shape), {"STEADY": False}),
        (triton_attention.prefill_kernel, prefill_tiles(*shape), {"STEADY": True}),
    ):
        constants = sizes | more | {"ROWS": tiles.rows, "TILE": tiles.keys}
        made.append(compiled(kernel, constants, capability, tiles.warps, tiles.stages, element))
    return made


@pytest.mark.sample(3)
@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("dim", "group", "element"), [(64, 8, "bf16"), (128, 4, "bf16"), (256, 4, "bf16"), (128, 4, "fp32")]
)
def test_attention(capability: int, dim: int, group: int, element: str, tmp_path: Path):
    kernels = attention(capability, dim, group, element)
    for kernel in kernels:
        assert kernel.metadata.shared <= SHARED_BYTES
        assert stack_bytes(kernel, tmp_path) <= SPILLED_BYTES
        assert ("mma" in kernel.asm["ptx"]) == (element == "bf16")
    assert ("wgmma" in kernels[1].asm["ptx"]) == (capability == 90 and element == "bf16")


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("capability", [80, 90])
def test_the_others(capability: int):
    combine = {"DIM": 128, "WIDTH": 128, "WINDOW": 0, "SPLIT": SPLIT_TOKENS, "CHUNK": triton_attention.COMBINED}
    compiled(triton_attention.combine_kernel, combine, capability)
    rotate = {"HALF": 64, "NORMS": True, "HEADS": triton_rows.HEADS_AT_ONCE, "BLOCK": 64}
    compiled(triton_rows.rotate_and_store_kernel, rotate, capability)
    compiled(triton_rows.rms_norm_kernel, {"ADD": True, "BLOCK": 4096}, capability, 8)
    for activation in ("silu", "gelu", "gelu_tanh"):
        compiled(triton_rows.gate_kernel, {"ACTIVATION": activation, "BLOCK": triton_rows.GATE_COLUMNS}, capability)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("capability", [80, 90])
def test_sampling(capability: int, tmp_path: Path):
    width, segment = {"SEGMENTS": 128}, {"BLOCK": triton_sampling.SEGMENT}  # a vocabulary of 152 thousand
    compiled(triton_sampling.peak_kernel, segment, capability)
    compiled(triton_sampling.draw_kernel, width | segment, capability)
    compiled(triton_sampling.token_kernel, width, capability, 1)
    edge = compiled(triton_sampling.edge_kernel, width | {"BLOCK": triton_sampling.SEARCHED}, capability, 16)
    assert stack_bytes(edge, tmp_path) <= SPILLED_BYTES
    assert "div.rn.f32" in edge.asm["ptx"], "distances must be rounded as on a CPU"


def test_each_kernel_equals_its_torch_reference(seed):
    """Runs tests/unit/gpu/kernels under Triton's interpreter in a separate process, because it is chosen at import."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore"]
    variables = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "BATON_TEST_SEED": str(seed)}
    root = Path(__file__).parents[3]
    command += ["-x", str(root / "tests/unit/gpu/kernels")]
    done = subprocess.run(command, cwd=root, env=variables, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
