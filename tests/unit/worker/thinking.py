"""Engines that seem to think: what a role is told of thoughts and states, without a model that has any."""

from __future__ import annotations

from typing import Any

from baton.core import ThinkingState, Thought

CHUNK = 4  # as many tokens as a block has


def thought_about(chunk):
    return Thought(chunk, (100 + chunk, 7) if chunk % 2 == 0 else ())


def thoughts_about(count):
    return [thought_about(chunk) for chunk in range(count)]


def state_at(position):
    """As a handoff carries it: the chunks before that of `position` were thought about."""
    chunk, offset = divmod(position, CHUNK)
    ids = tuple(thought.token_ids for thought in thoughts_about(chunk))
    return ThinkingState("thinker", chunk, offset, bytes([position]) * 32, b"", ids)


def thinks(engine, *, always=False):
    """Each step tells thoughts about the chunks of prompts that it completed. `always`: about generated ones, too."""
    step = engine.step
    told: dict[Any, int] = {}  # by sequence

    def thinking_step():
        result = step()
        for key, request in engine._requests.items():
            sequence = request.sequence
            begin = told.get(sequence, 0)
            end = sequence.computed if always else min(sequence.computed, sequence.prefill_end)
            if end // CHUNK > begin:
                result.thoughts.append((key, thoughts_about(end // CHUNK)[begin:]))
                told[sequence] = end // CHUNK
        return result

    def thinking_state(key):
        engine.held(key)
        return state_at(engine._requests[key].sequence.computed)

    engine.step, engine.thinking_state = thinking_step, thinking_state
