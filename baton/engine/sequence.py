"""The scheduler's state of a request, and its plan of a step: numbers of tokens, never the tokens.

`SequencePolicy` is the seam for features that change how a sequence is scheduled: determinism and thinking states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from baton.core import HandoffId, PromptPart, Thought
from baton.engine.block_pool import Allocation
from baton.engine.prefix_cache import BlockHashChain

UNLIMITED = 2**31  # more than the tokens of any sequence
Policy = TypeVar("Policy", bound="SequencePolicy")


class SequencePolicy:
    """The rules of one feature for one sequence. The defaults are those of an ordinary sequence."""

    __slots__ = ()
    own_forwards: ClassVar[bool] = False  # it has forwards in addition to the ordinary batch

    @property
    def settled(self) -> bool:
        """Whether KV is final as soon as it is written."""
        return True

    @property
    def shareable(self) -> int:
        """Number of leading positions with KV that is right for any sequence with the same tokens."""
        return UNLIMITED

    @property
    def cacheable(self) -> int:
        """Number of leading positions that may come from the prefix cache."""
        return UNLIMITED

    def most(self, computed: int) -> int:
        """Return how many tokens a forward may compute after `computed` ones."""
        return UNLIMITED

    def ordinary(self, known: int) -> int:
        """Return how many of `known` tokens the ordinary batch may compute next."""
        return UNLIMITED

    def usable(self, hashes: Iterable[bytes]) -> Iterable[bytes]:
        """Return the first block hashes, up to the first that this sequence cannot continue from."""
        return hashes

    def aligned(self, cached: int, block_size: int) -> int:
        """Return how many of `cached` tokens, in whole blocks, end where the sequence can continue."""
        return cached

    def admitted(self, sequence: Sequence, block_size: int) -> None:
        """Begin behind the cached blocks of `sequence`, at its `computed` position."""

    def adopted(self, sequence: Sequence) -> None:
        """Continue with KV from elsewhere in the blocks of `sequence`."""

    def preempted(self, sequence: Sequence) -> None:
        """Start over, because the KV is gone."""

    def published(self, hashes: ListOf[bytes], first: int, block_size: int) -> None:
        """Record that the blocks from number `first` on are cached under `hashes`."""

    def stepped(self, sequence: Sequence) -> None:
        """Record the end of a step that computed tokens of `sequence`."""

    def new_thoughts(self) -> list[Thought]:
        """Return thoughts that were not returned before."""
        return []

    def new_prompt_parts(self) -> list[PromptPart]:
        """Return scored parts of the prompt that were not returned before."""
        return []


@dataclass(slots=True, eq=False)
class Sequence:
    """Progress of one request: `known` tokens, of which the first `computed` have their KV in `allocation`."""

    key: HandoffId
    arrival: int
    known: int
    prefill_end: int  # earlier tokens are prefill when computed, later ones decode
    computed: int = 0
    allocation: Allocation | None = None
    priority: int = 0
    chain: BlockHashChain | None = None  # hashes of full blocks; None means no caching
    cached: int | None = None  # tokens found in the cache at its first admission
    rank: tuple[int, int] | None = None  # lower runs first; set once by the scheduler
    policies: tuple[SequencePolicy, ...] = ()  # of the features that the request uses

    @property
    def pending(self) -> int:
        """Number of tokens to compute before the next token can be sampled."""
        return self.known - self.computed

    @property
    def most(self) -> int:
        most = self.known - self.computed
        for policy in self.policies:  # loops, because these properties are read for each sequence in each step
            most = min(most, policy.most(self.computed))
        return most

    @property
    def ordinary(self) -> int:
        tokens = self.known - self.computed
        for policy in self.policies:
            tokens = min(tokens, policy.ordinary(self.known))
        return tokens

    @property
    def own_forwards(self) -> bool:
        own = False
        for policy in self.policies:
            own = own or policy.own_forwards
        return own

    @property
    def settled(self) -> bool:
        """Whether KV is final as soon as it is written; else only `computed` positions are, between steps."""
        return all(policy.settled for policy in self.policies)

    @property
    def shareable(self) -> int:
        if not self.policies:
            return self.computed
        return min(self.computed, *(policy.shareable for policy in self.policies))

    @property
    def cacheable(self) -> int:
        """Number of leading positions that may be cached. One token is left to compute, because logits are needed."""
        return min((self.known - 1, *(policy.cacheable for policy in self.policies)))

    def policy(self, kind: type[Policy]) -> Policy | None:
        for policy in self.policies:
            if isinstance(policy, kind):
                return policy
        return None


@dataclass(slots=True)  # not frozen, because that would double the cost of a step
class ScheduledSequence:
    """Work of one sequence in a step: `count` tokens, from position `computed`."""

    sequence: Sequence
    count: int

    @property
    def completes(self) -> bool:
        """Whether this computes all known tokens, so that a token is to be sampled."""
        return self.count == self.sequence.pending

    @property
    def prefill_tokens(self) -> int:
        return min(self.count, max(0, self.sequence.prefill_end - self.sequence.computed))

    @property
    def context(self) -> int:
        """Number of positions that its tokens attend to, including themselves, summed over the tokens."""
        return self.count * self.sequence.computed + self.count * (self.count + 1) // 2


LayerListener = Callable[[list[ScheduledSequence], int], None]  # receives the work of a forward, and a written layer


@dataclass(frozen=True, slots=True)
class VerifyWork:
    """One row of a fixed forward: `count` known tokens of `sequence` from position `start` on, padded to `size`."""

    sequence: Sequence
    start: int
    count: int
    size: int
    on_grid: bool  # a chunk of the prompt; else candidates to verify


@dataclass(slots=True)
class SchedulerOutput:
    """Plan of one step: the work, the sequences preempted for it, and the number of cached tokens it reuses."""

    work: list[ScheduledSequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    cached_tokens: int = 0
    windows: list[VerifyWork] = field(default_factory=list)  # work of the fixed forward
