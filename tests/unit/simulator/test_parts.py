"""The parts of the simulator: time, links, blocks, stretches of steps, percentiles."""

import asyncio
from random import Random

import pytest

from baton.bench.traces import Arrival
from baton.engine.block_pool import Allocation, BlockPool
from baton.planner.sim.block_pool import BlockHashes, CountedPool
from baton.planner.sim.event_loop import Kernel
from baton.planner.sim.network import Flow, Way
from baton.planner.sim.stats import Gaps, Histogram, percentile
from baton.planner.sim.timing import Stretch


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
