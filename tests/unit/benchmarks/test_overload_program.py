"""The figures of benchmarks/overload.py, from what clients saw."""

import json
import random
from typing import Any

import pytest

from baton.errors import EngineFault, Overloaded
from benchmarks import overload
from benchmarks.lib.protocol import ROOT
from benchmarks.lib.report import fill


def phase(**fields):
    return overload.Phase(**{"offered": 100, "finished": 100, "lasted_s": 10.0, "ttft": [0.1] * 100, **fields})


def test_ratios_are_those_of_the_overload_to_one_time():
    over = phase(offered=500, finished=90, ttft=[0.2] * 89 + [1.0], refused=[0.004] * 410, delays=[0.5] * 409 + [0.0])
    over.rss = [50, 100, 100, 110]
    figures = overload.ratios({"capacity": phase(), "1x": phase(ttft=[0.1] * 99 + [0.8]), "5x": over})
    assert figures == pytest.approx(
        {
            "ttft_ratio_p50": 2.0,
            "ttft_ratio_p99": 1.25,
            "goodput_ratio": 0.9,
            "refused_share": 0.82,
            "refusal_ms_p50": 4.0,
            "refusals_without_delay": 1.0,
            "rss_growth": 1.1,
        }
    )
    json.dumps(figures)


def test_what_was_not_seen_is_no_figure():
    figures = overload.ratios({"capacity": phase(), "1x": phase(ttft=[]), "5x": phase(refused=[])})
    assert [name for name, value in figures.items() if value is None] == [
        "ttft_ratio_p50",
        "ttft_ratio_p99",
        "refusal_ms_p50",
        "rss_growth",
    ]


def test_the_table_has_a_line_for_each_load():
    text = overload.table({"1x": phase(rss=[2**20]), "5x": phase(finished=0, ttft=[], refused=[0.1] * 100)})
    assert [line.split("|")[1].strip() for line in text.splitlines()[2:]] == ["1x", "5x"]
    assert "100.0%" in text


class Client:
    """Ends each call as it is told."""

    def __init__(self, *ends):
        self.ends = list(ends)

    def stream(self, prompt, **options):
        assert (len(prompt), options["max_tokens"]) == (overload.PROMPT, overload.ANSWER)
        return self

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    async def __aiter__(self):
        yield "token"
        if (end := self.ends.pop(0)) is not None:
            raise end


async def test_each_end_is_counted_once():
    seen, rng = overload.Phase(), random.Random(1)
    client: Any = Client(None, Overloaded("full", 2.0), Overloaded("waited 1 s for room", 3.0), EngineFault("broke"))
    for _ in range(4):
        await overload.ask(client, seen, rng)
    assert (seen.offered, seen.finished, seen.late, len(seen.failed)) == (4, 1, 1, 1)
    assert seen.delays == [2.0, 3.0]
    assert len(seen.ttft) == 1


def test_the_page_has_the_section():
    page = (ROOT / "docs" / "performance.md").read_text()
    assert "new" in fill(page, "new", overload.NAME)
