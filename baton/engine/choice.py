"""The output side of one sequence: its tokens, their text, and how it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.core import Finish, FinishReason, Token, TokenLogprobs
from baton.engine.sampler import Row
from baton.engine.text import OutputText

if TYPE_CHECKING:
    from baton.core import SequenceSpec
    from baton.tokenizer import Tokenizer


class Choice:
    """A pure function of the spec and the tokens pushed: `spec.known` is replayed first, and may already have ended it.

    `tokens` are prompt and output. A token that ends the choice by its id (EOS, stop token) is not part of the output.
    """

    def __init__(self, spec: SequenceSpec, tokenizer: Tokenizer, vocab_size: int, max_model_len: int) -> None:
        self.sampling = spec.sampling
        self.tokens = list(spec.prompt)
        self.finish: Finish | None = None
        self._prompt_len = len(spec.prompt)
        self._max_output = min(self.sampling.max_tokens, max_model_len - len(spec.prompt))
        self._eos_ids = () if self.sampling.ignore_eos else tokenizer.eos_ids
        self._text = OutputText(tokenizer.stream(spec.prompt), self.sampling.stop, self.sampling.min_tokens)
        self.row = Row(spec.prompt, self.sampling, (*self._eos_ids, *self.sampling.stop_token_ids), vocab_size)
        for token_id in spec.known:
            if self.finish is None:
                self.push(token_id)

    def push(self, token_id: int, logprobs: TokenLogprobs | None = None) -> Token | None:
        """Take the next token: returns it with its text, or None if it only ends the choice. Sets `finish`."""
        reason = self._ends_by_id(token_id)
        if reason is not None:
            self.finish = Finish(reason, str(token_id), self._text.tail())
            return None
        index = len(self.tokens) - self._prompt_len
        self.tokens.append(token_id)
        self.row.advance(token_id)
        text, stop = self._text.push(token_id)
        if stop is not None:
            self.finish = Finish(FinishReason.STOP_STRING, stop)
        elif index + 1 >= self._max_output:
            self.finish = Finish(FinishReason.LENGTH, tail=self._text.tail())
        return Token(index, token_id, text, logprobs)

    def _ends_by_id(self, token_id: int) -> FinishReason | None:
        if token_id in self._eos_ids:
            return FinishReason.EOS
        return FinishReason.STOP_TOKEN if token_id in self.sampling.stop_token_ids else None
