"""A worker's checks of its model's fixed forwards at its start."""

from dataclasses import replace
from typing import Any

import pytest
import structlog
import torch

from baton.engine.determinism.checks import check_fixed, checked_shapes, exact_rows
from baton.engine.determinism.shapes import FixedShapes
from baton.engine.models.loading import load_model
from baton.engine.oracle import OracleBackend
from tests.unit.engine.test_determinism import DEMO

SHAPES = FixedShapes()


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
            checked_shapes(backend, SHAPES)
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
        assert checked_shapes(Spoilt(where), replace(SHAPES, exact_rows=64)) == SHAPES
    assert [line["event"] for line in logs] == ["decode_steps_vary", "fixed_forwards_checked"]
    assert logs[0]["reason"].endswith(reason)


@pytest.mark.parametrize(("asked", "found"), [(0, 0), (1, 1), (40, 40), (64, 64), (256, 64)])
def test_exact_are_as_many_rows_as_were_looked_at(asked, found):
    assert checked_shapes(OracleBackend(), replace(SHAPES, exact_rows=asked)) == replace(SHAPES, exact_rows=found)


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
