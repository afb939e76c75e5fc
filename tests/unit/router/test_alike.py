"""Placement of deterministic requests on compatible workers. Requests without such workers do not block others."""

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core import Role, Sampling, SequenceSpec
from baton.engine.prefix_cache import hashable_blocks
from baton.errors import DeadlineExceeded, InvalidRequest, NoWorker, Overloaded
from baton.ledger.prefix_index import PrefixIndex
from router.placement.policy import POLICIES, local_prefill_if_faster
from router.workers.placement import Requirements
from tests.unit.router import fakes
from tests.unit.router.fakes import block_names, floor_of, named, pair_of, pool_of, publish, say, turns

SPEC = SequenceSpec(tuple(range(40)), Sampling(), deterministic=True)
PLAIN = replace(SPEC, deterministic=False)
DETERMINISTIC, THOUGHTS = Requirements(spec=SPEC), Requirements(spec=PLAIN, thinks=("thoughts",))
BEGUN = Requirements(None, SPEC, "z")  # a deterministic request in progress


def links_of(*workers):
    """Create links of workers (role, name, determinism fingerprint)."""
    return [fakes.link(role, name, bits=bits) for role, name, bits in workers]


P, D = Role.PREFILL, Role.DECODE
MIXED = ((P, "p0", "x"), (P, "p1", "y"), (P, "p2", ""), (D, "d0", ""), (D, "d1", "y"))
workers = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["", "x", "y"]), st.booleans()), max_size=5)


@pytest.mark.parametrize("policy", POLICIES)
@given(workers, workers, st.sampled_from(["", "x", "z"]))
def test_a_pair_is_alike_and_is_found_whenever_there_is_one(policy, left, right, begun):
    links = [
        fakes.link(role, f"{role}-{number}", fingerprint, bits=bits)
        for role, drawn in ((P, left), (D, right))
        for number, (fingerprint, bits, _) in enumerate(drawn)
    ]
    for one, (*_, usable) in zip(links, left + right, strict=True):
        one.usable = usable
    fleet = fakes.fleet_of(*links)
    snapshot = fleet.snapshot()
    pair = POLICIES[policy](snapshot, fleet.ask(len(SPEC), 3, None, SPEC, begun))
    able = {
        (f"{P}-{p}", f"{D}-{d}")
        for p, one in enumerate(left)
        for d, other in enumerate(right)
        if one == other and one[2] and (one[1] == begun if begun else one[1])
    }
    found = pair and tuple(fleet.ref(role, row).worker_id for role, row in zip(Role, pair[:2], strict=True))
    assert (found in able) if able else found is None


def test_others_may_go_anywhere():
    pool = pool_of(*links_of(*MIXED))
    pairs = {pair_of(pool.place(40, requirements)) for requirements in (Requirements(), Requirements(spec=PLAIN)) * 6}
    assert {decode for _, decode in pairs} == {"d0", "d1"}
    assert {prefill for prefill, _ in pairs} == {"p0", "p1", "p2"}
    assert {pair_of(pool.place(40, DETERMINISTIC)) for _ in range(4)} == {("p1", "d1")}


def test_a_decode_worker_does_it_alone_where_no_prefill_worker_is_like_it():
    pool: Any = pool_of(*links_of((P, "p0", "x"), (P, "p1", ""), (D, "d0", ""), (D, "d1", "y")))
    placement = pool.place(40, DETERMINISTIC)
    assert (placement.prefill, placement.decode.info.ref.worker_id, placement.determinism) == (None, "d1", "y")
    assert pool.place(40).prefill is not None, "others have a pair"


def test_who_has_no_room_is_waited_for_and_who_is_not_there_is_said():
    pool = pool_of(*links_of(*MIXED))
    say(pool, "d1", full=True)
    assert pool.place(40, DETERMINISTIC) is None
    say(pool, "d1", usable=False)
    assert not pool.can_serve(DETERMINISTIC)
    assert pool.place(40, DETERMINISTIC) is None, "no worker that is not alike"
    assert pool.place(40) is not None


def test_local_prefill_keeps_to_who_is_alike():
    """The worker that has the whole prompt cached is incompatible."""
    joint = {"pace": fakes.pace(1000, 1, 40, 0.001), "prompts": fakes.pace(1000, 10, 55, 0.002, 0.0001)}
    links = [
        fakes.prefill("p0", bits="x", pace=fakes.pace(1000, 100, 5050, 0.1, 0.01)),
        fakes.decode("d0", bits="x", **joint, beside=fakes.pace(1000, 1, 40)),
        fakes.decode("d1", bits="y", **joint, beside=fakes.pace(1000, 1, 40)),
    ]
    prefixes = PrefixIndex()
    publish(prefixes, links[2], block_names(SPEC.prompt, 2, marked=True))
    fleet = fakes.fleet_of(*links, prefixes=prefixes)
    snapshot = fleet.snapshot()
    for begun in ("x", "y"):
        ask = fleet.ask(len(SPEC), 0, None, SPEC, begun)
        assert list(ask.decode_cached) == ([0, 32] if begun == "y" else [0, 0])
        pair = POLICIES["predicted"](snapshot, ask)
        assert (pair is None) == (begun == "y")
        if pair is not None:
            alone = local_prefill_if_faster(snapshot, ask, pair)
            assert alone is not None
            assert fleet.ref(D, alone.decode).worker_id == "d0"
            plain = local_prefill_if_faster(snapshot, fleet.ask(len(PLAIN), 0, None, PLAIN), pair)
            assert plain is not None


SHORT, LONG = 60, 2048  # the answer may need 40 + 64 tokens


@pytest.mark.parametrize(
    ("spec", "fleet", "keep", "expected"),
    [
        pytest.param(PLAIN, "p0aL p1aS d0aL d1aS", "", {("p0", "d0")}, id="room for it"),
        pytest.param(PLAIN, "p0aS d0aL d1aS", "", {("p0", "d0")}, id="only decode workers have room"),
        pytest.param(PLAIN, "p0aS p1bL d0aS", "", {("p0", "d0")}, id="the long one has no decode worker"),
        pytest.param(PLAIN, "p0aS d0aS d1bL", "", {("p0", "d0")}, id="the long one has no prefill worker"),
        pytest.param(PLAIN, "p0aS p1bL d0aS d1bL", "", {("p1", "d1")}, id="a long pair next to a short one"),
        pytest.param(PLAIN, "p0aS p1bL d0aS d1bS d2cL", "", {("p0", "d0"), ("p1", "d1")}, id="no pair has room"),
        pytest.param(PLAIN, "p0aS p1bL d0aS d1bL", "p0", {("p0", "d0")}, id="the KV is at the short pair"),
        pytest.param(PLAIN, "p0aS d0aS d1aL", "p0", {("p0", "d1")}, id="KV at a short worker goes to a long one"),
        pytest.param(PLAIN, "p0aL d0aL d1aS", "d0", {("d0", "d1")}, id="it moves although its worker is the long one"),
        pytest.param(SPEC, "p0axS p1aL d0axS d1aL", "", {("p0", "d0")}, id="the long pair is not deterministic"),
        pytest.param(SPEC, "p0axS p1ayL d0axS d1azL", "", {("p0", "d0")}, id="the long ones are not alike"),
    ],
)
def test_a_worker_with_a_short_context_is_used_where_no_other_can_do_it(spec, fleet, keep, expected):
    links = [fakes.link(Role.PREFILL if n[0] == "p" else D, n[:2], n[2], bits=n[3:-1]) for n in fleet.split()]
    for one, text in zip(links, fleet.split(), strict=True):
        one.view.info = replace(one.info, max_model_len=LONG if text[-1] == "L" else SHORT)
    pool = pool_of(*links)
    pool._even = False
    spec = replace(spec, sampling=Sampling(max_tokens=64))
    requirements = Requirements(named(pool, keep) if keep else None, spec)
    assert {pair_of(pool.place(40, requirements)) for _ in range(6)} == expected


def test_without_prefill_workers_a_decode_worker_with_room_needs_no_partner():
    links = [fakes.decode("d0", "a"), fakes.decode("d1", "b")]
    links[1].view.info = replace(links[1].info, max_model_len=SHORT)
    pool: Any = pool_of(*links)
    pool._even = False
    requirements = Requirements(spec=replace(PLAIN, sampling=Sampling(max_tokens=64)))
    assert {pool.place(40, requirements).decode.info.ref.worker_id for _ in range(4)} == {"d0"}


def test_what_is_cached_is_found_by_names_of_their_own():
    prefixes, one = PrefixIndex(), fakes.prefill("p0", bits="x")
    fleet = fakes.fleet_of(one, fakes.decode("d0", bits="x"), prefixes=prefixes)
    size = fakes.LAYOUT.block_size
    grown = replace(SPEC, known=tuple(range(40)))
    for spec, marked in ((grown, True), (replace(grown, deterministic=False), False)):
        publish(prefixes, one, block_names(spec.tokens, 4, marked=marked), 1 + (not marked))
        fleet.snapshot()
        cached = fleet.ask(len(spec), 0, None, spec).prefill_cached
        assert list(cached) == [hashable_blocks(spec, size) * size]
        assert list(fleet.ask(len(spec), 0, None, replace(spec, deterministic=not marked)).prefill_cached) == [0]


def test_blocks_behind_the_prompt_are_looked_for_only_where_the_model_does_not_think():
    prefixes, links = PrefixIndex(), [fakes.prefill("p0"), fakes.prefill("p1", "b"), fakes.decode("d0")]
    links[1].view.info = replace(links[1].info, thinking_chunk=8)
    fleet, grown = fakes.fleet_of(*links, prefixes=prefixes), replace(PLAIN, known=tuple(range(40)))
    for one in links[:2]:
        publish(prefixes, one, block_names(grown.tokens, 4, one.info.fingerprint))
    fleet.snapshot()
    assert list(fleet.ask(80, 0, None, grown).prefill_cached) == [64, 32]
    assert list(fleet.ask(80, 0, None, replace(grown, think_while_decoding=True)).prefill_cached) == [64, 64]


# --- waiting


class Gate:
    """The queue and the pool of a router with these workers, and a clock that stands still."""

    def __init__(self, *workers, wait_s=10.0, most=100):
        limits = {"queue_max_wait_s": wait_s, "queue_max_requests": most}
        context: Any = floor_of(*links_of(*workers), policy="least_loaded", **limits)
        self.pool, self.admission, self.clock = context.pool, context.admission, context.sinks.clock
        self.tickets = 0

    def ask(self, requirements, deadline_s=60.0, **admitted):
        self.tickets += 1
        ticket = (self.tickets, self.tickets)
        return asyncio.create_task(self.admission.admit(ticket, 40, requirements, deadline_s=deadline_s, **admitted))

    async def waiting(self, requirements, **facts):
        """Start a request and check that it waits."""
        task = self.ask(requirements, **facts)
        await turns()
        assert not task.done()
        return task


def tell(pool, name, **facts):
    """Change the worker's info."""
    one = named(pool, name)
    one.view.info = replace(one.info, **facts)


def gate_of_one(prefill="x", decode="x", **facts):
    """Create a gate with one pair of workers with these determinism fingerprints."""
    return Gate((P, "p0", prefill), (D, "d0", decode), **facts)


async def test_who_waits_for_workers_that_are_not_there_is_in_nobodys_way():
    gate = Gate(*MIXED)
    say(gate.pool, "d1", usable=False)
    waits = await gate.waiting(DETERMINISTIC)
    assert gate.admission.waiting == 0
    assert (await gate.ask(Requirements(spec=PLAIN))).decode.info.ref.worker_id == "d0"
    say(gate.pool, "d1", usable=True)
    assert pair_of(await waits) == ("p1", "d1")


async def test_who_is_first_in_the_queue_when_its_workers_leave_lets_others_pass():
    gate = Gate(*MIXED)
    for name in ("d0", "d1"):
        say(gate.pool, name, full=True)
    first, second = gate.ask(DETERMINISTIC), gate.ask(Requirements(spec=PLAIN))
    await turns()
    assert gate.admission.waiting == 2
    say(gate.pool, "d1", usable=False)
    await turns()
    assert gate.admission.waiting == 1
    say(gate.pool, "d0", full=False)
    assert (await second).decode.info.ref.worker_id == "d0"
    say(gate.pool, "d1", usable=True, full=False)
    assert pair_of(await first) == ("p1", "d1")


async def test_where_no_worker_can_it_is_refused_with_their_reasons():
    gate = gate_of_one("", "")
    for name, why in (("p0", "a GPU"), ("d0", "sums as they come")):
        tell(gate.pool, name, nondeterminism=why)
    refusal = "deterministic: no worker can compute such requests: a GPU; sums as they come"
    with pytest.raises(InvalidRequest, match=refusal):
        await gate.ask(DETERMINISTIC)
    tell(gate.pool, "d0", determinism="x")
    assert (await gate.ask(DETERMINISTIC)).determinism == "x"


@pytest.mark.parametrize("chunk", [8, 0])
async def test_who_asks_for_thoughts_waits_until_a_model_is_known(chunk):
    gate = Gate()
    waits = await gate.waiting(THOUGHTS)
    assert gate.admission.waiting == 0
    for one in (fakes.prefill("p0"), fakes.decode("d0")):
        one.view.info = replace(one.info, thinking_chunk=chunk)
        gate.pool._add(one)
    gate.admission.changed()
    if chunk:
        assert pair_of(await waits) == ("p0", "d0")
    else:
        with pytest.raises(InvalidRequest, match="thoughts: the served model does not think"):
            await waits


async def test_a_model_thinks_if_all_its_workers_say_so():
    gate = gate_of_one("", "")
    assert gate.pool.thinking_chunk() == 0
    tell(gate.pool, "p0", thinking_chunk=8)
    assert gate.pool.thinking_chunk() == 0
    with pytest.raises(InvalidRequest):
        await gate.ask(THOUGHTS)
    named(gate.pool, "d0").retired = True
    assert gate.pool.thinking_chunk() == 8
    assert pool_of().thinking_chunk() is None


@pytest.mark.parametrize(
    ("requirements", "deadline_s", "error", "says"),
    [
        (THOUGHTS, 60.0, NoWorker, r"waited 0\.01 s: no decode worker is connected"),
        (DETERMINISTIC, 60.0, NoWorker, r"waited 0\.01 s: no decode worker that computes deterministic requests"),
        (BEGUN, 60.0, NoWorker, "no decode worker with the system fingerprint z that computes"),
        (BEGUN, 0.001, DeadlineExceeded, "the deadline passed while the request waited: no decode worker with"),
    ],
)
async def test_it_waits_no_longer_than_others_do(requirements, deadline_s, error, says):
    bits = "" if requirements.determinism else "x"  # new requests would be rejected, requests in progress are not
    gate = gate_of_one(bits, "", wait_s=0.01) if requirements.deterministic else Gate(wait_s=0.01)
    with pytest.raises(error, match=says):
        await gate.ask(requirements, deadline_s=deadline_s)
    assert gate.admission.aside == 0


async def test_one_that_leaves_is_forgotten():
    gate = gate_of_one("x", "")
    waits = await gate.waiting(DETERMINISTIC)
    waits.cancel()
    await asyncio.wait([waits])
    assert gate.admission.aside == 0
    gate.admission.changed()
    assert gate.admission.waiting == 0


async def test_who_came_first_is_let_in_first():
    gate = gate_of_one()
    say(gate.pool, "d0", usable=False)
    asked, served = [gate.ask(DETERMINISTIC) for _ in range(30)], []
    for number, one in enumerate(asked):
        one.add_done_callback(lambda _, number=number: served.append(number))
    for _ in range(3):  # irrelevant changes have no effect
        await turns()
        gate.admission.changed()
    say(gate.pool, "d0", usable=True)
    await asyncio.gather(*asked[:5])
    assert served[:5] == [0, 1, 2, 3, 4]
    for one in asked:
        one.cancel()
    await asyncio.wait(asked)


async def test_time_in_the_queue_is_no_time_without_a_worker():
    """An accepted request may wait longer for capacity than any request waits for a worker."""
    gate = gate_of_one()
    say(gate.pool, "d0", full=True)
    waits = await gate.waiting(DETERMINISTIC, deadline_s=600.0, returning=True, accepted=True)
    gate.clock.advance(20.0)
    say(gate.pool, "d0", usable=False)
    await turns()
    assert (gate.admission.waiting, gate.admission.aside) == (0, 1)
    say(gate.pool, "d0", usable=True, full=False)
    assert pair_of(await waits) == ("p0", "d0")


async def test_so_many_wait_and_a_newcomer_is_refused():
    """The limit rejects only newcomers: accepted and waiting requests stay."""
    gate = gate_of_one(most=2)
    say(gate.pool, "d0", usable=False)
    newcomer = partial(gate.ask, DETERMINISTIC)
    asked = [newcomer(), newcomer(), await gate.waiting(DETERMINISTIC, accepted=True)]
    with pytest.raises(Overloaded, match="3 requests wait already for a worker that can compute them") as caught:
        await newcomer()
    assert caught.value.retry_after_s == 10.0
    gate.admission.changed()
    await turns()
    say(gate.pool, "d0", usable=True)
    asked.append(newcomer())
    for one in asked:
        assert pair_of(await one) == ("p0", "d0")
