"""Accumulates the events of one stream into an answer. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.client._messages import trusted, values
from baton.client.types import Choice, Completion, Delta, Placement, PromptToken, Thought, Timings, Usage
from baton.core import FinishReason, PromptPart, TokenLogprobs
from baton.errors import EngineFault
from baton.rpc import convert
from baton.rpc.convert import span_from_pb
from baton.rpc.v1 import common_pb2 as common
from baton.rpc.v1 import inference_pb2 as inference
from baton.tracing.trace import Span


@dataclass(slots=True)
class _ChoiceState:
    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    matched_stop: str = ""
    ended_in: int = 0  # value of `resumed` when the end was reported
    tail: str = ""  # text that came without a token, since the last token
    repeated: str = ""  # part of the tail that a resumed stream will repeat
    thoughts: list[Thought] = field(default_factory=list)
    end_logprobs: TokenLogprobs | None = None

    def freeze(self) -> Choice:
        content = ("".join(self.text), tuple(self.tokens), tuple(self.logprobs))
        return Choice(*content, self.finish_reason, self.matched_stop, tuple(self.thoughts), self.end_logprobs)


class Fold:
    """The answer so far, common to both streams. An event or token out of order raises EngineFault, because an answer
    with a gap must not look complete.
    """

    def __init__(self) -> None:
        self.request_id = ""  # named by the server in its first event
        self.resumed = 0  # resumed streams
        self.usage: Usage | None = None
        self.timings: Timings | None = None
        self.placement: Placement | None = None
        self.system_fingerprint = ""
        self._defaults = common.Sampling()  # that the router added to the request
        self.trace_id = ""
        self.trace: tuple[Span, ...] = ()
        self.receipt = ""
        self._prompt: list[PromptToken] = []  # scored
        self._started = False  # an event has arrived; the request must not be sent again
        self._events = 0  # events of the current stream
        self._choices: dict[int, _ChoiceState] = {}

    @property
    def text(self) -> str:
        return self._choice().text

    @property
    def tokens(self) -> tuple[int, ...]:
        return self._choice().tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._choice().finish_reason

    @property
    def thoughts(self) -> tuple[Thought, ...]:
        return self._choice().thoughts

    @property
    def prompt_logprobs(self) -> tuple[PromptToken, ...]:
        return tuple(self._prompt)

    def _choice(self, index: int = 0) -> Choice:
        return self._choices.get(index, _ChoiceState()).freeze()

    def _feed(self, event: inference.GenerateEvent) -> Delta | None:
        """Process the next event; return its text, tokens or thought, if any. Raises EngineFault."""
        self._check_order(event)
        self.resumed += self._started and not self._events
        self._started = True
        self.request_id = event.request_id
        self._events += 1
        match event.WhichOneof("event"):
            case "tokens":
                return self._tokens(event.tokens)
            case "thought":
                return self._thought(event.thought)
            case "prompt_logprobs":
                self._score(trusted(convert.prompt_part_from_pb, event.prompt_logprobs))
            case "finished":
                self._finished(event.finished)
            case "accepted":
                self.system_fingerprint = event.accepted.system_fingerprint
                self._defaults.MergeFrom(event.accepted.defaults)  # a Resume has the earlier ones
            case "completed":
                self.usage = Usage(**values(event.completed.usage))
                self.timings = Timings(**values(event.completed.timings))
                self.placement = Placement(**values(event.completed.placement))
                self.system_fingerprint = event.completed.system_fingerprint
                self.trace_id = event.completed.trace_id
                self.trace = tuple(map(span_from_pb, event.completed.spans))
                self.receipt = event.completed.receipt
        return None  # other events, also those of newer servers, are ignored

    def _received(self, choices: int) -> list[common.TokenIds]:
        count = max(choices, 1, *(index + 1 for index in self._choices))
        return [common.TokenIds(ids=self._choice(index).tokens) for index in range(count)]

    def _rewind(self) -> None:
        """Prepare for a resumed stream. Text without a token has no number and will be sent again."""
        self._events = 0
        for state in self._choices.values():
            state.repeated = state.tail

    def _completion(self) -> Completion:
        """Return the whole answer after the end of the stream. Raises EngineFault if it ended early."""
        if self.usage is None or self.timings is None or self.placement is None:
            raise self._broken("ended without Completed")
        if any(state.finish_reason is None for state in self._choices.values()) or not self._choices:
            raise self._broken("ended with an unfinished choice")
        choices = tuple(self._choice(index) for index in sorted(self._choices))
        rest = (self.usage, self.timings, self.placement, self.system_fingerprint, self.trace_id, self.trace)
        return Completion(self.request_id, choices, *rest, self.prompt_logprobs, self.receipt)

    def _check_order(self, event: inference.GenerateEvent) -> None:
        if self.usage is not None:
            raise self._broken("event after Completed")
        if event.seq != self._events:
            raise self._broken(f"received event {event.seq}, expected {self._events}")
        if self._events and event.request_id != self.request_id:
            raise self._broken(f"received an event of request {event.request_id!r}")

    def _tokens(self, message: inference.Tokens) -> Delta | None:
        state = self._choices.setdefault(message.choice, _ChoiceState())
        start: int = getattr(message, "from")  # a keyword in Python
        if start != len(state.tokens):
            raise self._broken(f"received token {start} of choice {message.choice}, expected {len(state.tokens)}")
        if len(message.logprobs) not in {0, len(message.ids)}:
            raise self._broken(f"received {len(message.ids)} tokens with {len(message.logprobs)} logprobs")
        logprobs = tuple(convert.token_logprobs_from_pb(entry) for entry in message.logprobs)
        content = tuple(message.ids), self._fresh(state, message), logprobs
        delta = Delta(message.choice, start, *content, lengths=tuple(message.lengths))
        again = message.text and not delta.text and not delta.tokens
        if state.finish_reason is not None and not again:
            raise self._broken(f"received tokens of choice {message.choice} after its end")
        state.text.append(delta.text)
        state.tail = "" if delta.tokens else state.tail + delta.text
        state.tokens.extend(delta.tokens)
        state.logprobs.extend(logprobs)
        return None if again else delta

    def _score(self, part: PromptPart) -> None:
        if part.start != len(self._prompt):
            raise self._broken(f"received prompt token {part.start}, expected {len(self._prompt)}")
        self._prompt += part.tokens

    def _thought(self, message: inference.Thought) -> Delta | None:
        """Return None for a repeated thought. Only the first choice has those of the prompt; others start later."""
        state = self._choices.setdefault(message.choice, _ChoiceState())
        first = message.chunk if message.choice else 0
        due = state.thoughts[-1].chunk + 1 if state.thoughts else first
        if message.chunk > due or (message.chunk < due and not self.resumed):
            raise self._broken(f"received thought {message.chunk} of choice {message.choice}, expected {due}")
        if message.chunk < due:
            return None
        state.thoughts.append(Thought(message.chunk, tuple(message.ids), message.text))
        return Delta(message.choice, len(state.tokens), (), "", thoughts=(state.thoughts[-1],))

    def _fresh(self, state: _ChoiceState, message: inference.Tokens) -> str:
        """Return the text of a message without the part that came before the stream broke."""
        repeated = message.text[: len(state.repeated)]
        if not state.repeated.startswith(repeated):
            raise self._broken(f"repeated text of choice {message.choice} differs")
        state.repeated = state.repeated[len(repeated) :]
        return message.text[len(repeated) :]

    def _finished(self, message: inference.Finished) -> None:
        state = self._choices.setdefault(message.choice, _ChoiceState())
        reason = trusted(lambda m: convert.finish_reason_from_pb(m.reason), message)
        if state.finish_reason is not None and (state.ended_in == self.resumed or state.finish_reason is not reason):
            raise self._broken(f"choice {message.choice} ended twice")
        state.finish_reason, state.ended_in = reason, self.resumed
        state.matched_stop = message.matched_stop
        if message.HasField("logprobs"):
            state.end_logprobs = convert.token_logprobs_from_pb(message.logprobs)

    def _broken(self, what: str) -> EngineFault:
        return EngineFault(f"the stream of request {self.request_id!r} is broken: {what}")
