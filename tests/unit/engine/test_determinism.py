"""The fingerprint of bits: equal in another process, and different whenever an input differs."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from baton.engine.determinism import checks
from baton.engine.determinism.checks import bits_fingerprint
from baton.engine.determinism.shapes import FixedShapes
from baton.engine.kernels.cpu.compiler import Machine
from baton.engine.kernels.cpu.kernel_choice import Choice, Profile
from baton.engine.kernels.cpu.ops import CpuKernels
from baton.engine.kernels.torch_reference import TorchKernels
from baton.engine.models import loading
from baton.engine.models.loading import load_model
from baton.engine.oracle import OracleBackend
from baton.engine.tp.backend import ShardedBackend
from tests.support.compiled_kernels import compiled_or_skip

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "models/demo"
SHAPES = FixedShapes()
IN_ANOTHER = """
import sys, torch
from baton.engine.determinism.checks import bits_fingerprint
from baton.engine.determinism.shapes import FixedShapes
from baton.engine.models.loading import load_model
torch.set_num_threads(1)
print(bits_fingerprint(load_model(sys.argv[1]), FixedShapes()))
"""


def of(monkeypatch, dtype="float32", kernels=None, shapes=SHAPES) -> str:
    if kernels is not None:
        monkeypatch.setattr(loading, "choose_kernels", lambda *_: kernels)
    return bits_fingerprint(load_model(DEMO, dtype=dtype), shapes)


def compiled(choice: Choice, unified: float | None = None, **options) -> CpuKernels:
    return compiled_or_skip(lambda: CpuKernels(torch.float32, Profile(static=choice, unified_max=unified), **options))


@pytest.mark.slow
@pytest.mark.parametrize("level", ["native", "none"])
def test_it_is_the_same_in_another_process(monkeypatch, level):
    """Log lines must not go to standard output, because it belongs to the program that loads the model."""
    monkeypatch.setenv("BATON_CPU_LEVEL", level)
    command = [sys.executable, "-c", IN_ANOTHER, str(DEMO)]
    there = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True)
    assert there.stdout == bits_fingerprint(load_model(DEMO), SHAPES) + "\n"
    if level == "none":
        assert "kernels_torch" in there.stderr


def test_anything_that_bits_depend_on_changes_it(monkeypatch):
    names = [of(monkeypatch), of(monkeypatch, "bfloat16")]
    names += [of(monkeypatch, shapes=shapes) for shapes in (FixedShapes(4, 32), FixedShapes(2, 64), FixedShapes(4, 16))]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 2)
        names.append(of(patch))
    for owner, name, value in (
        (torch, "__version__", "1.2.3"),
        (checks, "machine", lambda: Machine("another processor", frozenset({"avx512f"}))),
        (torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT"),
        (checks, "SHORT", 32),
        (checks, "SHORT_UNTIL", 512),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            names.append(of(patch))
    assert len(set(names)) == len(names)


def test_the_kernels_that_the_shapes_take_and_their_library_change_it_and_others_do_not(monkeypatch):
    flat = of(monkeypatch, kernels=compiled(Choice(300, tall=True)))
    assert flat == of(monkeypatch, kernels=compiled(Choice(400, tall=False)))  # no product has so many rows
    assert flat == of(monkeypatch, kernels=compiled(Choice(300, tall=True), splits="load"))  # of decode rows only
    others = [
        of(monkeypatch, kernels=compiled(Choice(255, tall=True))),
        of(monkeypatch, kernels=compiled(Choice(255, tall=False))),
        of(monkeypatch, kernels=compiled(Choice(300, tall=True), 0.0)),
    ]
    assert len({flat, *others}) == 4
    assert of(monkeypatch, kernels=TorchKernels()) not in {flat, *others}
    # Small forwards always use one product, whichever is fastest.
    assert others[0] == of(monkeypatch, kernels=compiled(Choice(8, tall=True)))
    elsewhere = compiled(Choice(300, tall=True))
    monkeypatch.setattr(elsewhere, "library", SimpleNamespace(_name="/elsewhere/f32-0123.so"))
    assert of(monkeypatch, kernels=elsewhere) != flat


def test_the_number_of_ranks_and_an_oracles_seed_change_it():
    names = [bits_fingerprint(OracleBackend(seed=seed), SHAPES) for seed in (1, 1, 2)]
    assert names[0] == names[1] != names[2]
    local, names = load_model(DEMO), [bits_fingerprint(load_model(DEMO), SHAPES)]
    for size in (2, 4):
        plan, none = cast("Any", SimpleNamespace(size=size, threads=1)), cast("Any", None)
        names.append(bits_fingerprint(ShardedBackend(plan, local, none, none, none), SHAPES))
    assert len(set(names)) == 3
