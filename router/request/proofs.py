"""The proofs of a deterministic answer: its audit digest, and its receipt if the client asked for one.

A router signs only what its workers computed. The tokens of a Resume are a claim of the client, and their
log-probabilities are not in it. So a resumed request with a receipt runs from its first token on (`RepeatedDelivery`).
The result has the same bits, because the request is deterministic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from baton.core import SequenceSpec, Token
from baton.errors import EngineFault
from baton.receipts.issuer import ComputedChoice
from baton.rpc.v1 import inference_pb2 as pb
from router.audit_digest import Delivered, audit_digest
from router.parsing.generate_request import ParsedRequest
from router.request.client_request import ClientRequest
from router.request.delivery import Delivery
from router.request.observer import ChoiceObserver

_THREAD_TOKENS = 4096  # more are proved in a thread, to keep the event loop free


class RepeatedDelivery(Delivery):
    """The delivery of a choice that is computed from its first token on, although its client has `received` tokens.
    These are compared and not sent again. A difference is an EngineFault, because a fault of a worker can cause it as
    well as a wrong claim. The error has no token ids, because logs have its text.
    """

    def __init__(self, received: Sequence[int]) -> None:
        super().__init__(keeps_logprobs=True)
        self._received = received

    def merge(self, tokens: Iterable[Token]) -> list[Token]:
        """Return the tokens that are due and that the client lacks. Raises EngineFault if the client has others."""
        fresh = super().merge(tokens)
        for token in fresh:
            if token.index < len(self._received) and self._received[token.index] != token.token_id:
                text = "differs from the one in received; either a worker or received is wrong"
                raise EngineFault(f"token {token.index} of the answer, computed again, {text}")
        return [token for token in fresh if token.index >= len(self._received)]

    def complete(self) -> None:
        """End the stream. Raises EngineFault if a token is missing, or if the client has more tokens."""
        super().complete()
        if len(self.ids) < len(self._received):
            found = f"{len(self.ids)} tokens, but the client has {len(self._received)}"
            raise EngineFault(f"the answer, computed again, has {found}")


def delivery_of(parsed: ParsedRequest, choice: int) -> Delivery:
    """Return the delivery of a choice, after the tokens that the client has."""
    received = parsed.received[choice]
    if parsed.issuer is not None:
        return RepeatedDelivery(received)
    return Delivery(received, keeps_logprobs=parsed.spec.deterministic)


async def prove(
    completed: pb.Completed, request: ClientRequest, choices: Sequence[tuple[Delivery, ChoiceObserver]]
) -> None:
    """Add the proofs of all choices to `completed`. Raises EngineFault if a receipt lacks a part."""
    if not request.parsed.spec.deterministic:
        return
    if len(request.parsed.spec.prompt) + sum(len(delivery.ids) for delivery, _ in choices) <= _THREAD_TOKENS:
        _prove(completed, request, choices)
    else:
        await asyncio.to_thread(_prove, completed, request, choices)


def _prove(completed: pb.Completed, request: ClientRequest, choices: Sequence[tuple[Delivery, ChoiceObserver]]) -> None:
    spec, issuer = request.parsed.spec, request.parsed.issuer
    completed.usage.audit_digest = _audit(spec, [delivery for delivery, _ in choices])
    if issuer is not None:
        computed = [ComputedChoice(one.ids, one.logprobs or (), observer.finish) for one, observer in choices]
        now_s = request.call.observer.sinks.clock.wall()
        completed.receipt = issuer.issue(request.call.name, spec, completed.system_fingerprint, computed, now_s)


def _audit(spec: SequenceSpec, deliveries: Sequence[Delivery]) -> str:
    """Return the audit digest, or "" if another router delivered some of the logprobs."""
    answers = [Delivered(one.ids, one.logprobs or ()) for one in deliveries]
    if spec.sampling.logprobs is not None and any(len(one.tokens) > len(one.logprobs) for one in answers):
        return ""
    return audit_digest(spec.prompt, spec.sampling, answers)
