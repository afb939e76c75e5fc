"""Take the pictures of the live page, in both themes, and of `baton top`: a small cluster under load.

    python -m tools.screenshots [--out docs/images] [--seconds 60] [--widths 1280]

Starts 1 prefill and 2 decode workers on this machine under load, kills a worker, and takes the pictures.
Needs Chromium, see `tools/browser.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from baton.cli.inspect.top.app import Top
from baton.cli.inspect.top.feed import Feed
from baton.cli.target import Admins
from baton.cluster.state_dir import ClusterState, StateFolder
from tools.browser import chromium, executable

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).resolve().parent.parent
CONFIG = "configs/no-ray.yaml"
NAME = "no-ray"
SETS = (
    "decode.replicas=2",
    "router.local_prefill=never",
    *(f"router.{listener}=127.0.0.1:0" for listener in ("grpc", "admin", "metrics", "http")),
)
LOAD = ("--prompt-tokens", "512", "--max-tokens", "128", "--requests", "100000")
HEIGHT, COLOURS = 1000, 256
FONTS = re.compile(r"@font-face \{.*?\}", re.DOTALL)  # of another host; a monospace font of the reader will do
TERMINAL, TERMINAL_S = (140, 32), 20.0  # columns and lines; time for the charts
THEMES = ("light", "dark")
VICTIM, BUSY = "decode-1", re.compile(r"[3-9] running")
ON_ITS_WAY = "circle.dot.prefill, circle.dot.transfer, circle.dot.commit"


@contextmanager
def cluster(concurrency: int) -> Iterator[ClusterState]:
    """Run a cluster under load."""
    with tempfile.TemporaryDirectory(prefix="baton-pictures-") as home:
        sets = [part for item in SETS for part in ("--set", item)]
        run(home, "up", "-c", CONFIG, *sets, "--detach")
        load = start(home, "bench", "--name", NAME, "--concurrency", str(concurrency), *LOAD)
        try:
            state = StateFolder(NAME, Path(home)).read_state()
            assert state is not None
            yield state
        finally:
            load.terminate()
            load.wait()
            run(home, "down", "--name", NAME)


def start(home: str, *args: str) -> subprocess.Popen[bytes]:
    """Start `baton ARGS` with a temporary state folder."""
    command, env = [sys.executable, "-m", "baton", *args], {**os.environ, "BATON_HOME": home}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def run(home: str, *args: str) -> None:
    """Run `baton ARGS`. Raises SystemExit if it fails."""
    if code := start(home, *args).wait():
        raise SystemExit(f"baton {' '.join(args)} ended with {code}")


def opened(browser: Browser, address: str, theme: str, width: int) -> Page:
    """Open the page in one theme."""
    page: Page = browser.new_page(viewport={"width": width, "height": HEIGHT})
    page.emulate_media(color_scheme="dark" if theme == "dark" else "light")
    page.on("pageerror", lambda error: print(theme, error))
    page.goto(f"http://{address}/")
    page.get_by_text("all accounted for").first.wait_for()
    return page


def shoot(page: Page, file: Path) -> None:
    """Take a picture with one answered prompt and a request in progress. The palette saves two thirds of the bytes."""
    page.bring_to_front()  # a hidden page renders rarely and shows an answer's tokens in one go
    page.wait_for_timeout(3000)
    page.get_by_role("button", name="Send").click()
    page.locator("#timeline").wait_for()
    page.wait_for_timeout(1500)
    page.locator(ON_ITS_WAY).first.wait_for(state="attached", timeout=60_000)
    with Image.open(io.BytesIO(page.screenshot(full_page=True))) as picture:
        picture.convert("RGB").quantize(COLOURS, kmeans=2, dither=Image.Dither.NONE).save(file, optimize=True)
    print(f"{file}: {file.stat().st_size / 1000:.0f} kB")


async def terminal(admin: str) -> str:
    """Return a picture of `baton top` with the router at this admin address, as SVG."""
    app = Top(Feed(lambda: Admins([admin]), 0.5))
    async with app.run_test(size=TERMINAL):
        await asyncio.sleep(TERMINAL_S)
        return FONTS.sub("", app.export_screenshot())


def main() -> int:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--seconds", type=float, default=60.0, help="of load before the pictures")
    parser.add_argument("--concurrency", type=int, default=12)
    parser.add_argument("--widths", type=int, nargs="+", default=[1280])
    options = parser.parse_args()
    path = executable()
    if path is None:
        print("no Chromium here; name one in BATON_CHROMIUM", file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    shots = list(product(THEMES, options.widths))
    with cluster(options.concurrency) as state, ThreadPoolExecutor(1) as other, chromium(path) as browser:
        pages = [opened(browser, state.http, *shot) for shot in shots]
        pages[0].wait_for_timeout(options.seconds * 500)
        pages[0].get_by_role("article", name=VICTIM).get_by_text(BUSY).wait_for()
        os.kill(state.processes[VICTIM].pid, signal.SIGKILL)
        pages[0].get_by_role("article", name=VICTIM).get_by_text("connected").wait_for(state="hidden", timeout=120_000)
        pages[0].get_by_role("article", name=VICTIM).get_by_text("connected").wait_for(timeout=120_000)
        pages[0].wait_for_timeout(options.seconds * 500)
        for page, (theme, width) in zip(pages, shots, strict=True):
            suffix = f"-{width}" if options.widths[1:] else ""
            shoot(page, options.out / f"page-{theme}{suffix}.png")
        # Playwright's event loop runs in this thread.
        (options.out / "top.svg").write_text(other.submit(asyncio.run, terminal(state.admin)).result())
    return 0


if __name__ == "__main__":
    sys.exit(main())
