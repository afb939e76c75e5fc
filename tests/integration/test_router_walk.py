"""The files of the router that one plain `Generate` enters: a reader of its way through the router opens no more."""

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
    """The file of a call by the request, relative to the router's folder."""
    path = frame.f_code.co_filename
    if not path.startswith(ROUTER):
        return None
    task = asyncio.current_task()
    return None if task is not None and task.get_name() in BACKGROUND else path.removeprefix(ROUTER)


async def test_a_generate_enters_few_files(cluster):
    await cluster.generate()  # a first one loads and caches what later ones find
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
