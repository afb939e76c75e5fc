"""A newcomer's first steps: `baton demo` on a terminal, its page with requests, and Ctrl-C."""

import json
import signal
import urllib.request

import pytest

from tests.support.time_factor import scaled

pytestmark = pytest.mark.slow

ENOUGH = 5  # requests in addition to the two prompts


def finished_of(address: str):
    """Yield the number of ended requests at each event of the page's source."""
    with urllib.request.urlopen(f"{address}live?interval_s=0.1", timeout=scaled(30)) as stream:
        for line in stream:
            if line.startswith(b"data:"):
                yield int(json.loads(line[5:])["status"]["finished"])


def test_requests_flow_on_its_page_until_it_is_told_to_stop(home):
    demo = home.start("demo", "-c", "configs/no-ray.yaml", "--stay")
    said = []
    for line in iter(demo.stdout.readline, ""):
        said.append(line)
        if line.startswith("the live page: "):
            break
    assert "can vary widely" in "".join(said), said
    address = said[-1].split()[3]
    with urllib.request.urlopen(address, timeout=scaled(30)) as page:
        assert b"<title>" in page.read()
    assert any(count >= 2 + ENOUGH for count in finished_of(address))
    demo.send_signal(signal.SIGINT)
    rest, _ = demo.communicate(timeout=scaled(60))
    assert demo.returncode == 0, rest


@pytest.mark.xdist_group("ray")
def test_ray_has_nothing_to_say_at_its_end(home):
    demo = home.start("demo")
    said, _ = demo.communicate(timeout=scaled(120))
    assert demo.returncode == 0, said
    assert "can vary widely" in said
    assert "raylet" not in said
