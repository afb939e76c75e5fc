"""From a worker's cache to a router's choice, through a real redis-server."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import cast

import pytest

from baton.clock import SystemClock
from baton.core import Role, Sampling, SequenceSpec, WorkerRef
from baton.engine.prefix import Chain, scope_key
from baton.ledger.directory_log import DirectoryLog
from baton.ledger.directory_view import DirectoryView
from baton.ledger.ledger import Ledger
from router.claim import Wish
from router.link import WorkerLink
from router.policy import POLICIES
from router.workers import WorkerPool
from tests.support.waiting import until
from tests.unit.router import fakes

SPEC = SequenceSpec(tuple(range(200)), Sampling())


pytestmark = pytest.mark.usefixtures("without_pauses")


async def registered(ledger: Ledger, role: Role, name: str, block_size: int) -> fakes.FakeLink:
    """A worker of a router's pool, which the ledger knows."""
    one = fakes.link(role, name)
    ref = WorkerRef(name, await ledger.mint(name), "127.0.0.1:1")
    one.view.info = replace(one.info, ref=ref, layout=replace(one.info.layout, block_size=block_size))
    assert await ledger.register(one.info)
    return one


def blocks(one: fakes.FakeLink, count: int, scope: str = "") -> list[bytes]:
    """What this worker calls the prompt's first blocks."""
    chain = Chain(scope_key(one.info.fingerprint, scope), SPEC.prompt, one.info.layout.block_size)
    return [chain.digest(block) for block in range(count)]


async def test_the_workers_that_have_the_prompt_are_found_and_forgotten(ledger):
    links = [await registered(ledger, Role.PREFILL, f"prefill-{n}", 16) for n in range(3)]
    links += [await registered(ledger, Role.DECODE, f"decode-{n}", 32) for n in range(3)]
    view = DirectoryView(ledger.connection, compare_s=0.05)
    pool = WorkerPool(ledger.workers, POLICIES["prefix"], "r", 1.0, SystemClock(), prefixes=view.prefixes)
    for one in links:
        pool._add(cast("WorkerLink", one))

    async def chosen(*expected: str, spec: SequenceSpec = SPEC) -> bool:
        claim = pool.claim(len(SPEC), Wish(spec=spec))
        assert claim is not None
        assert claim.prefill is not None
        claim.release()
        return (claim.prefill.info.ref.worker_id, claim.decode.info.ref.worker_id) == expected

    assert await chosen("prefill-0", "decode-0"), "nobody has it"
    following = asyncio.create_task(view.run())
    logs = [DirectoryLog(ledger, one.info.ref) for one in (links[2], links[4])]
    logs[0].note(blocks(links[2], 10))
    logs[1].note(blocks(links[4], 3))  # in blocks of its own size
    await until(lambda: chosen("prefill-2", "decode-1"))
    assert await chosen("prefill-0", "decode-0", spec=replace(SPEC, cache_scope="mine")), "in another scope nothing is"
    logs[0].note(removed=blocks(links[2], 1))
    await until(lambda: chosen("prefill-0", "decode-1"))
    following.cancel()
    await asyncio.wait([following])
    for log in logs:
        await log.close()
