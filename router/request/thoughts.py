"""Thoughts of a model that thinks: what a call asks of them, and what its client has been told of each choice.

They are no part of the answer: no token index counts them, and nothing waits for them.
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
    """`fields`: those by which a call asks for a model that thinks. `spell`: token ids to text, if its client is to see
    thoughts.
    """

    fields: Sequence[str] = ()
    spell: Callable[[Sequence[int]], str] | None = None

    @classmethod
    def of(cls, message: pb.GenerateRequest, tokenizer: Tokenizer) -> Asked:
        """Of a client's request."""
        given = (message.thoughts, message.think_while_decoding)
        fields = [field for field, value in zip(_FIELDS, given, strict=True) if value]
        return cls(fields, tokenizer.decode if message.thoughts else None)


class Thoughts:
    """Of one choice: merges what any number of workers say of its chunks, so that each comes once and in order.

    As with tokens, P says those of the prompt and D's may be there before them; a successor says all of them again, of
    which those that came already are passed over. All choices have the same prompt: its thoughts are those of choice 0.
    """

    def __init__(self, choice: int = 0, asked: Asked | None = None) -> None:
        self.tokens = 0  # of all that were told
        self._choice = choice
        self._spell = asked.spell if asked is not None else None
        self._due = 0  # chunk number
        self._anywhere = False
        self._early: dict[int, Thought] = {}  # later chunks, held back until the earlier ones are there

    def begin(self, prompt_tokens: int, chunk_size: int, *, parked: bool) -> None:
        """A new attempt begins. `chunk_size` 0: the model does not think. `parked`: it may begin behind what another
        router has told the client.
        """
        self._early.clear()
        self._anywhere = parked
        if self._choice and chunk_size:
            self._due = max(self._due, prompt_tokens // chunk_size)

    async def tell(self, client: EventStream, heard: list[Thought]) -> None:
        """Tell the client what is new of `heard`, if it asked for that; `heard` is empty then."""
        fresh = self.take(heard) if heard else []
        heard.clear()
        if (spell := self._spell) is not None:
            for thought in fresh:
                await client.thought(self._choice, thought, spell(thought.token_ids).strip())

    def take(self, heard: Iterable[Thought]) -> list[Thought]:
        """Those that are due, in order."""
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
        """The choice has ended. Raises EngineFault if its client asked for thoughts, and an earlier one never came."""
        if self._early and self._spell is not None:
            raise EngineFault(f"no thought about chunk {self._due} came, one about chunk {min(self._early)} did")
        self.tokens += sum(len(thought.token_ids) for thought in self._early.values())


def fitted(spec: SequenceSpec, info: WorkerInfo) -> SequenceSpec:
    """As this worker takes it: to a model that does not think, what the cluster file says of thinking is nothing."""
    if info.thinking_chunk or not spec.think_while_decoding:
        return spec
    return replace(spec, think_while_decoding=False)


def most_events(spec: SequenceSpec, info: WorkerInfo) -> int:
    """How many messages with thoughts an attempt may bring: both workers may say each chunk by itself."""
    if not info.thinking_chunk:
        return 0
    return 2 * ((len(spec.prompt) + spec.sampling.max_tokens) // info.thinking_chunk)
