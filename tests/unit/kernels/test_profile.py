"""The measurements, decisions and files of `baton profile`."""

import json

import pytest

from baton.engine.kernels.cpu import kernel_choice, tuning
from baton.engine.kernels.cpu.compiler import Machine
from baton.engine.kernels.cpu.kernel_choice import FLAT_ROWS, Choice, Profile, load_profile, save_profile, static_choice

K = 32
STATIC = static_choice(K)


def points(tall: float = 1.0, **others_over_flat: float) -> list[tuning.Point]:
    """Return one point per `rNNN=ratio`. The tall kernel's time is `tall` times torch's."""
    return [tuning.Point(64, K, int(name[1:]), 1.0, ratio * tall, ratio) for name, ratio in others_over_flat.items()]


@pytest.mark.parametrize(
    ("ratios", "flat_rows"),
    [
        ({"r1": 1.0, "r64": 1.0, "r96": 1.0, "r128": 1.02, "r512": 0.98}, FLAT_ROWS),  # no clear winner: the preset
        ({"r1": 2.0, "r16": 1.2, "r32": 0.8, "r64": 0.7, "r128": 0.7}, 16),  # not used from the first slower one
        ({"r1": 0.5, "r16": 0.5}, 0),
        ({"r1": 2.0, "r96": 1.3, "r128": 1.3, "r192": 1.2, "r256": 0.9, "r384": 0.8}, 192),  # as far as it leads
        ({"r1": 2.0, "r8": 1.5, "r16": 0.7, "r32": 1.5, "r96": 1.3, "r128": 0.7, "r192": 0.6}, FLAT_ROWS),  # disturbed
    ],
)
def test_the_flat_kernel_is_taken_as_far_as_it_leads(ratios, flat_rows):
    assert STATIC.flat_rows == FLAT_ROWS
    found = tuning.best_choice(points(**ratios))
    assert found.flat_rows == flat_rows
    assert found == STATIC or flat_rows != FLAT_ROWS


@pytest.mark.parametrize(("ratio", "tall"), [(0.5, True), (2.0, False)])
def test_the_faster_of_the_tall_kernel_and_torch_is_taken(ratio, tall):
    assert tuning.best_choice(points(ratio, r1=4.0, r128=0.4, r512=0.4)).tall is tall


def test_a_processor_with_a_tile_unit_leaves_many_rows_to_torch(monkeypatch):
    monkeypatch.setattr(kernel_choice, "machine", lambda: Machine("x", frozenset({kernel_choice.TILE_UNIT})))
    assert not static_choice(K).tall
    monkeypatch.setattr(kernel_choice, "machine", lambda: Machine("x", frozenset()))
    assert static_choice(K).tall
    assert static_choice(kernel_choice.LONG_K).flat_rows < static_choice(kernel_choice.LONG_K - 1).flat_rows


@pytest.mark.parametrize(
    ("attention", "expected"), [([2.0, 1.0], tuning.UNIFIED), ([1.0, 0.98], None), ([1.0, 2.0], None)]
)
def test_the_preset_maximum_must_be_clearly_faster(attention, expected):
    assert tuning.make_profile(points(r1=2.0), attention).unified_max == expected


def test_a_profile_survives_the_disk_and_is_added_to(tmp_path):
    path = tmp_path / "deep" / "file.json"
    first = Profile({(64, 32): Choice(7, True), (1, 2): Choice(3, False)}, 0.0)
    save_profile(path, first)
    assert load_profile(path) == first
    save_profile(path, load_profile(path).merged(Profile({(64, 32): Choice(9, False)})))
    assert load_profile(path) == Profile({(64, 32): Choice(9, False), (1, 2): Choice(3, False)}, None)
    assert load_profile(path).choice(64, 32).flat_rows == 9
    assert load_profile(path).choice(5, 5) == static_choice(5)


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({"choices": [[1, 2]], "unified_max": None})])
def test_a_broken_file_means_the_defaults(tmp_path, text):
    path = tmp_path / "p.json"
    path.write_text(text)
    assert load_profile(path) == Profile() == load_profile(tmp_path / "absent")


def test_another_torch_dtype_or_thread_count_has_another_profile(tmp_path):
    paths = {
        kernel_choice.profile_path(*key, tmp_path)
        for key in (("bf16", 1, "2"), ("f32", 1, "2"), ("bf16", 2, "2"), ("bf16", 1, "3"))
    }
    assert len(paths) == 4
