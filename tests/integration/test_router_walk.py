"""The number of the router's files that a plain `Generate` enters, which its readers must open."""

import asyncio
import sys
from pathlib import Path
from types import FrameType

import router

MOST = 24
ROUTER = str(Path(router.__file__).parent) + "/"
BACKGROUND = {"health", "live", "worker pool"}  # tasks of the router that run without a request


async def test_a_generate_enters_few_files(cluster):
    await cluster.generate()  # the first one fills caches
    entered = set[str]()

    def profile(frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(ROUTER):
            task = asyncio.current_task()
            if task is None or task.get_name() not in BACKGROUND:
                entered.add(path.removeprefix(ROUTER))

    sys.setprofile(profile)
    try:
        events = await cluster.generate()
        await cluster.nothing_is_left()
    finally:
        sys.setprofile(None)
    assert events[-1].HasField("completed")
    assert {"service.py", "request/lifecycle.py", "admission/admission.py", "workers/stream.py"} <= entered
    assert len(entered) <= MOST, f"{len(entered)} files, at most {MOST}: {', '.join(sorted(entered))}"
