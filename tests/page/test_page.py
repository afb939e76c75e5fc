"""The live page in a browser, with a router whose scripted workers hold any state, and during failures."""

import json
import re
import threading
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from baton.tokenizer import OracleTokenizer
from router.server import serve
from tests.integration.access_support import TOKENS, WRONG_TOKEN, token_file
from tests.integration.gateway_support import alone
from tests.support.in_process_router import at
from tests.support.time_factor import scaled

pytestmark = pytest.mark.xdist_group("page")
CONTRAST = (Path(__file__).parent / "contrast.js").read_text()
SETTLED = "Promise.allSettled(document.getAnimations().map((one) => one.finished)).then((all) => all.length)"
STAGES = {"queued": "queue", "prefilling": "prefill", "transferring": "transfer", "decoding": "decode"}


def test_it_shows_the_workers_and_that_their_blocks_add_up(page, cluster):
    for worker in cluster.workers:
        card = page.get_by_role("article", name=f"{worker.role} worker {worker.info.ref.worker_id}")
        expect(card).to_contain_text("connected")
    expect(page.locator(".pool p.right")).to_have_count(2)
    expect(page.locator("#happenings")).to_contain_text("a prefill worker joined prefill-0")
    assert page.title() == "test: 0 running"


@pytest.mark.sample(2)
@pytest.mark.parametrize("state", STAGES)
def test_a_request_is_drawn_where_it_is(tab, build, beside, state):
    cluster = build(blocks=1) if state == "queued" else build()
    page = tab(cluster.router.http)
    call = beside.run(at(cluster, state))
    stage = STAGES[state]
    expect(page.locator("#flow-text")).to_contain_text(f"1 in {stage}")
    expect(page.locator(f"circle.dot.{stage}")).to_have_count(1)
    page.locator("#requests summary").click()
    expect(page.locator("#requests tbody tr").filter(has_text=stage)).to_have_count(1)
    beside.soon(call.cancel)
    beside.release(cluster.workers)
    expect(page.locator("#flow-text")).to_have_text("no requests in progress")
    expect(page.locator("circle.dot")).to_have_count(0)


def test_workers_that_compute_prompts_themselves_are_next_to_the_router(tab, build, beside):
    cluster = build(prefill=0, decode=2, colocated=True)
    page = tab(cluster.router.http)
    expect(page.locator("g.links path")).to_have_count(2)
    for worker in cluster.decode:
        worker.gates["first"].clear()
    call = beside.run(begun(cluster))
    expect(page.locator("circle.dot.prefill")).to_have_count(1)
    beside.soon(call.cancel)
    expect(page.locator("circle.dot")).to_have_count(0)


async def begun(cluster):
    return cluster.call()


def test_a_prompt_is_answered_as_it_comes_and_its_time_is_drawn(page, cluster, beside):
    for worker in cluster.decode:
        worker.hold_at = 3
        beside.soon(worker.gates["hold"].clear)
    page.get_by_label("Prompt", exact=True).fill("hello")
    page.get_by_label("Max tokens").fill("6")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#answer")).to_contain_text("<2>")
    expect(page.locator("#answer")).to_have_attribute("aria-busy", "true")
    expect(page.locator("#timeline")).to_be_hidden()
    for worker in cluster.decode:
        beside.soon(worker.gates["hold"].set)
    expect(page.locator("#answer-note")).to_contain_text("6 tokens in")
    expect(page.locator("#answer")).to_have_text("".join(f"<{index}>" for index in range(6)) + "!")
    expect(page.locator("#timeline")).to_contain_text("from the router's trace")
    expect(page.locator("#timeline .span.router").first).to_be_visible()
    page.locator("#timeline summary").click()
    for stage in ("queue", "prefill", "decode"):
        expect(page.locator("#timeline tbody tr").filter(has_text=f"router{stage}")).to_have_count(1)
    expect(page.locator("#figures")).to_contain_text("1 finished")
    expect(page.get_by_role("img", name="Time to first token, latest: p50").first).to_be_visible()


def test_a_prompt_can_be_stopped_and_a_refusal_is_shown(page, cluster, beside):
    for worker in cluster.decode:
        beside.soon(worker.gates["decode"].clear)
    page.get_by_role("button", name="Send").click()
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#answer-note")).to_have_text("stopped")
    page.get_by_label("Max tokens").fill("4000")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#answer-note")).to_contain_text("rejected: ")
    expect(page.get_by_role("button", name="Send")).to_be_enabled()


def test_with_the_keyboard_alone(page):
    seen = []
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.locator("#theme")).to_be_focused()
    page.keyboard.press("Space")
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    for _ in range(30):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.parentElement.id"))
        outline = page.evaluate("getComputedStyle(document.activeElement).outline")
        assert "solid 2px" in outline, f"the focus on {seen[-1]} cannot be seen: {outline}"
        if seen[-1] == "prompt-text":
            break
    assert {"requests", "prompt-text"} <= set(seen)
    page.keyboard.press("Control+Enter")
    expect(page.locator("#answer-note")).to_contain_text("tokens in")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read(tab, cluster, scheme):
    page = tab(cluster.router.http, color_scheme=scheme)
    expect(page.locator("#happenings")).to_contain_text("joined")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#timeline")).to_be_visible()
    for summary in page.locator("summary").all():
        summary.click()
    page.evaluate(SETTLED)  # not wait_for_function: it evaluates a string, which the page's policy forbids
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(244, 245, 242)" if scheme == "light" else "rgb(15, 21, 19)")
    found = page.evaluate(CONTRAST)
    assert found["seen"] > 60
    assert found["low"] == []
    page.evaluate("document.body.dataset.state = 'lost'")
    assert page.evaluate(CONTRAST)["low"] == []


def test_the_theme_can_be_chosen_and_is_kept(page):
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.locator("#theme").click()
    assert page.evaluate(background) == light
    page.locator("#theme").click()
    assert page.evaluate(background) != light
    page.reload()
    expect(page.locator("#theme")).to_have_text("Theme: dark")
    assert page.evaluate(background) != light


@pytest.mark.sample(1)
@pytest.mark.parametrize("width", [360, 768, 1600])
def test_nothing_is_wider_than_the_window(tab, cluster, beside, width):
    page = tab(cluster.router.http, viewport={"width": width, "height": 800})
    expect(page.locator("#status")).to_have_text("live")
    beside.run(at(cluster, "decoding"))
    expect(page.locator("#flow-text")).to_contain_text("1 in decode")
    page.get_by_role("button", name="Send").click()
    page.locator("#requests summary").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_nothing_moves_for_who_wants_no_motion(tab, cluster, beside):
    page = tab(cluster.router.http, reduced_motion="reduce")
    beside.run(at(cluster, "decoding"))
    expect(page.locator("circle.dot.decode")).to_have_count(1)
    assert page.evaluate("document.getAnimations().length") == 0


def test_a_router_that_goes_away_and_comes_back(page, cluster, beside):
    address = cluster.router.http
    beside.run(cluster.router.stop(grace_s=0))
    expect(page.locator("#status")).to_contain_text("disconnected")
    expect(page.locator("#status")).to_contain_text("reconnecting in")

    async def again():
        cluster.router = await serve(replace(cluster.settings, http=address), cluster.source, OracleTokenizer())

    beside.run(again())
    expect(page.locator("#status")).to_have_text("live")
    expect(page.locator("#happenings")).to_contain_text("another router")


def test_a_lost_worker_and_where_its_request_went_on(tab, build, beside):
    cluster = build(decode=2)
    page = tab(cluster.router.http)
    beside.run(at(cluster, "prefilling"))
    expect(page.locator("#flow-text")).to_contain_text("1 in prefill")
    lost = next(worker for worker in cluster.decode if worker.count("reserve"))
    beside.run(lost.kill())
    name = lost.info.ref.worker_id
    expect(page.locator("#happenings li[data-kind=left]")).to_contain_text(name)
    expect(page.locator("#happenings li[data-kind=recovered]")).to_contain_text(name)
    expect(page.get_by_role("article", name=f"decode worker {name}")).to_contain_text("lost")
    expect(page.locator("#figures")).to_contain_text("1 recovered")


def test_an_admin_s_token_is_asked_for_and_kept_in_this_tab_only(tab, build, tmp_path):
    cluster = build(tokens=token_file(tmp_path / "tokens"))
    page = tab(cluster.router.http)
    expect(page.locator("#status")).to_have_text("token required")
    expect(page.get_by_label("Token", exact=True)).to_be_focused()
    refused = dict.fromkeys(("a \u2713", "schl\u00fcssel"), "ASCII characters only")  # no header can carry them
    refused |= {WRONG_TOKEN: "Unknown token", TOKENS["alice"]: "requires a token with role admin"}
    for token, why in refused.items():
        page.keyboard.type(token)
        page.keyboard.press("Enter")
        expect(page.locator("#sign-in-why")).to_contain_text(why)
        expect(page.get_by_label("Token", exact=True)).to_be_focused()
        expect(page.get_by_label("Token", exact=True)).to_have_value("")
        expect(page.locator("#status")).to_have_text("token required")
    page.keyboard.type(TOKENS["admin"])
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_have_text("live")
    expect(page.locator("#sign-in")).to_be_hidden()
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#answer-note")).to_contain_text("tokens in")
    assert TOKENS["admin"] not in json.dumps(page.evaluate("[document.cookie, {...localStorage}, location.href]"))
    assert TOKENS["admin"] not in page.content()
    other = page.context.new_page()
    other.goto(page.url)
    expect(other.locator("#status")).to_have_text("token required")


def test_a_gateway_alone_says_so_and_still_answers(tab, beside):
    async def started():
        held = alone()
        return held, await held.__aenter__()

    held, gateway = beside.run(started())
    try:
        page = tab(gateway.address)
        expect(page.locator("#status")).to_contain_text("this gateway has no router in its process")
        expect(page.locator("#figures")).to_be_hidden()
        page.get_by_role("button", name="Send").click()
        expect(page.locator("#answer")).to_have_text("dog cat")
        page.close()
    finally:
        beside.run(held.__aexit__(None, None, None))


EVIL = "<img src=x onerror=alert(1)>"
NAMES = r'("(?:name|model|router_id|text|note|request_id|worker_id|prefill_worker|decode_worker)": )"[^"]*"'


def test_names_are_text_and_nothing_else(fed, cluster, beside):
    """The names of workers, models and errors are never parsed as HTML."""
    beside.run(at(cluster, "decoding"))
    page = fed(lambda said: said.update(json.loads(re.sub(NAMES, rf'\1"{EVIL}"', json.dumps(said)))))
    expect(page.locator("#name")).to_have_text(EVIL)
    expect(page.locator("article h3").first).to_have_text(EVIL)
    expect(page.locator("img")).to_have_count(1)


# --- failures


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
        thawed.wait(scaled(20))

    beside.soon(freeze)
    try:
        assert frozen.wait(scaled(10))
        page.clock.fast_forward(6_000)
        expect(page.locator("#status")).to_contain_text("disconnected: no data received; reconnecting in")
    finally:
        thawed.set()
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
