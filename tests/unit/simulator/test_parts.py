"""The parts of the simulator: time, links, blocks, times of steps, percentiles."""

import asyncio
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from baton.bench.traces import Arrival
from baton.engine.block_pool import Allocation, BlockPool
from baton.planner.sim.block_pool import BlockHashes, CountedPool
from baton.planner.sim.cluster import hosts_of, simulate
from baton.planner.sim.event_loop import Kernel
from baton.planner.sim.network import Flow, Way
from baton.planner.sim.scenario import Contention, Linear, Pool, Slo, Slowed, line
from baton.planner.sim.stats import Gaps, Histogram, percentile
from baton.planner.sim.timing import Stretch, Timing
from tests.unit.simulator.scenes import AT_ONCE, NO_OVERHEADS, colocated, scene


def test_events_happen_in_order_and_tasks_wait_in_made_up_time():
    kernel, said = Kernel(), []

    async def waits() -> None:
        try:
            async with asyncio.timeout(5.0):
                await kernel.create_future()
        except TimeoutError:
            said.append(("late", kernel.now))

    kernel.after(2.0, said.append, "second")
    kernel.after(1.0, said.append, "first")
    kernel.after(2.0, said.append, "third")
    kernel.timer(2.0, said.append, "never").cancel()
    kernel.spawn(waits())
    kernel.run()
    assert said == ["first", "second", "third", ("late", 5.0)]

    async def fails() -> None:
        raise ValueError("on purpose")

    kernel.spawn(fails())
    with pytest.raises(ValueError, match="on purpose"):
        kernel.run()


def test_flows_share_the_ways_of_both_ends():
    kernel = Kernel()
    ends: dict[str, float] = {}
    out, other, into = Way(100.0), Way(100.0), Way(100.0)

    def flow(name: str, source: Way, nbytes: float) -> Flow:
        made = Flow(kernel, source, into, lambda: ends.setdefault(name, kernel.now))
        made.add(nbytes)
        made.close()
        return made

    flow("alone", Way(50.0), 0.0)
    flow("long", out, 300.0)
    kernel.after(1.0, flow, "short", other, 50.0)  # both have 50 from 1.0 to 2.0
    kernel.after(5.0, flow, "cancelled", other, 1e9)
    kernel.run(5.5)
    assert ends == {"alone": 0.0, "short": 2.0, "long": 3.5}


def test_a_flow_waits_for_what_is_not_ready_and_takes_no_share_meanwhile():
    kernel, ends, way = Kernel(), [], Way(10.0)
    first = Flow(kernel, way, Way(10.0), lambda: ends.append((1, kernel.now)))
    second = Flow(kernel, way, Way(10.0), lambda: ends.append((2, kernel.now)))
    first.add(10.0)
    kernel.at(2.0, second.add, 10.0)
    kernel.at(2.0, second.close)
    kernel.at(4.0, first.add, 10.0)
    kernel.at(4.0, first.close)
    kernel.at(4.5, way.set_rate, 5.0)
    kernel.run()
    assert ends == [(2, 3.0), (1, 5.5)]


@pytest.mark.parametrize("seed", range(20))
def test_counted_blocks_are_those_of_the_real_pool(seed):
    draw, real, counted = Random(seed), BlockPool(64), CountedPool(64)
    held: list[tuple[Allocation, Allocation]] = []
    for _ in range(300):
        if held and draw.random() < 0.45:
            for one in held.pop(draw.randrange(len(held))):
                one.release()
        elif (pair := _allocated(draw, real, counted)) is not None:
            held.append(pair)
        assert counted.counts().check() == real.counts()


def _allocated(draw: Random, real: BlockPool, counted: CountedPool) -> tuple[Allocation, Allocation] | None:
    """Allocate in both pools, for prompts with common beginnings. Check for equal decisions and equally many hits."""
    head, length = draw.randrange(1, 4) * 100, draw.randrange(1, 8)
    chain: list = [head + n for n in range(length)]
    digests = [str(name).encode() for name in chain]
    shared, theirs = real.find(digests), counted.find(chain)
    assert len(shared) == len(theirs)
    size, spare = draw.randrange(length, length + 6) - len(shared), draw.randrange(4)
    ours = real.allocate(size, shared=shared, spare=spare)
    other = counted.allocate(size, shared=theirs, spare=spare)
    assert (ours is None) == (other is None)
    if ours is None or other is None:
        return None
    if size:
        ours.publish(len(shared), (*digests[len(shared) :], b"own %d" % draw.getrandbits(60))[:size])
        other.publish(len(shared), (*chain[len(shared) :], 0)[:size])
    return ours, other


def test_equal_beginnings_have_equal_hashes():
    hashes = BlockHashes(16)
    first, directory = hashes.of(Arrival(0.0, 1000, 1, blocks=(7, 8), block_tokens=512))
    same, _ = hashes.of(Arrival(0.0, 600, 1, blocks=(7, 8), block_tokens=512))
    other, _ = hashes.of(Arrival(0.0, 1000, 1, blocks=(9, 8), block_tokens=512))
    assert (len(first.hashes), len(same.hashes), len(directory)) == (62, 37, 2)
    assert first.hashes[:37] == same.hashes
    assert not set(first.hashes) & set(other.hashes)
    fine, _ = hashes.of(Arrival(0.0, 100, 1, blocks=tuple(range(10)), block_tokens=10))
    assert len(fine.hashes) == 6


@pytest.mark.parametrize("drawn", [(), [0.01] * 5 + [0.03] * 5])
def test_a_stretch_is_its_steps(drawn):
    stretch = Stretch(10.0, 10, 0.01, 0.001, drawn)
    ends = [stretch.end(step) for step in range(11)]
    for step in range(10):
        middle = (ends[step] + ends[step + 1]) / 2
        assert stretch.done_by(middle) == step
        assert stretch.next_end(middle) == step + 1
    assert stretch.done_by(99.0) == 10
    pieces = stretch.pieces(10)
    assert sum(count for count, _ in pieces) == 10
    assert sum(count * seconds for count, seconds in pieces) == pytest.approx(ends[10] - 10.0)


def test_gaps_of_a_request_and_their_percentile():
    gaps = Gaps()
    gaps.add(0, 100, 0.01)
    gaps.add(100, 1, 0.5)
    gaps.add(101, 100, 0.02)
    own = gaps.of(50, 151)
    assert own == [(0.01, 50), (0.5, 1), (0.02, 50)]
    assert [percentile(own, percent) for percent in (40, 99, 100)] == [0.01, 0.02, 0.5]
    gaps.forget(100)
    assert gaps.of(0, 101) == [(0.5, 1)]


def test_percentiles_are_those_of_the_values():
    draw, histogram = Random(5), Histogram()
    values = sorted(draw.lognormvariate(-3, 1) for _ in range(5000))
    for value in values:
        histogram.add(value)
    found = histogram.quantiles()
    for share, got in ((0.5, found.p50), (0.9, found.p90), (0.99, found.p99)):
        assert got == pytest.approx(values[int(share * 5000) - 1], rel=0.01)
    assert found.max == values[-1]
    assert found.mean == pytest.approx(sum(values) / 5000)


# --- workers on one host: a step's time depends on the others' work when it begins

COST = Linear(line(0.1), line(0.010))
BESIDE = Contention(2, prompts=1.5, beside_prompts=Slowed(factor=1.2), beside_decode=Slowed(factor=2.0))
POOL = Pool(1, COST, contention=BESIDE)
KEPT = Slo(itl_percentile=50.0)


def timings(*pools: Pool, on: list[Timing] | None = None) -> list[Timing]:
    host = on if on is not None else []
    return [Timing(pool, Random(1), host) for pool in pools]


def prompt(timing: Timing) -> float:
    return timing.step(10, 55, 0, 0)


def decode(timing: Timing) -> float:
    return timing.steps(1, 20, 1)[0]


def test_a_step_is_as_long_as_what_the_others_do_makes_it():
    host: list[Timing] = []
    one, other = timings(POOL, POOL, on=host)
    assert (prompt(one), decode(one)) == (0.1, 0.010)
    decode(other)
    assert (prompt(one), decode(one)) == pytest.approx((0.15, 0.020))
    prompt(other)
    assert (prompt(one), decode(one)) == pytest.approx((0.15, 0.012))
    other.rest()
    assert (prompt(one), decode(one)) == (0.1, 0.010)
    decode(other)
    other.leave()
    assert decode(one) == 0.010
    (successor,) = timings(POOL, on=host)
    decode(successor)
    assert decode(one) == pytest.approx(0.020)


def test_who_does_both_at_a_time_is_in_between():
    one, other = timings(POOL, POOL)
    both_s = other.step(10, 55, 1, 20)
    share = 0.010 / both_s
    assert both_s == pytest.approx(0.1)
    assert decode(one) == pytest.approx(0.010 * (1 + share * 1.0 + (1 - share) * 0.2))
    decode(other)
    assert one.step(10, 55, 1, 20) == pytest.approx(both_s * (1 + share * 1.0 + (1 - share) * 0.5))


def test_of_several_others_each_counts_as_one_of_them():
    four = replace(POOL, contention=replace(BESIDE, workers=4))
    one, *others = timings(four, four, four)
    decode(others[0])
    assert decode(one) == pytest.approx(0.010 * (1 + 1 / 3))
    prompt(others[1])
    assert decode(one) == pytest.approx(0.010 * (1 + 1 / 3 + 0.2 / 3)), "of three, one of which is not here"


def test_steps_differ_as_those_beside_such_others_did(seed):
    beside = Contention(2, beside_prompts=Slowed(spread=(0.5, 1.5)), beside_decode=Slowed(spread=(0.25, 1.75)))
    one, other = timings(Pool(1, COST, spread=(0.9, 1.1), contention=beside), POOL)

    def seen() -> set[float]:
        return {round(one.steps(1, 20, 1)[2][0] / 0.010, 6) for _ in range(50)}

    assert seen() == {0.9, 1.1}
    decode(other)
    assert seen() == {0.25, 1.75}
    prompt(other)
    assert seen() == {0.5, 1.5}


def test_the_others_hear_of_what_changes_and_of_nothing_else():
    heard = []
    one, other = timings(POOL, POOL)
    one.on_change, other.on_change = (lambda: heard.append("one")), (lambda: heard.append("other"))
    for change in (decode, decode, prompt, prompt):
        change(one)
    one.rest()
    one.rest()
    assert heard == ["other"] * 3


FACTS: dict[str, Any] = {"network": AT_ONCE, "overheads": NO_OVERHEADS, "slo": KEPT}
FACTS["pool"] = {"cost": COST, "contention": BESIDE}


def test_what_decodes_is_slower_while_a_prompt_is_computed_and_no_longer():
    """101 tokens. The second prompt begins when it gets blocks, and takes 0.15 s: 12 or 13 steps of 12 ms."""
    alone = simulate(scene(1, 1, **FACTS), [Arrival(0.0, 10, 101)])
    assert (alone.itl.p50, alone.itl.max) == pytest.approx((0.010, 0.010), rel=0.01)
    both = simulate(scene(1, 1, **FACTS), [Arrival(0.0, 10, 101), Arrival(0.455, 10, 1)])
    assert both.e2e.max == pytest.approx(0.1 + 100 * 0.010 + 12.5 * 0.002, abs=0.003)
    assert (both.itl.p50, both.itl.max) == pytest.approx((0.010, 0.012), rel=0.01)
    assert both.ttft.max == pytest.approx(0.005 + 0.150)


def test_colocated_workers_slow_each_other_as_far_as_they_decode_at_the_same_time():
    scenario = colocated(2, **FACTS)
    apart = simulate(scenario, [Arrival(0.0, 10, 51), Arrival(5.0, 10, 51)])
    assert (apart.itl.p50, apart.itl.max) == pytest.approx((0.010, 0.010), rel=0.01)
    together = simulate(scenario, [Arrival(0.0, 10, 51), Arrival(0.001, 10, 51)])
    assert together.itl.p50 == pytest.approx(0.020, rel=0.01)


def test_a_host_has_as_many_workers_as_were_measured_together():
    placed = hosts_of(scene(3, 2, **FACTS))
    assert list(placed) == ["prefill-0", "prefill-1", "prefill-2", "decode-0", "decode-1"]
    hosts = {tuple(name for name, one in placed.items() if one is host) for host in placed.values()}
    assert hosts == {("prefill-0", "decode-0"), ("prefill-1", "decode-1"), ("prefill-2",)}
    assert hosts_of(scene(3, 2)) == {}
