"""The figures that the page draws and adds up, from given views."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.xdist_group("page")
BLOCKS = {"owned": 1, "reserved": 2, "cached": 3, "quarantined": 4, "free": 4_990, "total": 5_000}
WRONG = "InvalidRequest: n"
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


def test_a_clock_that_was_set_back_does_not_stop_a_chart(fed):
    def back(said: dict[str, Any]) -> None:
        said["time_s"] -= 600
        rates(77, 5)(said)

    page = fed(rates(1000, 0), rates(2000, 0), back)
    found = page.locator("figure.chart").filter(has=page.get_by_role("heading", name="Tokens per second", exact=True))
    expect(found.locator(".key")).to_have_text(["output 77", "prompt 5.0"])
    found.locator("summary").click()
    expect(found.locator("tbody tr")).to_have_text(["now775.0"])


def test_blocks_that_add_up_give_no_warning(fed):
    page = fed(blocks("decode", owned=0), blocks("decode"))
    for role in ("prefill", "decode"):
        expect(page.locator(f".pool.{role} p.right")).to_have_text(
            "1 worker, 7 of 5,000 KV blocks used (0 %), all accounted for"
        )
        keys = ["1 owned", "2 reserved", "4 quarantined", "3 cached", "4,990 free"]
        expect(page.locator(f".pool.{role} .key")).to_have_text(keys)
    expect(page.locator(".pool p.warn")).to_have_count(0)


@pytest.mark.parametrize(
    ("role", "different", "found", "other"),
    [("prefill", {"free": 4_989}, "4,999", "decode"), ("decode", {"cached": 4}, "5,001", "prefill")],
    ids=["one lost", "one counted twice"],
)
def test_blocks_that_do_not_add_up_give_one(fed, role, different, found, other):
    page = fed(blocks(role), blocks(role, **different))
    expect(page.locator(f".pool.{role} p.warn")).to_contain_text(f", but {found} accounted for")
    expect(page.locator(f".pool.{other} p.right")).to_contain_text("all accounted for")
    expect(page.locator(".pool p.warn")).to_have_count(1)


def test_each_figure_names_its_window_and_each_state_its_meaning(fed):
    page = fed(blocks("decode", owned=4_000, free=0, cached=994), moved)
    windows = ["now", "last minute", "last minute", "last 5 s", "last minute", "last minute"]
    expect(page.locator(".figure small")).to_have_text(windows)
    expect(page.locator("figure.chart small")).to_have_text(["each point: 5 s"] * 3)
    assert all(len(str(key.get_attribute("title"))) > 12 for key in page.locator("#ledger .key").all())
    expect(page.get_by_text("transferred by shm").first).to_have_attribute("title", "shm: shared memory of this host")
    expect(page.locator(".pool.decode p").first).to_contain_text("4,006 of 5,000 KV blocks used (80 %)")
    states = page.locator(".pool.decode .part").evaluate_all("all => all.map(one => one.className.split(' ')[1])")
    assert states == ["owned", "reserved", "quarantined", "cached", "free"], "used ones first"


def moved(said: dict[str, Any]) -> None:
    for worker in said["status"]["workers"]:
        worker["load"].update(transfer_bytes=str(2**20), transport="shm")


def rejected(at: float, text: str, request_id: str = "", kind: str = "refused") -> dict[str, Any]:
    return {"time_s": at, "kind": kind, "text": text, "request_id": request_id, "worker_id": ""}


def test_rejections_with_one_reason_share_a_line_and_others_stay(fed):
    long_id = "6b09b76eca678c40d3791c306bc739b7"
    page = fed(
        lambda said: said.update(
            happenings=[rejected(1, "InvalidRequest: n (3 times)"), rejected(2, "gone", "", "left")]
        ),
        lambda said: said.update(
            happenings=[rejected(3, WRONG, long_id), rejected(4, "Overloaded: wait 1.5 s", long_id)]
        ),
        lambda said: said.update(
            happenings=[rejected(6, "Overloaded: wait 2 s"), rejected(5, "fault", long_id, "failed")]
        ),
    )
    lines = ["Overloaded: wait 2 s (2 times)", "fault …6bc739b7", f"{WRONG} (4 times)", "gone"]
    expect(page.locator("#happenings .text")).to_have_text(lines)
    expect(page.locator("#happenings li").nth(1)).to_have_attribute("title", f"request {long_id}")


def test_a_router_that_is_back_sends_its_events_again_without_effect(fed):
    """Routers behind one address: each sends all that it keeps to a new watcher."""

    def of(router: str, *events: dict[str, Any]) -> Change:
        return lambda said: (said["status"].update(router_id=router), said.update(happenings=list(events)))  # type: ignore[return-value]

    first = rejected(1, "InvalidRequest: n (3 times)"), rejected(2, "gone", "", "left")
    page = fed(of("router-a", *first), of("router-b", rejected(3, "fault", "x", "failed")), of("router-a", *first))
    expect(page.locator("#happenings li[data-kind=router]")).to_have_count(2)
    expect(page.locator("#happenings li:not([data-kind=router]) .text")).to_have_text(
        ["fault x", "gone", f"{WRONG} (3 times)"]
    )


def test_on_a_phone_the_prompt_comes_after_the_figures_and_on_a_desk_workers_fill_their_row(fed):
    page = fed(lambda said: None)
    width = "all => all.reduce((sum, one) => sum + one.offsetWidth, 0)"
    whole = page.locator("#workers").evaluate("one => one.offsetWidth")
    assert page.locator(".worker").evaluate_all(width) > 0.95 * whole
    panels = page.locator(".halves > .panel")
    assert len(set(panels.evaluate_all("all => all.map(one => one.offsetHeight)"))) == 1
    page.set_viewport_size({"width": 375, "height": 800})
    top = "one => one.getBoundingClientRect().top"
    prompt, flow = page.locator("#prompt").evaluate(top), page.locator("#flow").evaluate(top)
    assert page.locator("#figures").evaluate(top) < prompt < flow


def test_dots_on_the_same_way_lie_apart_and_travel_below_the_boxes(fed):
    def in_transfer(said: dict[str, Any]) -> None:
        one = {"stage": "transfer", "prefill_worker": "prefill-0", "decode_worker": "decode-0", "choice": 0}
        facts = {"prompt_tokens": 1, "tokens": 0, "age_s": 1, "attempt": 1, "deterministic": False}
        said["requests"] = [{"request_id": f"r{number}", **one, **facts} for number in range(12)]

    page = fed(in_transfer, in_transfer)
    expect(page.locator("circle.dot.transfer")).to_have_count(12)
    places = page.locator("circle.dot").evaluate_all("all => all.map(one => one.style.transform)")
    assert len(set(places)) == 12
    order = page.locator("#flow svg > g").evaluate_all("all => all.map(one => one.querySelector('rect') !== null)")
    assert order == [False, False, True, False], "links, travelling dots, boxes, resting dots"
    boxes = [box.bounding_box() for box in page.locator("#flow rect").all()]
    page.wait_for_function("() => document.getAnimations().length === 0")
    for dot in page.locator("circle.dot").all():
        at = dot.bounding_box()
        assert not any(
            at["x"] < box["x"] + box["width"] and box["x"] < at["x"] + at["width"]
            and at["y"] < box["y"] + box["height"] and box["y"] < at["y"] + at["height"]
            for box in boxes
        )  # fmt: skip
