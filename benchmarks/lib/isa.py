"""Instruction sets that all measured processes of a comparison are restricted to, and the reports of each one.

Libraries choose their code when they run, by variables of the environment or by functions that are replaced here.
llama.cpp is built for one set (benchmarks/lib/environments.py). MKL has no choice: on processors of AMD it always takes
its AVX2 kernels `..._zen`, on those of Intel it should obey its variable, which was not tried.
MLAS in OpenVINO, for products with float32 weights, asks the processor itself and cannot be restricted.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable

NATIVE = "native"
ISA_VARIABLE = "BATON_BENCH_ISA"  # of measured processes
VARIABLES = {
    NATIVE: {},
    "avx2": {
        "BATON_CPU_LEVEL": "avx2",
        "ATEN_CPU_CAPABILITY": "avx2",  # kernels of torch itself
        "ONEDNN_MAX_CPU_ISA": "AVX2",  # oneDNN in torch and in OpenVINO
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
}
MARCH = {NATIVE: "native", "avx2": "x86-64-v3"}  # of gcc
# OpenVINO's own kernels and its choice of a precision ask libopenvino, which ignores ONEDNN_MAX_CPU_ISA.
OPENVINO_LACKS = {
    NATIVE: (),
    "avx2": (
        *("avx2_vnni", "avx2_vnni_2", "avx512f", "bfloat16", "avx512_core", "avx512_core_vnni", "avx512_core_fp16"),
        *("avx512_core_amx", "avx512_core_amx_bf16", "avx512_core_amx_fp16", "avx512_core_amx_int8"),
    ),
}


def here() -> str:
    """Return the instruction set that this process is restricted to, or "native"."""
    return os.environ.get(ISA_VARIABLE, NATIVE)


def environment(isa: str) -> dict[str, str]:
    """Return the variables that restrict a process to `isa`."""
    return {ISA_VARIABLE: isa, **VARIABLES[isa]}


def restrict_openvino(folder: Path) -> None:
    """Replace OpenVINO's functions for the instructions that `here` lacks. Call it before the import of openvino."""
    if lacking := OPENVINO_LACKS[here()]:
        names = (f"with_cpu_x86_{what}" for what in lacking)
        source = "".join(f"int _ZN2ov{len(name)}{name}Ev(void) {{ return 0; }}\n" for name in names)
        ctypes.CDLL(str(_compiled(source, folder / f"openvino-{here()}.so")), mode=ctypes.RTLD_GLOBAL)


def _compiled(source: str, library: Path) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        raise RuntimeError("no C compiler, which is needed to restrict OpenVINO")
    library.parent.mkdir(parents=True, exist_ok=True)
    command = [compiler, "-x", "c", "-shared", "-fPIC", "-", "-o", str(library)]
    subprocess.run(command, input=source, text=True, check=True)
    return library


def torch_isa() -> str:
    """Return the instruction set of torch's own kernels, and what oneDNN prints of its own."""
    import torch

    verbose: Callable[[int], contextlib.AbstractContextManager[object]] = torch.backends.mkldnn.verbose

    def run() -> None:
        with verbose(torch.backends.mkldnn.VERBOSE_ON):
            torch.zeros(16, 16).to_mkldnn().relu()

    lines = [line.rpartition("isa:")[2] for line in printed(run).splitlines() if "cpu,isa:" in line]
    return f"torch {torch.backends.cpu.get_cpu_capability()}, oneDNN {lines[0] if lines else 'unknown'}"


def openvino_isa(precision: str) -> str:
    """Return the kernels of a product with float32 weights and of a softmax, and what OpenVINO makes of `precision`."""
    import numpy as np
    import openvino
    from openvino import opset13 as ops

    x = ops.parameter([-1, 64], np.float32)
    product = ops.matmul(x, ops.constant(np.ones((64, 64), np.float32)), False, True)
    model = openvino.Model([ops.softmax(product, 1)], [x])
    compiled = openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": precision})
    compiled([np.ones((64, 64), np.float32)])  # kernels are chosen for the first shape
    facts = [node.get_rt_info() for node in compiled.get_runtime_model().get_ordered_ops()]
    kinds = {fact["primitiveType"].astype(str) for fact in facts}
    free = " (MLAS is not restricted)" if here() != NATIVE and any("mlas" in kind for kind in kinds) else ""
    found = compiled.get_property("INFERENCE_PRECISION_HINT").to_string()
    return f"{', '.join(sorted(kinds))}{free}; {precision} is {found}"


def printed(run: Callable[[], None]) -> str:
    """Return the standard output of `run`, also that of C code."""
    own = os.dup(1)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 1)
        try:
            run()
            ctypes.CDLL(None).fflush(None)
        finally:
            os.dup2(own, 1)
            os.close(own)
        file.seek(0)
        return file.read()
