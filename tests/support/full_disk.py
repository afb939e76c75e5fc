"""Private files of a cluster that cannot be written, because the disk is full."""

import os

import pytest


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let writes of state files fail with ENOSPC, as /dev/full does, until the patch is undone."""
    real = os.open

    def full(path, flags, *mode):
        return real("/dev/full", os.O_WRONLY) if str(path).endswith(".new") else real(path, flags, *mode)

    monkeypatch.setattr(os, "open", full)
