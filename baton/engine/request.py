"""A request as the engine holds it.

How a request begins in an engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.engine.determinism.shapes import CandidateTokens
from baton.engine.prefix_cache import BlockHashChain, scope_key
from baton.engine.sequence import Sequence
from baton.engine.step_result import SequenceOutput
from baton.errors import InvalidRequest

if TYPE_CHECKING:
    from baton.core import HandoffId, SequenceSpec, ThinkingState
    from baton.engine.choice import OutputFactory, OutputState
    from baton.engine.determinism.verifier import FixedForwards
    from baton.engine.model_backend import ModelBackend
    from baton.engine.sampling.sampler import Row
    from baton.engine.thinking.states import Thoughts


@dataclass(slots=True)
class Request:
    """Its progress, and its output. `draft`: of a deterministic one, whose `choice` has verified tokens alone."""

    sequence: Sequence
    choice: OutputState
    hold: bool = False
    held: bool = False
    draft: CandidateTokens | None = None

    @property
    def tokens(self) -> list[int]:
        """All that the ordinary batch goes on from."""
        return self.choice.tokens if self.draft is None else self.draft.tokens

    @property
    def row(self) -> Row:
        """For its next draw."""
        return self.choice.row if self.draft is None else self.draft.row

    def confirm(self) -> None:
        """Its choice has one more token, of an exact step."""
        sequence, fixed = self.sequence, self.sequence.fixed
        if self.draft is not None and fixed is not None:
            self.draft.push(self.choice.tokens[-1])
            fixed.verified, fixed.final, fixed.ended = sequence.known, sequence.computed, self.draft.ended

    def push_candidate(self, token_id: int | None) -> None:
        """What the ordinary batch drew, or that it could not."""
        assert self.draft is not None
        assert self.sequence.fixed is not None
        self.draft.push(token_id)
        self.sequence.known, self.sequence.fixed.ended = len(self.draft.tokens), self.draft.ended

    def start_over(self) -> None:
        """Its KV is gone: candidates are, too."""
        if self.draft is not None:
            self.draft = CandidateTokens(self.choice)


@dataclass(slots=True)
class RequestFactory:
    """Checks specs and makes requests of them. `fixed`: for deterministic ones; None: these are refused."""

    backend: ModelBackend
    choices: OutputFactory
    fixed: FixedForwards | None
    thoughts: Thoughts | None
    prefix_cache: bool
    arrivals: int = 0

    def check(self, spec: SequenceSpec) -> None:
        """Raises InvalidRequest, naming the field, if `spec` can never be computed here."""
        if spec.deterministic and self.fixed is None:
            raise InvalidRequest.of("deterministic", f"not computed here. {self.backend.nondeterminism}".rstrip(". "))
        if spec.think_while_decoding and self.thoughts is None:
            raise InvalidRequest.of("think_while_decoding", "this model does not think")
        if spec.think_while_decoding and spec.deterministic:
            raise InvalidRequest.of("think_while_decoding", "not together with deterministic")
        self.choices.check(spec)

    def begin(self, key: HandoffId, spec: SequenceSpec, *, hold: bool) -> Request | SequenceOutput:
        """Computed from its first token on; or only its ending, if what it knows has ended it."""
        thinking = None if self.thoughts is None else self.thoughts.begin(spec)
        return self._begin(key, spec, Sequence(key, 0, len(spec), len(spec), thinking=thinking), hold=hold)

    def adopt(self, key: HandoffId, spec: SequenceSpec, carried: ThinkingState | None) -> Request | SequenceOutput:
        """The same with the KV of all that it knows, but of the last token. ValueError: `carried` is not right."""
        thinking = None if self.thoughts is None else self.thoughts.adopt(spec, carried)
        computed = len(spec) - 1
        return self._begin(key, spec, Sequence(key, 0, len(spec), computed, computed, thinking=thinking))

    def _begin(
        self, key: HandoffId, spec: SequenceSpec, sequence: Sequence, *, hold: bool = False
    ) -> Request | SequenceOutput:
        if (choice := self.choices.start(spec)).finish is not None:
            return SequenceOutput(key, [], choice.finish)
        self.arrivals += 1
        sequence.arrival, sequence.priority = self.arrivals, spec.priority
        if self.prefix_cache:
            scope = scope_key(self.backend.fingerprint, spec.cache_scope, spec.deterministic)
            sequence.chain = BlockHashChain(scope, choice.tokens, self.backend.layout.block_size)
        request = Request(sequence, choice, hold)
        if self.fixed is not None and spec.deterministic:
            self.fixed.begin(request, len(spec.prompt))
        return request
