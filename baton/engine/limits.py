"""What an engine can never compute, said before anything is spent on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baton.core import SequenceSpec


def check_spec(spec: SequenceSpec, vocab_size: int, max_model_len: int) -> None:
    """Raises InvalidRequest, naming the field: no prompt, no room for an answer, or an id outside the vocabulary."""
    if not spec.prompt:
        raise InvalidRequest.of("prompt", "must have at least one token")
    if len(spec.prompt) >= max_model_len or len(spec) > max_model_len:
        raise InvalidRequest.of(
            "prompt", f"has {len(spec)} tokens, which leaves no room for an answer within {max_model_len}"
        )
    _check_ids("prompt", spec.tokens, vocab_size)
    _check_ids("sampling.stop_token_ids", spec.sampling.stop_token_ids, vocab_size)
    _check_ids("sampling.logit_bias", (token_id for token_id, _ in spec.sampling.logit_bias), vocab_size)


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    wrong = next((i for i in ids if not 0 <= i < vocab_size), None)
    if wrong is not None:
        raise InvalidRequest.of(name, f"token id {wrong} is not within 0..{vocab_size - 1}")
