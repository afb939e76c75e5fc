"""One client request: its name, its deadline, its end, and its concurrent choices."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

from baton.core import SequenceSpec
from baton.errors import BatonError
from baton.rpc.v1 import inference_pb2 as pb
from baton.tracing.trace import TraceContext
from router.audit_digest import Delivered, audit_digest
from router.auth.tokens import Grant
from router.context import RouterContext
from router.observe.request_observer import RequestObserver
from router.request.attempt import StreamRetention
from router.request.delivery import EventStream
from router.request.lifecycle import ChoiceRun, serve_choice
from router.request.thoughts import Asked


class ClientRequest:
    """One request of a client. It ends after `within_s` seconds at the latest. `name` is the client's request id; a
    resumed request keeps the id of its stream. `task` runs in `scope`, and `end` makes it leave with `reason`.
    `trace_context` is the trace that the request belongs to.
    """

    def __init__(
        self,
        context: RouterContext,
        task: asyncio.Task[None],
        within_s: float,
        name: str = "",
        grant: Grant | None = None,
        trace_context: TraceContext | None = None,
    ) -> None:
        self._own = secrets.token_hex(16)  # hex, because it must be neither a command-line option nor special in a URL
        self.name = name or self._own
        self.resumes = bool(name)  # another router began it
        self.grant = grant  # of its caller; None if no tokens are configured
        self.task = task
        self.within_s = within_s
        self.arrival = next(context.arrivals)
        self.observer = RequestObserver(context.sinks, self.name, trace_context, resumes=self.resumes)
        self.deadline = self.observer.arrived[0] + within_s  # counts from before a long prompt is parsed
        self.scope = asyncio.timeout(within_s)
        self.reason: BatonError | None = None
        self.resumable_s = 0.0  # how long it continues without a router
        self.handing_over = False  # set when another router is to continue it
        self.lives: list[ChoiceRun] = []
        self.prompt_tokens = 0  # set by `serve_request`, like `deterministic`
        self.deterministic = False
        self.traced = False  # whether the client wants all spans
        self.asked = Asked()
        self.determinism = ""  # determinism fingerprint of a deterministic request, from its first attempt on

    def life_id(self, choice: int) -> str:
        """Return a choice's id on workers. A resumed name is never used: workers may have attempts of it."""
        return f"{self._own}.{choice}" if choice else self._own

    def stream(self, choice: int) -> str:
        """Return the client's name for a choice. It is the same on every router."""
        return f"{self.name}.{choice}" if choice else self.name

    def lasting(self, choice: int) -> StreamRetention:
        """Return how long workers retain the stream of a choice."""
        if not self.resumable_s:
            return StreamRetention()
        return StreamRetention(self.resumable_s, self.stream(choice), lambda: self.handing_over)

    def end(self, reason: BatonError) -> None:
        """End the request with `reason` and release its workers. Only the first reason counts."""
        if self.reason is None and not self.scope.expired():
            self.reason = reason
            self.scope.reschedule(asyncio.get_running_loop().time())

    @property
    def tenant(self) -> str:
        return self.grant.tenant if self.grant is not None else ""

    @property
    def accepted(self) -> bool:
        return self.observer.is_accepted


async def serve_request(
    context: RouterContext,
    call: ClientRequest,
    request: SequenceSpec,
    received: Sequence[Sequence[int]],
    client: EventStream,
) -> pb.Completed:
    """Serve one choice for each of `received`, the tokens that the client has already. The first choice computes the
    prompt; the others start after its first token and find the prompt in the prefix cache. Raises the one typed error
    that ended it. The failure of one choice ends the others.
    """
    call.prompt_tokens, call.deterministic = len(request.prompt), request.deterministic
    call.lives = [ChoiceRun(context, call, choice, ids) for choice, ids in enumerate(received)]
    for life in call.lives if request.deterministic else ():
        life.delivery.logprobs = []
    if call.resumes and call.resumable_s:
        await asyncio.gather(*(life.look_for_it() for life in call.lives))
    try:
        completed = await (
            _all(request, call.lives, client) if received[1:] else serve_choice(request, call.lives[0], client)
        )
    finally:
        for life in call.lives:
            life.let_go()
    if request.deterministic:
        completed.usage.audit_digest = _audit(request, call.lives)
    completed.trace_id = call.observer.trace.context.trace_id
    if call.traced:
        await call.observer.trace.settled(call.deadline - context.clock.monotonic())
        completed.spans.extend(call.observer.trace.spans())
    await client.completed(completed)
    call.observer.used(completed.usage)
    return completed


def _audit(request: SequenceSpec, lives: Sequence[ChoiceRun]) -> str:
    """Return the audit digest, or "" if another router delivered some of the logprobs."""
    answers = [Delivered(life.delivery.ids, life.delivery.logprobs or ()) for life in lives]
    if request.sampling.logprobs is not None and any(len(one.tokens) > len(one.logprobs) for one in answers):
        return ""
    return audit_digest(request.prompt, request.sampling, answers)


async def _all(request: SequenceSpec, lives: list[ChoiceRun], client: EventStream) -> pb.Completed:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_one(request, life, lives[0], client)) for life in lives]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    completed, *others = (task.result() for task in tasks)
    completed.usage.completion_tokens += sum(other.usage.completion_tokens for other in others)
    completed.usage.thinking_tokens += sum(other.usage.thinking_tokens for other in others)
    last = max((completed, *others), key=lambda one: one.timings.e2e_s)
    completed.timings.CopyFrom(last.timings)
    return completed


async def _one(request: SequenceSpec, life: ChoiceRun, first: ChoiceRun, client: EventStream) -> pb.Completed:
    if life is not first:
        await first.started.wait()
        seed = seed_of(f"{request.sampling.seed} {life.choice}")
        request = replace(request, sampling=replace(request.sampling, seed=seed))
    try:
        return await serve_choice(request, life, client)
    finally:
        life.started.set()


def seed_of(text: str) -> int:
    """Return 63 bits that depend only on `text`, so that a request resumed or sent again with its key has the same."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 1
