"""The figures that the page draws and adds up, from given views."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.xdist_group("page")
BLOCKS = {"owned": 1, "reserved": 2, "cached": 3, "quarantined": 4, "free": 4_990, "total": 5_000}
Change = Callable[[dict[str, Any]], None]


def gaps(p50: float, p99: float, count: int = 9) -> Change:
    return lambda said: said["lately"]["itl"].update(count=str(count), p50=p50, p99=p99)


def rates(new: float, prompts: float) -> Change:
    return lambda said: said["lately"].update(tokens_per_s=new, prompt_tokens_per_s=prompts)


def blocks(role: str, **different: int) -> Change:
    """Set the blocks of the workers of a role. All other workers have the usual, consistent counts."""

    def change(said: dict[str, Any]) -> None:
        for worker in said["status"]["workers"]:
            worker["load"]["blocks"].update(BLOCKS, **(different if worker["info"]["role"] == role else {}))

    return change


def heights(line: Any) -> list[float]:
    return [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", line.get_attribute("d"))]


CHARTS: dict[str, tuple[list[Change], list[str], list[str], int, str, list[int], list[str]]] = {
    # Views, keys, lines of the grid, the checked line, its form, where it meets the grid, the table
    "Inter-token latency": (
        [gaps(0.0123, 0.25), gaps(0, 0, count=0), gaps(0.02, 0.5)],
        ["p50 20.0 ms", "p99 500 ms"],
        ["0", "250 ms", "500 ms"],
        1,
        r"^M[\d. ]+M[\d. ]+$",  # broken where there was no gap
        [1, 2],
        ["now20.0 ms500 ms", "5 s––", "15 s––", "30 s12.3 ms250 ms"],  # noqa: RUF001 (the dash of the page)
    ),
    "Tokens per second": (
        [rates(1000, 0), rates(2000, 0), rates(0, 12.4)],
        ["output 0.0", "prompt 12"],
        ["0", "1,000", "2,000"],
        0,
        r"^M[\d. ]+L[\d. ]+L[\d. ]+$",
        [1, 2, 0],
        ["now0.012", "5 s2,0000.0", "15 s2,0000.0", "30 s1,0000.0"],
    ),
}


@pytest.mark.parametrize("title", CHARTS)
def test_what_a_chart_draws_and_says(fed, title):
    changes, keys, lines, number, path, at, rows = CHARTS[title]
    page = fed(*changes)
    found = page.locator("figure.chart").filter(has=page.get_by_role("heading", name=title, exact=True))
    expect(found.locator(".key")).to_have_text(keys)
    expect(found.get_by_role("img", name=f"{title}, latest: {', '.join(keys)}")).to_be_visible()
    expect(found.locator(".grid text")).to_have_text([*lines, "60 s ago", "now"])
    line = found.locator(f"path.line-{number}")
    expect(line).to_have_attribute("d", re.compile(path))
    grid = [float(one.get_attribute("y1")) for one in found.locator(".grid line").all()]
    assert grid == sorted(grid, reverse=True), "counted from above"
    assert heights(line) == [grid[number] for number in at]
    found.locator("summary").click()
    expect(found.locator("tbody tr")).to_have_text(rows)


def test_blocks_that_add_up_give_no_warning(fed):
    page = fed(blocks("decode", owned=0), blocks("decode"))
    for role in ("prefill", "decode"):
        expect(page.locator(f".pool.{role} p.right")).to_have_text("1 worker, 5,000 KV blocks, all accounted for")
        keys = ["1 owned", "2 reserved", "3 cached", "4 quarantined", "4,990 free"]
        expect(page.locator(f".pool.{role} .key")).to_have_text(keys)
    expect(page.locator(".pool p.warn")).to_have_count(0)


@pytest.mark.parametrize(
    ("role", "different", "found", "other"),
    [("prefill", {"free": 4_989}, "4,999", "decode"), ("decode", {"cached": 4}, "5,001", "prefill")],
    ids=["one lost", "one counted twice"],
)
def test_blocks_that_do_not_add_up_give_one(fed, role, different, found, other):
    page = fed(blocks(role), blocks(role, **different))
    text = f"1 worker, 5,000 KV blocks, but {found} accounted for"
    expect(page.locator(f".pool.{role} p.warn")).to_have_text(text)
    expect(page.locator(f".pool.{other} p.right")).to_contain_text("all accounted for")
    expect(page.locator(".pool p.warn")).to_have_count(1)
