"""A request in the engine (`Request`), and its creation from a spec (`RequestFactory`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.core import HandoffId, SequenceSpec, SequenceState
from baton.engine.determinism.planner import VerifiedProgress
from baton.engine.determinism.shapes import CandidateTokens
from baton.engine.model_backend import ModelBackend
from baton.engine.prefix_cache import BlockHashChain, scope_key
from baton.engine.sampling.logits import Row
from baton.engine.sampling.output import OutputFactory, OutputState
from baton.engine.sampling.prompt_logprobs import PromptScores
from baton.engine.sampling.sampler import Sampled
from baton.engine.sequence import Sequence, SequencePolicy
from baton.engine.speculation.control import Speculating
from baton.engine.states import States
from baton.engine.step_result import KvLengths, SequenceOutput
from baton.engine.thinking import Thoughts
from baton.errors import InvalidRequest


@dataclass(slots=True)
class Request:
    """Progress and output of one request. A deterministic one has a `draft`, and only verified tokens in `choice`."""

    sequence: Sequence
    choice: OutputState
    hold: int = 0  # tokens at which it stops and keeps its blocks, or 0
    held: bool = False
    draft: CandidateTokens | None = None
    progress: VerifiedProgress | None = None  # set together with `draft`
    speculating: Speculating | None = None  # after its first speculative step

    @property
    def tokens(self) -> list[int]:
        """All tokens that the ordinary batch continues from, including candidates."""
        return self.choice.tokens if self.draft is None else self.draft.tokens

    @property
    def row(self) -> Row:
        return self.choice.row if self.draft is None else self.draft.row

    @property
    def replays(self) -> bool:
        """Whether KV or the recurrent state of its tokens, except the last one, is missing here."""
        return self.progress is not None and self.progress.final < len(self.choice.tokens) - 1

    def is_final(self, *, exact: bool) -> bool:
        """Return whether the next token of an ordinary forward is final. `exact` means that the forward is."""
        return self.progress is None or (exact and self.progress.confirmed(self.sequence.known))

    def confirm(self) -> None:
        """Update the draft after an exact step has pushed one more token to `choice`."""
        if self.draft is not None and self.progress is not None:
            self.draft.push(self.choice.tokens[-1])
            self.progress.verified, self.progress.final = self.sequence.known, self.sequence.computed
            self.progress.ended = self.draft.ended

    def push_candidate(self, drawn: Sampled) -> None:
        """Add a token drawn by the ordinary batch, if one could be drawn."""
        assert self.draft is not None
        assert self.progress is not None
        self.draft.push(drawn.token_id)
        self.sequence.known, self.progress.ended = len(self.draft.tokens), self.draft.ended
        self.progress.margin = min(self.progress.margin, drawn.margin)
        self.progress.proposed = len(self.draft.proposals)

    def start_over(self) -> None:
        if self.draft is not None:
            self.draft = CandidateTokens(self.choice)


@dataclass(slots=True)
class RequestFactory:
    """Factory that checks specs and creates requests."""

    backend: ModelBackend
    choices: OutputFactory
    begin_fixed: Callable[[Request, int], None] | None  # for deterministic ones, with the length of the prompt
    thoughts: Thoughts | None
    states: States | None
    prefix_cache: bool
    arrivals: int = 0

    def check(self, spec: SequenceSpec) -> None:
        if spec.deterministic and self.begin_fixed is None:
            raise InvalidRequest.of("deterministic", f"not supported here. {self.backend.nondeterminism}".rstrip(". "))
        if spec.think_while_decoding and self.thoughts is None:
            raise InvalidRequest.of("think_while_decoding", "the model does not think")
        if spec.prompt_logprobs is not None and self.thoughts is not None:
            raise InvalidRequest.of("prompt_logprobs", "not supported for a model that thinks")
        if spec.think_while_decoding and spec.deterministic:
            raise InvalidRequest.of("think_while_decoding", "cannot be combined with deterministic")
        self.choices.check(spec)

    def begin(self, key: HandoffId, spec: SequenceSpec, *, hold: bool) -> Request | SequenceOutput:
        """Create a request that is computed from its first token, or return its end if known tokens end it."""
        keeper = self.thoughts or self.states
        policies: tuple[SequencePolicy, ...] = () if keeper is None else (keeper.begin(spec),)
        if spec.prompt_logprobs is not None:
            policies = (*policies, PromptScores(spec.prompt, spec.prompt_logprobs))
        return self._begin(key, spec, Sequence(key, 0, len(spec), len(spec), policies=policies), hold=hold)

    def adopt(self, key: HandoffId, spec: SequenceSpec, carried: SequenceState | None) -> Request | SequenceOutput:
        """Create a request with KV for all tokens but the last. Raises ValueError if `carried` does not fit."""
        keeper = self.thoughts or self.states
        policies = () if keeper is None else (keeper.adopt(spec, carried),)
        computed = len(spec) - 1
        return self._begin(key, spec, Sequence(key, 0, len(spec), computed, computed, policies=policies))

    def _begin(
        self, key: HandoffId, spec: SequenceSpec, sequence: Sequence, *, hold: bool = False
    ) -> Request | SequenceOutput:
        if (choice := self.choices.start(spec)).finish is not None:
            return SequenceOutput(key, [], choice.finish)
        self.arrivals += 1
        if spec.kv_lengths:
            sequence.policies = (*sequence.policies, KvLengths())
        sequence.arrival, sequence.priority = self.arrivals, spec.priority
        if self.prefix_cache:
            scope = scope_key(self.backend.fingerprint, spec.cache_scope, spec.deterministic)
            sequence.chain = BlockHashChain(scope, choice.tokens, self.backend.layout.block_size)
        request = Request(sequence, choice, len(spec) + 1 if hold else 0)
        if self.begin_fixed is not None and spec.deterministic:
            self.begin_fixed(request, len(spec.prompt))
        return request
