"""Overlap of host and device: a decode step is launched before the tokens of the step before are on the host.

    engine step n:    schedule n ── launch n ── read n-1, deliver n-1
    device:       ... n-1 ───────────────────┤ n ──────────────────────

The tokens of step n-1 stay on the device, where step n takes them as its input. The host reads them one step late and
handles its work while the device computes. Counts of tokens are enough to schedule, so `Sequence.known` includes a
token that is not read yet.

A step is launched early only if all its work is one token each of sequences that need no token on the host: no
constraint, penalty, log-probabilities, minimum length, deterministic request or thinking state. Every other step first
lands the step under way. So does one that may preempt, because a preempted sequence starts over from its tokens.

If a sequence ends when its next step is already launched, the further token is dropped. Its blocks are freed when that
step has ended, and the position written by it is never cached, because positions are cached when their step is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baton.core import HandoffId
from baton.engine.block_pool import Allocation
from baton.engine.kv_cache import KVCache
from baton.engine.model_backend import ModelBackend
from baton.engine.model_runner import OrdinaryForwards, SampledToken
from baton.engine.request import Request
from baton.engine.sampling.logits import upload
from baton.engine.sampling.sampler import NO_NUMBER, Sampled
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import LayerListener, ScheduledSequence, SchedulerOutput, Sequence
from baton.engine.step_result import Counters, StepResult


class LateTokens:
    """Tokens of a step on the device, int64 `[rows]`, and their copy to the host, which does not block."""

    def __init__(self, tokens: Tensor) -> None:
        self.on_device, self._host = tokens, tokens
        self._copied: torch.cuda.Event | None = None
        if tokens.device.type == "cuda":
            self._host = torch.empty(len(tokens), dtype=torch.int64, pin_memory=True)
            self._host.copy_(tokens, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def read(self) -> list[Sampled]:
        """Wait for the step and return its tokens. Raises what its kernels raised."""
        if self._copied is not None:
            self._copied.synchronize()
        return [Sampled(None if token == NO_NUMBER else token, None) for token in self._host.tolist()]


@dataclass(slots=True)
class StepUnderWay:
    """A launched step. `starts` has the position that it computes for each of its `requests`."""

    requests: list[Request]
    starts: list[int]
    tokens: LateTokens
    counts: StepResult  # of computed tokens; it has no outputs
    ended: list[Sequence] = field(default_factory=list)  # their blocks are freed when the step has ended


class Overlap:
    """The step under way of one engine, or none. Off if not `enabled`. `requests` are those of the engine by key.
    `attempt` returns the result of a call, or None if it raised and failed these sequences; `deliver` adds a token to
    its request.
    """

    def __init__(
        self,
        forwards: OrdinaryForwards,
        scheduler: Scheduler,
        requests: Mapping[HandoffId, Request],
        attempt: Callable[[Callable[[], Any], list[Sequence], StepResult], Any],
        deliver: Callable[[SampledToken, StepResult], None],
        *,
        enabled: bool,
    ) -> None:
        self._forwards, self._scheduler, self._requests = forwards, scheduler, requests
        self._attempt, self._deliver, self._enabled = attempt, deliver, enabled
        self.under_way: StepUnderWay | None = None

    def holdings(self) -> Iterator[tuple[HandoffId, Allocation | None]]:
        """Yield the key and the blocks of each ended sequence that the step under way still uses."""
        ended = self.under_way.ended if self.under_way is not None else []
        return ((sequence.key, sequence.allocation) for sequence in ended)

    def free(self, sequence: Sequence) -> None:
        """Free the blocks of an ended sequence: now, or after the step under way if that uses them."""
        step = self.under_way
        if step is not None and any(request.sequence is sequence for request in step.requests):
            step.ended.append(sequence)
        else:
            self._scheduler.free(sequence)

    def fits(self, plan: SchedulerOutput) -> bool:
        """Return whether the plan can be launched before the tokens of the step under way are read."""
        if not (self._enabled and plan.work) or plan.windows:
            return False
        requests = (self._requests[item.sequence.key] for item in plan.work)
        return all(item.count == 1 and item.completes for item in plan.work) and all(map(_needs_no_host, requests))

    def run(
        self,
        work: list[ScheduledSequence],
        backend: ModelBackend,
        kv: KVCache,
        on_layer: LayerListener | None,
        counters: Counters,
        result: StepResult,
    ) -> None:
        """Launch a step that `fits`, then read the step before."""
        launch = partial(self._launch, work, backend, kv, on_layer, counters)
        before, launched = self.under_way, self._attempt(launch, [item.sequence for item in work], result)
        self.under_way, result.under_way = launched, launched is not None
        self._read(before, result)

    def land(self, result: StepResult) -> None:
        """Read the step under way, if there is one."""
        step, self.under_way = self.under_way, None
        self._read(step, result)

    def _read(self, step: StepUnderWay | None, result: StepResult) -> None:
        """Deliver the tokens of a step, but not those of requests that have ended since."""
        if step is None:
            return
        same = [self._requests.get(each.sequence.key) is each for each in step.requests]
        live = [row for row, each in enumerate(step.requests) if same[row] and not each.held]
        drawn = self._attempt(step.tokens.read, [step.requests[row].sequence for row in live], result)
        for row in live if drawn is not None else ():
            request, start = step.requests[row], step.starts[row]
            self._scheduler.publish(request.sequence, start, start + 1)
            self._deliver(SampledToken(request, drawn[row], final=True), result)
        for sequence in step.ended:
            self._scheduler.free(sequence)

    @torch.inference_mode()
    def _launch(
        self,
        work: list[ScheduledSequence],
        backend: ModelBackend,
        kv: KVCache,
        on_layer: LayerListener | None,
        counters: Counters,
    ) -> StepUnderWay:
        """Run the model and draw without waiting for the device. Advance the sequences as if the tokens were known."""
        before, requests = self.under_way, [self._requests[item.sequence.key] for item in work]
        rows = {id(request): row for row, request in enumerate(before.requests)} if before is not None else {}
        sources = [rows.get(id(request), -1) for request in requests]
        listener = partial(on_layer, work) if on_layer is not None else None
        batch = self._forwards.inputs.build(work, [request.tokens for request in requests], listener)
        if before is not None:
            _feed(batch.token_ids, before.tokens.on_device, sources)
        ahead = [int(source >= 0) for source in sources]
        drawn = self._forwards.sampler.draw(backend.forward(batch, kv), [request.row for request in requests], ahead)
        step = StepUnderWay(requests, [item.sequence.computed for item in work], LateTokens(drawn), StepResult())
        counters.count(work, step.counts)
        for item, request in zip(work, requests, strict=True):
            self._advance(item.sequence, request)
        return step

    def _advance(self, sequence: Sequence, request: Request) -> None:
        """Count the drawn token as known. A sequence that certainly ends with it is not scheduled again."""
        sequence.computed, sequence.known = sequence.known, sequence.known + 1
        if 0 < request.hold <= sequence.known or request.choice.full_at(sequence.known):
            self._scheduler.remove(sequence)


def _needs_no_host(request: Request) -> bool:
    """Return whether the next draw of a request depends on nothing but counts and its last token."""
    row, sampling = request.row, request.choice.sampling
    unbarred = row.produced >= sampling.min_tokens and sampling.logprobs is None
    plain = row.seen is None and row.guide is None and not row.bad_words
    return unbarred and plain and not request.sequence.policies


def _feed(token_ids: Tensor, last: Tensor, sources: list[int]) -> None:
    """Write `last[sources[i]]` to `token_ids[i]`, int64 `[rows]`, unless `sources[i]` is -1: then the host wrote it."""
    places = [place for place, source in enumerate(sources) if source >= 0]
    if places:
        indices = upload(np.array([places, [sources[place] for place in places]]), token_ids.device)
        # NO_NUMBER is no index of the embedding. Its row is dropped when it is read.
        token_ids.index_copy_(0, indices[0], last.index_select(0, indices[1]).clamp_(min=0))
