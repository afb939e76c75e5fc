"""The torch reference: a product goes straight to the caller's memory if it can."""

from unittest.mock import Mock

import pytest
import torch
from torch.nn import functional as F

from baton.engine.kernels.torch_reference import TorchLinear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_only_a_result_of_another_dtype_is_copied(dtype, with_bias, seed, monkeypatch):
    """torch.mm writes to `out`, but only in the dtype of its factors."""
    generator = torch.Generator().manual_seed(seed)
    x, weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((3, 8), (5, 8), (5,)))
    copied = Mock(wraps=F.linear)
    monkeypatch.setattr(F, "linear", copied)
    layer = TorchLinear(weight, bias if with_bias else None)
    expected = x.float() @ weight.float().T + (bias.float() if with_bias else 0)
    for out in (torch.empty(3, 5, dtype=dtype), torch.empty(3, 5, dtype=torch.float64)):
        copied.reset_mock()
        assert layer(x, out) is out
        assert copied.called == (out.dtype is torch.float64)
        torch.testing.assert_close(out.float(), expected, atol=3e-2, rtol=3e-2)
