"""The fingerprint of bits, a worker's checks of fixed forwards at its start, and its choice of their size."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import structlog
import torch

from baton.engine.determinism import checks
from baton.engine.determinism.checks import VerifyShapeTimes, bits_fingerprint, check_fixed, exact_rows, measure_passes
from baton.engine.determinism.shapes import FixedShapes
from baton.engine.kernels.base import ANY_ROWS
from baton.engine.kernels.cpu.compiler import Machine
from baton.engine.kernels.cpu.kernel_choice import Choice, Profile
from baton.engine.kernels.cpu.ops import CpuKernels
from baton.engine.kernels.torch_reference import TorchKernels
from baton.engine.models import loading
from baton.engine.models.loading import load_model
from baton.engine.oracle import OracleBackend
from baton.engine.tp.backend import ShardedBackend
from baton.engine.tp.rank_model import RankModel
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
def test_the_fingerprint_is_the_same_in_another_process(monkeypatch, level):
    """Log lines must not go to standard output, because it belongs to the program that loads the model."""
    monkeypatch.setenv("BATON_CPU_LEVEL", level)
    command = [sys.executable, "-c", IN_ANOTHER, str(DEMO)]
    there = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True)
    assert there.stdout == bits_fingerprint(load_model(DEMO), SHAPES) + "\n"
    if level == "none":
        assert "kernels_torch" in there.stderr


def test_anything_that_bits_depend_on_changes_the_fingerprint(monkeypatch):
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


def test_only_the_kernels_that_the_shapes_take_and_their_library_change_the_fingerprint(monkeypatch):
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
    assert of(monkeypatch, kernels=compiled(Choice(90, tall=True))) == of(
        monkeypatch, kernels=compiled(Choice(8, tall=True))
    )
    elsewhere = compiled(Choice(300, tall=True))
    monkeypatch.setattr(elsewhere, "library", SimpleNamespace(_name="/elsewhere/f32-0123.so"))
    assert of(monkeypatch, kernels=elsewhere) != flat


def test_the_number_of_ranks_and_an_oracles_seed_change_the_fingerprint():
    names = [bits_fingerprint(OracleBackend(seed=seed), SHAPES) for seed in (1, 1, 2)]
    assert names[0] == names[1] != names[2]
    local, names = load_model(DEMO), [bits_fingerprint(load_model(DEMO), SHAPES)]
    for size in (2, 4):
        plan, none = cast("Any", SimpleNamespace(size=size, threads=1)), cast("Any", None)
        names.append(bits_fingerprint(ShardedBackend(plan, RankModel(local, none, none), none, none, none), SHAPES))
    assert len(set(names)) == 3


class Spoilt(OracleBackend):
    def __init__(self, where):
        super().__init__()
        self._where = where

    def forward(self, batch, kv):
        logits = super().forward(batch, kv)
        self._where(batch, kv, logits)
        return logits


def by_slot(batch, kv, logits):
    logits[-1:] *= 1 + 1e-6 * (len(batch.query_lens) > 1)


def by_company(batch, kv, logits):
    logits += 1e-6 * (sum(batch.context_lens) % 7)


def by_offset_in_kv_alone(batch, kv, logits):
    if len(batch.query_lens) > 1:
        kv.v.view(torch.int32)[-1, batch.block_tables[0, -1], 0] += 1
        first = batch.slot_mapping[0]
        kv.v.view(torch.int32)[-1].flatten(0, 1)[first] ^= 1


def by_padding(batch, kv, logits):
    if len(batch.query_lens) == 1 and len(logits):
        logits += 1e-6 * float(batch.token_ids[-1])


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (by_slot, "other logits in a verify pass"),
        (by_company, "tokens"),
        (by_offset_in_kv_alone, "other KV in a verify pass"),
        (by_padding, "bits of a chunk of 256 tokens depend on the padding"),
    ],
)
def test_what_varies_is_found(where, message):
    assert message in check_fixed(Spoilt(where), SHAPES)


@pytest.mark.parametrize(
    "shapes", [SHAPES, FixedShapes(1, 32), FixedShapes(1, 64), FixedShapes(8, 4), FixedShapes(2, 256)]
)
def test_the_oracle_is_steady(shapes):
    assert check_fixed(OracleBackend(), shapes) == ""


@pytest.mark.parametrize("length", [64, 100, 300])
def test_short_models_are_checked_too(length):
    assert check_fixed(load_model(DEMO, max_model_len=length), SHAPES) == ""


def test_the_log_and_the_backend_are_told():
    good, bad, known = OracleBackend(), Spoilt(by_slot), OracleBackend()
    known.nondeterminism = "known"
    with structlog.testing.capture_logs() as logs:
        for backend in (good, bad, known):
            checks.checked_shapes(backend, SHAPES)
    assert (good.nondeterminism, known.nondeterminism) == ("", "known")
    assert "verify pass" in bad.nondeterminism
    told = [(line["event"], line["log_level"], line.get("reason")) for line in logs]
    vary = [("fixed_forwards_vary", "warning", reason) for reason in (bad.nondeterminism, "known")]
    assert told == [("fixed_forwards_checked", "info", None), *vary]


def by_rows(batch, kv, logits):
    if len(batch.query_lens) == 40:
        logits[7] += 1e-6


def by_kv_of_rows(batch, kv, logits):
    if len(batch.query_lens) == 3:
        kv.k.view(torch.int32)[-1].flatten(0, 1)[batch.slot_mapping[1]] ^= 1


@pytest.mark.parametrize(
    ("where", "reason"),
    [(by_rows, "other logits in a decode step of 40 rows"), (by_kv_of_rows, "other KV in a decode step of 3 rows")],
)
def test_decode_steps_that_vary_are_not_exact(where, reason):
    with structlog.testing.capture_logs() as logs:
        assert checks.checked_shapes(Spoilt(where), replace(SHAPES, exact_rows=64)) == replace(SHAPES, ragged=True)
    assert [line["event"] for line in logs] == ["decode_steps_vary", "fixed_forwards_checked"]
    assert logs[0]["reason"].endswith(reason)


def by_kv_of_lengths(batch, kv, logits):
    if SHAPES.tokens - 1 in batch.query_lens:
        first = sum(batch.query_lens[: batch.query_lens.index(SHAPES.tokens - 1)])
        kv.k.view(torch.int32)[-1].flatten(0, 1)[batch.slot_mapping[first]] ^= 1


def by_length(batch, kv, logits):
    if 1 in batch.query_lens and len(logits) > 1:
        logits += 1e-6


@pytest.mark.parametrize(
    ("where", "varies"),
    [
        (by_length, "tokens have other logits in a window of 1 tokens"),
        (by_kv_of_lengths, "tokens have other KV in a window of 31 tokens"),
    ],
)
def test_windows_have_one_length_if_bits_depend_on_it(where, varies):
    with structlog.testing.capture_logs() as logs:
        assert checks.checked_shapes(Spoilt(where), SHAPES) == SHAPES
    assert [line["varies"] for line in logs] == [varies]


def by_mixture(batch, kv, logits):
    if len(set(batch.query_lens)) > 1:
        logits[-1] += 1e-6


def by_kv_of_mixture(batch, kv, logits):
    if len(set(batch.query_lens)) > 1 and len(logits) > 1:
        kv.k.view(torch.int32)[-1].flatten(0, 1)[batch.slot_mapping[-1]] ^= 1


@pytest.mark.parametrize(
    ("where", "reason"),
    [(None, None), (by_mixture, "other logits in chunks of 1 and then"), (by_kv_of_mixture, "other KV in chunks of 1")],
)
def test_every_forward_is_exact_only_if_chunks_beside_others_are(where, reason):
    backend: Any = OracleBackend() if where is None else Spoilt(where)
    backend.steady_rows = lambda: ANY_ROWS
    with structlog.testing.capture_logs() as logs:
        found = checks.checked_shapes(backend, replace(SHAPES, exact_rows=64))
    assert found == replace(SHAPES, exact_rows=64, everywhere=reason is None, ragged=True)
    assert [reason in line["reason"] for line in logs if line["event"] == "decode_steps_vary"] == [True] * bool(reason)


@pytest.mark.parametrize(("asked", "found"), [(0, 0), (1, 1), (40, 40), (64, 64), (256, 64)])
def test_exact_are_as_many_rows_as_were_looked_at(asked, found):
    shapes = replace(SHAPES, exact_rows=asked)
    assert checks.checked_shapes(OracleBackend(), shapes) == replace(SHAPES, exact_rows=found, ragged=True)


@pytest.mark.parametrize(("steady", "found"), [(0, 0), (63, 0), (64, 64), (1000, 64)])
def test_kernels_that_are_not_known_to_be_steady_are_not_trusted(steady, found):
    """Kernels are also not trusted if they differ in a verify pass, even if the check finds no difference."""
    backend: Any = OracleBackend()
    backend.steady_rows = lambda: steady
    assert exact_rows(backend, replace(SHAPES, exact_rows=64)) == found


def test_the_demo_model_is_exact_where_its_kernels_are_compiled():
    for dtype in ("bfloat16", "float32"):
        backend = load_model(DEMO, dtype=dtype)
        compiled = backend.model.kernels.name == "compiled"
        assert exact_rows(backend, replace(SHAPES, exact_rows=64)) == (64 if compiled else 0)


def passes(steady=0, **microseconds):
    """Return pass times by microseconds per token for each size: `of_64=2.0`."""
    return VerifyShapeTimes({int(name[3:]): int(name[3:]) * value for name, value in microseconds.items()}, steady)


@pytest.mark.parametrize(
    ("measured", "best"),
    [
        (passes(of_32=4.0, of_64=2.0, of_128=1.0, of_256=0.9, of_512=0.9), 128),
        (passes(of_32=1.0, of_64=1.0, of_128=1.0), 32),
        (passes(of_32=1.16, of_64=1.14, of_128=1.0), 64),
        (passes(of_32=8.0, of_64=4.0, of_128=2.0, of_256=1.0, of_512=0.5), 512),
        (passes(of_32=1.0, of_64=3.0, of_128=2.0), 32),
        (passes(of_32=5.0), 32),
    ],
)
def test_the_smallest_that_is_close_to_the_best_for_a_token(measured, best):
    assert measured.best(exact=False) == measured.best(exact=True) == best


@pytest.mark.parametrize(("steady", "best"), [(96, 64), (64, 64), (63, 32), (32, 32), (31, 256), (0, 256)])
def test_one_that_leaves_decode_steps_exact_is_better_than_any_other(steady, best):
    measured = passes(steady, of_32=4.0, of_64=2.0, of_128=1.5, of_256=1.0)
    assert measured.best(exact=True) == best
    assert measured.best(exact=False) == 256


def test_what_was_measured_survives_the_disk(tmp_path):
    path, measured = tmp_path / "deep" / "p.json", passes(96, of_32=4.0, of_64=2.0)
    assert checks.load_passes(path) is None
    checks.save_passes(path, measured)
    assert checks.load_passes(path) == measured
    assert [file.name for file in path.parent.iterdir()] == ["p.json"]


SECONDS: list[Any] = [[], {}, {"33": 1.0}, {"0": 1.0}, {"32": 0.0}, {"32": "NaN"}]
BROKEN = [*({"seconds": each, "steady": 0} for each in SECONDS), {"seconds": {"32": 1.0}, "steady": None}]


@pytest.mark.parametrize("text", ["[]", "{", '{"seconds": {"32": 1.0}}', *map(json.dumps, BROKEN)])
def test_a_broken_file_of_measurements_is_ignored(tmp_path, text):
    (tmp_path / "p.json").write_text(text)
    assert checks.load_passes(tmp_path / "p.json") is None


def test_a_model_is_measured_with_as_many_rows_as_may_run():
    backend = load_model(DEMO, dtype="float32")
    for most, totals in ((1, [32]), (5, [32, 64, 128]), (64, [32, 64, 128, 256, 512])):
        found = measure_passes(backend, most)
        assert list(found.seconds) == totals
        assert min(found.seconds.values()) > 0
        assert found.steady == backend.steady_rows()


def test_a_model_of_short_contexts_is_measured_within_them():
    seen = set()

    class Watched(OracleBackend):
        def forward(self, batch, kv):
            seen.update(batch.positions.tolist())
            return super().forward(batch, kv)

    for most in (40, 1024):
        seen.clear()
        assert list(measure_passes(Watched(max_model_len=most), 2).seconds) == [32, 64]
        assert (min(seen), max(seen)) == ((8, 39) if most == 40 else (256, 287))
