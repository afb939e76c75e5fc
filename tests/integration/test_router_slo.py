"""Finished requests that count as within the SLO."""

import asyncio

import pytest


async def counted(cluster):
    """Return the number of requests that met the SLO, and of those that did not."""
    lines = (await cluster.http("/metrics")).splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if line.startswith("baton_slo_total"))
    return tuple(float(values.get(f'baton_slo_total{{met="{met}"}}', 0)) for met in ("true", "false"))


@pytest.mark.parametrize(
    ("ttft_s", "itl_s", "asked", "met"),
    [
        (100.0, 100.0, {"max_tokens": 6}, True),
        (1e-9, 100.0, {"max_tokens": 6}, False),
        (100.0, 1e-9, {"max_tokens": 6}, False),
        (100.0, 1e-9, {"max_tokens": 1}, True),  # one token has no interval
        (100.0, 100.0, {"max_tokens": 4, "n": 3}, True),  # a request of several choices counts once
    ],
)
async def test_both_bounds_count(make, ttft_s, itl_s, asked, met):
    cluster = await make(slo_ttft_s=ttft_s, slo_itl_s=itl_s)
    await cluster.generate(**asked)
    assert await counted(cluster) == (float(met), float(not met))


async def test_what_does_not_finish_does_not_count(cluster):
    call = cluster.call()
    await anext(aiter(call))
    call.cancel()
    await asyncio.wait_for(cluster.nothing_is_left(), 5)
    assert await counted(cluster) == (0.0, 0.0)
