"""Output of one sequence: its tokens, text and end. It is a pure function of the token ids, so no text is sent."""

from __future__ import annotations

from collections.abc import Sequence

from baton.core import Finish, FinishReason, Sampling, SequenceSpec, Token, TokenLogprobs
from baton.engine.sampling.logits import Row
from baton.errors import TOO_LONG, InvalidRequest
from baton.structured_output import Grammars, Guide
from baton.tokenizer import Detokenizer, Tokenizer


class OutputText:
    """Detokenizer with stop strings. The first character that completes a stop string decides; among several matches
    there, the longest counts. A match that is complete before token number `min_tokens` (from 1) is ordinary text. The
    text `includes` the stop string, or ends before it.
    """

    def __init__(
        self, detokenizer: Detokenizer, stop: Sequence[str] = (), min_tokens: int = 0, *, includes: bool = False
    ) -> None:
        self._detokenizer, self._stop, self._min_tokens = detokenizer, tuple(stop), min_tokens
        self._includes = includes
        self._pushed = 0
        self._held = ""  # the longest end of the text that may begin a stop string

    def push(self, token_id: int) -> tuple[str, str | None]:
        """Add a token. Return the text that no later token can change, and the stop string that ended it, if any."""
        self._pushed += 1
        piece = self._detokenizer.push(token_id)
        if not self._stop:
            return piece, None
        text = self._held + piece
        match = self._find(text, len(self._held)) if self._pushed >= self._min_tokens else None
        if match is not None:
            begin, stop = match
            self._held = ""
            return text[: begin + len(stop) * self._includes], stop
        final = len(text) - self._partial(text)
        self._held = text[final:]
        return text[:final], None

    def ended_by(self, token_id: int) -> str:
        """Return the tail at a token that ends the output. It has the token's own text only if stops are included."""
        if self._includes:
            self._held += self._detokenizer.push(token_id)
        return self.tail()

    def tail(self) -> str:
        """Return the text still held back at the end: a partial stop string, an incomplete character."""
        tail, self._held = self._held + self._detokenizer.flush(), ""
        return tail

    def _find(self, text: str, searched: int) -> tuple[int, str] | None:
        """Return (begin, stop) of the match that ends first, after `searched`; the longest of several."""
        found = []
        for stop in self._stop:
            begin = text.find(stop, max(0, searched - len(stop) + 1))
            if begin >= 0:
                found.append((begin + len(stop), begin, stop))
        return min(found)[1:] if found else None

    def _partial(self, text: str) -> int:
        """Return the length of the longest end of `text` that is a proper beginning of a stop string."""
        longest = 0
        for stop in self._stop:
            length = min(len(stop) - 1, len(text))
            while length > longest and not text.endswith(stop[:length]):
                length -= 1
            longest = max(longest, length)
        return longest


def bad_words_of(sampling: Sampling, tokenizer: Tokenizer, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each bad word: at the beginning of a text and, if that differs, after a space. vLLM omits
    the latter if their number differs, so that small vocabularies still complete the word. Words with a token that the
    model of `vocab_size` logits cannot draw are left out.
    """
    found: list[tuple[int, ...]] = []
    for word in sampling.bad_words:
        bare = word.lstrip() or word  # a word of white space alone has one spelling
        first, within = (tuple(tokenizer.encode_plain(prefix + bare)) for prefix in ("", " "))
        found += [first] if first else []
        found += [within] if bare.strip() and first[:1] != within[:1] else []
    return tuple(word for word in found if max(word) < vocab_size)


class OutputFactory:
    """Creates the outputs of one engine."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, max_model_len: int) -> None:
        self._tokenizer, self._vocab_size, self._max_model_len = tokenizer, vocab_size, max_model_len
        self._grammars = Grammars(tokenizer, vocab_size)

    def check(self, spec: SequenceSpec) -> None:
        if not spec.prompt:
            raise InvalidRequest.of("prompt", "must have at least one token")
        needed = len(spec.prompt) + (spec.sampling.max_tokens > 0)
        if needed > self._max_model_len or len(spec) > self._max_model_len:
            limit = f"{TOO_LONG} {self._max_model_len} tokens"
            raise InvalidRequest.of("prompt", f"{limit}; {len(spec)} and at least one output token do not fit")
        sampling = spec.sampling
        for field, ids in (
            ("prompt", spec.tokens),
            ("sampling.stop_token_ids", sampling.stop_token_ids),
            ("sampling.logit_bias", (token_id for token_id, _ in sampling.logit_bias)),
        ):
            wrong = next((token_id for token_id in ids if not 0 <= token_id < self._vocab_size), None)
            if wrong is not None:
                raise InvalidRequest.of(field, f"token id {wrong} is not within 0..{self._vocab_size - 1}")
        self._grammars.check(spec.constraint)

    def start(self, spec: SequenceSpec) -> OutputState:
        """Create an output with `spec.known`. Raises InvalidRequest if its constraint does not allow these."""
        guide = self._grammars.start(spec.constraint)
        choice = OutputState(spec, self._tokenizer, self._vocab_size, self._max_model_len, guide)
        if guide is not None and guide.broken:
            raise InvalidRequest.of("known", "has tokens that the constraint does not allow")
        return choice


class OutputState:
    """Prompt and output of one sequence (`tokens`). `spec.known` is replayed first, and may already end it."""

    def __init__(
        self, spec: SequenceSpec, tokenizer: Tokenizer, vocab_size: int, max_model_len: int, guide: Guide | None
    ) -> None:
        self.sampling = spec.sampling
        self.tokens = list(spec.prompt)
        self.finish: Finish | None = None
        self._prompt_len = len(spec.prompt)
        self.max_output = min(self.sampling.max_tokens, max_model_len - len(spec.prompt))
        self._eos_ids = () if self.sampling.ignore_eos else tokenizer.eos_ids
        sampling = self.sampling
        stream = tokenizer.stream(spec.prompt, special=not sampling.skip_special_tokens)
        includes = sampling.include_stop_str_in_output
        self._text = OutputText(stream, sampling.stop, sampling.min_tokens, includes=includes)
        end_ids = (*self._eos_ids, *self.sampling.stop_token_ids)
        bad_words = bad_words_of(sampling, tokenizer, vocab_size)
        self.row = Row(spec.prompt, self.sampling, end_ids, vocab_size, guide, bad_words)
        for token_id in spec.known:
            if self.finish is None:
                self.push(token_id)

    def push(self, token_id: int, logprobs: TokenLogprobs | None = None) -> Token | None:
        """Add a token. Return it with its text, or None if it only ends the output. Sets `finish` at the end."""
        reason = self.ends_by_id(token_id)
        if not self.max_output:  # only the prompt was wanted
            self.finish = Finish(FinishReason.LENGTH)
            return None
        if reason is not None:
            self.finish = Finish(reason, str(token_id), self._text.ended_by(token_id), logprobs)
            return None
        index = len(self.tokens) - self._prompt_len
        self.tokens.append(token_id)
        self.row.advance(token_id)
        text, stop = self._text.push(token_id)
        if stop is not None:
            self.finish = Finish(FinishReason.STOP_STRING, stop)
        elif self.row.guide is not None and self.row.guide.complete:
            self.finish = Finish(FinishReason.EOS, tail=self._text.tail())  # nothing but an end token could follow
        elif self.full_at(len(self.tokens)):
            self.finish = Finish(FinishReason.LENGTH, tail=self._text.tail())
        return Token(index, token_id, text, logprobs)

    def full_at(self, length: int) -> bool:
        """Return whether a sequence of this many tokens ends by its length."""
        return length - self._prompt_len >= self.max_output

    def ends_by_id(self, token_id: int) -> FinishReason | None:
        """Return why this token is the end instead of output, or None."""
        if token_id in self._eos_ids:
            return FinishReason.EOS
        return FinishReason.STOP_TOKEN if token_id in self.sampling.stop_token_ids else None
