"""What of benchmarks/gpu.py runs without a GPU."""

from __future__ import annotations

import json

import pytest
import torch

from baton.engine.kernels.plain import TorchKernels
from benchmarks import gpu
from benchmarks.lib.device import CASES, attention_error, batch_of
from benchmarks.lib.random_weights import random_model, settings_of
from benchmarks.lib.shapes import TINY

CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_every_ratio_is_null(capsys):
    assert gpu.main([]) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert "no GPU" in first
    found = json.loads(last)
    assert found["benchmark"] == "gpu"
    assert len(found["ratios"]) == 6
    assert set(found["ratios"].values()) == {None}


def test_what_was_measured_stands_in_the_last_line():
    name = gpu.names()[0]
    found = json.loads(gpu.last_line({name: 0.5}, "some device"))["ratios"]
    assert found.pop(name) == 0.5
    assert set(found.values()) == {None}


@pytest.mark.parametrize("case", CASES)
def test_the_attention_check_passes_the_reference_and_fails_another(case):
    assert attention_error(case, TorchKernels(), CPU, torch.float32) < 1e-4

    class Deaf(TorchKernels):
        def attention(self, batch, block_size, window, scale):
            return super().attention(batch, block_size, window, scale * 0.5)

    assert attention_error(case, Deaf(), CPU, torch.float32) > 0.02 or max(case.contexts) == 1


def test_a_batch_has_blocks_of_its_own():
    batch = batch_of([1, 3], [9, 3], 4, CPU)
    assert batch.positions.tolist() == [8, 0, 1, 2]
    assert batch.logit_rows.tolist() == [0, 3]
    used = [int(block) for row, count in zip(batch.block_tables, (3, 1), strict=True) for block in row[:count]]
    assert sorted(used) == [1, 2, 3, 4]
    tables = batch.block_tables.tolist()
    assert batch.slot_mapping.tolist() == [tables[0][2] * 4, *(tables[1][0] * 4 + i for i in range(3))]


@pytest.mark.parametrize("size", ["S", "L"])
def test_a_model_without_files(size):
    shape = TINY[size]
    model = random_model(settings_of(shape, 64), device=CPU, dtype="float32", block_size=4, kernels=TorchKernels())
    batch = batch_of([5], [5], 4, CPU)
    logits = model.forward(batch, model.make_cache(3))
    assert logits.shape == (1, shape.vocab)
    assert bool(logits.isfinite().all())
    assert 0.1 < float(logits.std()) < 100
