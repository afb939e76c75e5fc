"""Limits of a tenant's token: concurrency, length, priority; and the tenant's cache scope."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from baton.core import SequenceSpec
from baton.errors import InvalidRequest, Overloaded, Violation
from baton.rpc.v1 import inference_pb2 as pb
from router.auth.tokens import Grant, Right

RETRY_S = 1.0


class Concurrency:
    """Running requests per token. A cancelled request no longer counts, so that its successor fits."""

    def __init__(self) -> None:
        self._running: dict[str, list[Callable[[], bool]]] = {}

    @contextmanager
    def one_more(self, grant: Grant | None, is_cancelled: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Count a request while it runs or waits. Raises Overloaded if it exceeds the limit."""
        if grant is None:
            yield
            return
        running, most = self._running.setdefault(grant.key, []), grant.limits.max_concurrent
        if most is not None and sum(not cancelled() for cancelled in running) >= most:
            raise Overloaded(f"this token allows at most {most} concurrent requests", RETRY_S)
        running.append(is_cancelled)
        try:
            yield
        finally:
            running.remove(is_cancelled)
            if not running:
                del self._running[grant.key]


def limited(spec: SequenceSpec, message: pb.GenerateRequest, grant: Grant | None) -> SequenceSpec:
    """Return the request within the limits of its token, in its tenant's cache scope. Raises InvalidRequest naming
    every field above a limit. Fields that the caller left unset are reduced to the limit.
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
    # A digest, because a long scope would not fit. No other tenant can name the scope.
    scope = hashlib.sha256(spec.cache_scope.encode()).hexdigest() if spec.cache_scope else ""
    return replace(spec, sampling=sampling, priority=priority, cache_scope=f"{grant.tenant}/{scope}")


def may_cancel(asking: Grant | None, owner: Grant | None) -> bool:
    """Return True if `asking` may cancel a request of `owner`: the same tenant, or an admin."""
    return asking is None or asking.right is Right.ADMIN or (owner is not None and owner.tenant == asking.tenant)


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
