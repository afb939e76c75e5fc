"""What a tenant's token bounds: how many requests at once, how long, how urgent. And whose cached prompts they find."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from baton.core import SequenceSpec
from baton.errors import BatonError, InvalidRequest, Overloaded, Violation
from baton.rpc.v1 import inference_pb2 as pb
from router.auth.tokens import Grant, Right

RETRY_S = 1.0


class Counted(Protocol):
    """A request: whose it is, and why it was told to end, if it was."""

    @property
    def grant(self) -> Grant | None: ...

    @property
    def reason(self) -> BatonError | None: ...


@dataclass(frozen=True, slots=True, eq=False)
class TextCall:
    """A Tokenize or Detokenize call."""

    grant: Grant | None
    reason: None = None


class Concurrency:
    """Counts the requests of each token. One that was told to end, for another that takes over, counts no more."""

    def __init__(self) -> None:
        self._running: dict[str, set[Counted]] = {}

    @contextmanager
    def one_more(self, call: Counted) -> Iterator[None]:
        """As long as a request runs or waits. Raises Overloaded if it is one too many."""
        grant = call.grant
        if grant is None:
            yield
            return
        running, most = self._running.setdefault(grant.key, set()), grant.limits.max_concurrent
        if most is not None and sum(each.reason is None for each in running) >= most:
            raise Overloaded(f"{most} requests of this token are under way, no more are taken", RETRY_S)
        running.add(call)
        try:
            yield
        finally:
            running.remove(call)
            if not running:
                del self._running[grant.key]


def limited(spec: SequenceSpec, message: pb.GenerateRequest, grant: Grant | None) -> SequenceSpec:
    """The request within what its token allows, in its tenant's own part of the cache.

    Raises InvalidRequest naming every field that asks for more. What the caller left to us is made to fit.
    """
    if grant is None:
        return spec
    violations = list(_violations(spec, message, grant))
    if violations:
        raise InvalidRequest(*violations)
    limits, sampling = grant.limits, spec.sampling
    if limits.max_tokens is not None and limits.max_tokens < sampling.max_tokens:
        sampling = replace(sampling, max_tokens=limits.max_tokens)
    priority = spec.priority if limits.priority_max is None else min(spec.priority, limits.priority_max)
    scope = scoped(grant.tenant, spec.cache_scope)
    return replace(spec, sampling=sampling, priority=priority, cache_scope=scope)


def may_end(asking: Grant | None, owner: Grant | None) -> bool:
    """May who asks end a request of `owner`? Its own tenant may, and an admin."""
    if asking is None or asking.right is Right.ADMIN:
        return True
    return owner is not None and owner.tenant == asking.tenant


def scoped(tenant: str, scope: str) -> str:
    """A scope that no other tenant can name. As a digest: a long one would not fit beside the tenant's name."""
    return f"{tenant}/{hashlib.sha256(scope.encode()).hexdigest() if scope else ''}"


def _violations(spec: SequenceSpec, message: pb.GenerateRequest, grant: Grant) -> Iterator[Violation]:
    limits, field = grant.limits, message.WhichOneof("prompt") or "prompt"
    asked = spec.sampling.max_tokens if message.sampling.HasField("max_tokens") else None
    for name, most, got in (
        (field, limits.max_prompt_tokens, len(spec.prompt)),
        ("sampling.max_tokens", limits.max_tokens, asked),
        ("priority", limits.priority_max, spec.priority if message.HasField("priority") else None),
    ):
        if most is not None and got is not None and got > most:
            unit = " prompt tokens" if name == field else ""
            yield Violation(name, f"this token allows at most {most}{unit}, got {got}")
