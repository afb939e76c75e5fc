"""The system's Chromium, headless and without background traffic, for tests and pictures of the page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome")
_ARGUMENTS = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def executable() -> str | None:
    """Return the path of `$BATON_CHROMIUM` or of a Chromium in PATH, or None."""
    return os.environ.get("BATON_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def chromium(path: str) -> Iterator[Browser]:
    """Run a browser until the context ends."""
    from playwright.sync_api import sync_playwright

    root = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's sandbox does not support root
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, headless=True, args=[*_ARGUMENTS, *root])
        try:
            yield browser
        finally:
            browser.close()
