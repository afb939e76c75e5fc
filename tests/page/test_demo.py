"""What a newcomer sees: `baton demo --stay`, the page that it names, requests there, and Ctrl-C."""

from __future__ import annotations

import re
import signal

import pytest
from playwright.sync_api import expect

pytestmark = [pytest.mark.xdist_group("page"), pytest.mark.timeout(180)]
SAID = "the live page: http://"
MORE = re.compile(r"\b([5-9]|\d\d+) finished")  # than the two prompts that it sends before it names the page
UP_OR_DOWN = re.compile(r" ([\d.]+)L[\d.]+ (?!\1([LM]|$))")  # two different values after each other
SOON_MS = 60_000


def test_requests_flow_on_its_page_until_it_is_told_to_stop(tab, home):
    demo = home.start("demo", "-c", "configs/no-ray.yaml", "--stay")
    assert demo.stdout is not None
    try:
        said = []
        for line in demo.stdout:
            said.append(line)
            if line.startswith(SAID):
                break
        assert "can vary widely" in "".join(said), said
        page = tab(said[-1].removeprefix(SAID).partition("/")[0])
        expect(page.locator("#flow-text")).to_have_text(re.compile(r"\d in (prefill|decode)"), timeout=SOON_MS)
        expect(page.locator("circle.dot.decode").first).to_be_attached(timeout=SOON_MS)
        expect(page.locator("#figures")).to_contain_text(MORE, timeout=SOON_MS)
        expect(page.locator(".pool p.right")).to_have_count(2, timeout=SOON_MS)
        for drawn in page.locator("figure.chart path.line-0").all():
            expect(drawn).to_have_attribute("d", re.compile("L"), timeout=SOON_MS)
        expect(drawn).to_have_attribute("d", UP_OR_DOWN, timeout=SOON_MS)  # the last: tokens per second
        demo.send_signal(signal.SIGINT)
        expect(page.locator("#status")).to_contain_text("router gone", timeout=SOON_MS)
        rest, _ = demo.communicate(timeout=60)
    finally:
        demo.kill()
        demo.wait()
    assert demo.returncode == 0, rest
