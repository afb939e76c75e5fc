"""A client's request as a whole: its name, its end, and its choices side by side."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

from baton.core import SequenceSpec
from baton.errors import BatonError
from baton.metrics.router import exemplar_of
from baton.rpc.v1 import inference_pb2 as pb
from baton.tracing.trace import TraceContext
from router.audit_digest import Delivered, audit_digest
from router.auth.tokens import Grant
from router.context import RouterContext
from router.request.attempt import StreamRetention
from router.request.delivery import EventStream
from router.request.lifecycle import ChoiceRun, serve_choice
from router.request.thoughts import Asked
from router.request.traces import Trace


class ClientRequest:
    """One request of a client. It ends after `within_s` at the latest.

    `name` is the request id that the client knows, also of a stream that it resumes. `scope` is what `task` runs in;
    `end` makes the task leave it with `reason`, in whatever state it is. `trace_context`: the trace that it belongs to.
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
        self._own = secrets.token_hex(16)  # no letter of it is an option to a command line, or has a meaning in a URL
        self.name = name or self._own
        self.resumes = bool(name)  # what another router began
        self.grant = grant  # of its caller; None: no tokens are configured
        self.task = task
        self.within_s = within_s
        self.arrival = next(context.arrivals)
        self.arrived = context.clock.monotonic(), context.clock.wall()  # before it is read: a long prompt takes a while
        self.deadline = self.arrived[0] + within_s
        self.scope = asyncio.timeout(within_s)
        self.reason: BatonError | None = None
        self.resumable_s = 0.0  # for so long it goes on without a router
        self.handing_over = False  # another router is to go on with it
        self.lives: list[ChoiceRun] = []
        self.prompt_tokens = 0  # known from `serve_request` on, as is the next
        self.deterministic = False
        self.trace = Trace(self.name, trace_context or TraceContext.new(), context.router_id, self.arrived[1])
        self.exemplar = exemplar_of(self.name, self.trace.context.trace_id)
        self.traced = False  # its client wants all spans
        self.asked = Asked()  # of a model that thinks
        self.determinism = ""  # of a deterministic request: what its workers say of their bits, from its begin on

    def life_id(self, choice: int) -> str:
        """What workers call a choice. Never a name that was resumed: they may know its attempts."""
        return f"{self._own}.{choice}" if choice else self._own

    def stream(self, choice: int) -> str:
        """What its client calls a choice, on whatever router."""
        return f"{self.name}.{choice}" if choice else self.name

    def lasting(self, choice: int) -> StreamRetention:
        """As workers are told of it."""
        if not self.resumable_s:
            return StreamRetention()
        return StreamRetention(self.resumable_s, self.stream(choice), lambda: self.handing_over)

    def end(self, reason: BatonError) -> None:
        """Release its workers and answer its client with `reason`. The first reason counts."""
        if self.reason is None and not self.scope.expired():
            self.reason = reason
            self.scope.reschedule(asyncio.get_running_loop().time())

    @property
    def tenant(self) -> str:
        return self.grant.tenant if self.grant is not None else ""

    @property
    def accepted(self) -> bool:
        return any(life.accepted for life in self.lives)


async def serve_request(
    context: RouterContext,
    call: ClientRequest,
    request: SequenceSpec,
    received: Sequence[Sequence[int]],
    client: EventStream,
) -> pb.Completed:
    """All choices of a request, one for each of `received`: what the client has of it already. The first one computes
    the prompt; the others begin when it is there, and find it in the prefix cache.

    Raises the one typed error that ended it: of whichever choice it was, the others end with it.
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
    completed.trace_id = call.trace.context.trace_id
    if call.traced:
        await call.trace.settled(call.deadline - context.clock.monotonic())
        completed.spans.extend(call.trace.spans())
    await client.completed(completed)
    used = completed.usage
    context.metrics.used(used.prompt_tokens, used.cached_tokens, used.completion_tokens)
    if not call.resumes:  # another router said the first tokens, and knows when
        context.metrics.kept_slo(met=all(life.met_slo() for life in call.lives))
    return completed


def _audit(request: SequenceSpec, lives: Sequence[ChoiceRun]) -> str:
    """Empty: another router delivered logprobs that nobody here knows."""
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
    """63 bits that depend on nothing else: a request that is resumed, or sent again with its key, has the same."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 1
