"""The output side of one sequence: its tokens, their text, and how it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.core import Finish, FinishReason, Token, TokenLogprobs
from baton.engine.limits import check_spec
from baton.engine.sampler import Row
from baton.engine.text import OutputText
from baton.errors import InvalidRequest
from baton.structured_output import Grammars

if TYPE_CHECKING:
    from baton.core import SequenceSpec
    from baton.structured_output import Guide
    from baton.tokenizer import Tokenizer


class Choices:
    """Begins the choices of one engine."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._grammars = Grammars(tokenizer, vocab_size)

    def check(self, spec: SequenceSpec) -> None:
        """Raises InvalidRequest, naming the field, if `spec` can never be computed here."""
        check_spec(spec, self._vocab_size, self._max_model_len)
        self._grammars.check(spec.constraint)

    def start(self, spec: SequenceSpec) -> Choice:
        """A choice that has `spec.known` already. Raises InvalidRequest if its constraint does not allow that."""
        guide = self._grammars.start(spec.constraint)
        choice = Choice(spec, self._tokenizer, self._vocab_size, self._max_model_len, guide)
        if guide is not None and guide.broken:
            raise InvalidRequest.of("known", "has tokens that the constraint does not allow")
        return choice


class Choice:
    """A pure function of the spec and the tokens pushed: `spec.known` is replayed first, and may already have ended it.

    `tokens` are prompt and output. A token that ends the choice by its id (EOS, stop token) is not part of the output.
    """

    def __init__(
        self,
        spec: SequenceSpec,
        tokenizer: Tokenizer,
        vocab_size: int,
        max_model_len: int,
        guide: Guide | None = None,
    ) -> None:
        self.sampling = spec.sampling
        self.tokens = list(spec.prompt)
        self.finish: Finish | None = None
        self._prompt_len = len(spec.prompt)
        self.max_output = min(self.sampling.max_tokens, max_model_len - len(spec.prompt))
        self._eos_ids = () if self.sampling.ignore_eos else tokenizer.eos_ids
        self._text = OutputText(tokenizer.stream(spec.prompt), self.sampling.stop, self.sampling.min_tokens)
        end_ids = (*self._eos_ids, *self.sampling.stop_token_ids)
        self.row = Row(spec.prompt, self.sampling, end_ids, vocab_size, guide)
        for token_id in spec.known:
            if self.finish is None:
                self.push(token_id)

    def push(self, token_id: int, logprobs: TokenLogprobs | None = None) -> Token | None:
        """Take the next token: returns it with its text, or None if it only ends the choice. Sets `finish`."""
        reason = self.ends_by_id(token_id)
        if reason is not None:
            self.finish = Finish(reason, str(token_id), self._text.tail())
            return None
        index = len(self.tokens) - self._prompt_len
        self.tokens.append(token_id)
        self.row.advance(token_id)
        text, stop = self._text.push(token_id)
        if stop is not None:
            self.finish = Finish(FinishReason.STOP_STRING, stop)
        elif self.row.guide is not None and self.row.guide.complete:
            self.finish = Finish(FinishReason.EOS, tail=self._text.tail())  # nothing but an end token could follow
        elif index + 1 >= self.max_output:
            self.finish = Finish(FinishReason.LENGTH, tail=self._text.tail())
        return Token(index, token_id, text, logprobs)

    def ends_by_id(self, token_id: int) -> FinishReason | None:
        """Why it is no token of the output, if it is none."""
        if token_id in self._eos_ids:
            return FinishReason.EOS
        return FinishReason.STOP_TOKEN if token_id in self.sampling.stop_token_ids else None
