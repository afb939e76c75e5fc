"""Which finished requests are counted as within the SLO."""

import asyncio

import pytest


async def counted(cluster):
    """Requests that met it, and that did not."""
    lines = (await cluster.http("/metrics")).splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if line.startswith("baton_slo_total"))
    return tuple(float(values.get(f'baton_slo_total{{met="{met}"}}', 0)) for met in ("true", "false"))


@pytest.mark.parametrize(
    ("slo", "tokens", "met"),
    [
        ({"slo_ttft_s": 100.0, "slo_itl_s": 100.0}, 6, True),
        ({"slo_ttft_s": 1e-9, "slo_itl_s": 100.0}, 6, False),
        ({"slo_ttft_s": 100.0, "slo_itl_s": 1e-9}, 6, False),
        ({"slo_ttft_s": 100.0, "slo_itl_s": 1e-9}, 1, True),  # one token has nothing between
    ],
)
async def test_both_bounds_count(make, slo, tokens, met):
    cluster = await make(**slo)
    await cluster.generate(max_tokens=tokens)
    assert await counted(cluster) == (float(met), float(not met))


async def test_a_request_of_several_choices_counts_once(make):
    cluster = await make(slo_ttft_s=100.0, slo_itl_s=100.0)
    await cluster.generate(n=3, max_tokens=4)
    assert await counted(cluster) == (1.0, 0.0)


async def test_what_does_not_finish_does_not_count(cluster):
    call = cluster.call()
    await anext(aiter(call))
    call.cancel()
    await asyncio.wait_for(cluster.nothing_is_left(), 5)
    assert await counted(cluster) == (0.0, 0.0)
