"""Thoughts of a model that thinks: a call's thinking options, and the order in which its client receives thoughts.

Thoughts are not part of the answer: they have no token index, and no token waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from baton.core import SequenceSpec, Thought, WorkerInfo
from baton.errors import EngineFault
from baton.rpc.v1 import inference_pb2 as pb
from baton.tokenizer import Tokenizer
from router.request.delivery import EventStream

_FIELDS = ("thoughts", "think_while_decoding")


@dataclass(frozen=True, slots=True)
class Asked:
    """Thinking options of a call. `fields` are the request fields that require a model that thinks. `spell` decodes
    token ids; it is None if the client does not want thoughts.
    """

    fields: Sequence[str] = ()
    spell: Callable[[Sequence[int]], str] | None = None

    @classmethod
    def of(cls, message: pb.GenerateRequest, tokenizer: Tokenizer) -> Asked:
        """Return the options of a client's request."""
        given = (message.thoughts, message.think_while_decoding)
        fields = [field for field, value in zip(_FIELDS, given, strict=True) if value]
        return cls(fields, tokenizer.decode if message.thoughts else None)


class Thoughts:
    """Merges the thoughts that workers report for one choice, so that each chunk's thought comes once and in order. P
    reports thoughts about the prompt, and those of D may arrive first. A new attempt repeats all; repeated ones are
    dropped. All choices share the prompt, so only choice 0 delivers thoughts about it.
    """

    def __init__(self, choice: int = 0, asked: Asked | None = None) -> None:
        self.tokens = 0  # of all delivered thoughts
        self._choice = choice
        self._spell = asked.spell if asked is not None else None
        self._due = 0  # the next chunk number
        self._anywhere = False
        self._early: dict[int, Thought] = {}  # later chunks, held back until the earlier ones arrive

    def begin(self, prompt_tokens: int, chunk_size: int, *, parked: bool) -> None:
        """Begin an attempt. `chunk_size` is 0 if the model does not think. A `parked` one may start at any chunk."""
        self._early.clear()
        self._anywhere = parked
        if self._choice and chunk_size:
            self._due = max(self._due, prompt_tokens // chunk_size)

    async def tell(self, client: EventStream, heard: list[Thought]) -> None:
        """Send the new ones of `heard` to the client, if it wants thoughts, and clear `heard`."""
        fresh = self.take(heard) if heard else []
        heard.clear()
        if (spell := self._spell) is not None:
            for thought in fresh:
                await client.thought(self._choice, thought, spell(thought.token_ids).strip())

    def take(self, heard: Iterable[Thought]) -> list[Thought]:
        """Return the thoughts that are due, in order."""
        for thought in heard:
            if self._anywhere:
                self._due, self._anywhere = max(self._due, thought.chunk), False
            if thought.chunk >= self._due:
                self._early.setdefault(thought.chunk, thought)
        fresh = []
        while self._due in self._early:
            fresh.append(self._early.pop(self._due))
            self._due += 1
        self.tokens += sum(len(thought.token_ids) for thought in fresh)
        return fresh

    def complete(self) -> None:
        """End the choice. Raises EngineFault if its client wants thoughts and an earlier one is missing."""
        if self._early and self._spell is not None:
            raise EngineFault(f"no thought about chunk {self._due} came, one about chunk {min(self._early)} did")
        self.tokens += sum(len(thought.token_ids) for thought in self._early.values())


def fitted(spec: SequenceSpec, info: WorkerInfo) -> SequenceSpec:
    """Return `spec` for this worker. A model that does not think ignores the default of the cluster file."""
    if info.thinking_chunk or not spec.think_while_decoding:
        return spec
    return replace(spec, think_while_decoding=False)


def most_events(spec: SequenceSpec, info: WorkerInfo) -> int:
    """Return the most messages with thoughts in one attempt. Both workers may send each chunk separately."""
    if not info.thinking_chunk:
        return 0
    return 2 * ((len(spec.prompt) + spec.sampling.max_tokens) // info.thinking_chunk)
