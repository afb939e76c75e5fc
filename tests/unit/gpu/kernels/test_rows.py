"""RMS norms, the gate, and rotation with the KV write, against plain torch."""

import pytest
import torch

from baton.engine.kernels.base import HeadNorms, Rotation
from baton.engine.kernels.gpu.triton_rows import gate, rms_norm, rotate_and_store
from baton.engine.kernels.torch_reference import TorchKernels

PLAIN = TorchKernels()
BLOCK = 4


def drawn(seed, device, dtype, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def close(found, expected, *, summands=1.0):
    """Check for equality up to one rounding, because the order of float32 sums differs.

    `summands`: size of the terms of a sum that the reference rounds one by one.
    """
    tolerance = 2**-7 if expected.dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * summands)


@pytest.mark.parametrize("shape", [(1, 1), (1, 64), (3, 70), (5, 129)])
def test_rms_norm_and_the_residual_that_is_added_in_place(shape, device, dtype, seed):
    x, delta, weight = (drawn(seed + i, device, dtype, *s) for i, s in enumerate((shape, shape, shape[1:])))
    empty, sum_ = torch.empty_like(x), x.clone()
    close(rms_norm(x, None, weight, 1e-5, empty), PLAIN.rms_norm(x, None, weight, 1e-5, torch.empty_like(x)))
    expected = PLAIN.rms_norm(sum_, delta, weight, 1e-5, torch.empty_like(x))
    close(rms_norm(x, delta, weight, 1e-5, empty), expected)
    assert torch.equal(x, sum_)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(1, 5), (3, 1030)])
def test_gate(activation, shape, device, dtype, seed):
    gate_up = drawn(seed, device, dtype, shape[0], 2 * shape[1])
    gate_up[0, :4] = torch.tensor([90.0, -90.0, 20.0, -20.0])  # where exp overflows and underflows
    out, expected = (torch.empty(shape, device=device, dtype=dtype) for _ in range(2))
    close(gate(gate_up, activation, out), PLAIN.gate(gate_up, activation, expected))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(1, 1, 64), (8, 2, 16), (7, 1, 6), (12, 3, 128)])
def test_rotation_and_the_cache(heads, kv_heads, head_dim, normed, device, dtype, seed):
    rows = 5
    qkv = drawn(seed, device, dtype, rows, heads + 2 * kv_heads, head_dim)
    rotation = Rotation(*(drawn(seed + i, device, dtype, rows, head_dim // 2) for i in (1, 2)))
    weights = drawn(seed + 3, device, dtype, head_dim), drawn(seed + 4, device, dtype, head_dim)
    norms = HeadNorms(*weights, 1e-6) if normed else None
    slots = torch.tensor([0, 7, 11, 3, 4], device=device)
    # One layer of a cache whose blocks are not contiguous, as if K and V of several layers alternated.
    keys, values = (torch.full((3, 2, BLOCK, kv_heads, head_dim), 9.0, device=device, dtype=dtype) for _ in range(2))
    plain_qkv, plain_keys, plain_values = qkv.clone(), keys[:, 1].contiguous(), values[:, 1].contiguous()
    expected = PLAIN.rotate_and_store(plain_qkv, rotation, norms, slots, plain_keys, plain_values)
    close(rotate_and_store(qkv, rotation, norms, slots, keys[:, 1], values[:, 1]), expected, summands=10)
    close(keys[:, 1].contiguous(), plain_keys, summands=10)
    assert torch.equal(values[:, 1], plain_values)
    assert bool((keys[:, 0] == 9).all())
    assert torch.equal(qkv[:, heads:], plain_qkv[:, heads:]) or normed


def test_padding_is_stored_nowhere(device, dtype, seed):
    qkv = drawn(seed, device, dtype, 3, 4, 16)
    rotation = Rotation(*(drawn(seed + i, device, dtype, 3, 8) for i in (1, 2)))
    keys, values = (torch.zeros(2, BLOCK, 1, 16, device=device, dtype=dtype) for _ in range(2))
    rotate_and_store(qkv, rotation, None, torch.tensor([-1, 2, -1], device=device), keys, values)
    for cache in (keys, values):
        assert cache.view(-1, 16).any(-1).nonzero().flatten().tolist() == [2]
