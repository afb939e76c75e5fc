"""The live page during failures."""

import threading
from copy import deepcopy
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.integration.access_support import TOKENS, token_file
from tests.support.in_process_router import at

pytestmark = pytest.mark.xdist_group("page")
BLOCKED = """for (const name of ["sessionStorage", "localStorage"])
  Object.defineProperty(window, name, { get() { throw new DOMException("blocked", "SecurityError"); } });"""
HIDDEN = """() => {
  Object.defineProperty(document, "hidden", { get: () => true });
  const animate = Element.prototype.animate;
  window.moves = 0;
  Element.prototype.animate = function (...given) { window.moves += 1; return animate.apply(this, given); };
}"""


def test_a_router_that_is_frozen_is_given_up_and_asked_again(page, beside):
    page.clock.install()
    page.reload()
    expect(page.locator("#status")).to_have_text("live")
    frozen, thawed = threading.Event(), threading.Event()

    def freeze():
        frozen.set()
        thawed.wait(20)

    beside.soon(freeze)
    try:
        assert frozen.wait(10)
        page.clock.fast_forward(6_000)
        expect(page.locator("#status")).to_contain_text("disconnected: no data received; reconnecting in")
    finally:
        thawed.set()
    expect(page.locator("#status")).to_have_text("live")


def test_a_token_that_no_header_can_carry_is_refused_by_the_page(tab, build, tmp_path):
    page = tab(build(tokens=token_file(tmp_path / "tokens")).router.http)
    field = page.get_by_label("Token", exact=True)
    for token in ("a \u2713", "schl\u00fcssel"):
        expect(page.locator("#status")).to_have_text("token required")
        field.fill(token)
        field.press("Enter")
        expect(page.locator("#sign-in-why")).to_contain_text("ASCII characters only")
        expect(field).to_be_focused()
    field.fill(TOKENS["admin"])
    field.press("Enter")
    expect(page.locator("#status")).to_have_text("live")


def test_where_storage_is_switched_off_the_token_is_kept_with_the_page(tab, build, tmp_path):
    page = tab(build(tokens=token_file(tmp_path / "tokens")).router.http)
    page.add_init_script(BLOCKED)
    page.reload()
    expect(page.locator("#status")).to_have_text("token required")
    page.get_by_label("Token", exact=True).fill(TOKENS["admin"])
    page.get_by_label("Token", exact=True).press("Enter")
    expect(page.locator("#status")).to_have_text("live")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#answer-note")).to_contain_text("tokens in")


def test_in_a_hidden_tab_nothing_moves_and_no_dot_is_left(page, cluster, beside):
    page.evaluate(HIDDEN)
    call = beside.run(at(cluster, "decoding"))
    expect(page.locator("circle.dot.decode")).to_have_count(1)
    beside.soon(call.cancel)
    beside.release(cluster.workers)
    expect(page.locator("circle.dot")).to_have_count(0)
    assert page.evaluate("moves") == 0


def of_eight(worker: dict[str, Any]) -> list[dict[str, Any]]:
    made = [deepcopy(worker) for _ in range(8)]
    for number, one in enumerate(made):
        one["info"]["ref"]["worker_id"] = f"{one['info']['role']}-{number}"
    return made


def crowded(said: dict[str, Any]) -> None:
    said["status"]["workers"] = [one for worker in said["status"]["workers"] for one in of_eight(worker)]
    common = {"choice": 0, "prefill_worker": "prefill-7", "decode_worker": "decode-6", "prompt_tokens": 9, "tokens": 0}
    common |= {"age_s": 1.0, "attempt": 1, "deterministic": False}
    stages = ("prefill", "prefill", "decode")
    said["requests"] = [{**common, "request_id": f"r{n}", "stage": stage} for n, stage in enumerate(stages)]


def test_the_workers_that_share_the_last_box_are_counted_by_role(fed):
    page = fed(crowded)
    expect(page.locator("g.prefill text", has_text="3 others")).to_have_count(1)
    expect(page.locator("g.prefill .number")).to_have_text(["0"] * 5 + ["2"])
    expect(page.locator("g.decode .number")).to_have_text(["0"] * 5 + ["1"])
