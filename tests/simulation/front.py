"""A router process, and clients that keep their responses."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any, cast

from baton.core import Constraint, PromptPart, PromptToken, Sampling, SequenceSpec
from baton.rpc import convert
from baton.rpc.convert import constraint_to_pb
from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import inference_pb2 as pb
from router.context import RouterSettings, build_context
from router.service import Inference
from tests.simulation.clock import LoopClock
from tests.simulation.engine import BACKEND, expected, same_scores, undisturbed, undisturbed_scores
from tests.simulation.rpc import Aborted, ClientCall
from tests.simulation.world import Process, SimLedger, World


class RouterHost:
    """One router, without its listeners."""

    def __init__(self, world: World, name: str, settings: RouterSettings, ledger: SimLedger) -> None:
        self.world = world
        self.process = Process(world, name)
        self._ledger = ledger
        self._settings = settings
        self.process.run(self._build)

    def _build(self) -> None:
        self.context = build_context(self._settings, self._ledger.workers, LoopClock(), streams=self._ledger.find)
        self.inference = Inference(self.context, BACKEND.tokenizer)
        self.process.start(self.context.pool.start(), "start")

    def leftovers(self) -> list[str]:
        """Return problems if counters are not zero although no request runs."""
        views = [(link.info.ref, link.view) for link in self.context.pool.links]
        found = [f"{ref} counts as loaded" for ref, v in views if v.dispatched or v.queued_tokens or v.pending_blocks]
        if self.context.running or self.context.admission.waiting:
            found.append("requests that run or wait")
        found += [f"a mailbox for {handoff}" for link in self.context.pool.links for handoff in link.mailboxes]
        return [f"{self.process} has {what}" for what in found]


@dataclass(frozen=True)
class Ask:
    """A request and its client's behavior. `leaves_after`: events before it cancels, or None if it does not."""

    name: str
    prompt: tuple[int, ...]
    sampling: Sampling
    at: float
    leaves_after: int | None
    stall: float
    priority: int
    constraint: Constraint | None = None
    resumable_s: float = 0.0  # 0 means that it does not resume
    deterministic: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def spec(self) -> SequenceSpec:
        sampling = replace(self.sampling, logprobs=self.logprobs)
        wanted: dict[str, Any] = {"constraint": self.constraint, "deterministic": self.deterministic}
        return SequenceSpec(self.prompt, sampling, **wanted, prompt_logprobs=self.prompt_logprobs)


class Client:
    """One request's client. It sends the request once, resumes at another router if possible, and keeps the outcome."""

    def __init__(self, world: World, router: RouterHost, ask: Ask, others: list[RouterHost]) -> None:
        self.world, self.router, self.ask = world, router, ask
        self.outcome = ""  # "finished", the name of an error, "left", or "router crashed"
        self.call = ClientCall(world, ask.name, ask.stall)
        self.calls = [self.call]
        self.resumed_with = 0  # tokens
        self._others = others

    async def run(self) -> None:
        await asyncio.sleep(self.ask.at)
        if not self.router.process.alive:
            self._end("router crashed")
            return
        await self._ask(self._generate())
        while not self.outcome and not self._leaves() and (router := self._another()) is not None:
            self.router, self.call = router, ClientCall(self.world, self.ask.name, self.ask.stall)
            self.calls.append(self.call)
            await self._ask(self._resume())
        if not self.outcome:
            self._end("left" if self.router.process.alive else "router crashed")

    def _another(self) -> RouterHost | None:
        living = [router for router in self._others if router.process.alive]
        return living[0] if living and self.ask.resumable_s and self._name else None

    @property
    def _name(self) -> str:
        """Return the request's id, or an empty string if the router has not sent it."""
        return next((event.request_id for event in self._events()), "")

    async def _ask(self, call: Coroutine[Any, Any, None]) -> None:
        task = self.router.process.spawn(call, self.ask.name)
        while not task.done() and not self._leaves():
            await asyncio.wait([task], timeout=0.01 if self.ask.leaves_after is not None else 1.0)
        if not task.done():
            task.cancel()
            await asyncio.wait([task])

    def _leaves(self) -> bool:
        return self.ask.leaves_after is not None and len(self.call.events) >= self.ask.leaves_after

    def _request(self) -> pb.GenerateRequest:
        sampling = convert.sampling_to_pb(self.ask.sampling)
        ids = common_pb2.TokenIds(ids=self.ask.prompt)
        request = pb.GenerateRequest(token_ids=ids, sampling=sampling, priority=self.ask.priority)
        request.resumable_s = self.ask.resumable_s
        request.deterministic = self.ask.deterministic
        if self.ask.logprobs is not None:
            request.logprobs = self.ask.logprobs
        if self.ask.prompt_logprobs is not None:
            request.prompt_logprobs = self.ask.prompt_logprobs
        if (constraint := constraint_to_pb(self.ask.constraint)) is not None:
            request.constraint.CopyFrom(constraint)
        return request

    async def _generate(self) -> None:
        await self._to_its_end(self.router.inference.Generate(self._request(), cast("Any", self.call)))

    async def _resume(self) -> None:
        received = [common_pb2.TokenIds(ids=[token_id for tokens in self._tokens() for token_id in tokens.ids])]
        message = pb.ResumeRequest(request_id=self._name, request=self._request(), received=received)
        message.system_fingerprint = next(iter(self._bits()), "")
        message.prompt_logprobs_received = sum(len(part.tokens) for part in self._parts())
        self.resumed_with = len(received[0].ids)
        if self.ask.deterministic:
            self.world.met["deterministic resumed"] += 1
        await self._to_its_end(self.router.inference.Resume(message, cast("Any", self.call)))

    def _events(self) -> list[pb.GenerateEvent]:
        return [event for call in self.calls for event in call.events]

    def _tokens(self) -> list[Any]:
        return [event.tokens for event in self._events() if event.HasField("tokens")]

    def _parts(self) -> list[PromptPart]:
        parts = [event.prompt_logprobs for event in self._events() if event.HasField("prompt_logprobs")]
        return [convert.prompt_part_from_pb(part) for part in parts]

    def _bits(self) -> set[str]:
        """Return the fingerprints of the answer, as the routers reported them."""
        events = self._events()
        accepted = {event.accepted.system_fingerprint for event in events if event.HasField("accepted")}
        return accepted | {event.completed.system_fingerprint for event in events if event.HasField("completed")}

    async def _to_its_end(self, answer: Coroutine[Any, Any, None]) -> None:
        try:
            await answer
        except Aborted:
            self._end(type(self.call.error()).__name__)
        else:
            self._end("finished")

    def _end(self, outcome: str) -> None:
        if self.outcome:
            self.world.broken(f"{self.ask.name} ended twice: {self.outcome} and {outcome}")
        self.outcome = outcome
        self.world.note("ended", self.ask.name, outcome)

    def check(self) -> list[str]:
        """Return the problems of the received events, whatever the outcome."""
        kinds = [event.WhichOneof("event") for event in self.call.events]
        ids: list[int] = []
        found: list[str] = []
        for tokens in self._tokens():
            first = getattr(tokens, "from")
            if first != len(ids):
                found.append(f"tokens from {first} after {len(ids)}")
            ids += tokens.ids
        wanted = expected(self.ask.spec)
        if ids != wanted[: len(ids)]:
            found.append(f"tokens {ids} instead of {wanted}")
        if self.outcome == "finished" and (ids != wanted or kinds[-2:] != ["finished", "completed"]):
            found.append(f"finished with {ids} instead of {wanted}, {kinds}")
        if [event.seq for event in self.call.events] != list(range(len(kinds))):
            found.append("events are not numbered")
        if kinds.count("accepted") > 1 or kinds.count("finished") > 1:
            found.append(f"said twice: {kinds}")
        if self.ask.deterministic:
            found += self._check_bits()
        if self.ask.prompt_logprobs is not None:
            found += self._check_scores()
        return [f"{self.ask.name}: {what}" for what in found]

    def _check_scores(self) -> list[str]:
        """Return problems if a position of the prompt is missing, repeated, wrong or behind a token."""
        tokens: list[PromptToken] = []
        found = list[str]()
        for part in self._parts():
            found += [f"positions from {part.start} after {len(tokens)}"] if part.start != len(tokens) else []
            tokens += part.tokens
        wanted = undisturbed_scores(replace(self.ask.spec, constraint=None, deterministic=False))
        if len(tokens) > len(wanted) or not same_scores(tokens, wanted[: len(tokens)]):
            found.append(f"the prompt has {tokens} instead of {wanted}")
        kinds = [event.WhichOneof("event") for event in self._events()]
        if {"tokens", "finished"} & {*kinds} and len(tokens) != len(wanted):
            found.append(f"only {len(tokens)} positions, and {kinds}")
        if "tokens" in kinds and "prompt_logprobs" in kinds[kinds.index("tokens") :]:
            found.append(f"in this order: {kinds}")
        return found

    def _check_bits(self) -> list[str]:
        """Return problems if the answer is not bit-identical to an undisturbed one on workers with one fingerprint."""
        bits = self._bits()
        found = [f"its bits depend on {bits}"] if len(bits) > 1 or "" in bits else []
        if self.outcome == "finished":
            said = self.call.events[-1].completed.usage.audit_digest
            unknown = self.ask.logprobs is not None and self.resumed_with
            if said != ("" if unknown else undisturbed(self.ask.spec)):
                found.append(f"its digest is {said or 'none'}, undisturbed it is {undisturbed(self.ask.spec)}")
        return found
