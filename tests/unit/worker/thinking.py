"""Engines with fake thoughts and thinking states, which need no thinking model."""

from typing import Any

from baton.core import ThinkingState, Thought

CHUNK = 4  # the size of a block


def thought_about(chunk):
    return Thought(chunk, (100 + chunk, 7) if chunk % 2 == 0 else ())


def thoughts_about(count):
    return [thought_about(chunk) for chunk in range(count)]


def thinks(engine, *, always=False):
    """Make each step return thoughts about completed chunks of prompts, with `always` also of generated tokens."""
    step = engine.step
    told: dict[Any, int] = {}  # reported positions by sequence

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

    def state_of(key):
        """Return the state in a handoff after thoughts about all whole chunks."""
        engine.held(key)
        position = engine._requests[key].sequence.computed
        chunk, offset = divmod(position, CHUNK)
        ids = tuple(thought.token_ids for thought in thoughts_about(chunk))
        return ThinkingState("thinker", chunk, offset, bytes([position]) * 32, b"", ids)

    engine.step, engine.state_of = thinking_step, state_of
