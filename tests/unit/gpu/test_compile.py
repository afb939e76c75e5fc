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

from baton.engine.kernels.gpu import triton_attention, triton_experts, triton_rows, triton_sampling  # noqa: E402
from baton.engine.kernels.gpu.shapes import SPLIT_TOKENS, Tiles, decode_tiles, prefill_tiles  # noqa: E402

pytestmark = pytest.mark.slow
CAPABILITIES = (80, 90, 100, 120)
HEAD_SIZES = (64, 80, 96, 112, 128, 192, 256)
SPILLED_BYTES, REGISTERS = 128, 65536  # of a thread, of a processor
SHARED_BYTES = {80: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}  # of a block; 8.6, 8.9: less than 8.0
FLOATS = {"scale", "unified", "safe", "eps"}
INDICES = {"tiles": "*i32", "tables": "*i32", "starts": "*i32", "lengths": "*i32", "slots": "*i64"}
INDICES |= {"tokens": "*i64"} | dict.fromkeys(("parameters", "places", "noisy_places", "edges"), "*i32")
WIDE = {"bases", "sums", "parts", "logits", "peaks", "noisy"}
OTHERS = set("weights query keys values out qkv cos sin query_norm key_norm x delta weight gate_up".split())


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


def resources(kernel: Any, folder: Path) -> tuple[int, int]:
    """Return the registers and the stack bytes of a thread. The stack holds values without a register."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    file = folder / "kernel.cubin"
    file.write_bytes(kernel.asm["cubin"])
    command = [str(tool), "--dump-resource-usage", str(file)]
    told = subprocess.run(command, text=True, capture_output=True, check=True).stdout
    registers, stack = (max(map(int, re.findall(rf"{name}:(\d+)", told))) for name in ("REG", "STACK"))
    return registers, stack


def bounded(
    folder: Path,
    kernel: Any,
    sizes: dict[str, Any],
    capability: int,
    warps: int = 4,
    stages: int = 3,
    kind: str = "bf16",
) -> Any:
    """Compile a kernel as the engine launches it, and check what it needs. Returns the compiled kernel."""
    made = compiled(kernel, sizes, capability, warps, stages, kind)
    registers, spilled = resources(made, folder)
    assert made.metadata.shared <= SHARED_BYTES[capability]
    assert registers * 32 * warps <= REGISTERS
    assert spilled <= SPILLED_BYTES, (kernel.__name__, sizes, capability, kind)
    return made


def is_ordered(ptx: str) -> bool:
    """Return whether a barrier is between each wait for tensor cores and the next copy into shared memory. The wait is
    that of one group of four warps, and another group may still read. Triton 3.7 does not ensure it; see
    triton-lang/triton#11047.
    """
    waited = False
    for line in ptx.splitlines():
        if "wgmma.wait_group" in line:
            waited = True
        elif re.search(r"\bbar\.sync|\bbarrier\.", line):
            waited = False
        elif waited and re.search(r"cp\.async\.c[ag]|st\.shared", line):
            return False
    return True


def check(kernel: Any, sizes: dict[str, Any], tiles: Tiles, capability: int, element: str, folder: Path) -> Any:
    constants = sizes | {"ROWS": tiles.rows, "TILE": tiles.keys, "WINDOW": 0}
    made = bounded(folder, kernel, constants, capability, tiles.warps, tiles.stages, element)
    assert bool(re.search("mma|tcgen05", made.asm["ptx"])) == (element != "fp32"), "tensor cores"
    return made


@pytest.mark.sample(1)
@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("fold", range(2 * len(CAPABILITIES)))
def test_attention(fold: int, tmp_path: Path):
    """A fold has all head sizes, capabilities and dtypes; all folds have all pairs of a capability and a head size."""
    for number, dim in enumerate(HEAD_SIZES):
        capability = CAPABILITIES[(number + fold) % len(CAPABILITIES)]
        element = {fold % len(HEAD_SIZES): "fp32", (fold + 1) % len(HEAD_SIZES): "fp16"}.get(number, "bf16")
        shape = dim, dim, 4 if element == "fp32" else 2
        width = triton.next_power_of_2(dim)
        sizes = {"GROUP": 4, "DIM": dim, "VALUE_DIM": dim, "WIDTH": width, "VALUE_WIDTH": width}
        # The unified maximum is off by default. In float32, heads of 256 spill 272 bytes with it (8.0).
        decode = sizes | {"UNIFIED": fold % 2 == 0 and element != "fp32", "SPLIT": SPLIT_TOKENS}
        check(triton_attention.split_kernel, decode, decode_tiles(4, *shape), capability, element, tmp_path)
        steady = (number + fold // len(CAPABILITIES)) % 2 == 1
        tiles = prefill_tiles(*shape, capability // 10)
        prefill = check(
            triton_attention.prefill_kernel, sizes | {"STEADY": steady}, tiles, capability, element, tmp_path
        )
        if capability == 90 and element != "fp32":
            assert "wgmma" in prefill.asm["ptx"]
            assert is_ordered(prefill.asm["ptx"])


@pytest.mark.sample(1)
@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_others(capability: int, tmp_path: Path):
    combine = {"DIM": 128, "WIDTH": 128, "WINDOW": 0, "SPLIT": SPLIT_TOKENS, "CHUNK": triton_attention.COMBINED}
    bounded(tmp_path, triton_attention.combine_kernel, combine, capability)
    rotate = {"HALF": 64, "NORMS": True, "HEADS": triton_rows.HEADS_AT_ONCE, "BLOCK": 64}
    bounded(tmp_path, triton_rows.rotate_and_store_kernel, rotate, capability)
    bounded(tmp_path, triton_rows.rms_norm_kernel, {"ADD": True, "BLOCK": 4096}, capability, 8)
    for activation in ("silu", "gelu", "gelu_tanh"):
        sizes = {"ACTIVATION": activation, "BLOCK": triton_rows.GATE_COLUMNS}
        bounded(tmp_path, triton_rows.gate_kernel, sizes, capability)


@pytest.mark.sample(1)
@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_sampling(capability: int, tmp_path: Path):
    width, segment = {"SEGMENTS": 128}, {"BLOCK": triton_sampling.SEGMENT}  # a vocabulary of 152 thousand
    bounded(tmp_path, triton_sampling.peak_kernel, segment, capability)
    bounded(tmp_path, triton_sampling.draw_kernel, width | segment, capability)
    bounded(tmp_path, triton_sampling.token_kernel, width, capability, 1)
    searched = width | {"BLOCK": triton_sampling.SEARCHED}
    edge = bounded(tmp_path, triton_sampling.edge_kernel, searched, capability, 16)
    assert "div.rn.f32" in edge.asm["ptx"], "distances must be rounded as on a CPU"


@pytest.mark.timeout(900)
@pytest.mark.sample(1)  # `make chaos` runs all cases of its matrices
def test_each_kernel_equals_its_torch_reference(seed, request):
    """Runs tests/unit/gpu/kernels under Triton's interpreter in a separate process, because it is chosen at import."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore"]
    variables = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "BATON_TEST_SEED": str(seed)}
    root = Path(__file__).parents[3]
    command += ["-x", str(root / "tests/unit/gpu/kernels"), *["--sample"] * request.config.getoption("sample")]
    done = subprocess.run(command, cwd=root, env=variables, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.sample(2)
@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("rows", [16, 64])
def test_products_of_experts(capability: int, rows: int, tmp_path: Path):
    constants = {"EXPERTS": 128, "ROWS": rows, "COLUMNS": 128, "DEPTH": 64}
    kernel = bounded(tmp_path, triton_experts.grouped_kernel, constants, capability, 8 if rows > 16 else 4)
    assert re.search("mma|tcgen05", kernel.asm["ptx"])
    assert is_ordered(kernel.asm["ptx"])
