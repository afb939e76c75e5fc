"""A headless Chromium for tests and pictures of the page: the one that the system has, told to talk to nobody else."""

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
    """The path of `$BATON_CHROMIUM`, or of what PATH has; None: there is none."""
    return os.environ.get("BATON_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def chromium(path: str) -> Iterator[Browser]:
    """Runs until the context is left."""
    from playwright.sync_api import sync_playwright

    root = ["--no-sandbox"] if os.geteuid() == 0 else []  # its sandbox is not for root
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, headless=True, args=[*_ARGUMENTS, *root])
        try:
            yield browser
        finally:
            browser.close()
