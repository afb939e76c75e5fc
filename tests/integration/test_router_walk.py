"""The number of the router's files that a plain `Generate` enters, which its readers must open."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import FrameType

import router

MOST = 24
ROUTER = str(Path(router.__file__).parent) + "/"
BACKGROUND = {"health", "live", "worker pool"}  # tasks of the router that run without a request


def entered_file(frame: FrameType) -> str | None:
    """Return the router file of a call, or None for background tasks and code outside of the router."""
    path = frame.f_code.co_filename
    if not path.startswith(ROUTER):
        return None
    task = asyncio.current_task()
    return None if task is not None and task.get_name() in BACKGROUND else path.removeprefix(ROUTER)


async def test_a_generate_enters_few_files(cluster):
    await cluster.generate()  # the first one fills caches
    entered = set[str]()

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (path := entered_file(frame)) is not None:
            entered.add(path)

    sys.setprofile(profile)
    try:
        events = await cluster.generate()
        await cluster.nothing_is_left()
    finally:
        sys.setprofile(None)
    assert events[-1].HasField("completed")
    assert {"service.py", "request/lifecycle.py", "admission/admission.py", "workers/stream.py"} <= entered
    assert len(entered) <= MOST, f"{len(entered)} files, at most {MOST}: {', '.join(sorted(entered))}"
