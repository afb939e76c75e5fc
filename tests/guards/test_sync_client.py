"""The blocking client equals the one generated from the asyncio client."""

import re
from pathlib import Path

import pytest

from tools.gen_sync_client import CLIENT, FILES, stale

ROOT = Path(__file__).resolve().parents[2]


def test_the_blocking_client_is_fresh():
    assert stale() == [], "run: make fmt"


@pytest.mark.parametrize("made", FILES.values())
def test_nothing_asynchronous_is_left(made: str):
    assert re.findall("async|await", (ROOT / CLIENT / made).read_text(), re.IGNORECASE) == []
