"""Tests on separate hosts. They are skipped with the reason if hosts are impossible."""

import pytest

from tests.netns import hosts


@pytest.fixture(scope="session", autouse=True)
def possible():
    if reason := hosts.why_not():
        pytest.skip(reason)
