"""Text that every Python installation has: its language reference, and the sources of its standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

LEFT_OUT = ("test", "tests", "idle_test", "site-packages", "lib2to3", "encodings", "__pycache__")
HELD_OUT = 20  # every 20th document is not trained on
LARGEST = 120_000  # characters; longer files are mostly tables


def documents() -> tuple[list[str], list[str]]:
    """Return documents to train on, and those held out. The order is constant for one version of Python."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if not {*path.relative_to(root).parts} & {*LEFT_OUT})
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    texts += [topics[name] for name in sorted(topics)]
    kept = [text for text in texts if 1_000 < len(text) < LARGEST]
    return [text for i, text in enumerate(kept) if i % HELD_OUT], kept[::HELD_OUT]
