"""Attention with the engine's tiles and splits over all shapes that it can have, and contexts of thousands.

Unwritten cache and results are NaN. A fold has all values of each dimension; all folds have all pairs of values.
"""

import random
from itertools import combinations, product

import pytest
import torch

from baton.engine.kernels.gpu.ops import GpuKernels
from benchmarks.lib.device import on_device
from tests.support.paged_attention import paged

pytestmark = pytest.mark.sample(1)
HEAD_SIZES = (64, 80, 96, 112, 128, 192, 256)
BLOCKS = (8, 16, 32, 64, 128, 256)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GROUPS = range(1, 9)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}


def attended(seed, device, lengths, *, window=None, dtype=torch.bfloat16, processors=16, **shape):
    """Return the engine's attention of sequences of (new tokens, positions), after comparing it with float64."""
    case = paged(seed, lengths, dtype=dtype, **shape)
    out = torch.full((len(case.query), case.query[0].numel()), torch.nan, dtype=dtype, device=device)
    attend = GpuKernels(processors).attention(
        on_device(case.batch, device), shape["block"], window, shape["dim"] ** -0.5
    )
    attend(case.query.to(device), case.keys.to(device), case.values.to(device), out)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.double().cpu(), case.expected(window), rtol=tolerance, atol=tolerance)
    return out


def cases_of(fold):
    """Return (group, head size, block, dtype) of each case of a fold."""
    return [
        (
            group,
            HEAD_SIZES[(number + fold[0]) % len(HEAD_SIZES)],
            BLOCKS[(number + fold[1]) % len(BLOCKS)],
            DTYPES[(number + sum(fold)) % len(DTYPES)],
        )
        for number, group in enumerate(GROUPS)
    ]


FOLDS = list(product(range(len(HEAD_SIZES)), range(len(BLOCKS))))


@pytest.mark.parametrize("fold", FOLDS, ids=str)
def test_head_sizes_blocks_groups_and_dtypes(fold, device, seed):
    rng = random.Random(f"{seed} {fold}")
    for number, (group, dim, block, dtype) in enumerate(cases_of(fold)):
        kv_heads = rng.choice([1, 2]) if group < 4 else 1
        edge = rng.choice([block, 64, 128]) + rng.choice([-1, 0, 1])
        lengths = [(1, edge), (1, rng.randint(1, 200)), (rng.randint(2, 20), rng.randint(20, 200))]
        shape = {"heads": group * kv_heads, "kv_heads": kv_heads, "dim": dim, "block": block, "dtype": dtype}
        window = rng.choice([None, None, rng.randint(1, 150)])
        attended(seed + number, device, lengths, window=window, **shape)


def test_a_fold_has_all_values_and_the_folds_have_all_pairs():
    dimensions = (GROUPS, HEAD_SIZES, BLOCKS, DTYPES)
    for fold in FOLDS:
        assert [set(column) for column in zip(*cases_of(fold), strict=True)] == [set(each) for each in dimensions]
    cases = [case for fold in FOLDS for case in cases_of(fold)]
    for left, right in combinations(range(4), 2):
        pairs = {(case[left], case[right]) for case in cases}
        assert pairs == set(product(dimensions[left], dimensions[right]))


@pytest.mark.parametrize(("dtype", "window"), [(torch.bfloat16, None), (torch.float16, 4500)])
def test_a_row_of_5000_tokens_among_short_ones(dtype, window, device, seed):
    """Five programs compute its five splits alone, four in the batch. Its bits are the same."""
    shape = {"heads": 4, "kv_heads": 1, "dim": 64, "block": 16, "dtype": dtype, "window": window}
    alone = attended(seed, device, [(1, 5000)], **shape)
    together = attended(seed, device, [(1, 5000), *[(1, 5)] * 16], processors=1, **shape)
    assert torch.equal(together[0], alone[0])


def test_a_chunk_behind_thousands_of_tokens(device, seed):
    attended(seed, device, [(37, 4700), (1, 4099)], heads=2, kv_heads=1, dim=64, block=256)
