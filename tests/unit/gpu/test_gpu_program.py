"""What of benchmarks/gpu.py runs without a GPU."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import gpu


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
