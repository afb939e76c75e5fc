"""KV in int8: its error, and at each level of instructions the compiled writes and reads against those of torch."""

import pytest
import torch

from baton.engine.kernels.base import Rotation
from baton.engine.kernels.cpu.kernel_choice import Profile
from baton.engine.kernels.cpu.ops import ELEMENTS, CpuKernels
from baton.engine.kernels.kv_levels import select, to_levels
from baton.engine.kernels.torch_attention import PagedAttention, SteadyAttention
from tests.support.compiled_kernels import compiled_or_skip
from tests.support.cpu_levels import on_levels
from tests.support.paged_attention import Paged, batch_over, paged

BLOCK = 16
LEVELS = on_levels("avx512-bf16", "avx512", "avx2")


def wide(cache: torch.Tensor) -> torch.Tensor:
    return select(cache, torch.arange(len(cache)), torch.float32)


@pytest.mark.parametrize("dtype", list(ELEMENTS), ids=str)
def test_the_error_of_a_value_is_at_most_half_the_scale_of_its_head(dtype: torch.dtype, seed: int) -> None:
    heads = torch.randn(70, 3, 20, generator=torch.Generator().manual_seed(seed)).to(dtype)
    heads *= torch.logspace(-20, 20, 70)[:, None, None].to(dtype)
    heads[4], heads[5, 0, 2], heads[6, 2, 7] = 0, torch.nan, torch.inf
    found, most = wide(to_levels(heads)), heads.float().abs().amax(-1, keepdim=True)
    good = torch.ones(70, 3, dtype=torch.bool)
    good[5, 0] = good[6, 2] = False
    assert ((found - heads.float()).abs() <= most / 127 * 0.503)[good].all()
    assert found[~good].isnan().all()
    assert (found[4] == 0).all()


@pytest.fixture(scope="module", params=list(ELEMENTS), ids=str)
def kernels(request, level: str) -> CpuKernels:
    return compiled_or_skip(lambda: CpuKernels(request.param, Profile()))


def quantised(made: Paged) -> Paged:
    made.keys, made.values = to_levels(made.keys), to_levels(made.values)
    return made


def reference(made: Paged, window: int | None, kind: type = PagedAttention) -> torch.Tensor:
    """Compute attention in float32, because a bfloat16 reference would have the same rounding errors."""
    query, dim = made.query.float(), made.query.shape[2]
    out = torch.empty(len(query), query.shape[1] * dim)
    return kind(made.batch, BLOCK, window, dim**-0.5)(query, made.keys, made.values, out)


class TestCompiled:
    pytestmark = LEVELS

    @pytest.mark.parametrize("dim", [16, 64, 80, 10])
    def test_heads_are_written_as_by_torch(self, kernels: CpuKernels, seed: int, dim: int) -> None:
        generator, dtype = torch.Generator().manual_seed(seed), kernels.dtype
        qkv = torch.randn(9, 8, dim, generator=generator)
        qkv *= torch.logspace(-9, 9, 8)[:, None]
        qkv[3, 5, 1], qkv[4, 7, 9], qkv[5, 6:], qkv[6, 4:] = torch.nan, torch.inf, 0, 1e-35
        rotation = Rotation(*(torch.rand(2, 9, dim // 2, generator=generator) * 2 - 1).to(dtype))
        slots = torch.randperm(5 * BLOCK, generator=generator)[:9]
        # Views of a wider cache, as in a rank of a tensor-parallel group.
        plain = torch.zeros(2, 5, BLOCK, 5, dim, dtype=dtype)
        levels = to_levels(plain)
        for cache in (plain, levels):
            kernels.rotate_and_store(qkv.to(dtype), rotation, None, slots, *cache[:, :, :, 1:3])
        assert torch.equal(levels, to_levels(plain))

    @pytest.mark.parametrize("shape", [(4, 4, 64), (8, 1, 128), (32, 2, 16), (4, 1, 96), (2, 2, 10)], ids=str)
    @pytest.mark.parametrize("window", [None, 20])
    def test_attention_equals_the_reference(self, kernels: CpuKernels, seed: int, shape, window: int | None) -> None:
        heads, kv_heads, dim = shape
        lengths = [(1, 1), (1, 17), (1, 64), (1, 65), (1, 300), (2, 2), (40, 40), (30, 97)]
        made = quantised(
            paged(seed, lengths, heads=heads, kv_heads=kv_heads, dim=dim, block=BLOCK, dtype=kernels.dtype)
        )
        out = torch.full((len(made.query), heads * dim), torch.nan, dtype=kernels.dtype)
        found = kernels.attention(made.batch, BLOCK, window, dim**-0.5)(made.query, made.keys, made.values, out)
        atol, rtol = (2e-5, 1e-4) if kernels.dtype is torch.float32 else (8e-3, 1.6e-2)
        torch.testing.assert_close(found.float(), reference(made, window), atol=atol, rtol=rtol)

    def test_rows_of_a_fixed_batch_do_not_depend_on_their_company(self, kernels: CpuKernels, seed: int) -> None:
        made = quantised(paged(seed, [(40, 130)], heads=4, kv_heads=2, dim=64, block=BLOCK, dtype=kernels.dtype))
        found = []
        for first, new in ((0, 40), (39, 1), (38, 2), (5, 7)):
            batch = batch_over(made.batch.block_tables, [new], [90 + first + new], fixed=True)
            out = torch.empty(new, 256, dtype=kernels.dtype)
            query = made.query[first : first + new].contiguous()
            found.append((kernels.attention(batch, BLOCK, None, 0.125)(query, made.keys, made.values, out), first, new))
        whole = found[0][0]
        assert all(torch.equal(part, whole[first : first + new]) for part, first, new in found)
        made.batch = batch_over(made.batch.block_tables, [40], [130], fixed=True)
        steady = reference(made, None, SteadyAttention)
        torch.testing.assert_close(whole.float(), steady, atol=8e-3, rtol=1.6e-2)

    def test_a_scale_that_is_not_a_number_is_never_hidden(self, kernels: CpuKernels, seed: int) -> None:
        for part in ("keys", "values"):
            made = quantised(
                paged(seed, [(1, 40), (6, 90)], heads=4, kv_heads=2, dim=64, block=BLOCK, dtype=kernels.dtype)
            )
            cache = getattr(made, part)
            cache[made.batch.block_tables[0, 1], 3, 1] = to_levels(torch.full((64,), torch.nan))
            out = torch.empty(7, 256, dtype=kernels.dtype)
            kernels.attention(made.batch, BLOCK, None, 0.125)(made.query, made.keys, made.values, out)
            assert out[0, 128:].isnan().all()
            assert out[0, :128].isfinite().all()
            assert out[1:].isfinite().all()
