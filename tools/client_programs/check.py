"""Checks of a client's program: each prints one line of JSON, and a failed one stops no other."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

BASE, MODEL = sys.argv[1], sys.argv[2]  # such as http://127.0.0.1:8000, demo
V1, KEY = f"{BASE}/v1", "none"
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def check(name: str) -> Callable[[Callable[[], object]], None]:
    """Run the decorated function. It raises, or returns a value that is false, if the client does not work."""

    def run(function: Callable[[], object]) -> None:
        try:
            result, reason = function(), ""
        except Exception as error:
            result, reason = None, f"{type(error).__name__}: {error}"
        ok = bool(result)
        print(json.dumps({"check": name, "ok": ok, "reason": "" if ok else reason or f"got {result!r}"}), flush=True)

    return run
