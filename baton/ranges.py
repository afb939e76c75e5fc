"""What numbers a request may hold: the one table of bounds, both ends included."""

from __future__ import annotations

import math

MAX_LOGPROBS = 20

SAMPLING: tuple[tuple[str, float, float, str], ...] = (
    ("max_tokens", 1, 2**31 - 1, "at least 1"),
    ("min_tokens", 0, 2**31 - 1, "at least 0"),
    ("temperature", 0.0, 100.0, "between 0 and 100"),
    ("top_p", math.ulp(0.0), 1.0, "above 0 and at most 1"),
    ("top_k", 0, 2**31 - 1, "at least 0 (0: off)"),
    ("min_p", 0.0, 1.0, "between 0 and 1"),
    ("seed", 0, 2**64 - 1, "between 0 and 2^64-1"),
    ("repetition_penalty", math.ulp(0.0), 100.0, "above 0 and at most 100"),
    ("presence_penalty", -2.0, 2.0, "between -2 and 2"),
    ("frequency_penalty", -2.0, 2.0, "between -2 and 2"),
    ("logprobs", 0, MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}"),
)
