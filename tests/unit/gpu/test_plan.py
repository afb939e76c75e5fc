"""Decisions that need no GPU: splits, tiles, buckets, when FlashAttention fits."""

import inspect
import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.kernels.gpu import flash_attention
from baton.engine.kernels.gpu.shapes import (
    SPLIT_TOKENS,
    bucket_for,
    buckets,
    decode_tiles,
    prefill_tiles,
    split_count,
    split_programs,
)
from baton.engine.kernels.gpu.warm_up import widest_batch
from tests.support.paged_attention import batch_over

CPU = torch.device("cpu")


@pytest.mark.parametrize(("longest", "splits"), [(0, 1), (1, 1), (1024, 1), (1025, 2), (32_768, 32), (131_072, 128)])
def test_splits_have_one_length(longest, splits):
    assert split_count(longest) == splits


@pytest.mark.parametrize("rows", [1, 33, 64, 256])
def test_a_long_context_gets_many_programs_in_every_batch(rows):
    """Rows of 8 KV heads on 132 processors. A context of 32k tokens among short ones was one program at 33 rows."""
    programs = split_programs(rows * 8, split_count(32_768), 132)
    assert programs * 8 >= 32
    assert programs * rows * 8 <= 132 * 64, "most of them have nothing to do"


@given(st.integers(1, 10**5), st.integers(0, 10**6), st.integers(1, 200))
def test_programs_are_at_most_the_splits(pairs, longest, processors):
    splits = split_count(longest)
    programs = split_programs(pairs, splits, processors)
    assert 1 <= programs <= splits
    assert programs >= min(4, splits)


def test_buckets_are_dense_below_and_end_at_the_most():
    assert buckets(1) == [1]
    assert buckets(3) == [1, 2, 3]
    assert buckets(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert buckets(300)[-3:] == [256, 288, 300]
    assert [bucket_for(rows, buckets(20)) for rows in (1, 3, 5, 17, 20, 21)] == [1, 4, 8, 20, 20, None]


@pytest.mark.parametrize("dim", [16, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("size", [2, 4])
def test_tiles_are_what_tensor_cores_and_shared_memory_take(dim, size):
    for tiles in (prefill_tiles(dim, dim, size), decode_tiles(1, dim, dim, size), decode_tiles(20, dim, dim, size)):
        assert tiles.rows >= 16
        assert tiles.rows & (tiles.rows - 1) == 0
        assert SPLIT_TOKENS % tiles.keys == 0
    assert decode_tiles(20, dim, dim, size).rows == 32


@pytest.mark.parametrize(("tokens", "longest", "lengths"), [(10, 100, [10]), (10, 4, [4, 4, 2]), (4, 4, [4])])
def test_the_widest_batch_needs_one_block(tokens, longest, lengths):
    batch = widest_batch(tokens, 3, longest, 4, CPU)
    assert batch.query_lens == batch.context_lens == lengths
    assert len(batch.token_ids) == batch.query_starts[-1] == tokens
    assert int(batch.slot_mapping.max()) < 4
    assert int(batch.block_tables.max()) == 0
    assert batch.block_tables.shape[1] == -(-max(lengths) // 4)
    assert len(batch.logit_rows) == 3


def test_this_torch_has_what_flash_attention_needs():
    found = flash_attention.find_varlen()
    assert found is not None
    assert list(inspect.signature(found).parameters)[:8] == "out query key value cu_seq_q cu_seq_k max_q max_k".split()


@pytest.mark.parametrize(
    ("shape", "value_dim", "dtype", "fits"),
    [
        ((2, 256, 2, 64), 64, torch.bfloat16, True),
        ((2, 512, 2, 128), 128, torch.float16, True),
        ((2, 16, 2, 64), 64, torch.bfloat16, False),
        ((2, 256, 2, 64), 64, torch.float32, False),
        ((2, 256, 2, 64), 32, torch.bfloat16, False),
        ((2, 256, 1, 576), 576, torch.bfloat16, False),
        ((2, 256, 2, 12), 12, torch.bfloat16, False),
    ],
)
def test_which_caches_flash_attention_takes(shape, value_dim, dtype, fits):
    keys = torch.empty(shape, dtype=dtype)
    assert flash_attention.varlen_fits(keys, torch.empty(*shape[:3], value_dim, dtype=dtype)) is fits


@pytest.mark.parametrize(("window", "wanted"), [(None, (-1, 0)), (5, (4, 0))])
def test_how_flash_attention_is_called(window, wanted):
    batch, varlen = batch_over(torch.full((2, 2), 5, dtype=torch.int32), [1, 2], [4, 7]), Mock()
    attend = flash_attention.VarlenAttention(varlen, batch, window, 0.5)
    query, cache, out = torch.zeros(3, 4, 64), torch.zeros(2, 256, 2, 64), torch.zeros(3, 256)
    assert attend(query, cache, cache, out) is out
    args, options = varlen.call_args
    assert args[0].shape == (3, 4, 64)
    assert args[0].data_ptr() == out.data_ptr()
    assert args[5].tolist() == [0, 4, 11]
    assert args[6:] == (2, 7)
    assert options["window_size"] == wanted
    assert options["num_splits"] == 1  # with more, torch leaves rows unwritten


@pytest.mark.slow
def test_a_cpu_does_not_import_triton():
    parts = "baton.worker.engine_factory, baton.engine.models.loading, baton.engine.kernels.gpu.cuda_graphs"
    code = f"import sys, {parts}, baton.engine.kernels.select; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    assert done.stdout.strip() == "False"
