"""When the silence of a worker ends its stream."""

import asyncio

import pytest

from router.workers.stream_timers import silence
from tests.simulation.clock import START
from tests.unit.router.fakes import virtual


def now() -> float:
    return asyncio.get_running_loop().time() - START


@virtual
async def test_the_block_ends_so_long_after_the_last_message():
    async def speak_once() -> None:
        async with silence(10.0) as heard:
            await asyncio.sleep(7.0)
            heard()
            await asyncio.sleep(60.0)

    with pytest.raises(TimeoutError):
        await speak_once()
    assert now() == pytest.approx(17.0)


@virtual
async def test_a_timer_that_a_pause_of_the_process_held_up_starts_once_more():
    loop = asyncio.get_running_loop()

    def pause() -> None:
        loop.now += 30.0  # type: ignore[attr-defined]

    loop.call_later(5.0, pause)
    with pytest.raises(TimeoutError):
        async with silence(10.0):
            await asyncio.sleep(1000.0)
    assert now() == pytest.approx(45.0)


@virtual
async def test_messages_that_waited_for_the_end_of_a_pause_keep_the_stream():
    loop = asyncio.get_running_loop()
    async with silence(10.0) as heard:
        await asyncio.sleep(5.0)
        loop.now += 30.0  # type: ignore[attr-defined]
        await asyncio.sleep(1.0)
        heard()
        await asyncio.sleep(9.0)
    await asyncio.sleep(60.0)  # no timer is left
