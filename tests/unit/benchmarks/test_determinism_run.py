import pytest

from baton.engine.fixed import FixedShapes
from baton.engine.oracle import OracleBackend
from benchmarks.lib.determinism_run import FixedDecode, Load, engine_of, run

SHAPES = FixedShapes(4, 8)


class Watched(OracleBackend):
    """Notes how many rows its decode steps have."""

    def __init__(self):
        super().__init__(max_model_len=256)
        self.rows = []

    def forward(self, batch, kv):
        if max(batch.query_lens) == 1:
            self.rows.append(len(batch.query_lens))
        return super().forward(batch, kv)


@pytest.mark.parametrize(("share", "deterministic"), [(0.0, 0), (0.02, 0), (0.25, 2), (0.5, 4), (1.0, 8)])
def test_all_tokens_come_and_a_share_is_verified(share, deterministic):
    backend, load = Watched(), Load(((20, 17),) * 8, 4, share)
    took = run(engine_of(backend, backend.tokenizer, load, SHAPES), load)
    assert took.tokens == 8 * 17
    assert (len(took.ttft_s), len(took.e2e_s), len(took.itl_s)) == (8, 8, 8 * 16)
    assert (took.counters.verify_passes > 0) == (deterministic > 0)
    assert max(took.e2e_s) <= took.seconds
    assert all(first <= last for first, last in zip(took.ttft_s, took.e2e_s, strict=True))


def test_a_fixed_decode_shape_has_all_rows_and_the_same_tokens():
    backend, load = Watched(), Load(((20, 9), (20, 17), (20, 5)), 4, 0.0)
    plain = engine_of(backend, backend.tokenizer, load, SHAPES)
    assert run(plain, load).tokens == 31
    assert set(backend.rows) == {1, 2, 3}
    backend.rows.clear()
    padded = engine_of(backend, backend.tokenizer, load, SHAPES, fixed_decode=True)
    assert isinstance(padded.backend, FixedDecode)
    assert run(padded, load).tokens == 31
    assert set(backend.rows) == {4}
