"""A router tells the board what it sees for as long as it serves, and goes whether or not the board is there."""

import asyncio
from typing import cast

from baton.errors import LedgerError
from baton.ledger.board import Board, ControlReport, RouterReport
from baton.tokenizer import OracleTokenizer
from router.floor import RouterSettings
from router.server import serve


class Noted:
    """A board that keeps what it is told, in `events`."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    async def put_router(self, report: RouterReport, lease_s: float) -> None:
        self.events.put_nowait(("put", report.router_id))

    async def drop_router(self, router_id: str) -> None:
        self.events.put_nowait(("drop", router_id))

    async def control(self) -> ControlReport | None:
        return None


class Silent(Noted):
    """Its Redis does not answer any more."""

    async def put_router(self, report: RouterReport, lease_s: float) -> None:
        await super().put_router(report, lease_s)
        raise LedgerError("no answer in time")

    async def drop_router(self, router_id: str) -> None:
        await asyncio.Event().wait()


async def serving(board):
    async def nobody():
        return []

    settings = RouterSettings(name="c", model="m", grpc="127.0.0.1:0", metrics="127.0.0.1:0")
    router = await serve(settings, nobody, OracleTokenizer(), board=cast("Board", board))
    async with asyncio.timeout(10):
        assert await board.events.get() == ("put", router.floor.router_id)
    return router


async def test_it_is_there_until_the_router_goes():
    board = Noted()
    router = await serving(board)
    await router.stop(0)
    events = [board.events.get_nowait() for _ in range(board.events.qsize())]
    assert events[-1] == ("drop", router.floor.router_id)


async def test_a_board_that_is_silent_holds_nobody_up():
    router = await serving(Silent())
    await router.stop(0)  # returns, though the board never does
