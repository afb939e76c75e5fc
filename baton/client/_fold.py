"""The events of one stream, folded into an answer. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.client._requests import trusted, values
from baton.client.types import Choice, Completion, Delta, Placement, Timings, Usage
from baton.core import FinishReason, TokenLogprobs
from baton.errors import EngineFault
from baton.rpc import convert
from baton.rpc.v1 import inference_pb2 as inference


@dataclass(slots=True)
class _ChoiceState:
    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    matched_stop: str = ""

    def freeze(self) -> Choice:
        return Choice(
            "".join(self.text), tuple(self.tokens), tuple(self.logprobs), self.finish_reason, self.matched_stop
        )


class Fold:
    """What both kinds of stream show of the answer so far; complete once the stream has ended.

    Asserts that each event is the next one, and each token too. A stream that breaks its promises raises EngineFault:
    an answer with a gap must not look like an answer.
    """

    def __init__(self) -> None:
        self.request_id = ""  # named by the server in its first event
        self.usage: Usage | None = None
        self.timings: Timings | None = None
        self.placement: Placement | None = None
        self._events = 0
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
    def _started(self) -> bool:
        """Whether an event has arrived: from then on the request must not be sent again."""
        return self._events > 0

    def _choice(self, index: int = 0) -> Choice:
        return self._choices.get(index, _ChoiceState()).freeze()

    def _feed(self, event: inference.GenerateEvent) -> Delta | None:
        """Take the next event; returns what it added, if that is text or tokens. Raises EngineFault."""
        self._check_order(event)
        self.request_id = event.request_id
        self._events += 1
        match event.WhichOneof("event"):
            case "tokens":
                return self._tokens(event.tokens)
            case "finished":
                self._finished(event.finished)
            case "completed":
                self.usage = Usage(**values(event.completed.usage))
                self.timings = Timings(**values(event.completed.timings))
                self.placement = Placement(**values(event.completed.placement))
        return None  # the others, also those of newer servers, need nothing done

    def _completion(self) -> Completion:
        """The whole answer, once the stream has ended. Raises EngineFault if it ended early."""
        if self.usage is None or self.timings is None or self.placement is None:
            raise self._broken("it ended without Completed")
        if any(state.finish_reason is None for state in self._choices.values()) or not self._choices:
            raise self._broken("a choice did not finish")
        choices = tuple(self._choice(index) for index in sorted(self._choices))
        return Completion(self.request_id, choices, self.usage, self.timings, self.placement)

    def _check_order(self, event: inference.GenerateEvent) -> None:
        if self.usage is not None:
            raise self._broken("an event came after Completed")
        if event.seq != self._events:
            raise self._broken(f"event {event.seq} came where {self._events} was due")
        if self._started and event.request_id != self.request_id:
            raise self._broken(f"an event of request {event.request_id!r} came")

    def _tokens(self, message: inference.Tokens) -> Delta:
        state = self._choices.setdefault(message.choice, _ChoiceState())
        start: int = getattr(message, "from")  # a keyword in Python
        if start != len(state.tokens):
            raise self._broken(f"token {start} of choice {message.choice} came where {len(state.tokens)} was due")
        if state.finish_reason is not None:
            raise self._broken(f"tokens of choice {message.choice} came after its end")
        if len(message.logprobs) not in {0, len(message.ids)}:
            raise self._broken(f"{len(message.ids)} tokens came with {len(message.logprobs)} logprobs")
        logprobs = tuple(convert.token_logprobs_from_pb(entry) for entry in message.logprobs)
        delta = Delta(message.choice, start, tuple(message.ids), message.text, logprobs)
        state.text.append(delta.text)
        state.tokens.extend(delta.tokens)
        state.logprobs.extend(logprobs)
        return delta

    def _finished(self, message: inference.Finished) -> None:
        state = self._choices.setdefault(message.choice, _ChoiceState())
        if state.finish_reason is not None:
            raise self._broken(f"choice {message.choice} ended twice")
        state.finish_reason = trusted(lambda m: convert.finish_reason_from_pb(m.reason), message)
        state.matched_stop = message.matched_stop

    def _broken(self, what: str) -> EngineFault:
        return EngineFault(f"the stream of request {self.request_id!r} is broken: {what}")
