"""What a decode worker tells routers of a commit, and of each step: events, made of what came. Nothing is kept here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.core import HandoffId, Thought
from baton.worker import events

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.engine.outcome import StepResult
    from baton.rpc.v1 import worker_pb2
    from baton.worker.times import DecodeTimes
    from kvtransfer.handoff import CommitState

    Told = tuple[HandoffId, list[worker_pb2.WorkerEvent]]


def taken_over(handoff: HandoffId, commit: CommitState, times: DecodeTimes) -> list[worker_pb2.WorkerEvent]:
    """The commit counts; then the thoughts and the token, which the prefill worker may have died with."""
    committed = events.committed(
        handoff,
        transfer_s=commit.transfer_s,
        commit_s=commit.commit_s,
        kv_bytes=commit.kv_bytes,
        transport=commit.transport,
        spans=times.taken_over(commit),
    )
    made = commit.thinking.thoughts if commit.thinking is not None else ()
    thoughts = [Thought(chunk, token_ids) for chunk, token_ids in enumerate(made)]
    again = [events.thoughts(handoff, thoughts)] if thoughts else []
    return [committed, *again, events.tokens(handoff, commit.first)]


def stepped(result: StepResult, times: DecodeTimes) -> Iterator[Told]:
    """In the order in which each router is to hear it: thoughts, tokens, ends."""
    times.verified(result)
    for key, thoughts in result.thoughts:
        yield key, [events.thoughts(key, thoughts)]
    for item in result.outputs:
        said = events.output(item)
        if item.finish is not None:
            said[-1].finish.verify_s = times.verify_s(item.key)
            said[-1].spans.extend(times.ended(item.key))
        yield item.key, said
    for key in result.preempted:
        yield key, [events.preempted(key, "the KV pool is full", times.ended(key))]
    for key, error in result.failed:
        yield key, [events.failed(key, error, spans=times.ended(key))]


def ended(result: StepResult) -> Iterator[tuple[HandoffId, str]]:
    """Of which nothing is held any more, and why."""
    yield from ((item.key, "finished") for item in result.outputs if item.finish)
    yield from ((key, "preempted") for key in result.preempted)
    yield from ((key, "failed") for key, _ in result.failed)
