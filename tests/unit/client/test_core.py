"""Folding events and deciding on retries and resumed streams, without I/O and real time."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton import errors
from baton.client._accumulator import Fold
from baton.client._retry import RETRY_BASE_S, RETRY_CAP_S, Attempts, ClientBase, Recovery
from baton.client.types import Delta, PromptToken, Thought
from baton.core import FinishReason, TokenLogprobs
from baton.errors import BatonError, ConfigError, EngineFault, InvalidRequest, NoWorker, Overloaded, WorkerLost
from baton.rpc.v1 import common_pb2 as common
from baton.rpc.v1 import inference_pb2 as inference
from baton.testing import FakeClock

Event = inference.GenerateEvent


def tokens(start: int, ids: Iterable[int], text: str = "", choice: int = 0, **more) -> Event:
    return Event(tokens=inference.Tokens(choice=choice, ids=ids, text=text, **more | {"from": start}))


def finished(choice: int = 0, reason: common.FinishReason.ValueType = common.FINISH_REASON_EOS) -> Event:
    return Event(finished=inference.Finished(choice=choice, reason=reason, matched_stop="x"))


ACCEPTED = Event(accepted=inference.Accepted(prompt_tokens=4, system_fingerprint="x"))
STAGES = ("queue_s", "route_s", "reserve_s", "prefill_s", "transfer_s", "commit_s", "decode_s", "ttft_s", "e2e_s")
PLACED: Any = {"prefill_worker": "p0", "decode_worker": "d0", "kv_bytes": 10, "transport": "gloo", "attempts": 1}
COMPLETED = Event(
    completed=inference.Completed(
        usage=inference.Usage(prompt_tokens=4, completion_tokens=2, audit_digest="ab", thinking_tokens=3),
        system_fingerprint="y",
        timings=common.Timings(**{stage: number for number, stage in enumerate(STAGES, 1)}),
        placement=inference.Placement(**PLACED),
    )
)


def numbered(events: Iterable[Event]) -> list[Event]:
    out = []
    for seq, event in enumerate(events):
        copy = Event(request_id="r1", seq=seq)
        copy.MergeFrom(event)
        out.append(copy)
    return out


def fold(*events: Event) -> tuple[Fold, list[Delta]]:
    return resumed(list(events))


def resumed(*streams: list[Event]) -> tuple[Fold, list[Delta]]:
    """Fold an answer that came in several streams. All but the last one broke."""
    folded, found = Fold(), list[Delta | None]()
    for number, stream in enumerate(streams):
        if number:
            folded._rewind()
        found += [folded._feed(event) for event in numbered(stream)]
    return folded, [delta for delta in found if delta is not None]


def test_a_whole_stream():
    logprobs = [common.TokenLogprobs(logprob=-0.5, top=[common.TopLogprob(token_id=7, logprob=-0.5)])]
    folded, deltas = fold(
        ACCEPTED,
        tokens(0, [7], " a", logprobs=logprobs),
        Event(recovered=inference.Recovered(attempt=2)),
        tokens(1, [8], "b", logprobs=logprobs),
        tokens(2, [], "!"),
        finished(),
        COMPLETED,
    )
    answer = folded._completion()
    shown = [(delta.start, delta.tokens, delta.text) for delta in deltas]
    assert shown == [(0, (7,), " a"), (1, (8,), "b"), (2, (), "!")]
    assert (answer.request_id, answer.text, answer.tokens) == ("r1", " ab!", (7, 8))
    assert answer.logprobs == (TokenLogprobs(-0.5, ((7, -0.5),)),) * 2
    assert answer.finish_reason is FinishReason.EOS
    assert answer.choices[0].matched_stop == "x"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 2)
    assert (answer.usage.audit_digest, answer.system_fingerprint) == ("ab", "y")
    assert [object.__getattribute__(answer.timings, stage) for stage in STAGES] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert {name: getattr(answer.placement, name) for name in PLACED} == PLACED


def test_choices_are_numbered_each_for_itself():
    said = tokens(0, [1], "a", 1), tokens(0, [2], "b", 0), tokens(1, [3], "c", 1)
    folded, _ = fold(*said, finished(0), finished(1), COMPLETED)
    assert [choice.text for choice in folded._completion().choices] == ["b", "ac"]


def test_an_event_of_a_newer_server_is_passed_over():
    folded, deltas = fold(ACCEPTED, Event(), tokens(0, [1], "a"))
    assert [delta.text for delta in deltas] == ["a"]
    assert folded._started
    assert folded.system_fingerprint == "x", "what a stream that breaks was begun with"


def thought(chunk: int, ids: Iterable[int] = (9,), text: str = "hm", choice: int = 0) -> Event:
    return Event(thought=inference.Thought(choice=choice, chunk=chunk, ids=ids, text=text))


def test_thoughts_are_beside_the_answer():
    begun = ACCEPTED, thought(0), thought(1, (), "")
    folded, deltas = fold(*begun, tokens(0, [7], "a"), thought(2), finished(), COMPLETED)
    said = (Thought(0, (9,), "hm"), Thought(1, (), ""), Thought(2, (9,), "hm"))
    shown = [(delta.start, delta.tokens, delta.thoughts) for delta in deltas]
    assert shown == [(0, (), said[:1]), (0, (), said[1:2]), (0, (7,), ()), (1, (), said[2:])]
    answer = folded._completion()
    assert (answer.text, answer.tokens, answer.thoughts) == ("a", (7,), said)
    assert folded.thoughts == said
    assert answer.usage.thinking_tokens == 3


def test_thoughts_that_a_resumed_stream_says_again_are_not_shown():
    folded, deltas = resumed(
        [ACCEPTED, thought(0), thought(1), tokens(0, [1], "a"), thought(5, choice=1)],
        [ACCEPTED, thought(0, (4, 4), "other")],
        [ACCEPTED, *(thought(chunk) for chunk in range(4)), thought(5, choice=1), thought(6, choice=1)],
    )
    assert [thought.chunk for thought in folded.thoughts] == [0, 1, 2, 3]
    shown = [(delta.choice, delta.thoughts[0].chunk) for delta in deltas if delta.thoughts]
    assert shown == [(0, 0), (0, 1), (1, 5), (0, 2), (0, 3), (1, 6)]
    assert folded.thoughts[0].text == "hm", "what was shown first"


def part(start: int, *ids: int) -> Event:
    ranks = [min(start + number, 1) for number in range(len(ids))]
    scores = [common.TokenLogprobs(logprob=-rank) for rank in ranks]
    rest: dict[str, Any] = {"from": start}
    return Event(prompt_logprobs=common.PromptLogprobs(ids=ids, ranks=ranks, logprobs=scores, **rest))


def test_log_probabilities_of_the_prompt_continue_in_a_resumed_stream():
    folded, deltas = resumed(
        [ACCEPTED, part(0, 4, 5)], [ACCEPTED, part(2, 6), tokens(0, [1], "a"), finished(), COMPLETED]
    )
    answer = folded._completion()
    scored = TokenLogprobs(-1.0)
    assert answer.prompt_logprobs == (PromptToken(4), PromptToken(5, 1, scored), PromptToken(6, 1, scored))
    assert (answer.text, [delta.text for delta in deltas]) == ("a", ["a"])


BEGUN = [ACCEPTED, tokens(0, [1], "a")]


@pytest.mark.parametrize(
    ("streams", "what"),
    [
        ([[tokens(0, [1]), tokens(0, [1])]], "received token 0 of choice 0, expected 1"),
        ([[tokens(0, [1]), tokens(2, [1])]], "received token 2 of choice 0, expected 1"),
        ([[tokens(1, [1])]], "received token 1 of choice 0, expected 0"),
        ([[finished(), tokens(0, [1])]], "after its end"),
        ([[thought(1)]], "received thought 1 of choice 0, expected 0"),
        ([[thought(0), thought(0)]], "received thought 0 of choice 0, expected 1"),
        ([[thought(0), thought(2)]], "received thought 2 of choice 0, expected 1"),
        ([[finished(), finished()]], "ended twice"),
        ([[finished(), COMPLETED, ACCEPTED]], "after Completed"),
        ([[tokens(0, [1, 2], logprobs=[common.TokenLogprobs()])]], "2 tokens with 1 logprobs"),
        ([[finished(reason=common.FINISH_REASON_UNSPECIFIED)]], "unknown reason 0"),
        ([[part(0, 1), part(2, 3)]], "received prompt token 2, expected 1"),
        ([[part(0, 1)], [part(0, 1)]], "received prompt token 0, expected 1"),
        ([[]], "without Completed"),
        ([[*BEGUN, finished()]], "without Completed"),
        ([[tokens(0, [1]), COMPLETED]], "unfinished choice"),
        ([[COMPLETED]], "unfinished choice"),
        ([BEGUN, BEGUN], "received token 0 of choice 0, expected 1"),
        ([BEGUN, [ACCEPTED, tokens(2, [1], "a")]], "received token 2 of choice 0, expected 1"),
        ([BEGUN, [ACCEPTED, finished(), finished()]], "ended twice"),
        ([[*BEGUN, finished()], [finished(reason=common.FINISH_REASON_LENGTH)]], "ended twice"),
        ([[*BEGUN, finished()], [tokens(1, [2], "b")]], "after its end"),
        ([[*BEGUN, tokens(1, [], "!?")], [tokens(1, [], "!.")]], "repeated text of choice 0 differs"),
    ],
)
def test_a_broken_promise_or_an_early_end_is_a_fault(streams: list[list[Event]], what: str):
    with pytest.raises(EngineFault, match=what):
        resumed(*streams)[0]._completion()


def test_a_lost_or_foreign_event_is_a_fault():
    first, _, third = numbered([ACCEPTED, tokens(0, [1]), tokens(1, [2])])
    for wrong in (first, third, Event(request_id="other", seq=1)):
        folded = Fold()
        folded._feed(first)
        with pytest.raises(EngineFault):
            folded._feed(wrong)
    folded = Fold()
    folded._feed(first)
    folded._rewind()
    with pytest.raises(EngineFault, match="received event 1, expected 0"):
        folded._feed(Event(request_id=first.request_id, seq=1))


@given(st.lists(st.integers(0, 3), max_size=20), st.randoms(use_true_random=False))
def test_any_split_gives_the_same_answer(cuts: list[int], rng):
    ids = [rng.randrange(2**32) for _ in range(sum(cuts))]
    starts = list(itertools.accumulate(cuts, initial=0))
    events = [tokens(start, ids[start : start + size], "x" * size) for start, size in zip(starts, cuts, strict=False)]
    folded, deltas = fold(*events, finished(), COMPLETED)
    assert folded._completion().tokens == tuple(ids)
    assert "".join(delta.text for delta in deltas) == folded.text == "x" * len(ids)


END = [tokens(1, [2], "b"), tokens(2, [], "!?"), finished(), COMPLETED]


@pytest.mark.parametrize("cut", range(len(END)))
@pytest.mark.parametrize("split", [1, 2])
def test_a_tail_that_was_said_is_not_said_again(cut: int, split: int):
    again = [tokens(2, [], "!?"[:split]), *([tokens(2, [], "!?"[split:])] if split < 2 else []), finished(), COMPLETED]
    rest = END if cut == 0 else again
    folded, deltas = resumed([ACCEPTED, tokens(0, [1], "a"), *END[:cut]], [ACCEPTED], [ACCEPTED, *rest])
    assert folded._completion().text == "".join(delta.text for delta in deltas) == "ab!?"
    assert (folded._completion().tokens, folded.resumed) == ((1, 2), 2)
    assert all(delta.text or delta.tokens for delta in deltas)


def attempts(
    timeout: float | None = None, retries: int = 5, draw: float = 1.0, clock: FakeClock | None = None
) -> Attempts:
    return Attempts(retries, timeout, clock or FakeClock(), lambda: draw)


@given(st.floats(0, 1, exclude_max=True), st.integers(0, 40))
def test_waits_double_up_to_the_cap_and_jitter_is_full(draw: float, before: int):
    tries = attempts(retries=before + 1, draw=draw)
    for _ in range(before):
        tries.wait_after(NoWorker("x"))
    assert tries.wait_after(NoWorker("x")) == draw * min(RETRY_CAP_S, RETRY_BASE_S * 2**before)


def test_a_wait_is_never_shorter_than_the_server_asked_for():
    assert attempts(draw=0.0).wait_after(Overloaded("full", retry_after_s=3.0)) == 3.0
    assert attempts(draw=1.0).wait_after(Overloaded("full", retry_after_s=3.0)) == 3.25


@pytest.mark.parametrize("error", [InvalidRequest.of("a", "b"), EngineFault("x"), errors.DeadlineExceeded("x")])
def test_what_no_retry_helps_is_raised_at_once(error: BatonError):
    with pytest.raises(type(error)) as caught:
        attempts().wait_after(error)
    assert caught.value is error


def test_retries_run_out_and_progress_gives_them_back():
    tries = attempts(retries=1, draw=1.0)
    assert tries.wait_after(NoWorker("first")) == 0.25
    tries.progressed()
    assert tries.wait_after(NoWorker("second")) == 0.25
    with pytest.raises(NoWorker, match="third"):
        tries.wait_after(NoWorker("third"))
    for none_left, started in ((attempts(retries=0), False), (attempts(), True)):  # a begun stream is not repeated
        with pytest.raises(NoWorker):
            none_left.wait_after(NoWorker("x"), started=started)


def test_several_routers_are_asked_in_turn():
    client = ClientBase("a:1, b:2,c:3")
    assert (client._target, client._targets) == ("a:1", ("a:1", "b:2", "c:3"))
    assert [client._after("a:1"), client._target, client._after("c:3"), client._target] == ["b:2", "b:2", "a:1", "a:1"]
    assert ClientBase("ipv4:127.0.0.1:1,127.0.0.1:2")._targets == ("ipv4:127.0.0.1:1,127.0.0.1:2",)


def test_only_an_unreachable_router_costs_no_retry():
    tries = Attempts(0, None, FakeClock(), lambda: 1.0, spare=1)
    away = "cannot reach a:1: failed to connect to all addresses; last error: x"
    others = (away, True), ("none is connected", False), ("cannot reach a:1: Socket closed", False)
    for text, started in others:  # a router may have got the last one
        with pytest.raises(NoWorker):
            tries.wait_after(NoWorker(text), started=started)
    assert tries.wait_after(NoWorker(away)) == 0.0
    with pytest.raises(NoWorker):
        tries.wait_after(NoWorker(away))


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), "5", 8e9])
def test_a_timeout_that_no_call_can_have(wrong: Any):
    with pytest.raises(ConfigError, match=rf"timeout: must be seconds above 0, at most 1e\+09, or None, got {wrong!r}"):
        ClientBase("host:1", timeout=wrong)
    with pytest.raises(ConfigError, match="timeout: must be seconds"):
        ClientBase("host:1")._attempts(wrong)
    assert ClientBase("host:1", timeout=3)._attempts(float("inf")).remaining() is None


def test_the_deadline_spans_all_tries():
    clock = FakeClock()
    tries = attempts(timeout=2.0, clock=clock)
    assert tries.remaining() == 2.0
    clock.advance(1.5)
    assert tries.remaining() == 0.5
    with pytest.raises(Overloaded):  # the original error is more useful than a deadline error
        tries.wait_after(Overloaded("full", retry_after_s=0.5))
    clock.advance(5)
    assert tries.remaining() == 0.0
    assert attempts().remaining() is None


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"target": ""}, "target"),
        ({"target": "a:1,,b:2"}, "target: must be host:port, or several"),
        ({"token": "a\nb"}, "token: must be printable"),
        ({"token": "ä"}, "token: must be printable"),
        ({"max_retries": -1}, "max_retries: must be a whole number of at least 0, got -1"),
        ({"max_retries": 1.5}, "max_retries: must be a whole number of at least 0, got 1.5"),
        ({"tls": "/nowhere/ca.pem"}, r"/nowhere/ca\.pem: cannot be read: No such file"),
    ],
)
def test_settings_that_cannot_work_are_named(wrong: dict, what: str):
    with pytest.raises(ConfigError, match=what) as caught:
        ClientBase(**{"target": "host:1"} | wrong)
    assert "a\nb" not in str(caught.value)


def test_the_token_is_hidden():
    client = ClientBase("host:1", token="secret")
    assert "secret" not in repr(client)
    assert client._metadata == (("authorization", "Bearer secret"),)


@pytest.mark.parametrize(
    ("target", "proxy"), [("127.0.0.1:1", False), ("localhost:1", False), ("router.example:1", True)]
)
def test_a_proxy_is_not_asked_for_this_machine(target: str, proxy: bool):
    assert ClientBase(target)._proxy is proxy


LOST = WorkerLost("lost")
ANSWERS = [EngineFault("x"), Overloaded("x"), errors.DeadlineExceeded("x"), errors.Cancelled("x")]
REFUSALS = [errors.Unsupported("x"), errors.UnknownModel("x"), InvalidRequest.of("received", "more than there are")]


def recovery(targets: int = 1) -> Recovery:
    made = Recovery(targets)
    made.resumable = True
    return made


def lost(targets: int = 1, retries: int = 5) -> tuple[Recovery, Attempts]:
    """Return the recovery of a lost stream."""
    broken, tries = recovery(targets), attempts(retries=retries)
    broken.wait_after(LOST, tries, answered=True)
    return broken, tries


def raised(broken: Recovery, error: BatonError, tries: Attempts | None = None, *, answered: bool) -> BatonError:
    with pytest.raises(BatonError) as caught:
        broken.wait_after(error, tries or attempts(), answered=answered)
    return caught.value


@pytest.mark.parametrize("loss", [LOST, NoWorker("x")])
def test_a_loss_is_waited_after_if_the_stream_can_be_resumed(loss: BatonError):
    assert recovery().wait_after(loss, attempts(), answered=True) == 0.25
    assert raised(Recovery(1), loss, answered=True) is loss


@pytest.mark.parametrize("error", [*ANSWERS, *REFUSALS])
def test_what_a_stream_with_events_says_is_the_answer(error: BatonError):
    broken = recovery()
    assert raised(broken, error, answered=True) is error
    broken.wait_after(LOST, attempts(), answered=True)
    assert raised(broken, error, answered=True) is error


@pytest.mark.parametrize("refusal", REFUSALS)
def test_each_router_may_refuse_once(refusal: BatonError):
    broken, tries = lost(targets=2)
    assert broken.wait_after(refusal, tries, answered=False) == 0.0
    for _ in range(2):
        given_up = raised(broken, refusal, answered=False)
        assert (given_up, given_up.__cause__) == (LOST, refusal)


def test_after_progress_everything_counts_anew():
    broken, tries = lost(targets=2)
    broken.wait_after(REFUSALS[0], tries, answered=False)
    broken.progressed()
    second = WorkerLost("again")
    broken.wait_after(second, tries, answered=True)
    assert broken.wait_after(REFUSALS[0], tries, answered=False) == 0.0
    assert raised(broken, REFUSALS[0], answered=False) is second


def test_a_resume_that_fails_is_tried_again_as_any_call():
    (broken, tries), last, fault = lost(retries=3), NoWorker("y"), EngineFault("x")
    assert broken.wait_after(Overloaded("full", 2.0), tries, answered=False) == 2.5
    assert broken.wait_after(NoWorker("x"), tries, answered=False) == 1.0
    assert raised(broken, last, tries, answered=False) is last
    assert raised(broken, fault, answered=False) is fault
