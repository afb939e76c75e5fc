"""Tests on hosts of their own, one after the other; skipped with the reason where there can be none."""

import pytest

from tests.netns import hosts


@pytest.fixture(scope="session", autouse=True)
def possible():
    if reason := hosts.why_not():
        pytest.skip(reason)
