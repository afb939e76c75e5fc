"""Decode and prefill attention against plain attention in float64, at the edges of blocks, tiles, splits, windows."""

import pytest
import torch

from baton.engine.kernels.gpu.ops import GpuKernels
from baton.engine.kernels.gpu.shapes import Tiles
from baton.engine.kernels.gpu.triton_attention import Pieces, decode_attention, prefill_attention
from benchmarks.lib import flash_gpu
from benchmarks.lib.device import CASES, Case, attention_error, batch_of
from tests.support.paged_attention import paged

pytestmark = pytest.mark.sample(2)
TILES = Tiles(16, 16, 1, 1)


class Drawn:
    def __init__(self, seed, device, dtype, queries, contexts, *, heads=4, kv_heads=2, dim=16, window=None, **more):
        lengths = list(zip(queries, contexts, strict=True))
        case = paged(seed, lengths, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, **more)
        # Queries are a part of the fused projection, so their rows are not contiguous.
        rest = torch.full((len(case.query), 2 * kv_heads, dim), torch.nan, dtype=dtype)
        self.query = torch.cat([case.query, rest], 1).to(device)[:, :heads]
        self.keys, self.values = case.keys.to(device), case.values.to(device)
        self.expected, batch = case.expected(window).to(device), case.batch
        self.places = batch.block_tables.to(device), batch.query_starts.to(device), batch.kv_lens.to(device)
        self.value_dim = case.values.shape[3]
        self.out = torch.full((len(case.query), heads * self.value_dim), 7.0, dtype=dtype, device=device)


def decoded(case, split, *, programs=2, tiles=TILES, window=None, **options):
    """Decode with splits of `split` tokens and unwritten results of splits that are NaN."""
    heads, dim = case.query.shape[1:]
    longest = min(int(case.places[2].max()), window or 10**6)
    pieces = Pieces.empty(len(case.places[2]), heads, -(-longest // split), case.value_dim, case.out.device)
    for part in pieces:
        part.fill_(float("nan"))
    memory = (case.keys, case.values, *case.places, case.out, pieces, tiles)
    options |= {"scale": dim**-0.5, "window": window, "programs": programs, "split": split}
    decode_attention(case.query, *memory, **options)
    return case.out, pieces


def prefilled(case, longest, *, window=None, tiles=TILES):
    memory = (case.keys, case.values, *case.places, case.out, tiles)
    prefill_attention(case.query, *memory, longest_query=longest, scale=case.query.shape[2] ** -0.5, window=window)
    return case.out


def close(found, expected):
    tolerance = 2**-6 if found.dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("split", "programs"), [(64, 1), (32, 2), (16, 2), (16, 3)])
def test_decode_at_the_edges_of_blocks_tiles_and_splits(split, programs, device, dtype, seed):
    contexts = [1, 4, 5, 16, 17, 33]
    case = Drawn(seed, device, dtype, [1] * len(contexts), contexts, heads=2, kv_heads=1)
    found, pieces = decoded(case, split, programs=programs)
    close(found, case.expected)
    written = (~pieces.bases.isnan()).sum(2)
    assert written.tolist() == [[-(-context // split)] * 2 for context in contexts], "the splits with keys, no others"


@pytest.mark.parametrize("window", [None, 37])
def test_the_bits_of_a_row_do_not_depend_on_its_batch_or_the_programs(window, device, dtype, seed):
    """A long row among short ones, and each row alone with as many programs as splits."""
    contexts, shape = [3, 200, 16], {"heads": 2, "kv_heads": 1, "window": window}
    case = Drawn(seed, device, dtype, [1] * 3, contexts, **shape)
    together = [decoded(case, 16, programs=programs, window=window)[0].clone() for programs in (1, 2, 13)]
    assert torch.equal(together[0], together[1])
    assert torch.equal(together[0], together[2])
    close(together[0], case.expected)
    tables, starts, lengths = case.places
    for row in range(3):
        case.places, query = (tables[row : row + 1], starts[:2], lengths[row : row + 1]), case.query
        case.query = query[row : row + 1]
        assert torch.equal(decoded(case, 16, programs=3, window=window)[0][0], together[0][row])
        case.query = query


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "value_dim"),
    [(2, 2, 64, 64), (4, 1, 24, 40), (8, 1, 128, 128), (7, 1, 24, 40), (20, 1, 64, 64)],
)
def test_groups_and_head_sizes(heads, kv_heads, dim, value_dim, device, dtype, seed):
    shape = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "value_dim": value_dim}
    case = Drawn(seed, device, dtype, [1, 1], [19, 2], **shape)
    tiles = TILES._replace(rows=32 if heads // kv_heads > 16 else 16)
    close(decoded(case, 16, tiles=tiles)[0], case.expected)
    chunk = Drawn(seed, device, dtype, [9], [12], **shape)
    close(prefilled(chunk, 9), chunk.expected)


@pytest.mark.parametrize(("window", "split"), [(1, 16), (5, 64), (5, 16), (20, 16), (1000, 16)])
def test_decode_window(window, split, device, dtype, seed):
    case = Drawn(seed, device, dtype, [1] * 3, [1, 5, 37], heads=2, kv_heads=1, window=window)
    close(decoded(case, split, window=window)[0], case.expected)


def test_decode_leaves_chunks_and_padding_alone(device, dtype, seed):
    case = Drawn(seed, device, dtype, [3, 1, 2, 1], [9, 21, 2, 4])
    case.places[2][3] = 0  # a row that only fills a bucket
    found, _ = decoded(case, 16)
    close(found[3:4], case.expected[3:4])
    assert bool((found[[0, 1, 2, 4, 5]] == 7).all())
    assert bool((found[6] == 0).all())


@pytest.mark.parametrize("split", [16, 64])
def test_one_loud_row_alone_leaves_the_unified_maximum(split, device, dtype, seed):
    case = Drawn(seed, device, dtype, [1] * 3, [40, 40, 40], loud={1})
    found, pieces = decoded(case, split, unified=0.5)
    close(found, case.expected)
    constant = torch.tensor(0.5 * 1.4426950408889634)
    left = pieces.bases != constant.to(device)
    assert left.flatten(1).any(1).tolist() == [False, True, False]


@pytest.mark.sample(1, of="long under the interpreter")
def test_the_benchmark_counts_the_rows_that_leave_the_unified_maximum(device):
    (found,) = flash_gpu.attention(device, (4, 2, 16), [40], [3], 1)
    assert set(found["seconds"]) == {"running", "unified"}
    assert found["count"] == 0
    batch = batch_of([1] * 3, [40] * 3, 16, device)
    query, keys, values = (torch.ones(n, *shape, device=device) for n, *shape in ((3, 4, 16), *[(10, 16, 2, 16)] * 2))
    query[1, 2] *= 100
    assert flash_gpu.left(*flash_gpu.decode(batch, query, keys, values)) == 1


def test_the_unified_maximum_is_left_downwards_too(device, dtype, seed):
    case = Drawn(seed, device, dtype, [1, 1], [40, 7])
    found, _ = decoded(case, 32, unified=400.0)  # every weight underflows
    close(found, case.expected)


def test_without_the_fallback_the_loud_row_is_lost(device, seed):
    case = Drawn(seed, device, torch.float32, [1] * 2, [40, 40], loud={1})
    found, _ = decoded(case, 32, unified=0.5, safe_range=float("inf"))
    close(found[:1], case.expected[:1])
    assert not bool(torch.isfinite(found[1]).all())


@pytest.mark.parametrize(("window", "rows"), [(None, 16), (None, 32), (1, 16), (5, 16), (5, 32), (1000, 32)])
def test_prefill_over_a_prefix(window, rows, device, dtype, seed):
    case = Drawn(seed, device, dtype, [2, 1, 7, 16, 33, 5], [2, 8, 7, 49, 40, 21], heads=2, kv_heads=1, window=window)
    found = prefilled(case, 33, window=window, tiles=TILES._replace(rows=rows))
    assert bool((found[2] == 7).all())  # the decode kernel computes the row with one new token
    found[2] = case.expected[2]
    close(found, case.expected)


SMALL = (Case((1, 20, 1), (130, 70, 5), 4, 1, 64, 16), Case((9, 1), (75, 33), 2, 1, 128, 256, 30))


@pytest.mark.parametrize("case", CASES if torch.cuda.is_available() else SMALL)
@pytest.mark.parametrize("unified", [None, 0.0])
def test_with_the_tiles_and_splits_of_the_engine(case, unified, device):
    assert attention_error(case, GpuKernels(16, unified=unified), device, torch.bfloat16) < 0.02
