"""The pictures of the live page in the README: a small cluster under load, in both themes.

    python -m tools.screenshots [--out docs/images] [--seconds 45] [--widths 1280]

Starts 1 prefill and 2 decode workers on this machine, keeps requests under way, kills a worker, and takes a picture in
each theme. Needs Chromium, see `tools/browser.py`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from baton.cluster.state import StateFolder
from tools.browser import chromium, executable

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).resolve().parent.parent
CONFIG = "configs/no-ray.yaml"
NAME = "no-ray"
SETS = ("decode.replicas=2", *(f"router.{listener}=127.0.0.1:0" for listener in ("grpc", "admin", "metrics", "http")))
LOAD = ("--prompt-tokens", "512", "--max-tokens", "128", "--requests", "100000")
HEIGHT = 1000


def baton(home: str, *args: str) -> list[str]:
    """The command line in a state folder of our own."""
    os.environ["BATON_HOME"] = home
    return [sys.executable, "-m", "baton", *args]


@contextmanager
def cluster(concurrency: int) -> Iterator[str]:
    """Its HTTP address, under load."""
    with tempfile.TemporaryDirectory(prefix="baton-pictures-") as home:
        sets = [part for item in SETS for part in ("--set", item)]
        subprocess.run(
            baton(home, "up", "-c", CONFIG, *sets, "--detach"), cwd=ROOT, check=True, stdout=subprocess.DEVNULL
        )
        command = baton(home, "bench", "--name", NAME, "--concurrency", str(concurrency), *LOAD)
        load = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            state = StateFolder(NAME, Path(home)).read_state()
            assert state is not None
            yield state.http
        finally:
            load.terminate()
            load.wait()
            subprocess.run(baton(home, "down", "--name", NAME), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def opened(browser: Browser, address: str, theme: str, width: int) -> Page:
    """The page in one theme, with a prompt answered."""
    page = browser.new_page(
        viewport={"width": width, "height": HEIGHT}, color_scheme="dark" if theme == "dark" else "light"
    )
    page.on("console", lambda message: print(theme, message.text))
    page.on("pageerror", lambda error: print(theme, error))
    page.goto(f"http://{address}/")
    page.get_by_text("the ledger adds up").first.wait_for()
    page.get_by_role("button", name="Send").click()
    page.locator("#timeline").wait_for()
    return page


def main() -> int:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--seconds", type=float, default=45.0, help="of load before the pictures")
    parser.add_argument("--concurrency", type=int, default=12)
    parser.add_argument("--widths", type=int, nargs="+", default=[1280])
    options = parser.parse_args()
    path = executable()
    if path is None:
        print("no Chromium here; name one in BATON_CHROMIUM", file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    with cluster(options.concurrency) as address, chromium(path) as browser:
        pages = {
            (theme, width): opened(browser, address, theme, width)
            for theme in ("light", "dark")
            for width in options.widths
        }
        next(iter(pages.values())).wait_for_timeout(options.seconds * 1000)
        for (theme, width), page in pages.items():
            suffix = "" if len(options.widths) == 1 else f"-{width}"
            file = options.out / f"page-{theme}{suffix}.png"
            page.screenshot(path=file, full_page=True)
            print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
