"""Frames tile the KV exactly and keep their size, for any layout."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from baton.core import KVLayout
from kvtransfer.plan import plan_frames, staging_bytes

layouts = st.builds(
    KVLayout,
    layers=st.integers(1, 40),
    kv_heads=st.integers(1, 9),
    head_dim=st.sampled_from([1, 8, 64]),
    block_size=st.sampled_from([1, 4, 16]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)


@given(layouts, st.integers(1, 60), st.integers(1, 1 << 20))
@example(KVLayout(2, 1, 1, 1, "bfloat16"), 3, 1)  # not even one layer-block fits
@example(KVLayout(2, 1, 1, 1, "bfloat16"), 3, 3 * 4)  # one layer fits exactly
@example(KVLayout(2, 1, 1, 1, "bfloat16"), 3, 3 * 4 - 1)  # and just not
def test_rectangles_tile_exactly(layout: KVLayout, n_blocks: int, frame_size: int) -> None:
    frames = plan_frames(layout, n_blocks, frame_size)
    cells = [(la, b) for f in frames for la in f.layers for b in range(n_blocks)[f.blocks]]
    assert sorted(cells) == [(la, b) for la in range(layout.layers) for b in range(n_blocks)]
    assert sum(frame.nbytes for frame in frames) == n_blocks * layout.block_bytes
    for frame in frames:
        cell_count = len(frame.layers) * (frame.block_end - frame.block_begin)
        assert frame.nbytes == cell_count * layout.layer_block_bytes
        assert frame.nbytes <= staging_bytes(layout, frame_size)
        assert frame.nbytes <= frame_size or cell_count == 1


@given(layouts, st.integers(1, 60))
def test_what_fits_one_frame_is_one_frame(layout: KVLayout, n_blocks: int) -> None:
    assert len(plan_frames(layout, n_blocks, n_blocks * layout.block_bytes)) == 1


@pytest.mark.parametrize(("n_blocks", "frame_size"), [(0, 1), (1, 0), (-1, 8)])
def test_sizes_below_one_are_refused(n_blocks: int, frame_size: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        plan_frames(KVLayout(1, 1, 1, 1, "float32"), n_blocks, frame_size)
