"""Quantised weights: the compiled product against exact integers, its rows, and the error of a quantisation."""

from itertools import product

import pytest
import torch

from baton.engine.kernels.cpu.compiler import LEVEL_VARIABLE, LEVELS
from baton.engine.kernels.cpu.kernel_choice import Profile
from baton.engine.kernels.cpu.ops import ELEMENTS, CpuKernels
from baton.engine.kernels.quantized import SCHEMES, QuantizedWeight, Scheme, quantize
from tests.support.compiled_kernels import compiled_or_skip
from tests.support.cpu_levels import on_levels

pytestmark = on_levels(*LEVELS)


@pytest.fixture(scope="module", params=list(ELEMENTS), ids=str)
def kernels(request, level: str) -> CpuKernels:
    return compiled_or_skip(lambda: CpuKernels(request.param, Profile()))


@pytest.fixture
def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(rng: torch.Generator, n: int, k: int, scheme: Scheme, dtype: torch.dtype, *, zeros: bool) -> QuantizedWeight:
    """Return a weight with all levels, also those that `quantize` does not produce."""
    group = scheme.group or -(-k // 8) * 8
    groups, top = -(-k // group), 2**scheme.bits

    def levels(*shape: int) -> torch.Tensor:
        return torch.randint(top, shape, generator=rng, dtype=torch.uint8)

    factors = torch.rand(n, generator=rng)
    scales = torch.randn(n, groups, generator=rng).half() if scheme.group else None
    zero_levels = levels(n, groups) if zeros else None
    return QuantizedWeight(levels(n, groups * group), factors, scheme.bits, group, k, dtype, scales, zero_levels)


def expected(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the product in float64 of activations that are rounded to int8 by row."""
    most = x.float().abs().amax(1, keepdim=True)
    levels = (x.double() * torch.div(torch.tensor(127.0), most).double()).round()  # ties to even, as in the kernel
    middle = torch.tensor(2.0 ** (weight.bits - 1), dtype=torch.float64)
    zero = middle if weight.zeros is None else weight.zeros.double().repeat_interleave(weight.group, 1)
    wide = (weight.levels.double() - zero)[:, : weight.k] * weight.factors.double()[:, None]
    if weight.scales is not None:
        wide *= weight.scales.double().repeat_interleave(weight.group, 1)[:, : weight.k]
    return levels @ wide.t() * (most / 127).double() + (0 if bias is None else bias.double())


@pytest.mark.sample(12)
@pytest.mark.parametrize("zeros", [False, True], ids=["", "with zeros"])
@pytest.mark.parametrize("scheme", [Scheme(b, g) for b, g in product((8, 4), (0, 32, 64, 128))], ids=str)
def test_the_product_equals_exact_integers(kernels, rng, scheme: Scheme, zeros: bool):
    for n, k, rows in ((1, 8, 1), (16, 128, 2), (70, 200, 7), (144, 129, 13), (65, 384, 1), (32, 2048, 3)):
        weight = drawn(rng, n, k, scheme, kernels.dtype, zeros=zeros)
        x, bias = (torch.randn(*shape, generator=rng).to(kernels.dtype) for shape in ((rows, k), (n,)))
        for extra in (None, bias):
            found = kernels.quantized(weight, extra, torch.clone)(x, torch.full((rows, n), torch.nan))
            exact = expected(x, weight, extra)
            torch.testing.assert_close(found.double(), exact, atol=2e-6 * exact.abs().max().item(), rtol=0)


@pytest.mark.parametrize("name", list(SCHEMES))
def test_rows_do_not_depend_on_their_company(kernels, rng, name: str):
    weight = quantize(torch.randn(150, 700, generator=rng), SCHEMES[name])
    layer = kernels.quantized(weight, None, torch.clone)
    x = torch.randn(40, 700, generator=rng).to(kernels.dtype)
    whole = layer(x, torch.empty(40, 150, dtype=kernels.dtype))
    for first, rows in ((0, 1), (39, 1), (1, 2), (2, 3), (3, 5), (1, 6), (5, 7), (1, 33)):
        part = layer(x[first : first + rows], torch.empty(rows, 150, dtype=kernels.dtype))
        assert torch.equal(part, whole[first : first + rows])


@pytest.mark.parametrize("name", list(SCHEMES))
def test_levels_give_the_same_bits(kernels, rng, name: str, monkeypatch):
    weight = quantize(torch.randn(70, 300, generator=rng), SCHEMES[name])
    x = torch.randn(9, 300, generator=rng).to(kernels.dtype)
    monkeypatch.setenv(LEVEL_VARIABLE, "avx2")
    lowest = CpuKernels(kernels.dtype, Profile())
    found, expected = (each.quantized(weight, None, torch.clone)(x, torch.empty(9, 70)) for each in (kernels, lowest))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_is_nan_and_others_are_not(kernels, rng, bad: float):
    layer = kernels.quantized(quantize(torch.randn(20, 64, generator=rng), SCHEMES["int8"]), None, torch.clone)
    x = torch.randn(3, 64, generator=rng).to(kernels.dtype)
    x[1, 5], x[2] = bad, 0
    found = layer(x, torch.empty(3, 20, dtype=kernels.dtype))
    assert found[0].isfinite().all()
    assert found[1].isnan().all()
    assert (found[2] == 0).all()


@pytest.mark.parametrize(("name", "most"), [("int8", 0.5 / 127), ("int4", 1 / 8)])
def test_the_error_of_a_weight_is_bounded_by_the_largest_of_its_group(rng, name: str, most: float):
    weight = torch.randn(33, 100, generator=rng) * torch.logspace(-6, 3, 33)[:, None]
    weight[3], weight[:, 7] = 0, 0
    wide = quantize(weight, SCHEMES[name]).widened()
    group = SCHEMES[name].group or 100
    for part, near in zip(weight.split(group, 1), wide.split(group, 1), strict=True):
        largest = part.abs().amax(1, keepdim=True)
        assert ((part - near).abs() <= 1.01 * most * largest).all()
    assert wide.dtype is weight.dtype
    assert (wide[3] == 0).all()
