"""The newcomer's path: a cluster as `baton up` starts it, and the page at the address that it prints."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

pytestmark = [pytest.mark.xdist_group("page"), pytest.mark.timeout(120)]


def test_open_the_page_see_a_request_flow(tab, home):
    with home.cluster("configs/no-ray.yaml") as cluster:
        page = tab(cluster.state().http)
        for role in ("prefill", "decode"):
            expect(page.get_by_role("article", name=f"{role} worker {role}-0")).to_contain_text("connected")
        expect(page.locator(".pool p.right")).to_have_count(2)
        expect(page.locator("#happenings")).to_contain_text("the cluster file says so")
        page.get_by_role("button", name="Send").click()
        expect(page.locator("#answer")).to_contain_text("doll", timeout=30_000)
        expect(page.locator("#answer-note")).to_contain_text("tokens in")
        expect(page.locator("#timeline .span").first).to_be_visible()
        expect(page.locator("#figures")).to_contain_text("1 finished")
        expect(page.get_by_role("img", name="First token, lately: p50").first).to_be_visible()
        for line in page.locator("figure.chart path.line-0").all():
            expect(line).to_have_attribute("d", re.compile("^M"))  # a value, of each chart
