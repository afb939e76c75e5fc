"""The figures that the page draws and adds up, of views that a test gives to it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import expect

pytestmark = [pytest.mark.xdist_group("page"), pytest.mark.timeout(90)]
EVERY_S = 20
BLOCKS = {"owned": 1, "reserved": 2, "cached": 3, "quarantined": 4, "free": 4_990, "total": 5_000}
Change = Callable[[dict[str, Any]], None]


@pytest.fixture
def fed(tab, cluster, view):
    """`fed(change, ...)`: a page that got one view after the other, each what the router says now with one change."""

    def opened(*changes: Change) -> Any:
        page = tab(cluster.router.http)
        said, views = view(), []
        for change in changes:
            said["time_s"] += EVERY_S
            change(said)
            views.append(f"data: {json.dumps(said)}\n\n")
        page.route("**/live?*", lambda route: route.fulfill(content_type="text/event-stream", body="".join(views)))
        page.reload()
        return page

    return opened


def gaps(p50: float, p99: float, count: int = 9) -> Change:
    return lambda said: said["lately"]["itl"].update(count=str(count), p50=p50, p99=p99)


def rates(new: float, prompts: float) -> Change:
    return lambda said: said["lately"].update(tokens_per_s=new, prompt_tokens_per_s=prompts)


def blocks(role: str, **different: int) -> Change:
    """Those of the workers of a role; all other workers have as many, and theirs add up."""

    def change(said: dict[str, Any]) -> None:
        for worker in said["status"]["workers"]:
            worker["load"]["blocks"].update(BLOCKS, **(different if worker["info"]["role"] == role else {}))

    return change


def chart(page: Any, title: str) -> Any:
    return page.locator("figure.chart").filter(has=page.get_by_role("heading", name=title, exact=True))


def heights(line: Any) -> list[float]:
    return [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", line.get_attribute("d"))]


def test_the_gap_between_tokens_is_drawn_and_said(fed):
    found = chart(fed(gaps(0.0123, 0.25), gaps(0, 0, count=0), gaps(0.02, 0.5)), "Between tokens")
    expect(found.locator(".key")).to_have_text(["p50 20.0 ms", "p99 500 ms"])
    expect(found.get_by_role("img", name="Between tokens, lately: p50 20.0 ms, p99 500 ms")).to_be_visible()
    expect(found.locator(".grid text")).to_have_text(["0", "250 ms", "500 ms", "60 s ago", "now"])
    p99 = found.locator("path.line-1")
    expect(p99).to_have_attribute("d", re.compile(r"^M[\d. ]+M[\d. ]+$"))  # broken where there was no gap
    grid = [float(line.get_attribute("y1")) for line in found.locator(".grid line").all()]
    assert heights(p99) == grid[1:]
    found.locator("summary").click()
    expect(found.locator("tbody tr")).to_have_text(
        ["now20.0 ms500 ms", "5 s––", "15 s––", "30 s12.3 ms250 ms"]  # noqa: RUF001 (the dash of the page)
    )


def test_tokens_per_second_are_drawn_and_said(fed):
    found = chart(fed(rates(1000, 0), rates(2000, 0), rates(0, 12.4)), "Tokens per second")
    expect(found.locator(".key")).to_have_text(["new 0.0", "prompts 12"])
    expect(found.get_by_role("img", name="Tokens per second, lately: new 0.0, prompts 12")).to_be_visible()
    expect(found.locator(".grid text")).to_have_text(["0", "1,000", "2,000", "60 s ago", "now"])
    new = found.locator("path.line-0")
    expect(new).to_have_attribute("d", re.compile(r"^M[\d. ]+L[\d. ]+L[\d. ]+$"))
    none, half, most = (float(line.get_attribute("y1")) for line in found.locator(".grid line").all())
    assert heights(new) == [half, most, none]
    assert none > half > most  # counted from above
    found.locator("summary").click()
    expect(found.locator("tbody tr")).to_have_text(["now0.012", "5 s2,0000.0", "15 s2,0000.0", "30 s1,0000.0"])


def test_blocks_that_add_up_give_no_warning(fed):
    page = fed(blocks("decode", owned=0), blocks("decode"))
    for role in ("prefill", "decode"):
        expect(page.locator(f".pool.{role} p.right")).to_have_text("1 worker, 5,000 KV blocks: the ledger adds up")
        expect(page.locator(f".pool.{role} .key")).to_have_text(
            ["1 owned", "2 reserved", "3 cached", "4 quarantined", "4,990 free"]
        )
    expect(page.locator(".pool p.warn")).to_have_count(0)


@pytest.mark.parametrize(
    ("role", "different", "found", "other"),
    [("prefill", {"free": 4_989}, "4,999", "decode"), ("decode", {"cached": 4}, "5,001", "prefill")],
    ids=["one lost", "one counted twice"],
)
def test_blocks_that_do_not_add_up_give_one(fed, role, different, found, other):
    page = fed(blocks(role), blocks(role, **different))
    text = f"1 worker, 5,000 KV blocks, but {found} are accounted for"
    expect(page.locator(f".pool.{role} p.warn")).to_have_text(text)
    expect(page.locator(f".pool.{other} p.right")).to_contain_text("adds up")
    expect(page.locator(".pool p.warn")).to_have_count(1)
