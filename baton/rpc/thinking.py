"""Thoughts and thinking states on the wire, as `baton.rpc.convert` does for all else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.core import ThinkingState, Thought
from baton.rpc.convert import require
from baton.rpc.v1 import common_pb2 as common
from baton.rpc.v1 import worker_pb2 as worker

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def thinking_to_pb(value: ThinkingState | None) -> worker.ThinkingState | None:
    """Names are the same on both sides."""
    if value is None:
        return None
    return worker.ThinkingState(
        thinker=value.thinker,
        chunk=value.chunk,
        offset=value.offset,
        state=value.state,
        rows=value.rows,
        thoughts=_ids_to_pb(value.thoughts),
    )


def thinking_from_pb(message: worker.ThinkingState) -> ThinkingState:
    """Raises InvalidRequest without a thinker or a state, or for more thoughts than chunks.

    Whether the sizes are right is for who knows the model to say.
    """
    require(message.thinker, "thinking.thinker", "must not be empty")
    require(message.state, "thinking.state", "must not be empty")
    text = f"must be at most {message.chunk}, one for each chunk before the open one, got {len(message.thoughts)}"
    require(len(message.thoughts) <= message.chunk, "thinking.thoughts", text)
    thoughts = tuple(tuple(each.ids) for each in message.thoughts)
    return ThinkingState(message.thinker, message.chunk, message.offset, message.state, message.rows, thoughts)


def thoughts_to_pb(thoughts: Sequence[Thought]) -> worker.OutputThoughts:
    """Thoughts about consecutive chunks, at least one. Raises ValueError for others."""
    first = thoughts[0].chunk if thoughts else -1
    if [thought.chunk for thought in thoughts] != list(range(first, first + len(thoughts))) or first < 0:
        raise ValueError(f"chunks are not consecutive: {[thought.chunk for thought in thoughts]}")
    return worker.OutputThoughts(chunk=first, thoughts=_ids_to_pb(thought.token_ids for thought in thoughts))


def thoughts_from_pb(message: worker.OutputThoughts) -> list[Thought]:
    """Any lists of ids are thoughts."""
    return [Thought(chunk, tuple(each.ids)) for chunk, each in enumerate(message.thoughts, message.chunk)]


def _ids_to_pb(thoughts: Iterable[Iterable[int]]) -> list[common.TokenIds]:
    return [common.TokenIds(ids=ids) for ids in thoughts]
