"""The size of verify passes: the choice, the measurement, and the saved result."""

import json
from pathlib import Path
from typing import Any

import pytest

from baton.engine.determinism.checks import VerifyShapeTimes, load_passes, measure_passes, save_passes
from baton.engine.models.loading import load_model
from baton.engine.oracle import OracleBackend

DEMO = Path(__file__).parents[3] / "models" / "demo"


def passes(steady=0, **microseconds):
    """Return pass times by microseconds per token for each size: `of_64=2.0`."""
    return VerifyShapeTimes({int(name[3:]): int(name[3:]) * value for name, value in microseconds.items()}, steady)


@pytest.mark.parametrize(
    ("measured", "best"),
    [
        (passes(of_32=4.0, of_64=2.0, of_128=1.0, of_256=0.9, of_512=0.9), 128),
        (passes(of_32=1.0, of_64=1.0, of_128=1.0), 32),
        (passes(of_32=1.16, of_64=1.14, of_128=1.0), 64),
        (passes(of_32=8.0, of_64=4.0, of_128=2.0, of_256=1.0, of_512=0.5), 512),
        (passes(of_32=1.0, of_64=3.0, of_128=2.0), 32),
        (passes(of_32=5.0), 32),
    ],
)
def test_the_smallest_that_is_close_to_the_best_for_a_token(measured, best):
    assert measured.best(exact=False) == measured.best(exact=True) == best


@pytest.mark.parametrize(("steady", "best"), [(96, 64), (64, 64), (63, 32), (32, 32), (31, 256), (0, 256)])
def test_one_that_leaves_decode_steps_exact_is_better_than_any_other(steady, best):
    measured = passes(steady, of_32=4.0, of_64=2.0, of_128=1.5, of_256=1.0)
    assert measured.best(exact=True) == best
    assert measured.best(exact=False) == 256


def test_what_was_measured_survives_the_disk(tmp_path):
    path, measured = tmp_path / "deep" / "p.json", passes(96, of_32=4.0, of_64=2.0)
    assert load_passes(path) is None
    save_passes(path, measured)
    assert load_passes(path) == measured
    assert [file.name for file in path.parent.iterdir()] == ["p.json"]


SECONDS: list[Any] = [[], {}, {"33": 1.0}, {"0": 1.0}, {"32": 0.0}, {"32": "NaN"}]
BROKEN = [*({"seconds": each, "steady": 0} for each in SECONDS), {"seconds": {"32": 1.0}, "steady": None}]


@pytest.mark.parametrize("text", ["[]", "{", '{"seconds": {"32": 1.0}}', *map(json.dumps, BROKEN)])
def test_a_broken_file_is_none(tmp_path, text):
    (tmp_path / "p.json").write_text(text)
    assert load_passes(tmp_path / "p.json") is None


def test_a_model_is_measured_with_as_many_rows_as_may_run():
    backend = load_model(DEMO, dtype="float32")
    for most, totals in ((1, [32]), (5, [32, 64, 128]), (64, [32, 64, 128, 256, 512])):
        found = measure_passes(backend, most)
        assert list(found.seconds) == totals
        assert min(found.seconds.values()) > 0
        assert found.steady == backend.steady_rows()


def test_a_model_of_short_contexts_is_measured_within_them():
    seen = set()

    class Watched(OracleBackend):
        def forward(self, batch, kv):
            seen.update(batch.positions.tolist())
            return super().forward(batch, kv)

    for most in (40, 1024):
        seen.clear()
        assert list(measure_passes(Watched(max_model_len=most), 2).seconds) == [32, 64]
        assert (min(seen), max(seen)) == ((8, 39) if most == 40 else (256, 287))
