"""Log-probabilities of a prompt on their way to the client: each position once and in order, whatever dies."""

from __future__ import annotations

from baton.core import PromptPart, PromptToken, SequenceSpec
from baton.errors import EngineFault
from router.request.delivery import EventStream


class PromptScores:
    """Merges the parts that prefill workers report. The client has the first `received` positions. Another attempt, and
    a worker that sends held KV again, repeat parts. `spec` is the one of the choice.
    """

    def __init__(self, spec: SequenceSpec, received: int = 0) -> None:
        self._total = 0 if spec.prompt_logprobs is None else len(spec.prompt)
        self._next = max(received, 1)
        self.most_events = 2 * self._total  # of one attempt: a part has at least one position, and may come twice
        # Workers do not report the first token, because nothing comes before it.
        self._fresh = [PromptPart(0, (PromptToken(spec.prompt[0]),))] if self._total and not received else []

    @property
    def missing(self) -> bool:
        """Whether a worker has not reported all positions."""
        return self._next < self._total

    @property
    def fresh(self) -> bool:
        """Whether there is something to deliver."""
        return bool(self._fresh)

    def add(self, part: PromptPart) -> None:
        """Add a part. Raises EngineFault if an earlier one is missing."""
        if part.start > self._next:
            raise EngineFault(f"log-probabilities of the prompt from {self._next} are missing: {part.start} came")
        if tokens := part.tokens[self._next - part.start :]:
            self._fresh.append(PromptPart(self._next, tokens))
            self._next += len(tokens)

    async def deliver(self, client: EventStream) -> None:
        """Send what is new to the client."""
        fresh, self._fresh = self._fresh, []
        for part in fresh:
            await client.prompt_logprobs(part)
