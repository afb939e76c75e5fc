"""In which order benchmarks/disaggregation.py measures what, and what it measures again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks import disaggregation
from benchmarks.lib.disagg_figures import Phase, kept
from benchmarks.lib.disagg_goals import AIM
from benchmarks.lib.disagg_run import SPLIT, Side, Target, colocated, vllm
from benchmarks.lib.mixed_load import Kinds, kinds_of
from tests.unit.benchmarks.disagg_support import SLO, phase, seen


def test_profiles_are_measured_in_each_round_on_each_cluster(monkeypatch, tmp_path):
    """In the clusters that the loads run on, before these."""
    happened: list[tuple[str, str]] = []
    seeds: list[int] = []
    kinds = kinds_of("32,192,64,16")

    @contextmanager
    def running(side: Side, model: Path, itl_s: float, kinds: Kinds) -> Iterator[Target]:
        yield Target((side.name,), kinds=kinds)

    def closed(target: Target, prompt_tokens: int, max_tokens: int, requests: int, seed: int) -> dict[str, Any]:
        seeds.append(seed)
        assert (prompt_tokens, max_tokens) == (32, 96)
        gap_s = 0.05 * (1 + len(seeds) / 100)
        return {"samples": [{"prompt_tokens": prompt_tokens, "ttft_s": 0.1, "gaps_s": [gap_s, gap_s, 9.0]}]}

    def loaded(target: Target, side: Side, rate: float, seconds: float, number: int, tried: int) -> Phase:
        assert target.kinds == kinds
        happened.append((target.where[0], "load"))
        return phase(side.name, rate, number, (seen(0.1, 0.01),))

    for name, fake in (
        ("running", running),
        ("loaded", loaded),
        ("warm_up", lambda target: None),
        ("profiled", lambda target, out, seconds: happened.append((target.where[0], out.name))),
        ("closed", closed),
    ):
        monkeypatch.setattr(disaggregation, name, fake)
    lab, sides = disaggregation.Lab(tmp_path, 1.0, kinds=kinds), [Side(SPLIT), colocated(64), colocated(128)]
    lab.turns(sides, [1.0], range(1, 3), SLO, tmp_path / "here.json")
    profiled = [one for one in happened if one[1] != "load"]
    assert sorted(profiled) == sorted(
        (side.name, f"here-{number}-{side.name}.json") for side in sides for number in (1, 2)
    )
    assert all(happened[happened.index(one) + 1] == (one[0], "load") for one in profiled)
    assert len(set(seeds)) == len(seeds) == 12, "no prefix cache knows them"
    happened.clear()
    seeds.clear()
    found = lab.turns([*sides, vllm(64)], [1.0], range(1, 2), SLO)
    assert {one.tries for one in found} == {1}
    assert {what for _, what in happened} == {"load"}
    assert [one.speed for one in found if not one.side.startswith("vllm")] == pytest.approx([1.015, 1.035, 1.055])
    assert [one.speed for one in found if one.side.startswith("vllm")] == [1.0]
    assert {one.told_s for one in found} == {SLO.itl_s * AIM}


@pytest.mark.parametrize(
    ("gaps_s", "speed", "wander", "tries"),
    [
        ((0.05, 0.054), 1.04, 1.08, 1),
        ((0.05, 0.07, 0.072), 1.42, 0.072 / 0.07, 2),
        ((0.05, 0.07, 0.058), 1.28, 0.07 / 0.058, 2),  # neither is steady: the second one is steadier
        ((0.05, 0.06, 0.08), 1.1, 1.2, 2),  # and here the first one
    ],
)
def test_a_load_is_given_again_where_the_machine_changed_meanwhile(monkeypatch, tmp_path, gaps_s, speed, wander, tries):
    told, coming = list[int](), list(gaps_s)

    def loaded(target: Target, side: Side, rate: float, seconds: float, number: int, tried: int) -> Phase:
        told.append(tried)
        return phase(side.name, rate, number, (seen(0.1, 0.01),))

    @contextmanager
    def running(side: Side, model: Path, itl_s: float, kinds: Kinds) -> Iterator[Target]:
        yield Target((side.name,), kinds=kinds)

    monkeypatch.setattr(disaggregation, "running", running)
    monkeypatch.setattr(disaggregation, "warm_up", lambda target: None)
    monkeypatch.setattr(disaggregation, "loaded", loaded)
    monkeypatch.setattr(disaggregation.Lab, "_gap", lambda lab, target, side: coming.pop(0))
    file = tmp_path / "kept.json"
    (found,) = disaggregation.Lab(tmp_path, 1.0, file).turns([Side(SPLIT)], [1.0], range(1, 2), SLO)
    assert (found.speed, found.wander) == pytest.approx((speed, wander))
    assert (found.tries, told, coming) == (tries, list(range(tries)), []), "each with prompts of its own"
    assert kept(file) == (SLO, [found])
