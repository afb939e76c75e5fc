"""The prefill role in any order of events: hypothesis searches for a lost block or a missing end.

Two routers prefill, repush, release and disconnect. Pushes end in every way. The pool is small and some prompts are
urgent, so that others are preempted. The pusher fails the run when blocks are freed that it may still read.
"""

import functools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from baton.core import HandoffId, Sampling, SequenceSpec
from baton.errors import ChannelBroken, DigestMismatch, OfferRefused, StaleAttempt
from tests.support.fake_pusher import CUT, done_of
from tests.support.sessions import STALE, FakeSession, expected, prefill, prompt_of, release, repush
from tests.support.workers import PrefillSide

REQUESTS = "abcde"
ENDS = ("pushed", "failed", "finish")
FAILURES = (CUT, OfferRefused("length"), StaleAttempt("no reservation"), DigestMismatch("frame 3"))
requests, numbers, routers = st.sampled_from(REQUESTS), st.integers(0, 3), st.integers(0, 1)
deadlines, skips = st.sampled_from([0.0, 0.0, 3.0]), st.integers(0, 4)
NEXT = -1  # an attempt back: the one after the newest


@functools.cache
def spec_for(request):
    """`a` ends with its first token; later ones are longer and more urgent; `d` and `e` share a prefix."""
    index = REQUESTS.index(request)
    prompt = prompt_of(HandoffId("d" if request == "e" else request, 1), 5 + 4 * index)
    sampling = Sampling(max_tokens=1 + index, temperature=0.0, ignore_eos=True)
    return SequenceSpec(prompt, sampling, priority=index // 2)


first_of = functools.cache(lambda request: expected(spec_for(request), 1))


def outcome_of(push):
    """Return the outcome of a push that does not fail."""
    return StaleAttempt("aborted") if push.aborted else done_of()


class PrefillMachine(RuleBasedStateMachine):
    @initialize(blocks=st.integers(6, 14), budget=st.sampled_from([3, 8, 2048]), less=st.sampled_from([0, 2000, 10**6]))
    def start(self, blocks, budget, less):
        self.side = PrefillSide(blocks, coalesce_below=less, max_batched_tokens=budget)
        self.sessions = [FakeSession("router-a"), FakeSession("router-b")]
        self.former = []  # sessions whose stream has ended
        self.attempts = dict.fromkeys(REQUESTS, 0)
        self.owners = {}  # session of each accepted attempt, until it is renamed, released or disconnected

    # --- routers

    @rule(request=requests, back=st.sampled_from([NEXT, NEXT, 0, 2]), router=routers, deadline_s=deadlines, skip=skips)
    def prefill(self, request, back, router, deadline_s, skip):
        """Prefill the next attempt, or an earlier one late or again."""
        handoff, session = self.one_of(request, back), self.sessions[router]
        new, refused = handoff.attempt > self.attempts[request], session.kinds(handoff).count("refused")
        self.side.take(session, prefill(handoff, spec_for(request), deadline_s=deadline_s, skip=skip))
        assert session.kinds(handoff).count("refused") == refused + (not new)
        assert new or session.refusals[-1] == STALE
        if new:
            assert handoff in self.side.role._work
            self.attempts[request] = handoff.attempt
            self.owners[handoff] = session

    @rule(request=requests, back=numbers, deadline_s=deadlines, skip=skips, own=st.booleans())
    def repush(self, request, back, deadline_s, skip, own):
        """Repush the newest attempt or another one, by its owner or another session."""
        held, handoff = self.one_of(request, back), self.one_of(request, NEXT)
        work = self.side.role._work.get(held)
        session = work.session if own and work is not None else self.sessions[0]
        accepted = work is not None and work.session is session
        computed, refused = self.side.engine.counters.prefill_tokens, session.kinds(handoff).count("refused")
        self.side.take(session, repush(held, handoff, deadline_s=deadline_s, skip=skip))
        assert session.kinds(handoff).count("refused") == refused + (not accepted)
        assert (handoff in self.side.role._work) == accepted
        assert self.side.engine.counters.prefill_tokens == computed
        if accepted:
            assert held not in self.side.role._work
            self.attempts[request] = handoff.attempt
            self.owners.pop(held, None)
            self.owners[handoff] = session

    @rule(request=requests, back=numbers, router=routers)
    def release(self, request, back, router):
        """Release by the owner, or by the other session. Then the owner receives a failure."""
        handoff, session = self.one_of(request, back), self.sessions[router]
        work = self.side.role._work.get(handoff)
        said = work.session.kinds(handoff).count("failed") if work else 0
        self.side.take(session, release(handoff))
        if work is not None and work.session is not session:
            assert work.session.kinds(handoff).count("failed") == said + 1
        self.owners.pop(handoff, None)

    @rule(router=routers)
    def lose_a_router(self, router):
        lost = self.sessions[router]
        self.sessions[router] = FakeSession(lost.router_id)
        self.former.append(lost)
        self.side.role.gone(lost)
        self.owners = {handoff: session for handoff, session in self.owners.items() if session is not lost}
        assert lost.handoffs == set()

    # --- progress

    @rule(times=st.integers(1, 5))
    def step(self, times):
        self.side.step(times)

    @rule(number=numbers, failure=st.sampled_from((None, *FAILURES)), heard=st.booleans())
    def a_push_ends(self, number, failure, heard):
        """End a push: well if all of it could be sent, badly at any time. `heard`: the role sees it immediately."""
        if not (pushes := list(self.side.pusher.pushes.values())):
            return
        push = pushes[number % len(pushes)]
        if failure is not None or push.aborted or push.end is not None:
            self.side.pusher.done(push.job.handoff, failure or outcome_of(push))
        if heard:
            self.side.loop.drain()

    @rule(number=numbers)
    def some_of_it_leaves(self, number):
        if pushes := [push for push in self.side.pusher.pushes.values() if push.blocks and not push.aborted]:
            push = pushes[number % len(pushes)]
            if (frame := push.progress.next(1 << 12)) is not None:
                push.progress.took(frame)

    @rule(seconds=st.sampled_from([1.0, 5.0]))
    def time_passes(self, seconds):
        self.side.clock.advance(seconds)

    @rule(refuses=st.booleans())
    def the_sender_is_closed_or_open(self, refuses):
        self.side.pusher.refuse = ChannelBroken("the sender was closed") if refuses else None

    # --- guarantees

    @invariant()
    def the_ledger_adds_up(self):
        counts = self.side.counts.check()
        assert counts.reserved == counts.quarantined == 0

    @invariant()
    def each_attempt_ends_once(self):
        reports = self.side.pusher.reports
        assert len(reports) == len(set(reports))
        for session in (*self.sessions, *self.former):
            for handoff in {HandoffId(event.handoff.request_id, event.handoff.attempt) for event in session.events}:
                self.check_ending(session, handoff)

    def check_ending(self, session, handoff):
        """Check that there is one end. Held KV may have a second one, which is reported and final."""
        mine = session.told(handoff)
        ends = [event for event in mine if event.WhichOneof("event") in ENDS]
        assert len(ends) <= 2, ends
        if len(ends) == 2:
            assert ends[0].failed.held, ends
            assert not ends[1].failed.held, ends
            assert not ends[1].HasField("pushed"), ends
        if ends and not ends[0].failed.held:
            after = mine[mine.index(ends[0]) + 1 :]
            assert all(event.HasField("refused") for event in after), mine
        tokens = session.ids(handoff)
        assert tokens in ([], first_of(handoff.request_id))

    @invariant()
    def what_is_pushed_is_here(self):
        for push in self.side.pusher.pushes.values():
            holders = self.side.engine.pool._references
            assert push.aborted or all(holders[block] for block in push.blocks)

    def teardown(self):
        if not hasattr(self, "side"):
            return
        self.side.pusher.refuse = None
        self.goes_quiet()
        for handoff, session in self.owners.items():
            kinds = session.kinds(handoff)
            assert set(kinds) & set(ENDS), f"{handoff} has not ended: {kinds}"
        assert (self.side.all_free, self.side.counts.owned, self.side.counts.reserved) == (True, 0, 0)
        assert not self.side.role._work
        assert not self.side.engine._requests
        assert not any(session.handoffs for session in (*self.sessions, *self.former))
        self.each_attempt_ends_once()

    def goes_quiet(self):
        """Finish all computation and pushes, and release all held KV."""
        for _ in range(100):
            self.side.step(60)
            for push in list(self.side.pusher.pushes.values()):
                if push.aborted or push.end is not None:
                    self.side.pusher.done(push.job.handoff, outcome_of(push))
            for handoff, work in list(self.side.role._work.items()):
                if work.waits:
                    self.side.take(work.session, release(handoff))
            if not self.side.engine.has_work() and not self.side.loop.jobs:
                return
        raise AssertionError("does not come to rest")

    def one_of(self, request, back):
        return HandoffId(request, max(1, self.attempts[request] - back))


TestPrefill = pytest.mark.slow(PrefillMachine.TestCase)
TestPrefill.settings = settings(report_multiple_bugs=False, max_examples=150, stateful_step_count=50)
