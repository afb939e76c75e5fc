"""What a worker reports of itself with each step. Nothing here changes once it is made; to have that enforced would
take several times as long as to make it.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class BlockCounts:
    """The block ledger of one worker. `check` is the invariant: every block is in exactly one state."""

    total: int
    free: int = 0
    reserved: int = 0
    owned: int = 0
    cached: int = 0
    quarantined: int = 0

    @property
    def available(self) -> int:
        """Blocks that can be allocated: what is only cached makes room when it is needed."""
        return self.free + self.cached

    def check(self) -> BlockCounts:
        """Return self, or raise AssertionError with the counts: a block was lost or is owned twice."""
        if self.free + self.reserved + self.owned + self.cached + self.quarantined != self.total:
            raise AssertionError(f"block ledger does not add up: {self}")
        return self


@dataclass(frozen=True, slots=True)
class Channel:
    """A data channel that a worker sends on: to which worker, by what, and how fast its probe went through."""

    peer: str
    transport: str
    bytes_per_s: float


@dataclass(slots=True)
class Pace:
    """Steps of one kind since the process began, all together, and the seconds they took."""

    steps: int = 0
    tokens: int = 0  # computed
    context: int = 0  # positions that these tokens attended to, summed
    seconds: float = 0.0

    def plus(self, tokens: int, context: int, seconds: float) -> Pace:
        """After one more step."""
        return Pace(self.steps + 1, self.tokens + tokens, self.context + context, self.seconds + seconds)

    def since(self, before: Pace) -> Pace:
        """What came after `before`."""
        return Pace(
            self.steps - before.steps,
            self.tokens - before.tokens,
            self.context - before.context,
            self.seconds - before.seconds,
        )


@dataclass(slots=True)
class Load:
    """What a worker reports with each step: the router's live view of it, and what `baton status` shows."""

    step: int = 0
    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0  # prompt tokens accepted and not computed yet
    prefill_tokens: int = 0  # computed since the process began
    cached_tokens: int = 0  # found in the prefix cache instead
    decode_steps: int = 0
    decode_tokens: int = 0
    blocks: BlockCounts = field(default_factory=lambda: BlockCounts(0))
    transfer_bytes: int = 0
    transport: str = ""
    fetched_tokens: int = 0  # whose KV came from a decode worker instead of being computed
    channels: tuple[Channel, ...] = ()
    prefill_pace: Pace = field(default_factory=Pace)  # of steps that only computed prompts
    decode_pace: Pace = field(default_factory=Pace)  # of steps that only decoded
    joint_pace: Pace = field(default_factory=Pace)  # of steps that did both: what they computed of prompts, and took
    beside_pace: Pace = field(default_factory=Pace)  # what the same steps decoded, at no seconds
    verify_passes: int = 0  # of deterministic requests
    rollbacks: int = 0  # candidates that a verify pass did not agree with
    recomputed_tokens: int = 0  # dropped with them, or behind them
    draining: bool = False  # takes nothing new, finishes what it has

    @property
    def starved(self) -> bool:
        """After a step: all that is here waits for blocks, which others have."""
        return self.waiting > 0 and self.running == 0
